//! What the benches share: the problem, the two attentions to compare, the proof that they
//! agree, a counting allocator, and the table.

mod machine;
mod memory;
mod problem;
mod subject;
mod table;
mod timing;
mod verify;

pub use machine::machine;
pub use memory::used_mib;
pub use problem::{Inputs, Pass, Problem};
pub use subject::Subject;
pub use table::{Measured, Table};
pub use timing::{drawn, median};
pub use verify::verify;
