//! Llama on exact sharded attention: model, data, training, and the `distflash` program.

pub mod checkpoint;
pub mod cli;
mod counting;
pub mod data;
pub mod llama;
pub mod loss;
mod method;
pub mod planner;
pub mod plot;
pub mod train;

pub use counting::Counting;
pub use method::{Method, UnknownMethod};
