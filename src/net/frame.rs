//! stub
use crate::base::ids::*;
/// stub
#[derive(Clone, Debug, Default)]
pub struct CallContext { /// c
 pub client_instance: ClientInstance, /// s
 pub session_epoch: u64, /// s
 pub slot: u32, /// s
 pub slot_sequence: u64, /// g
 pub group_epoch: u64, /// m
 pub map_version: u64, /// k
 pub known_csn: Csn, /// t
 pub trace_id: u64, /// d
 pub deadline_ms: u32 }
