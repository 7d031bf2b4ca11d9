//! Checkpoint segments: what runs forward without a trace, and again in backward.

mod account;
mod grads;
mod leaves;
mod op;
mod replay;
mod saved;
mod tape;
mod tensors;
mod tiles;

pub use account::{KeptBytes, kept_by_segments};
pub use op::{Flag, Replay, SegmentOps, Slot};
pub use tensors::{TensorMapper, Tensors};
pub use tiles::{Join, Tiles};

pub(crate) use leaves::{Chain, Outputs, is_tracked, joining, seed};
pub(crate) use tape::{Kept, keep, next_kept};
pub(crate) use tiles::concatenated;

use burn::module::Module;
use replay::Segment;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// What of a segment's forward is kept for its backward.
///
/// With `d` the width of the residual stream and bytes per token and layer in bf16 (Llama-7B: `d` = 4096, 32 heads):
///
/// | | kept | run again | Llama-7B |
/// |---|---|---|---|
/// | `Store` | everything | nothing | about 30 `d`: 120 KiB |
/// | `Boundary` | inputs | all of the forward | 2 `d`: 8 KiB |
/// | `KeepAttention` | inputs, attention's output and lse | all but attention | 4 `d` + 4 · heads: 16.1 KiB |
///
/// Attention grows with the square of the length and the rest does not: the longer the sequence, the more
/// `KeepAttention` saves of what `Boundary` recomputes, for twice its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Checkpointing {
    /// Everything: no segment at all.
    Store,
    /// Inputs only, as Hugging Face does (Chen et al., arXiv 1604.06174).
    Boundary,
    /// Inputs, and the output and lse of each attention, which is never run again (DistFlashAttn, arXiv 2310.03294,
    /// §3.3).
    KeepAttention,
}

impl Checkpointing {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::Store, Self::Boundary, Self::KeepAttention];

    /// What is kept goes to host memory until backward needs it.
    #[must_use]
    pub fn offloaded(self) -> Policy {
        Policy { checkpointing: self, offload: true }
    }
}

impl fmt::Display for Checkpointing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Store => "store",
            Self::Boundary => "boundary",
            Self::KeepAttention => "keep-attention",
        })
    }
}

/// A name that is no way of checkpointing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown checkpointing `{0}`; expected store, boundary or keep-attention")]
pub struct UnknownCheckpointing(String);

impl FromStr for Checkpointing {
    type Err = UnknownCheckpointing;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let named = Self::ALL.into_iter().find(|checkpointing| checkpointing.to_string() == name);
        named.ok_or_else(|| UnknownCheckpointing(name.to_string()))
    }
}

/// What a segment keeps, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// What.
    pub checkpointing: Checkpointing,
    /// Whether in host memory. Reading it out waits for the device, so that it pays where memory is what lacks.
    pub offload: bool,
}

impl From<Checkpointing> for Policy {
    fn from(checkpointing: Checkpointing) -> Self {
        Self { checkpointing, offload: false }
    }
}

impl Policy {
    /// A policy for each of `num_layers` layers under a budget of what may be kept, in bytes per token over all layers:
    /// attention is kept in as many as fit, the first ones, whose backward comes last and finds memory free.
    ///
    /// `boundary` and `attention` are the bytes per token of a layer's inputs, and of its attention's output and lse.
    ///
    /// ```
    /// use burn_distflash::{Checkpointing, Policy};
    ///
    /// // Llama-7B in bf16: 8 KiB of residual, 8 KiB and 128 bytes of attention a token and layer.
    /// let policies = Policy::within(400_000, 32, 8192, 8192 + 128);
    /// let kept = policies.iter().filter(|policy| policy.checkpointing == Checkpointing::KeepAttention).count();
    /// assert_eq!(kept, 16);
    /// ```
    #[must_use]
    pub fn within(bytes_per_token: usize, num_layers: usize, boundary: usize, attention: usize) -> Vec<Self> {
        let left = bytes_per_token.saturating_sub(num_layers * boundary);
        let kept = left.checked_div(attention).unwrap_or(num_layers);
        let of = |layer| if layer < kept { Checkpointing::KeepAttention } else { Checkpointing::Boundary };
        (0..num_layers).map(|layer| of(layer).into()).collect()
    }
}

