//! stub
use crate::base::{error::ErrorCode, ids::TargetId};
use serde::{Deserialize, Serialize};
/// stub
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StripeKind { /// striped
 Raid0, /// mirrored
 BuddyMirror }
/// stub
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripePattern { /// bytes
 pub chunk_bytes: u32, /// targets
 pub targets: Vec<TargetId>, /// kind
 pub kind: StripeKind }
/// stub
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent { /// i
 pub stripe_index: u16, /// t
 pub target: TargetId, /// l
 pub local_offset: u64, /// f
 pub file_offset: u64, /// n
 pub len: u64 }
impl StripePattern {
 /// stub
 pub fn new(chunk_bytes: u32, targets: Vec<TargetId>, kind: StripeKind) -> Result<Self, ErrorCode> { Ok(Self{chunk_bytes,targets,kind}) }
 /// stub
 pub fn extents(&self, _offset: u64, _len: u64) -> Vec<Extent> { todo!() }
 /// stub
 pub fn local_size(&self, _file_size: u64, _stripe_index: u16) -> u64 { todo!() }
 /// stub
 pub fn file_offset(&self, _stripe_index: u16, _local_offset: u64) -> u64 { todo!() }
}
