//! What each role does. A role never imports another.

pub mod mgmt;
pub mod storage;
