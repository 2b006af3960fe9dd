//! Pure rules of the file system and the chunk engine.

pub mod chunkfile;
pub mod name;
pub mod placement;
pub mod stripe;
