//! stub
use super::rpc::{Peer, Service};
use crate::base::{ids::NodeId, start::StartError};
use std::{net::SocketAddr, sync::Arc};
/// stub
#[derive(Clone, Debug)]
pub struct Endpoint;
impl Endpoint {
 /// p
 pub fn peer(&self, _node: NodeId, _addrs: Vec<SocketAddr>) -> Arc<Peer> { Arc::new(Peer) }
 /// s
 pub fn serve(&self, _service: Arc<dyn Service>) {}
 /// l
 pub fn local_addr(&self) -> Result<SocketAddr, StartError> { todo!() }
}
