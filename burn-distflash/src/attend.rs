//! The two functions a model calls.

use crate::attention::{ChunkOptions, refusal};
use crate::baseline::whole_rows;
use crate::comm::{CommError, Communicator, local};
use crate::context::{Context, RankPlan};
use crate::error::AttentionError;
use crate::executor::{AttentionCall, SharedHeads};
use crate::layout::Rank;
use crate::mask::Mask;
use crate::op::DistAttention;
use crate::plan::{RankWork, digest};
use crate::schedule::{AttentionShape, Pass};
use crate::segment::{Kept, SegmentError, keep, next_kept};
use crate::strategy::Strategy;
use burn::backend::Dispatch;
use burn::tensor::Tensor;
use distflash_kernels::Kernel;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// What attention to compute.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Who sees whom, over the global positions of the whole sequence.
    pub mask: Mask,
    /// Multiplies the logits; `None` is `1/√head_dim`.
    pub scale: Option<f64>,
    /// Which kernels compute it on a GPU; the default is the fastest that the device allows. The choice is
    /// a rank's own: it changes rounding, not results.
    pub kernel: Kernel,
}

impl Default for AttentionOptions {
    /// Causal, `1/√head_dim`.
    fn default() -> Self {
        Self { mask: Mask::causal(), scale: None, kernel: Kernel::Auto }
    }
}

impl AttentionOptions {
    /// `mask`, with the default scale.
    #[must_use]
    pub fn masked(mask: Mask) -> Self {
        Self { mask, ..Self::default() }
    }
}

/// Exact attention on one device in O(N) memory: `out = softmax(scale · query · keyᵀ) · value` over the
/// keys the mask lets each query see.
///
/// # Shapes
/// - `query`, returned `out`: `[batch, heads, num_rows, head_dim]`
/// - `key`, `value`: `[batch, kv_heads, num_keys, head_dim]`; `kv_heads` divides `heads`
/// - returned `lse`: `[batch, heads, num_rows]`
///
/// Where `num_rows` and `num_keys` differ, the queries are the last tokens of the sequence.
///
/// # Units
/// `lse`, the logarithm of the softmax's denominator, is in nats, in f32 (f64 for f64 operands) and not
/// tracked by autodiff. A query that sees no key gets `out = 0`, `lse = -inf` and zero gradients.
///
/// # Errors
/// If shapes or dtypes do not fit each other, or the mask not the length.
///
/// # Source
/// Dao et al., *FlashAttention*, arXiv 2205.14135; the backward recomputes the scores from `lse`.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_distflash::{AttentionOptions, flash_attention};
///
/// let device = Device::flex().autodiff();
/// let draw = |heads| Tensor::<4>::random([1, heads, 100, 16], Distribution::Default, &device);
/// let (query, key, value) = (draw(6).require_grad(), draw(2), draw(2)); // 3 query heads per key head
///
/// let (out, lse) = flash_attention(query.clone(), key, value, &AttentionOptions::default())?;
/// assert_eq!((out.dims(), lse.dims()), ([1, 6, 100, 16], [1, 6, 100]));
///
/// let grads = out.sum().backward();
/// assert_eq!(query.grad(&grads).unwrap().dims(), [1, 6, 100, 16]);
/// # Ok::<(), burn_distflash::AttentionError>(())
/// ```
pub fn flash_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: &AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    static ALONE: LazyLock<Arc<dyn Communicator>> =
        LazyLock::new(|| Arc::new(local::group(1, Duration::from_secs(60)).remove(0)));
    let chunk_options = check(0, &query, &key, &value, options)?;
    let work = RankWork::solo(&options.mask, query.dims()[2], key.dims()[2])
        .map_err(|source| AttentionError::Mask { rank: 0, source })?;
    let call = AttentionCall {
        work: Arc::new(work),
        comm: ALONE.clone(),
        options: chunk_options,
        number: 0,
        tally: Arc::default(),
        shared: None,
    };
    let (out, lse) = run(query, key, value, call)?;
    Ok((out, lse.squeeze_dim(3)))
}

