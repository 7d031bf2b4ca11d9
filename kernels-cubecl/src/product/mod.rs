//! `C = A · B` for Hopper GPUs: the products of a linear layer and of its gradients.
//!
//! Operands of f16 or bf16 with f32 sums, at the speed of the matrix units. A linear layer `y = x · W` with `W`
//! `[inputs, outputs]` needs three forms of it:
//!
//! | | A | B |
//! |---|---|---|
//! | `y = x · W` | `x` | `W` |
//! | `dx = dy · Wᵀ` | `dy` | `W`, transposed |
//! | `dW = xᵀ · dy` | `x`, transposed | `dy` |
//!
//! # How
//! A cluster of two cubes computes a tile of 256×256, each cube 128 rows of it. Both need all of the tile's part of
//! B: each copies half of it, to both. Along k the operands come in blocks of 64, four of them in flight. In a cube
//! one unit does nothing but start copies, and two warpgroups multiply 64 rows by 256 columns each, which is what
//! their registers hold. As many clusters as the device runs at once walk the tiles, in an order that finds
//! operands in the cache; one tile's results are stored while the next is computed.
//!
//! `order` says which tile comes when, `blocks` is the loop along k, `epilogue` the way out, `kernel` all of it.

#![allow(clippy::manual_is_multiple_of, reason = "device code has no such method")]

mod blocks;
mod epilogue;
pub(crate) mod kernel;
mod launch;
mod order;
mod problem;
mod shape;

pub use launch::{ProductTensors, launch};
pub use problem::{Operand, ProductProblem, Store, Target};
pub use shape::ProductTiles;
