//! Llama on exact sharded attention: model, data, training, and the `distflash` program.

pub mod cli;
pub mod data;
pub mod llama;
pub mod loss;
mod method;
pub mod planner;
pub mod plot;
pub mod train;

pub use method::{Method, UnknownMethod};
