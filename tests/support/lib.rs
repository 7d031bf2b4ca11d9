//! What the suites share: inputs drawn on the host, the f64 truth, a naive run in the same precision,
//! and the bound derived from the two.

mod bound;
mod device;
mod draw;
#[cfg(feature = "cuda")]
pub mod gpu;
mod naive;
mod problem;
mod product;
mod run;

pub use bound::{Compared, Results, Truth, assert_close, assert_within_bound, host};
pub use device::{device, is_cuda, kernel, kernel_for, may_cut_loops, strategies, takes, worlds};
pub use draw::Draw;
pub use naive::naive;
pub use problem::{Masks, Problem};
pub use product::{Expected, assert_is_product, decode, encode};
pub use run::{Done, TIME_LIMIT, flash, sharded, sharded_and_done};
