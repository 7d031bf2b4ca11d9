//! The subjects under test, run on a problem.

use crate::bound::{Results, host};
use crate::problem::Problem;
use burn::tensor::{Device, Tensor};
use burn_distflash::comm::local;
use burn_distflash::schedule::Pass;
use burn_distflash::{AttentionError, Context, Layout, Strategy, dist_attention, flash_attention};
use std::time::Duration;

/// No healthy run of a test comes near it.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

/// `problem` by [`flash_attention`] on `device`.
///
/// # Panics
/// If it is refused.
#[must_use]
pub fn flash(problem: &Problem, device: &Device) -> Results {
    let device = device.clone().autodiff();
    let leaf = |index| problem.tensor(index, &device).require_grad();
    let (query, key, value) = (leaf(0), leaf(1), leaf(2));
    let (out, lse) =
        flash_attention(query.clone(), key.clone(), value.clone(), &problem.options).expect("a valid problem");
    let grads = (out.clone() * problem.tensor(3, &device)).sum().backward();
    let grad = |x: &Tensor<4>| host(x.grad(&grads).expect("tracked"));
    Results {
        out: host(out.inner()),
        lse: host(lse.inner()),
        d_query: grad(&query),
        d_key: grad(&key),
        d_value: grad(&value),
    }
}

/// `problem` by [`dist_attention`] over `world_size` ranks, each a thread on `device`.
///
/// # Panics
/// If any rank fails.
#[must_use]
pub fn sharded(problem: &Problem, strategy: Strategy, world_size: usize, device: &Device) -> Results {
    sharded_and_done(problem, strategy, world_size, device).0
}

/// What a rank did in the forward and in the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Bytes of tensors it sent.
    pub bytes: [u64; 2],
    /// Unmasked (query, key) pairs its kernels computed, once per query head.
    pub pairs: [u64; 2],
}

/// As [`sharded`], with what each rank did.
///
/// # Panics
/// If any rank fails.
#[must_use]
pub fn sharded_and_done(
    problem: &Problem,
    strategy: Strategy,
    world_size: usize,
    device: &Device,
) -> (Results, Vec<Done>) {
    let (shared, device) = (problem.clone(), device.clone().autodiff());
    let ranks = local::run(world_size, TIME_LIMIT, move |comm| {
        let context = Context::for_mask(comm.clone(), strategy, shared.dims.num_keys, &shared.options.mask)
            .expect("a strategy and a mask that fit");
        let shard = |index| context.shard(shared.tensor(index, &device), 2).detach();
        let leaf = |index| shard(index).require_grad();
        let (query, key, value) = (leaf(0), leaf(1), leaf(2));
        let (out, lse) = dist_attention(query.clone(), key.clone(), value.clone(), &shared.options, &context)?;
        let forward_bytes = comm.bytes_sent();
        let grads = context.backward(&(out.clone() * shard(3)).sum())?;
        let bytes = [forward_bytes, comm.bytes_sent() - forward_bytes];
        let done = Done { bytes, pairs: [Pass::Forward, Pass::Backward].map(|pass| context.computed(pass).1) };
        let grad = |x: &Tensor<4>| x.grad(&grads).expect("tracked");
        let tensors = [out.inner(), lse.inner().unsqueeze_dim(3), grad(&query), grad(&key), grad(&value)];
        Ok::<_, AttentionError>((tensors, done))
    })
    .expect("healthy ranks");
    let layout = strategy.layout_for(&problem.intervals(), world_size);
    let (tensors, done): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    let [out, lse, d_query, d_key, d_value] = unshard(&layout, tensors).map(host);
    (Results { out, lse, d_query, d_key, d_value }, done)
}

fn unshard(layout: &Layout, ranks: Vec<[Tensor<4>; 5]>) -> [Tensor<4>; 5] {
    std::array::from_fn(|i| layout.unshard(ranks.iter().map(|tensors| tensors[i].clone()).collect(), 2))
}
