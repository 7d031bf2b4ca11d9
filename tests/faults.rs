//! A rank that panics, vanishes, stalls or does something else: every other rank returns an error that
//! names it, within the time limit.

use burn::tensor::{Device, Tensor};
use burn_distflash::comm::local::{self, RunError};
use burn_distflash::{
    AttentionError, AttentionOptions, CommError, Communicator, Context, Mask, Sequence, Strategy, dist_attention,
};
use distflash_tests::TIME_LIMIT;
use rstest::rstest;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Body = fn(&Context, &Arc<dyn Communicator>) -> Result<(), AttentionError>;

const SEQ_LEN: usize = 30;

fn leaf(context: &Context) -> Tensor<4> {
    Tensor::<4>::ones([1, 2, context.shard_len(), 4], &Device::flex().autodiff()).require_grad()
}

fn attend(context: &Context) -> Result<Tensor<4>, AttentionError> {
    let (q, k, v) = (leaf(context), leaf(context), leaf(context));
    Ok(dist_attention(q, k, v, &AttentionOptions::default(), context)?.0)
}

fn train(context: &Context, steps: usize) -> Result<(), AttentionError> {
    for _ in 0..steps {
        context.backward(&attend(context)?.sum())?;
    }
    Ok(())
}

/// Runs a group in which the last rank does `bad` and the others train.
fn failing(world_size: usize, limit: Duration, strategy: impl Into<Strategy>, bad: Body) -> (RunError, Duration) {
    let (start, strategy) = (Instant::now(), strategy.into());
    let error = local::run(world_size, limit, move |comm| {
        let context = Context::new(comm.clone(), strategy, SEQ_LEN)?;
        if comm.rank() + 1 == comm.world_size() { bad(&context, &comm) } else { train(&context, 3) }
    })
    .expect_err("a rank failed");
    (error, start.elapsed())
}

fn assert_all_name(error: &RunError, world_size: usize, bad: usize, says: &str) {
    assert!(error.stalled.is_empty(), "{error}");
    let mut failed: Vec<usize> = error.failures.iter().map(|failure| failure.0).collect();
    failed.sort_unstable();
    assert!((0..world_size).filter(|&rank| rank != bad).all(|rank| failed.contains(&rank)), "{error}");
    for (rank, reason) in &error.failures {
        assert!(*rank == bad || reason.contains(&format!("rank {bad}")), "rank {rank} does not name {bad}: {reason}");
        assert!(reason.contains(says), "rank {rank} does not say `{says}`: {reason}");
    }
}

#[rstest]
fn a_panic_reaches_every_rank(
    #[values(2, 3, 5)] world_size: usize,
    #[values("ring", "balanced", "adaptive", "all-gather", "ulysses", "ring-self-attention")] strategy: &str,
) {
    let (error, took) = failing(world_size, TIME_LIMIT, strategy.parse::<Strategy>().unwrap(), |context, _| {
        train(context, 1)?;
        panic!("the cat pulled the plug")
    });
    assert_all_name(&error, world_size, world_size - 1, "the cat pulled the plug");
    assert_eq!(error.failures[0].0, world_size - 1, "the first to fail is reported first: {error}");
    assert!(took < TIME_LIMIT / 2, "noticed at once, not by time-out: {took:?}");
}

#[test]
fn a_panic_between_forward_and_backward_ends_the_others_backward() {
    let (error, _) = failing(3, TIME_LIMIT, Sequence::Balanced, |context, _| {
        let _graph_kept_alive = attend(context)?;
        panic!("gone before backward")
    });
    assert_all_name(&error, 3, 2, "gone before backward");
    let backward = error.failures.iter().any(|(_, reason)| reason.contains("attention backward"));
    assert!(backward, "the step is named: {error}");
}

#[test]
fn a_rank_that_returns_early_is_missed_by_name() {
    let (error, took) = failing(3, TIME_LIMIT, Sequence::Ring, |context, _| train(context, 1));
    let others: Vec<_> = error.failures.iter().map(|failure| failure.0).collect();
    assert!(others.contains(&0) && others.contains(&1), "{error}");
    assert!(error.to_string().contains("lost rank 2") && error.to_string().contains("it has finished"), "{error}");
    assert!(took < TIME_LIMIT / 2, "{took:?}");
}

#[test]
fn a_stalled_rank_ends_the_others_within_the_time_limit() {
    let limit = Duration::from_millis(300);
    let (error, took) = failing(3, limit, Sequence::Balanced, |context, _| {
        train(context, 1)?;
        std::thread::sleep(Duration::from_secs(5));
        Ok(())
    });
    assert!(error.failures.iter().any(|(_, reason)| reason.contains("heard nothing from rank 2")), "{error}");
    assert_eq!(error.stalled, [2], "{error}");
    assert!(took < Duration::from_secs(4), "the run did not wait for the stalled rank: {took:?}");
}

#[test]
fn an_error_of_one_rank_stays_with_it_and_reaches_its_peers() {
    let error = local::run(2, TIME_LIMIT, |comm| {
        let context = Context::new(comm.clone(), Sequence::Ring, SEQ_LEN)?;
        if comm.rank() == 1 {
            let short = Tensor::<4>::ones([1, 2, 3, 4], &Device::flex());
            let first = dist_attention(short.clone(), short.clone(), short, &AttentionOptions::default(), &context);
            assert!(first.unwrap_err().to_string().contains("length of query is 3; expected 15"));
            // Every later call repeats it, so that it cannot be missed.
            assert!(comm.barrier().unwrap_err().to_string().contains("length of query is 3"));
            return Ok(());
        }
        train(&context, 1)
    })
    .unwrap_err();
    assert_eq!(error.failures.len(), 1, "{error}");
    assert!(
        error.failures[0].1.contains("lost rank 1") && error.failures[0].1.contains("length of query is 3"),
        "{error}"
    );
}

