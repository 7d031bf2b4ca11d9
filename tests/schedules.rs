//! Schedules as data: every unmasked pair exactly once, no idle rank where none need be, and what is
//! simulated is what travels.

use burn::tensor::{DType, Device};
use burn_distflash::schedule::{AttentionShape, Pass, Schedule, ShardedMask, Simulation};
use burn_distflash::{Layout, Mask, Plan, RowIntervals, Sequence, Strategy};
use distflash_kernels::reference::Dims;
use distflash_tests::{Done, Masks, Problem, sharded_and_done};
use proptest::prelude::*;
use std::collections::HashSet;

const SHAPE: AttentionShape = AttentionShape { batch: 1, heads: 4, kv_heads: 4, head_dim: 8, element_bytes: 2 };

#[test]
fn every_unmasked_pair_is_computed_exactly_once_for_worlds_1_to_33() {
    for world_size in 1..=33 {
        for len in [0, 1, 20, 2 * world_size, 101] {
            for mask in Masks::ALL {
                for strategy in Sequence::ALL {
                    let sharded = strategy.shard(&mask.build(len), len, world_size).unwrap();
                    let schedule = strategy.schedule(&sharded);
                    for schedule in [&schedule, &schedule.transposed()] {
                        let proof = schedule.check(&sharded);
                        assert!(
                            proof.is_ok(),
                            "{strategy} {mask:?}, {len} tokens over {world_size}: {proof:?}\n{schedule}"
                        );
                    }
                }
            }
        }
    }
}

/// The checker counts areas; this counts single scores.
#[test]
fn the_checker_agrees_with_counting_every_score() {
    for (strategy, world_size) in Sequence::ALL.into_iter().flat_map(|s| [1, 2, 3, 4, 5, 8].map(|w| (s, w))) {
        for mask in Masks::ALL {
            let rows = mask.build(37).intervals(37, 37).unwrap();
            let sharded = strategy.shard(&mask.build(37), 37, world_size).unwrap();
            let layout = sharded.layout();
            let positions: Vec<_> = (0..world_size).map(|rank| layout.positions(rank)).collect();
            let mut seen = HashSet::new();
            for (_, _, pair) in strategy.schedule(&sharded).iter() {
                let intervals = sharded.intervals(pair);
                for row in 0..intervals.num_rows() {
                    for key in intervals.row(row) {
                        let query = positions[pair.query.owner][pair.query.rows.start + row];
                        let key = positions[pair.key_value.owner][pair.key_value.rows.start + key];
                        assert!(rows.row(query).contains(&key), "{strategy} {mask:?}: ({query}, {key}) is masked");
                        assert!(seen.insert((query, key)), "{strategy} {mask:?}: ({query}, {key}) twice");
                    }
                }
            }
            assert_eq!(seen.len() as u64, rows.area(), "{strategy} {mask:?} over {world_size}");
        }
    }
}

#[test]
fn the_balanced_schedule_leaves_no_rank_idle_under_a_causal_mask() {
    for world_size in 1..=33 {
        let len = 4 * world_size;
        let sharded = Sequence::Balanced.shard(&Mask::causal(), len, world_size).unwrap();
        let schedule = Schedule::balanced(&sharded);
        assert_eq!(schedule.num_steps(), world_size / 2 + 1);
        let simulation = schedule.simulate(&sharded, &SHAPE, Pass::Forward);
        assert_eq!(simulation.idle_share(), 0., "world {world_size}\n{schedule}");
        let work: Vec<u64> = (0..world_size).map(|rank| simulation.rank_work(rank)).collect();
        assert!(work.iter().all(|&w| w == work[0]), "world {world_size}: {work:?}");
    }
}

#[test]
fn odd_shards_cost_the_balanced_schedule_at_most_one_row_of_the_split_step() {
    for world_size in [2, 4, 8, 16] {
        let len = 7 * world_size;
        let sharded = Sequence::Balanced.shard(&Mask::causal(), len, world_size).unwrap();
        let simulation = Schedule::balanced(&sharded).simulate(&sharded, &SHAPE, Pass::Forward);
        let steps = simulation.work();
        let last = &steps[steps.len() - 1];
        assert!(last.iter().max().unwrap() - last.iter().min().unwrap() <= 7, "{last:?}");
    }
}