/// Exact attention over a sequence sharded across ranks, as this rank sees it:
/// `out = softmax(scale · query · keyᵀ) · value`, its own queries over the keys of all ranks.
///
/// All ranks call it together, with the same options and their own shards, and so do their backward
/// passes; use [`Context::backward`] to get errors of the latter.
///
/// Ranks that are threads each need a *fork* of the module, `module.fork(&device)`. Clones share their
/// parameters and with them one autodiff graph, whose backward pass lets one rank in while it waits for
/// the others, until the time limit.
///
/// # Shapes
/// As [`flash_attention`], with `num_rows = num_keys =` [`Context::shard_len`].
///
/// # Errors
/// Before anything is sent, if shapes, dtypes or mask do not fit, or ranks were called with different
/// things; afterwards, if a peer is lost or sends nothing within the group's time limit. Peers of a rank
/// that returns an error get one too.
///
/// # Source
/// Li et al., *DistFlashAttn*, arXiv 2310.03294; who computes what is the context's
/// [`Strategy`](crate::Strategy).
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_distflash::comm::local;
/// use burn_distflash::{AttentionError, AttentionOptions, Context, Sequence, dist_attention};
/// use std::time::Duration;
///
/// local::run(3, Duration::from_secs(30), |comm| {
///     let context = Context::new(comm, Sequence::Balanced, 100)?;
///     let device = Device::flex().autodiff();
///     let shape = [1, 4, context.shard_len(), 16];
///     let draw = || Tensor::<4>::random(shape, Distribution::Default, &device).require_grad();
///     let (query, key, value) = (draw(), draw(), draw());
///
///     let options = AttentionOptions::default();
///     let (out, _lse) = dist_attention(query, key.clone(), value, &options, &context)?;
///     let grads = context.backward(&out.sum())?;
///     assert_eq!(key.grad(&grads).unwrap().dims(), shape); // from the queries of all ranks
///     Ok::<_, AttentionError>(())
/// })?;
/// # Ok::<(), local::RunError>(())
/// ```
pub fn dist_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: &AttentionOptions,
    context: &Context,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let comm = context.communicator();
    comm.check()?;
    let (prepared, call) = prepare(&query, &key, &value, options, context).inspect_err(|error| {
        // Peers are about to wait for this rank: tell them why it does not come.
        let failure = match error {
            AttentionError::Comm(error) => error.clone(),
            other => CommError::Invalid { rank: context.rank(), message: other.to_string() },
        };
        comm.fail(&failure);
    })?;
    let (out, lse) = match context.strategy() {
        Strategy::RingSelfAttention => whole_rows(query, key, value, &prepared.plan, options, call),
        _ if prepared.plan.head_ranks() == 1 => run(query, key, value, call)?,
        _ => {
            let shared = SharedHeads::new(&prepared.plan, &call, [query.dims()[1], key.dims()[1]]);
            run(query, key, value, AttentionCall { shared: Some(Arc::new(shared)), ..call })?
        }
    };
    comm.check()?;
    Ok((out, lse.squeeze_dim(3)))
}

/// Attention, or what a checkpoint segment kept of it.
fn run(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    call: AttentionCall,
) -> Result<(Tensor<4>, Tensor<4>), AttentionError> {
    let expected = kept_dims(&query, &call);
    let [query, key, value] = [query, key, value].map(Tensor::into_dispatch);
    let (out, lse, _, own_out, own_lse) = match next_kept()? {
        None => Dispatch::attention_forward(query, key, value, call),
        Some(Kept { out, lse }) => {
            if out.dims() != expected {
                let reason = format!("attention of {expected:?}; the forward's was {:?}", out.dims());
                return Err(SegmentError::Diverged(reason).into());
            }
            Dispatch::attention_again(query, key, value, out.into_dispatch(), lse.into_dispatch(), call)
        }
    };
    keep(Kept { out: Tensor::from_dispatch(own_out), lse: Tensor::from_dispatch(own_lse) });
    Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
}

/// The shape of what this rank's kernels give.
fn kept_dims(query: &Tensor<4>, call: &AttentionCall) -> [usize; 4] {
    let [batch, heads, rows, head_dim] = query.dims();
    let [heads, rows] = call.shared.as_ref().map_or([heads, rows], |shared| shared.own_size());
    [batch, heads, rows, head_dim]
}

