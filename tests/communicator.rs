//! The communicator's operations over threads.

use burn::tensor::{Device, Tensor};
use burn_distflash::comm::local::{self, RunError};
use burn_distflash::{CommError, Communicator};
use distflash_tests::{Draw, TIME_LIMIT};
use rstest::rstest;
use std::sync::Arc;

fn run<T: Send + 'static>(
    world_size: usize,
    body: impl Fn(Arc<dyn Communicator>) -> Result<T, CommError> + Send + Sync + 'static,
) -> Vec<T> {
    local::run(world_size, TIME_LIMIT, body).expect("healthy ranks")
}

fn tensor(values: &[f32]) -> Tensor<1> {
    Tensor::from_floats(values, &Device::flex())
}

fn values(tensor: Tensor<1>) -> Vec<f32> {
    tensor.into_data().try_into_vec::<f32>().unwrap()
}

/// `len` numbers that rank `rank` holds.
fn held(rank: usize, len: usize) -> Vec<f32> {
    Draw::new(rank as u64).uniform(len, 1.)
}

#[rstest]
fn all_reduce_gives_every_rank_the_same_sum(
    #[values(1, 2, 3, 4, 5, 8)] world_size: usize,
    #[values(0, 1, 7, 100)] len: usize,
) {
    let sums = run(world_size, move |comm| Ok(values(comm.all_reduce(tensor(&held(comm.rank(), len)))?)));
    let mut expected = held(0, len);
    for rank in 1..world_size {
        expected.iter_mut().zip(held(rank, len)).for_each(|(sum, x)| *sum += x);
    }
    assert!(sums.iter().all(|sum| *sum == expected), "added in order of rank, bit for bit");
}

#[rstest]
fn all_gather_takes_tensors_of_any_length(#[values(1, 2, 3, 5)] world_size: usize) {
    let gathered = run(world_size, |comm| {
        Ok(comm.all_gather(tensor(&held(comm.rank(), comm.rank() * 2)))?.into_iter().map(values).collect::<Vec<_>>())
    });
    let expected: Vec<_> = (0..world_size).map(|rank| held(rank, rank * 2)).collect();
    assert!(gathered.iter().all(|all| *all == expected));
}

#[rstest]
fn reduce_scatter_keeps_each_ranks_part(#[values(1, 2, 3, 5)] world_size: usize) {
    let lens: Vec<usize> = (0..world_size).map(|rank| (rank * 3) % 4).collect();
    let len = lens.iter().sum();
    let given = lens.clone();
    let parts = run(world_size, move |comm| Ok(values(comm.reduce_scatter(tensor(&held(comm.rank(), len)), &given)?)));
    let mut sum = held(0, len);
    for rank in 1..world_size {
        sum.iter_mut().zip(held(rank, len)).for_each(|(sum, x)| *sum += x);
    }
    assert_eq!(parts.concat(), sum);
    assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), lens);
}

#[rstest]
fn all_to_all_transposes(#[values(1, 2, 3, 5)] world_size: usize) {
    let received = run(world_size, |comm| {
        let to = |to: usize| tensor(&vec![(comm.rank() * 10 + to) as f32; to + 1]);
        let all = comm.all_to_all((0..comm.world_size()).map(to).collect())?;
        Ok(all.into_iter().map(values).collect::<Vec<_>>())
    });
    for (rank, from) in received.into_iter().enumerate() {
        let expected: Vec<_> = (0..world_size).map(|from| vec![(from * 10 + rank) as f32; rank + 1]).collect();
        assert_eq!(from, expected);
    }
}

#[rstest]
fn broadcast_repeats_the_root(#[values(1, 2, 3, 5)] world_size: usize) {
    let root = world_size - 1;
    let received = run(world_size, move |comm| Ok(values(comm.broadcast(tensor(&held(comm.rank(), 6)), root)?)));
    assert!(received.iter().all(|values| *values == held(root, 6)));
}

#[test]
fn bytes_are_gathered_in_order_of_rank() {
    let gathered = run(4, |comm| comm.gather_bytes("names", vec![comm.rank() as u8; comm.rank()]));
    assert!(gathered.iter().all(|all| *all == [vec![], vec![1], vec![2; 2], vec![3; 3]]));
}

#[test]
fn disjoint_groups_work_at_once_and_keep_their_order() {
    let results = run(5, |comm| {
        let group = comm.split(comm.rank() % 2)?;
        let mut sums = Vec::new();
        for round in 0..20 {
            sums.push(values(group.all_reduce(tensor(&[(comm.rank() * round) as f32]))?)[0]);
        }
        comm.barrier()?;
        Ok((group.rank(), group.world_size(), sums))
    });
    for (rank, (place, size, sums)) in results.into_iter().enumerate() {
        let members: Vec<usize> = (0..5).filter(|other| other % 2 == rank % 2).collect();
        assert_eq!((place, size), (rank / 2, members.len()));
        let expected = |round: usize| (members.iter().sum::<usize>() * round) as f32;
        assert_eq!(sums, (0..20).map(expected).collect::<Vec<_>>());
    }
}

#[test]
fn ten_thousand_exchanges_leave_nothing_behind() {
    let sent = run(3, |comm| {
        for round in 0..2500 {
            comm.all_gather(tensor(&[round as f32]))?;
            comm.barrier()?;
            comm.all_reduce(tensor(&[1., 2., 3.]))?;
        }
        Ok(comm.bytes_sent())
    });
    // Per round: 2 × 4 bytes gathered; all-reduce 2 × 4 scattered and 2 × 4 gathered.
    assert_eq!(sent, [2500 * 24; 3]);
}

#[rstest]
#[case::too_few_parts(|comm: &dyn Communicator| comm.all_to_all(vec![]).map(drop), "one tensor per rank, 2; got 0")]
#[case::wrong_lengths(|comm: &dyn Communicator| comm.reduce_scatter(tensor(&[1.]), &[1, 1]).map(drop), "add up to 1")]
#[case::no_such_root(|comm: &dyn Communicator| comm.broadcast(tensor(&[1.]), 2).map(drop), "expected a rank below 2")]
fn wrong_arguments_are_named(#[case] call: fn(&dyn Communicator) -> Result<(), CommError>, #[case] says: &'static str) {
    let error: RunError = local::run(2, TIME_LIMIT, move |comm| call(&*comm)).unwrap_err();
    assert!(error.to_string().contains(says), "{error}");
}
