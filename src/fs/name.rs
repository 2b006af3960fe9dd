//! stub
use crate::base::error::ErrorCode;
use serde::{Deserialize, Serialize};
/// stub
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct FileName(#[serde(with = "serde_bytes")] Vec<u8>);
impl FileName {
 /// stub
 pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, ErrorCode> { Ok(Self(bytes.into())) }
 /// stub
 pub fn as_bytes(&self) -> &[u8] { &self.0 }
}
/// 48 bits
pub fn name_hash(_key: &[u8; 16], _name: &FileName) -> u64 { todo!() }
