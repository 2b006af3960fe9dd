//! The border of a process: every call that comes in passes here before a role sees it.
//!
//! Checks that the method is known, that the peer's certificate is of a role that may call it and has not been revoked,
//! then hands the call to the role that serves it. A refusal is logged with the peer, the method and the reason.

use super::{
    method::{self, Method},
    rpc::{RequestContext, Service, ServiceFuture},
};
use crate::base::{
    error::ErrorCode,
    ids::{NodeId, Role},
};
use crate::fs::map::ClusterMap;
use bytes::Bytes;
use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, OnceLock, PoisonError, RwLock},
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// One refusal of a kind is logged per this time, so that a peer cannot fill the log.
const REFUSAL_LOG_PAUSE: Duration = Duration::from_secs(10);
/// Kinds of refusal remembered for the pause.
const REFUSAL_KINDS_MAX: usize = 1024;

/// Dispatches by role. Roles are added as they come up; a role announced but not yet up answers `NotReady`.
#[derive(Default)]
pub struct Router {
    announced: Vec<Role>,
    services: RwLock<HashMap<Role, Arc<dyn Service>>>,
    map: OnceLock<watch::Receiver<Arc<ClusterMap>>>,
    refusals: Mutex<HashMap<(IpAddr, u16, &'static str), Instant>>,
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Router").field("announced", &self.announced).finish_non_exhaustive()
    }
}

impl Router {
    /// A router of a process that will serve these roles.
    pub fn new(announced: Vec<Role>) -> Arc<Self> {
        Arc::new(Self { announced, ..Self::default() })
    }

    /// The role is up: its calls go to `service` from now on.
    pub fn serve(&self, role: Role, service: Arc<dyn Service>) {
        self.services.write().unwrap_or_else(PoisonError::into_inner).insert(role, service);
    }

    /// The role is stopping: its calls are answered `NotReady` from now on.
    pub fn stop(&self, role: Role) {
        self.services.write().unwrap_or_else(PoisonError::into_inner).remove(&role);
    }

    /// Where revocations are read from. Only the first call counts.
    pub fn use_map(&self, map: watch::Receiver<Arc<ClusterMap>>) {
        // A second map of the same process says the same.
        let _ = self.map.set(map);
    }

    fn route(&self, peer: &[NodeId], from: SocketAddr, number: u16) -> Result<Arc<dyn Service>, ErrorCode> {
        let Some(method) = method::find(number) else {
            self.log_refusal(peer, from, number, "unknown", "this version has no such method");
            return Err(ErrorCode::UnknownMethod);
        };
        if let Err(reason) = permit(method, peer, self.map.get().map(|m| m.borrow().clone()).as_deref()) {
            self.log_refusal(peer, from, number, method.name, reason);
            return Err(ErrorCode::Forbidden);
        }
        if let Some(service) = self.services.read().unwrap_or_else(PoisonError::into_inner).get(&method.served_by) {
            return Ok(service.clone());
        }
        if self.announced.contains(&method.served_by) {
            return Err(ErrorCode::NotReady);
        }
        self.log_refusal(peer, from, number, method.name, "that role does not run in this process");
        Err(ErrorCode::WrongNode)
    }

    fn log_refusal(&self, peer: &[NodeId], from: SocketAddr, number: u16, name: &str, reason: &'static str) {
        let mut seen = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if seen.len() >= REFUSAL_KINDS_MAX {
            seen.retain(|_, at| now.duration_since(*at) < REFUSAL_LOG_PAUSE);
        }
        let key = (from.ip(), number, reason);
        if seen.get(&key).is_some_and(|at| now.duration_since(*at) < REFUSAL_LOG_PAUSE)
            || seen.len() >= REFUSAL_KINDS_MAX
        {
            return;
        }
        seen.insert(key, now);
        drop(seen);
        tracing::warn!(
            "refused a call: peer {} at {}, method {name} ({number}): {reason}",
            names(peer),
            from
        );
    }
}

/// The peer's ids for a log line.
fn names(peer: &[NodeId]) -> String {
    if peer.is_empty() {
        return "without a certificate".into();
    }
    peer.iter().map(ToString::to_string).collect::<Vec<_>>().join("+")
}

/// May a peer with these ids make this call? The error is the reason for the log.
fn permit(method: &Method, peer: &[NodeId], map: Option<&ClusterMap>) -> Result<(), &'static str> {
    if method.callers.is_empty() {
        return Ok(());
    }
    if peer.is_empty() {
        return Err("the peer has no certificate of this cluster");
    }
    // A process with several roles shares one certificate: one revoked id revokes it.
    if map.is_some_and(|map| peer.iter().any(|id| map.revoked.contains(id))) {
        return Err("the peer was removed from the cluster, its certificate is revoked");
    }
    if !peer.iter().any(|id| method.callers.contains(&id.role)) {
        return Err("the role in the peer's certificate may not make this call");
    }
    Ok(())
}

impl Service for Router {
    fn handle(self: Arc<Self>, ctx: RequestContext, method: u16, body: Bytes, payload: Bytes) -> ServiceFuture {
        match self.route(&ctx.peer, ctx.peer_addr, method) {
            Ok(service) => service.handle(ctx, method, body, payload),
            Err(code) => Box::pin(async move { Err(code) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number_of(name: &str) -> &'static Method {
        method::table().find(|m| m.name == name).expect("method exists")
    }

    #[test]
    fn permit_without_certificate_allows_only_joining() {
        assert!(permit(number_of("JoinRequest"), &[], None).is_ok());
        assert!(permit(number_of("RegisterRequest"), &[], None).is_err());
    }

    #[test]
    fn permit_by_role_of_certificate() {
        let token = number_of("TokenRequest");
        assert!(permit(token, &[NodeId::new(Role::Admin, 1)], None).is_ok());
        assert!(permit(token, &[NodeId::new(Role::Client, 1), NodeId::new(Role::Storage, 1)], None).is_err());
    }

    #[test]
    fn permit_revoked_peer_is_refused_even_with_another_good_id() {
        let bad = NodeId::new(Role::Storage, 7);
        let map = ClusterMap { revoked: vec![bad], ..ClusterMap::default() };
        let register = number_of("RegisterRequest");
        assert!(permit(register, &[NodeId::new(Role::Meta, 1), bad], Some(&map)).is_err());
        assert!(permit(register, &[NodeId::new(Role::Meta, 1)], Some(&map)).is_ok());
    }

    #[test]
    fn route_to_absent_role_is_not_ready_or_wrong_node() {
        let peer = [NodeId::new(Role::Client, 1)];
        let from: SocketAddr = "127.0.0.1:1".parse().expect("address");
        let register = number_of("RegisterRequest").number;
        assert_eq!(Router::new(vec![Role::Mgmt]).route(&peer, from, register).err(), Some(ErrorCode::NotReady));
        assert_eq!(Router::new(vec![Role::Meta]).route(&peer, from, register).err(), Some(ErrorCode::WrongNode));
        assert_eq!(Router::new(vec![]).route(&peer, from, 65000).err(), Some(ErrorCode::UnknownMethod));
    }
}
