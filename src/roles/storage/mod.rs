//! Storage: keeps chunk files on its targets. It knows nothing of names; meta and clients tell it what to keep.

mod fence;
mod service;
mod workers;

pub use service::{OpenTarget, StorageServer};
