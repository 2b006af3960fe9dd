//! Every message on the wire. Wire structs live here alone; docs/protocol.md lists them.

pub mod meta;
pub mod mgmt;
pub mod storage;