fn prepare(
    query: &Tensor<4>,
    key: &Tensor<4>,
    value: &Tensor<4>,
    options: &AttentionOptions,
    context: &Context,
) -> Result<(Arc<RankPlan>, AttentionCall), AttentionError> {
    let rank = context.rank();
    let chunk_options = check(rank, query, key, value, options)?;
    for (what, tensor) in [("length of query", query), ("length of key", key)] {
        expect(rank, what, context.shard_len(), tensor.dims()[2])?;
    }
    let ([batch, heads, _, head_dim], kv_heads) = (query.dims(), key.dims()[1]);
    let shape = AttentionShape { batch, heads, kv_heads, head_dim, element_bytes: query.dtype().size() };
    let prepared = context.plan(&options.mask, shape).map_err(|source| AttentionError::Mask { rank, source })?;
    let plan = &prepared.plan;
    let field = |name, value: &dyn ToString| (name, value.to_string());
    let hex = |digest: u64| format!("{digest:016x}");
    agree(
        context,
        &[
            field("sequence length", &plan.layout().seq_len()),
            field("strategy", &context.strategy()),
            field("mask with digest", &hex(digest(&options.mask))),
            field("layout with digest", &hex(digest(plan.layout()))),
            field("schedule with digest", &hex(digest(plan.schedule(Pass::Forward)))),
            field("batch size", &batch),
            field("query heads", &heads),
            field("key/value heads", &kv_heads),
            field("head_dim", &head_dim),
            field("dtype", &format!("{:?}", query.dtype())),
            field("scale", &chunk_options.scale),
        ],
    )?;
    let comm = context.communicator().clone();
    let number = comm.next_call();
    let call = AttentionCall {
        work: prepared.work.clone(),
        comm,
        options: chunk_options,
        number,
        tally: context.tally(),
        shared: None,
    };
    Ok((prepared, call))
}

/// Finds out, before any tensor is sent, whether all ranks were called with the same `fields`. Once per
/// kind of call: what was agreed on stays agreed, and a rank that has something new while its peers do
/// not is out of step with them, which every receive checks.
fn agree(context: &Context, fields: &[(&str, String)]) -> Result<(), AttentionError> {
    let digest = digest(&fields);
    if context.is_agreed(digest) || context.world_size() == 1 {
        return Ok(());
    }
    let (rank, comm) = (context.rank(), context.communicator());
    let said: Vec<&str> = fields.iter().map(|field| field.1.as_str()).collect();
    let all = comm.gather_bytes("agreement on attention", said.join("\n").into_bytes())?;
    for (peer, theirs) in all.iter().enumerate() {
        let theirs = String::from_utf8_lossy(theirs);
        for ((name, ours), theirs) in fields.iter().zip(theirs.split('\n')) {
            if ours != theirs {
                let (field, ours, theirs) = ((*name).to_string(), ours.clone(), theirs.to_string());
                return Err(CommError::Disagree { rank, peer, field, ours, theirs }.into());
            }
        }
    }
    context.agree(digest);
    Ok(())
}

fn expect(rank: Rank, what: &'static str, expected: usize, actual: usize) -> Result<(), AttentionError> {
    if expected == actual { Ok(()) } else { Err(AttentionError::Shape { rank, what, expected, actual }) }
}

/// Checks what a rank can check alone, and returns how blocks are to be computed.
fn check(
    rank: Rank,
    query: &Tensor<4>,
    key: &Tensor<4>,
    value: &Tensor<4>,
    options: &AttentionOptions,
) -> Result<ChunkOptions, AttentionError> {
    let ([batch, heads, _, head_dim], [_, kv_heads, num_keys, _]) = (query.dims(), key.dims());
    expect(rank, "batch size of key", batch, key.dims()[0])?;
    expect(rank, "head_dim of key", head_dim, key.dims()[3])?;
    expect(rank, "batch size of value", batch, value.dims()[0])?;
    expect(rank, "heads of value", kv_heads, value.dims()[1])?;
    expect(rank, "length of value", num_keys, value.dims()[2])?;
    expect(rank, "head_dim of value", head_dim, value.dims()[3])?;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(AttentionError::UnevenGroups { rank, heads, kv_heads });
    }
    if let Some(reason) = refusal(query, key, options.kernel) {
        return Err(AttentionError::Unsupported { rank, reason });
    }
    let [query, key, value] = [query, key, value].map(Tensor::dtype);
    if query != key || query != value {
        return Err(AttentionError::DTypes { rank, query, key, value });
    }
    let scale = options.scale.unwrap_or(1. / (head_dim as f64).sqrt());
    if !scale.is_finite() {
        return Err(AttentionError::Scale { rank, scale });
    }
    Ok(ChunkOptions { scale, kernel: options.kernel })
}
