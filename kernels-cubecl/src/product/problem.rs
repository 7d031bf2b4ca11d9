//! What a matrix product is asked to do.

use crate::hopper::Half;
use crate::problem::Refusal;
use cubecl::ir::{ElemType, FloatKind};

/// `C = A · B` or `C += A · B`: sizes, precision, and how the matrices lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductProblem {
    /// Rows of A and of C.
    pub m: usize,
    /// Columns of B and of C.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// Of A and B: f16 or bf16.
    pub dtype: ElemType,
    /// The left factor, `[m, k]`.
    pub a: Operand,
    /// The right factor, `[k, n]`.
    pub b: Operand,
    /// Where `[m, n]` goes.
    pub c: Target,
}

/// How a factor lies in memory: row by row, itself or its transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Whether memory holds the transpose.
    pub transposed: bool,
    /// Elements from the start of one row in memory to the next.
    pub row_stride: usize,
}

/// How results lie in memory, row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// What becomes of the sums.
    pub store: Store,
    /// Elements from the start of one row in memory to the next.
    pub row_stride: usize,
}

/// What becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Store {
    /// Rounded to the dtype of the operands.
    Half,
    /// Stored as they are, f32.
    F32,
    /// Added to what C holds, f32.
    AddF32,
}

impl Store {
    /// The dtype of C for operands of `dtype`.
    #[must_use]
    pub fn dtype(self, dtype: ElemType) -> ElemType {
        match self {
            Store::Half => dtype,
            Store::F32 | Store::AddF32 => FloatKind::F32.into(),
        }
    }
}

/// Coordinates of copies are below 2³¹, also those of the last tile's end.
const LONGEST: usize = i32::MAX as usize - 255;
/// What the copying unit can step over from row to row, in bytes.
const WIDEST: usize = 1 << 40;
/// What addresses of rows must be multiples of, in bytes.
pub(super) const ALIGNMENT: usize = 16;

/// A matrix in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored {
    pub(super) name: &'static str,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) dtype: ElemType,
}

impl ProductProblem {
    /// A, B and C as memory has them.
    pub(super) fn stored(&self) -> [Stored; 3] {
        let Self { m, n, k, dtype, a, b, c } = *self;
        let operand = |name, Operand { transposed, row_stride }, rows, columns| {
            let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
            Stored { name, rows, columns, row_stride, dtype }
        };
        let results = Stored { name: "C", rows: m, columns: n, row_stride: c.row_stride, dtype: c.store.dtype(dtype) };
        [operand("A", a, m, k), operand("B", b, k, n), results]
    }

    /// Checks what does not depend on the device.
    ///
    /// # Errors
    /// The first thing that cannot be done: operands that are not of 16 bits, an empty dimension, one too long for
    /// coordinates, rows that overlap or do not start at multiples of 16 bytes, rows of C that do not end at one.
    pub fn validate(&self) -> Result<(), Refusal> {
        let Self { m, n, k, .. } = *self;
        Half::of(self.dtype)?;
        if [m, n, k].contains(&0) {
            return Err(Refusal::EmptyProduct { m, n, k });
        }
        for (dimension, len) in [("m", m), ("n", n), ("k", k)] {
            if len > LONGEST {
                return Err(Refusal::LongProduct { dimension, len, most: LONGEST });
            }
        }
        let stored = self.stored();
        stored.iter().try_for_each(Stored::validate)?;
        // What is stored outside a matrix is left out by 16 bytes at a time (measured on an H200).
        let [.., results] = stored;
        let bytes = results.columns * results.dtype.size();
        if bytes.is_multiple_of(ALIGNMENT) {
            Ok(())
        } else {
            Err(Refusal::Misaligned { matrix: results.name, what: "row length", bytes })
        }
    }
}

impl Stored {
    fn validate(&self) -> Result<(), Refusal> {
        let Self { name: matrix, rows, columns, row_stride, dtype } = *self;
        // A single row's stride is never taken.
        if rows == 1 {
            return Ok(());
        }
        let most = WIDEST / dtype.size() - 1;
        if row_stride < columns || row_stride > most {
            return Err(Refusal::RowStride { matrix, row_stride, least: columns, most });
        }
        let bytes = row_stride * dtype.size();
        if bytes.is_multiple_of(ALIGNMENT) {
            Ok(())
        } else {
            Err(Refusal::Misaligned { matrix, what: "row stride", bytes })
        }
    }
}