#[test]
fn the_plain_ring_idles_half_of_its_slots_and_zigzag_none() {
    let idle = |strategy: Sequence| {
        let sharded = strategy.shard(&Mask::causal(), 800, 8).unwrap();
        strategy.schedule(&sharded).simulate(&sharded, &SHAPE, Pass::Forward).idle_share()
    };
    // Blocks of 100²: 7 steps full, whose last ranks alone are busy, and the diagonal of 50.5 · 100.
    let (done, slots) = (8. * 50.5 + 28. * 100., 8. * (50.5 + 7. * 100.));
    assert!((idle(Sequence::Ring) - (1. - done / slots)).abs() < 1e-12);
    assert!(idle(Sequence::Zigzag) < 0.01, "{}", idle(Sequence::Zigzag));
    assert!(idle(Sequence::Striped) < 0.02, "{}", idle(Sequence::Striped));
}

/// In units of one shard of one operand per rank; the paper's table, with f32 partials counted as f32.
#[test]
fn traffic_of_the_balanced_schedule_is_the_papers() {
    let world_size = 8;
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, head_dim: 1 << 20, element_bytes: 4 };
    let sharded = Sequence::Balanced.shard(&Mask::causal(), 64, world_size).unwrap();
    let simulation = Schedule::balanced(&sharded).simulate(&sharded, &shape, Pass::Forward);
    let shard = (8 * shape.head_dim * shape.element_bytes) as f64;
    let forward: u64 = (0..world_size).map(|rank| simulation.bytes_sent(rank)).sum();
    // The paper counts g(3P − 2)/4 + (P − 2)/4 = 7 per rank with the last step unsplit: 4 of P/2 whole
    // key/value shards. Splitting adds half a query and half a partial to each of those 4 pairs.
    let per_rank = forward as f64 / world_size as f64 / shard;
    assert!((per_rank - (7. + 4. / 8.)).abs() < 1e-3, "{per_rank}");
}

#[test]
fn simulated_bytes_and_work_are_what_ranks_really_send_and_compute() {
    for (len, world_size) in [(61, 3), (48, 4), (61, 5), (3, 8)] {
        for mask in [Masks::Causal, Masks::Full, Masks::WindowedDocuments, Masks::Prefix] {
            for strategy in Strategy::all_for(world_size) {
                let dims = Dims { batch: 2, heads: 6, kv_heads: 2, num_rows: len, num_keys: len, head_dim: 8 };
                assert_simulated(strategy, mask, dims, world_size);
            }
        }
    }
}

#[test]
fn a_window_is_neither_sent_nor_computed_beyond_its_reach() {
    // A window of 10 keys over shards of 100: only the next rank needs the last 9 keys.
    let sharded = Sequence::Ring.shard(&Mask::causal().with_window(10, 0).unwrap(), 800, 8).unwrap();
    let schedule = Schedule::ring(&sharded);
    assert_eq!(schedule.num_steps(), 2);
    for transfer in schedule.inputs(1) {
        assert_eq!(transfer.chunk.rows, 91..100);
    }
    assert_eq!(schedule.inputs(1).len(), 7);
}

