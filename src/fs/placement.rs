//! stub
use crate::base::ids::{NodeNumber, TargetId};
use serde::{Deserialize, Serialize};
/// stub
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CapacityPool { /// n
 Normal, /// l
 Low, /// e
 Emergency }
/// stub
#[derive(Clone, Debug)]
pub struct Candidate { /// t
 pub target: TargetId, /// n
 pub node: NodeNumber, /// f
 pub free_bytes: u64, /// t
 pub total_bytes: u64, /// p
 pub pool: CapacityPool, /// u
 pub usable: bool }
/// stub
pub fn choose(_candidates: &[Candidate], _count: usize, _seed: u64) -> Vec<TargetId> { todo!() }
/// stub
pub fn classify(_free: u64, _total: u64) -> CapacityPool { todo!() }