#[test]
fn gradients_of_a_failed_backward_are_nan_and_its_error_is_kept() {
    let error = local::run(2, TIME_LIMIT, |comm| {
        let context = Context::new(comm.clone(), Sequence::Ring, SEQ_LEN)?;
        let (q, k, v) = (leaf(&context), leaf(&context), leaf(&context));
        let (out, _) = dist_attention(q.clone(), k, v, &AttentionOptions::default(), &context)?;
        if comm.rank() == 1 {
            panic!("left");
        }
        // Burn's own backward cannot return an error.
        let grads = out.sum().backward();
        assert!(q.grad(&grads).unwrap().into_data().iter::<f32>().all(f32::is_nan));
        comm.check().map_err(AttentionError::from)
    })
    .unwrap_err();
    assert_eq!(error.failures.len(), 2, "{error}");
    assert!(error.failures.iter().any(|(rank, reason)| *rank == 0 && reason.contains("lost rank 1")), "{error}");
}

/// What differs, as rank 1 has it while the others have the usual.
#[rstest]
#[case::mask(|context: &Context| attend_as(context, Mask::full(), None, 2, 4), "mask with digest")]
#[case::scale(|context: &Context| attend_as(context, Mask::causal(), Some(0.7), 2, 4), "scale")]
#[case::heads(|context: &Context| attend_as(context, Mask::causal(), None, 4, 4), "query heads")]
#[case::head_dim(|context: &Context| attend_as(context, Mask::causal(), None, 2, 8), "head_dim")]
fn ranks_called_with_different_things_are_told_what_differs(
    #[case] other: fn(&Context) -> Result<(), AttentionError>,
    #[case] field: &'static str,
) {
    let error = local::run(3, TIME_LIMIT, move |comm| {
        let context = Context::new(comm.clone(), Sequence::Balanced, SEQ_LEN)?;
        if comm.rank() == 1 { other(&context) } else { attend_as(&context, Mask::causal(), None, 2, 4) }
    })
    .unwrap_err();
    assert_eq!(error.failures.len(), 3, "{error}");
    assert!(error.failures.iter().all(|(_, reason)| reason.contains(field)), "{error}");
}

#[rstest]
#[case::strategy(Sequence::Ring, SEQ_LEN, "strategy balanced")]
#[case::length(Sequence::Balanced, SEQ_LEN + 3, "sequence length 30")]
fn contexts_that_differ_are_told_what_differs(
    #[case] strategy: Sequence,
    #[case] seq_len: usize,
    #[case] says: &'static str,
) {
    let error = local::run(3, TIME_LIMIT, move |comm| {
        let usual = Context::new(comm.clone(), Sequence::Balanced, SEQ_LEN)?;
        let context = if comm.rank() == 1 { Context::new(comm, strategy, seq_len)? } else { usual };
        attend(&context).map(drop)
    })
    .unwrap_err();
    assert_eq!(error.failures.len(), 3, "{error}");
    assert!(error.failures.iter().any(|(_, reason)| reason.contains(says)), "{error}");
}

fn attend_as(
    context: &Context,
    mask: Mask,
    scale: Option<f64>,
    heads: usize,
    head_dim: usize,
) -> Result<(), AttentionError> {
    let ones = |heads| Tensor::<4>::ones([1, heads, context.shard_len(), head_dim], &Device::flex());
    let options = AttentionOptions { mask, scale, ..AttentionOptions::default() };
    dist_attention(ones(heads), ones(2), ones(2), &options, context).map(drop)
}

#[test]
fn ranks_out_of_step_are_told_so() {
    let error = local::run(2, TIME_LIMIT, |comm| {
        let one = Tensor::<1>::ones([1], &Device::flex());
        if comm.rank() == 0 {
            return comm.all_gather(one).map(drop);
        }
        comm.broadcast(one, 1)?;
        // Stays: to a peer that has finished rank 0 could not even send.
        comm.barrier()
    })
    .unwrap_err();
    assert!(error.to_string().contains("ranks must call the same operations in the same order"), "{error}");
}

#[test]
fn tensors_of_another_shape_are_refused_by_name() {
    let error = local::run(2, TIME_LIMIT, |comm| {
        let ones = Tensor::<1>::ones([2 + comm.rank()], &Device::flex());
        comm.broadcast(ones, 0).map(drop)
    })
    .unwrap_err();
    assert!(error.to_string().contains("expected a F32 tensor of shape [3] from rank 0"), "{error}");
    assert!(error.to_string().contains("sent a F32 tensor of shape [2]"), "{error}");
}

#[test]
fn a_panic_reaches_the_members_of_a_subgroup() {
    let start = Instant::now();
    let error = local::run(4, TIME_LIMIT, |comm| {
        let group = comm.split(comm.rank() / 2)?;
        if comm.rank() == 3 {
            let _kept_alive = Box::leak(Box::new(group));
            panic!("rank 3 is gone");
        }
        group.barrier()?;
        Ok::<_, CommError>(())
    })
    .unwrap_err();
    let failed: Vec<_> = error.failures.iter().map(|failure| failure.0).collect();
    assert_eq!(failed, [3, 2], "the other group is untouched: {error}");
    assert!(start.elapsed() < TIME_LIMIT / 2);
}
