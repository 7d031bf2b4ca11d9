//! What all kernels know of a tile: where rows lie, and which rows and keys see each other.

use cubecl::prelude::*;

/// Index of the first element of a head.
#[cube]
pub(crate) fn head_offset<E: CubePrimitive>(of: &Tensor<E>, batch: usize, head: usize) -> usize {
    batch * of.stride(0) + head * of.stride(1)
}

/// Index of the first element of a row.
#[cube]
pub(crate) fn row_offset<E: CubePrimitive>(of: &Tensor<E>, batch: usize, head: usize, row: usize) -> usize {
    head_offset(of, batch, head) + row * of.stride(2)
}

/// Keys that some row of a tile sees, and those that all of them see.
#[derive(CubeType)]
pub(crate) struct SeenKeys {
    pub start: usize,
    pub end: usize,
    pub full_from: usize,
    pub full_to: usize,
}

/// The keys that rows `first_row..=last_row` see. Bounds never decrease: they are those from the first row's
/// first to the last row's last.
#[cube]
pub(crate) fn seen_keys(bounds: &Tensor<u32>, num_rows: usize, first_row: usize, last_row: usize) -> SeenKeys {
    SeenKeys {
        start: bounds[first_row] as usize,
        end: bounds[num_rows + last_row] as usize,
        full_from: bounds[last_row] as usize,
        full_to: bounds[num_rows + first_row] as usize,
    }
}

/// The first row that sees a key from `first_key` on: the first that ends after it.
#[cube]
pub(crate) fn first_seer(bounds: &Tensor<u32>, num_rows: usize, first_key: usize) -> usize {
    first_above(bounds, num_rows, num_rows, first_key as u32)
}

/// The end of the rows that see a key up to `last_key`: the first that starts after it.
#[cube]
pub(crate) fn end_of_seers(bounds: &Tensor<u32>, num_rows: usize, last_key: usize) -> usize {
    first_above(bounds, 0usize, num_rows, last_key as u32)
}

/// The first of `len` bounds from `offset` on that is greater than `than`; bounds never decrease.
#[cube]
fn first_above(bounds: &Tensor<u32>, offset: usize, len: usize, than: u32) -> usize {
    let mut low = 0usize;
    let mut high = len;
    while low < high {
        let middle = (low + high) / 2;
        if bounds[offset + middle] > than {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}
