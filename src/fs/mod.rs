//! Pure rules of the file system and the chunk engine.

pub mod attr;
pub mod chunkfile;
pub mod map;
pub mod name;
pub mod placement;
pub mod stripe;
