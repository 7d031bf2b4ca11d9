//! Checks, tensor maps and the grid of the product.

use super::kernel;
use super::problem::{ALIGNMENT, ProductProblem, Stored};
use super::shape::{BLOCK, ProductTiles, SHARE, TILE};
use crate::hopper::wgmma::BOX;
use crate::problem::Refusal;
use cubecl::client::Client;
use cubecl::prelude::*;

/// Operands and result of [`launch`], in the shapes that memory has: of a transposed operand, those of the transpose.
#[derive(Clone, Debug)]
pub struct ProductTensors {
    /// `[m, k]`, or `[k, m]` where it is transposed.
    pub a: TensorBinding,
    /// `[k, n]`, or `[n, k]` where it is transposed.
    pub b: TensorBinding,
    /// `[m, n]`, written. It may share no memory with the operands.
    pub c: TensorBinding,
}

/// A matrix seen by the copying unit in boxes of `rows` rows of 128 bytes.
///
/// # Errors
/// If its first element is not at a multiple of 16 bytes.
///
/// # Panics
/// If `tensor` is not `stored`, or its memory ends before it.
fn map(stored: Stored, tensor: TensorBinding, rows: u32) -> Result<TensorMapArg<Tiled>, Refusal> {
    let size = stored.dtype.size();
    let start = tensor.handle.offset_start.unwrap_or(0) as usize;
    if !start.is_multiple_of(ALIGNMENT) {
        return Err(Refusal::Misaligned { matrix: stored.name, what: "start", bytes: start });
    }
    assert_eq!(tensor.shape[..], [stored.rows, stored.columns], "shape of {stored:?}");
    let is_as_stored =
        (stored.rows == 1 || tensor.strides[0] == stored.row_stride) && (stored.columns == 1 || tensor.strides[1] == 1);
    assert!(is_as_stored, "strides of {stored:?} are {:?}", tensor.strides);
    // A single row has no stride, but the map needs one that is aligned.
    let row_stride = if stored.rows == 1 { stored.columns.next_multiple_of(ALIGNMENT) } else { stored.row_stride };
    let len = (stored.rows - 1) * row_stride + stored.columns;
    assert!((len * size) as u64 <= tensor.handle.size_in_used(), "memory of {stored:?} ends before it");
    let tensor = TensorBinding { strides: [row_stride, 1].into(), ..tensor };
    let boxes = TiledArgs::new([rows as usize, 128 / size].into());
    Ok(TensorMapArg::new(boxes, tensor.into_tensor_arg(), stored.dtype).with_swizzle(TensorMapSwizzle::B128))
}

/// Computes `problem`.
///
/// # Errors
/// As [`ProductTiles::select`], or if a tensor does not start at a multiple of 16 bytes; nothing is launched then.
///
/// # Panics
/// If the tensors do not have the shapes and strides of `problem`.
pub fn launch(client: &Client, problem: &ProductProblem, tensors: ProductTensors) -> Result<(), Refusal> {
    let tiles = ProductTiles::select(client, problem)?;
    let [a, b, c] = problem.stored();
    // Where rows run along k, a share is a box.
    let box_rows = |along_k| if along_k { SHARE } else { BLOCK };
    let a_map = map(a, tensors.a, box_rows(tiles.a_along_k))?;
    let b_map = map(b, tensors.b, box_rows(tiles.b_along_k))?;
    let c_map = map(c, tensors.c, BOX as u32)?;
    let [rows, columns] = [problem.m, problem.n].map(|len| len.div_ceil(TILE as usize) as u32);
    let blocks = problem.k.div_ceil(BLOCK as usize) as u32;
    // One cluster for every two multiprocessors, that is, as many as run at once.
    let multiprocessors = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(2);
    let clusters = (multiprocessors / 2).clamp(1, rows * columns);
    // SAFETY: the kernel reaches global memory through the maps alone, whose copies leave out what is not in the
    // matrix, and `map` has seen that all of the matrix is in its memory; shared memory holds what `shared_bytes`
    // counts.
    unsafe {
        kernel::matrix_product::launch_unchecked(
            client,
            CubeCount::Static(2 * clusters, 1, 1),
            tiles.cube_dim(),
            a_map,
            b_map,
            c_map,
            rows,
            columns,
            blocks,
            tiles,
            a.dtype,
            c.dtype,
        );
    }
    Ok(())
}
