//! What each role does. A role never imports another.

pub mod client;
pub mod meta;
pub mod mgmt;
pub mod storage;
