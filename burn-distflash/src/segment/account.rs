//! How many bytes segments keep.

use super::tensors::{TensorMapper, Tensors};
use burn::tensor::Tensor;
use std::cell::Cell;

/// Bytes that segments of one thread, hence of one rank, keep for backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptBytes {
    /// Inputs.
    pub inputs: usize,
    /// Outputs of attention, and their lse.
    pub attention: usize,
    /// Of both, what was offloaded, and is counted in neither.
    pub on_host: usize,
}

thread_local! {
    static KEPT: Cell<KeptBytes> = const { Cell::new(KeptBytes { inputs: 0, attention: 0, on_host: 0 }) };
}

/// What the segments of this thread keep now. An input that something else keeps as well is counted all the same.
#[must_use]
pub fn kept_by_segments() -> KeptBytes {
    KEPT.get()
}

/// Counted for as long as it lives.
pub(super) struct Counted {
    own: KeptBytes,
    is_offloaded: bool,
}

impl Counted {
    pub fn new<I: Tensors>(inputs: &I, is_offloaded: bool) -> Self {
        let mut counted = Self { own: KeptBytes::default(), is_offloaded };
        counted.add(inputs, |kept| &mut kept.inputs);
        counted
    }

    pub fn add_attention<T: Tensors>(&mut self, kept: &T) {
        self.add(kept, |kept| &mut kept.attention);
    }

    fn add<T: Tensors>(&mut self, tensors: &T, kind: fn(&mut KeptBytes) -> &mut usize) {
        let bytes = bytes(tensors);
        let on_host: fn(&mut KeptBytes) -> &mut usize = |kept| &mut kept.on_host;
        let kind = if self.is_offloaded { on_host } else { kind };
        *kind(&mut self.own) += bytes;
        let mut sum = KEPT.get();
        *kind(&mut sum) += bytes;
        KEPT.set(sum);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // Of another thread, if a graph was moved there: saturating, because its counts are not these.
        let sum = KEPT.get();
        KEPT.set(KeptBytes {
            inputs: sum.inputs.saturating_sub(self.own.inputs),
            attention: sum.attention.saturating_sub(self.own.attention),
            on_host: sum.on_host.saturating_sub(self.own.on_host),
        });
    }
}

fn bytes<T: Tensors>(tensors: &T) -> usize {
    struct Bytes(usize);
    impl TensorMapper for Bytes {
        fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
            self.0 += tensor.shape().num_elements() * tensor.dtype().size();
            tensor
        }
    }
    let mut sum = Bytes(0);
    drop(tensors.clone().map_tensors(&mut sum));
    sum.0
}
