//! What everything stands on: identifiers, the error registry, the codec. No I/O except in `durable` and `format`.

pub mod codec;
pub mod durable;
pub mod error;
pub mod format;
pub mod ids;
pub mod start;
pub mod version;
