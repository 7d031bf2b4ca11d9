//! Parameters, gradients and optimizer state spread over ranks.

mod gather;
mod mesh;
mod norm;
mod prefetch;
mod sharded;
mod sharding;

pub use mesh::{Mesh, MeshError};
pub use norm::{clip_shards, scale_gradients};
pub use prefetch::Prefetch;
pub use sharded::Sharded;
pub use sharding::{Sharding, UnknownSharding};