#[test]
fn schedules_print_one_line_a_step() {
    let sharded = Sequence::Balanced.shard(&Mask::causal(), 16, 4).unwrap();
    let expected = "\
step 0:  q0·kv0       q1·kv1       q2·kv2       q3·kv3
step 1:  q3·kv0       q1·kv0       q2·kv1       q3·kv2
step 2:  q2[2..4]·kv0  q3[2..4]·kv1  q2[0..2]·kv0  q3[0..2]·kv1
";
    let squeeze = |text: &str| text.split_whitespace().map(str::to_string).collect::<Vec<_>>();
    assert_eq!(squeeze(&Schedule::balanced(&sharded).to_string()), squeeze(expected));
    let ring = Sequence::Ring.shard(&Mask::causal(), 4, 2).unwrap();
    assert_eq!(Schedule::ring(&ring).to_string(), "step 0:  q0·kv0  q1·kv1\nstep 1:  idle    q1·kv0\n");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn random_layouts_are_computed_exactly_once(
        owners in prop::collection::vec(0usize..6, 1..40),
        run_len in 1usize..5,
        lo in prop::collection::vec(0u32..200, 1..200),
    ) {
        let len = owners.len() * run_len;
        let mut runs = vec![Vec::new(); 6];
        for (i, &owner) in owners.iter().enumerate() {
            runs[owner].push(i * run_len..(i + 1) * run_len);
        }
        let mut bounds: Vec<u32> = lo.iter().cycle().take(2 * len).map(|&x| x.min(len as u32)).collect();
        bounds[..len].sort_unstable();
        bounds[len..].sort_unstable();
        // Both never decrease, and no row ends before it starts.
        let hi = bounds[len..].iter().zip(&bounds).map(|(&hi, &lo)| hi.max(lo)).collect();
        let rows = RowIntervals::new(bounds[..len].to_vec(), hi, len).unwrap();
        let sharded = ShardedMask::new(Layout::from_rank_runs(len, runs), &rows);
        for schedule in [
            Schedule::ring(&sharded),
            Schedule::balanced(&sharded),
            Schedule::all_gather(&sharded),
            Schedule::leveled(&sharded),
            Schedule::double_ring(&sharded, 2),
            Schedule::double_ring(&sharded, 3),
        ] {
            prop_assert_eq!(schedule.check(&sharded), Ok(()));
            prop_assert_eq!(schedule.transposed().check(&sharded), Ok(()));
        }
    }

    #[test]
    fn random_packings_are_computed_exactly_once(
        lens in prop::collection::vec(0usize..40, 1..8),
        causal: bool,
        window in prop::option::of((1usize..30, 0usize..10)),
        prefix in 0usize..10,
        world_size in 1usize..10,
    ) {
        let mut mask = if causal { Mask::causal() } else { Mask::full() };
        if let Some((left, right)) = window {
            mask = mask.with_window(left, right).unwrap();
        }
        let ends = lens.iter().scan(0, |end, len| { *end += len; Some(*end) });
        let cumulative: Vec<usize> = std::iter::once(0).chain(ends).collect();
        let len = cumulative[lens.len()];
        let mask = mask.with_documents(&cumulative).unwrap().with_prefix(prefix);
        for strategy in Sequence::ALL {
            let sharded = strategy.shard(&mask, len, world_size).unwrap();
            let schedule = strategy.schedule(&sharded);
            prop_assert_eq!(schedule.check(&sharded), Ok(()));
            prop_assert_eq!(schedule.transposed().check(&sharded), Ok(()));
            // Whoever computes a pair owns one side of it and is sent the other.
            for (step, rank, pair) in schedule.iter() {
                for chunk in [&pair.query, &pair.key_value] {
                    let arrives = schedule.inputs(step).iter().any(|t| t.to == rank && t.chunk == *chunk);
                    prop_assert!(chunk.owner == rank || arrives);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn what_random_groups_send_and_compute_is_simulated(
        len in 1usize..80,
        world_size in 1usize..9,
        (kv_heads, group) in (1usize..4, 1usize..4),
        mask in 0usize..10,
        strategy in 0usize..40,
    ) {
        let strategies = Strategy::all_for(world_size);
        let strategy = strategies[strategy % strategies.len()];
        let dims = Dims { batch: 1, heads: kv_heads * group, kv_heads, num_rows: len, num_keys: len, head_dim: 4 };
        assert_simulated(strategy, Masks::ALL[mask], dims, world_size);
    }
}

fn assert_simulated(strategy: Strategy, mask: Masks, dims: Dims, world_size: usize) {
    let Dims { batch, heads, kv_heads, num_rows: len, head_dim, .. } = dims;
    let problem = Problem::draw(dims, mask.build(len), DType::BF16);
    let (_, done) = sharded_and_done(&problem, strategy, world_size, &Device::flex());
    let shape = AttentionShape { batch, heads, kv_heads, head_dim, element_bytes: 2 };
    let plan = Plan::new(strategy, &mask.build(len), len, world_size, shape).unwrap();
    let simulated = [Pass::Forward, Pass::Backward].map(|pass| plan.simulate(pass));
    for (rank, done) in done.into_iter().enumerate() {
        let [bytes, pairs] = [Simulation::bytes_sent, Simulation::rank_work]
            .map(|of| [of(&simulated[0], rank), of(&simulated[1], rank)]);
        // Whole rows are Burn's own products: no kernel of ours is called.
        let pairs = if strategy == Strategy::RingSelfAttention { [0; 2] } else { pairs };
        let case = format!("{strategy} {mask:?}, {len} tokens, {heads}/{kv_heads} heads, rank {rank} of {world_size}");
        assert_eq!(done, Done { bytes, pairs }, "{case}");
    }
}
