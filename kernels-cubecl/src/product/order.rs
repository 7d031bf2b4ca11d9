//! Which tile comes when.

use cubecl::prelude::*;

/// A tile's place among the tiles of C.
#[derive(CubeType, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) row: u32,
    pub(super) column: u32,
}

/// Where tile `index` of `rows` by `columns` is. They come in bands of `band` rows, in each of them column by column:
/// what runs at the same time is close to a square, and shares the operands that it finds in the L2 cache.
#[cube]
pub(super) fn place(index: u32, rows: u32, columns: u32, #[comptime] band: u32) -> Place {
    let tiles = columns * band;
    let first = index / tiles * band;
    let left = rows - first;
    let height = select(left < band, left, band);
    let within = index % tiles;
    Place { row: first + within % height, column: within / height }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_tile_comes_exactly_once() {
        for (rows, columns) in [(1, 1), (1, 9), (9, 1), (8, 3), (13, 5), (16, 16), (31, 2)] {
            for band in [1, 4, 8, 16] {
                let places: HashSet<Place> =
                    (0..rows * columns).map(|index| place(index, rows, columns, band)).collect();
                assert_eq!(places.len() as u32, rows * columns, "{rows}×{columns} in bands of {band}");
                assert!(places.iter().all(|place| place.row < rows && place.column < columns));
            }
        }
    }

    #[test]
    fn what_runs_together_is_close_to_a_square() {
        // 66 clusters on an H200: in 64 tiles of a large matrix there are 8 rows and 8 columns of tiles.
        let places: Vec<Place> = (0..64).map(|index| place(index, 128, 32, 8)).collect();
        assert!(places.iter().all(|place| place.row < 8 && place.column < 8));
    }
}
