//! stub
use super::{frame::CallContext, rpc::{Call, Peer}};
use crate::base::{error::ErrorCode, ids::{ClusterId, NodeId}};
use crate::fs::map::ClusterMap;
use bytes::Bytes;
use std::{sync::Arc, time::Duration};
use tokio::sync::watch;
/// A process's view of the cluster: the current map and a connection to each node.
#[derive(Debug)]
pub struct Cluster { map: watch::Receiver<Arc<ClusterMap>> }
impl Cluster {
 /// i
 pub fn id(&self) -> ClusterId { self.map.borrow().cluster }
 /// The current map.
 pub fn map(&self) -> Arc<ClusterMap> { self.map.borrow().clone() }
 /// Notified of each new map.
 pub fn watch(&self) -> watch::Receiver<Arc<ClusterMap>> { self.map.clone() }
 /// One attempt's connection.
 pub fn peer(&self, _node: NodeId) -> Result<Arc<Peer>, ErrorCode> { todo!() }
 /// Calls; repeats while the error is retryable or the outcome unknown (the method must be idempotent or deduplicated), until `wait` has passed. Logs once per outage, naming node and address, and once when it ends.
 pub async fn call<C: Call>(&self, _node: NodeId, _ctx: &CallContext, _request: &C, _payload: Bytes, _wait: Duration) -> Result<(C::Reply, Bytes), ErrorCode> { todo!() }
}
