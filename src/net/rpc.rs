//! stub
use super::frame::CallContext;
use crate::base::{error::ErrorCode, ids::NodeId};
use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};
use std::{future::Future, net::SocketAddr, pin::Pin, sync::Arc, time::Duration};
/// stub
pub trait Call: Serialize + DeserializeOwned + Send + Sync + 'static {
 /// r
 type Reply: Serialize + DeserializeOwned + Send + 'static; /// m
 const METHOD: u16; /// b
 const BULK: bool; }
/// stub
#[derive(Clone, Debug)]
pub struct RequestContext { /// peer
 pub peer: Vec<NodeId>, /// a
 pub peer_addr: SocketAddr, /// c
 pub call: CallContext }
/// stub
#[derive(Debug, Default)]
pub struct Response { /// b
 pub body: Vec<u8>, /// p
 pub payload: Bytes }
impl Response {
 /// stub
 pub fn ok<T: Serialize>(reply: &T) -> Self { Self { body: crate::base::codec::encode(reply), payload: Bytes::new() } }
 /// stub
 pub fn with_payload<T: Serialize>(reply: &T, payload: Bytes) -> Self { Self { body: crate::base::codec::encode(reply), payload } }
}
/// stub
pub type ServiceFuture = Pin<Box<dyn Future<Output = Result<Response, ErrorCode>> + Send>>;
/// stub
pub trait Service: Send + Sync + 'static {
 /// h
 fn handle(self: Arc<Self>, ctx: RequestContext, method: u16, body: Bytes, payload: Bytes) -> ServiceFuture; }
/// stub
#[derive(Debug)]
pub struct Peer;
impl Peer {
 /// c
 pub async fn call<C: Call>(&self, _ctx: &CallContext, _request: &C, _payload: Bytes) -> Result<(C::Reply, Bytes), ErrorCode> { todo!() }
 /// s
 pub fn set_addrs(&self, _addrs: Vec<SocketAddr>) {}
 /// c
 pub fn is_connected(&self) -> bool { false }
 /// r
 pub fn remote(&self) -> Option<SocketAddr> { None }
 /// r
 pub fn rtt(&self) -> Option<Duration> { None }
}
