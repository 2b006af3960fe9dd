//! stub
use crate::base::ids::*;
use super::stripe::StripeKind;
use serde::{Deserialize, Serialize};
/// stub
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ChunkKey { /// i
 pub ino: InodeId, /// d
 pub data_id: DataId }
/// stub
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ChunkHeaderRecord { /// v
 pub version: u16, /// f
 pub fs_id: ClusterId, /// i
 pub ino: InodeId, /// d
 pub data_id: DataId, /// s
 pub stripe_index: u16, /// c
 pub chunk_bytes: u32, /// t
 pub targets: Vec<TargetId>, /// k
 pub kind: StripeKind, /// u
 pub uid: u32, /// g
 pub gid: u32, /// p
 pub project: u32, /// m
 pub mirror_sequence: u64 }