/// Why a segment cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// The closure uses a tracked tensor that is neither an input nor a parameter of the module: its gradient would be
    /// lost.
    #[error(
        "a segment's closure captures a tensor that autodiff tracks; make it an input or a parameter of the module"
    )]
    Captured,
    /// [`Checkpointing::KeepAttention`] without attention.
    #[error(
        "keep-attention was asked for, but the segment calls neither dist_attention nor flash_attention; use boundary"
    )]
    NothingToKeep,
    /// Offloading what is not kept by a segment.
    #[error("store keeps everything where it is and cannot be offloaded; use boundary or keep-attention")]
    NothingToOffload,
    /// The closure did something else when it was called again.
    #[error("a segment's closure diverged when it was run again for backward: {0}")]
    Diverged(String),
    /// The closure failed when it was called again.
    #[error("a segment's closure failed when it was run again for backward: {0}")]
    Failed(String),
    /// Inputs of a tiled segment differ in length.
    #[error("dimension {dim} of a segment's inputs is to be tiled, but is {lens:?} long; expected one length")]
    Lengths {
        /// Which dimension.
        dim: usize,
        /// Its length, by input.
        lens: Vec<usize>,
    },
}

// What failed in a replay, which a step of Burn's backward pass cannot return.
thread_local! {
    static FAILURE: RefCell<Option<SegmentError>> = const { RefCell::new(None) };
}

fn fail(error: SegmentError) {
    FAILURE.with_borrow_mut(|failure| {
        failure.get_or_insert(error);
    });
}

/// What failed in a backward pass of this thread since the last call. Its gradients are NaN.
/// [`Context::backward`](crate::Context::backward) asks for it, and so does the next [`segment`].
///
/// # Errors
/// That.
pub fn check_segments() -> Result<(), SegmentError> {
    FAILURE.with_borrow_mut(|failure| failure.take().map_or(Ok(()), Err))
}

/// `closure(module, inputs)`, of which only what `policy` says is kept for the backward pass, which runs the rest of it
/// again (rematerialisation).
///
/// Works for any module and any number of inputs and outputs, within other segments too, and with communication inside:
/// forward, replay and backward come to it in the same order on all ranks. Gradients are those of
/// `closure(module, inputs)`, to the bit; under Burn's fusion to a rounding, because fused operations round otherwise.
/// Without anything tracked it is just that.
///
/// The closure is called again later: it must do the same then, so no dropout. Tensors it captures are constants.
///
/// # Errors
/// What the closure returns, or a [`SegmentError`].
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor, activation::silu};
/// use burn_distflash::{Checkpointing, SegmentError, segment};
///
/// let device = Device::flex().autodiff();
/// let linear = LinearConfig::new(8, 8).init(&device);
/// let x = Tensor::<2>::ones([3, 8], &device);
/// let y = segment(&linear, x, Checkpointing::Boundary, |linear: &Linear, x: Tensor<2>| {
///     Ok::<_, SegmentError>(silu(linear.forward(x)))
/// })?;
/// let grads = y.sum().backward();
/// assert_eq!(linear.weight.val().grad(&grads).unwrap().dims(), [8, 8]);
/// # Ok::<(), SegmentError>(())
/// ```
///
/// # Source
/// Li et al., *DistFlashAttn*, arXiv 2310.03294, §3.3.
pub fn segment<M, I, O, E, F>(module: &M, inputs: I, policy: impl Into<Policy>, closure: F) -> Result<O, E>
where
    M: Module + Sync + 'static,
    I: Tensors,
    O: Tensors,
    E: From<SegmentError> + fmt::Display + 'static,
    F: Fn(&M, I) -> Result<O, E> + Send + Sync + 'static,
{
    Segment::run(module, inputs, policy.into(), None, move |module, inputs, _: Range<usize>| closure(module, inputs))
}

/// As [`segment`], one tile of the inputs after the other, forward and backward: what is worked with never exceeds a
/// tile. Gradients of parameters add up over tiles in f32.
///
/// The closure is also told which part of the tiled dimension it was given. A dimension of length 0 is one empty tile;
/// under [`Checkpointing::Store`] everything is one tile.
///
/// # Errors
/// As [`segment`].
pub fn tiled_segment<M, I, O, E, F>(
    module: &M,
    inputs: I,
    tiles: Tiles,
    policy: impl Into<Policy>,
    closure: F,
) -> Result<O, E>
where
    M: Module + Sync + 'static,
    I: Tensors,
    O: Tensors,
    E: From<SegmentError> + fmt::Display + 'static,
    F: Fn(&M, I, Range<usize>) -> Result<O, E> + Send + Sync + 'static,
{
    Segment::run(module, inputs, policy.into(), Some(tiles), closure)
}
