//! A segment in parts.

use super::SegmentError;
use super::tensors::{TensorMapper, Tensors};
use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use std::ops::Range;

/// How the inputs of a segment are cut, and the outputs put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Which dimension of every input is cut.
    pub dim: usize,
    /// Into tiles of so many; the last may be shorter.
    pub len: usize,
    /// What the outputs of all tiles become.
    pub join: Join,
}

/// What the outputs of all tiles become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    /// One after the other along the tiled dimension.
    Cat,
    /// Added up: losses.
    Sum,
}

impl Tiles {
    /// The tiles of `inputs`.
    ///
    /// # Errors
    /// If the inputs differ in length.
    pub(super) fn ranges<I: Tensors>(self, inputs: &I) -> Result<Vec<Range<usize>>, SegmentError> {
        struct Lengths(usize, Vec<usize>);
        impl TensorMapper for Lengths {
            fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
                self.1.push(tensor.dims()[self.0]);
                tensor
            }
        }
        let mut lens = Lengths(self.dim, Vec::new());
        drop(inputs.clone().map_tensors(&mut lens));
        let len = lens.1.first().copied().unwrap_or(0);
        if lens.1.iter().any(|&other| other != len) {
            return Err(SegmentError::Lengths { dim: self.dim, lens: lens.1 });
        }
        let each = self.len.max(1);
        let cut = (0..len).step_by(each).map(|start| start..(start + each).min(len)).collect::<Vec<_>>();
        Ok(if cut.is_empty() { std::iter::once(0..0).collect() } else { cut })
    }
}

/// One tile of every tensor.
pub(super) struct Slice {
    pub dim: usize,
    pub range: Range<usize>,
}

impl TensorMapper for Slice {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        // Whole, it may be empty, and backends need not cut nothing out of nothing.
        if self.range == (0..tensor.dims()[self.dim]) { tensor } else { tensor.slice_dim(self.dim, self.range.clone()) }
    }
}

/// Takes all tensors apart.
#[derive(Default)]
pub(super) struct Flatten(pub Vec<DispatchTensor>);

impl TensorMapper for Flatten {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.0.push(tensor.clone().into_dispatch());
        tensor
    }
}

/// The tensors of the first tile, with those of all others put behind them or added.
struct Joined {
    tiles: Tiles,
    others: Vec<std::vec::IntoIter<DispatchTensor>>,
}

impl TensorMapper for Joined {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let others = self.others.iter_mut().map(|tile| Tensor::from_dispatch(tile.next().expect("as many outputs")));
        let all = std::iter::once(tensor).chain(others);
        match self.tiles.join {
            Join::Cat => concatenated(all.collect(), self.tiles.dim),
            Join::Sum => all.reduce(|sum, tile| sum + tile).expect("at least one tile"),
        }
    }
}

/// One after the other along `dim`; a single one as it is.
pub(crate) fn concatenated<const D: usize>(mut all: Vec<Tensor<D>>, dim: usize) -> Tensor<D> {
    if all.len() == 1 { all.remove(0) } else { Tensor::cat(all, dim) }
}

/// What the tiles' outputs are together.
pub(super) fn joined<O: Tensors>(outputs: Vec<O>, tiles: Tiles) -> O {
    let mut outputs = outputs.into_iter();
    let first = outputs.next().expect("at least one tile");
    let flat = |tile: O| {
        let mut flat = Flatten::default();
        drop(tile.map_tensors(&mut flat));
        flat.0.into_iter()
    };
    let others = outputs.map(flat).collect();
    first.map_tensors(&mut Joined { tiles, others })
}
