//! A process's view of the cluster: the current map, kept fresh by a subscription to mgmt, and a connection to each node.
//!
//! When mgmt is away everything goes on with the last map, which is also kept in a file so that a start works then.
//! Every role's outgoing calls pass through `Cluster::call`; waiting for a server that is away happens here and nowhere else.

use super::{
    endpoint::Endpoint,
    frame::CallContext,
    rpc::{Call, Peer},
};
use crate::base::{
    durable,
    error::{ErrorClass, ErrorCode},
    ids::{ClusterId, MapVersion, NodeId, Role},
    version::{self, Unreadable},
};
use crate::fs::map::{ClusterMap, NodeEntry};
use crate::net::msg::mgmt::{SubscribeRequest, TargetCapacity};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// First pause between two attempts of a call.
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
/// Longest pause between two attempts.
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// A subscription is answered after 2 s at the latest; much later than that, mgmt is away.
const SUBSCRIBE_WAIT: Duration = Duration::from_secs(10);
/// Of the map file.
const MAP_FORMAT: u32 = 1;
/// mgmt's id: there is one.
pub const MGMT: NodeId = NodeId::new(Role::Mgmt, 1);

/// Supplies the room on this process's targets for each heartbeat.
pub type Capacities = Arc<dyn Fn() -> Vec<TargetCapacity> + Send + Sync>;

/// A process's view of the cluster: the current map and a connection to each node.
pub struct Cluster {
    endpoint: Endpoint,
    me: Vec<NodeId>,
    mgmt: Vec<SocketAddr>,
    map: watch::Sender<Arc<ClusterMap>>,
    map_file: Option<PathBuf>,
    /// Held while the map file is written. Locked alone.
    saving: Mutex<()>,
    capacities: Capacities,
    /// Locked for a look-up only, never across an await. Taken before nothing else.
    peers: Mutex<HashMap<NodeId, Arc<Peer>>>,
    /// Since when a node does not answer. Locked alone.
    outages: Mutex<HashMap<NodeId, Instant>>,
    cancel: CancellationToken,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("me", &self.me).field("map", &self.map.borrow().version).finish_non_exhaustive()
    }
}

/// What stands in the map file.
#[derive(Serialize, Deserialize)]
struct MapRecord {
    format: u32,
    map: ClusterMap,
}

impl Cluster {
    /// Starts with `initial`, which stays until `follow` or `offer_map`.
    /// `map_file` receives each new map. A process with a client role connects to all meta and storage nodes at once.
    /// Must be called within the runtime.
    pub fn start(
        endpoint: Endpoint,
        me: Vec<NodeId>,
        mgmt: Vec<SocketAddr>,
        initial: ClusterMap,
        map_file: Option<PathBuf>,
        capacities: Capacities,
        cancel: CancellationToken,
    ) -> Arc<Self> {
        let cluster = Arc::new(Self {
            endpoint,
            me,
            mgmt,
            map: watch::Sender::new(Arc::new(initial)),
            map_file,
            saving: Mutex::default(),
            capacities,
            peers: Mutex::default(),
            outages: Mutex::default(),
            cancel,
        });
        cluster.map_changed();
        cluster.save_map();
        cluster
    }

    /// Keeps the map fresh from mgmt, and reports this process as alive, until `cancel` of `start`. To be called once,
    /// after registration: mgmt takes reports of registered nodes only. No mgmt address: the map stays as it is.
    /// Must be called within the runtime.
    pub fn follow(self: &Arc<Self>) {
        if !self.mgmt.is_empty() {
            let task = self.clone();
            tokio::spawn(async move { task.subscribe().await });
        }
    }

    /// The map that a file of an earlier run holds. None: there is no file.
    pub fn saved_map(path: &Path) -> io::Result<Option<ClusterMap>> {
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let damaged = |e: serde_json::Error| Unreadable::Damaged(e.to_string());
        let read = || -> Result<ClusterMap, Unreadable> {
            // The version first: a newer format may have other fields.
            let found: Version = serde_json::from_slice(&text).map_err(damaged)?;
            version::check(found.format, MAP_FORMAT)?;
            Ok(serde_json::from_slice::<MapRecord>(&text).map_err(damaged)?.map)
        };
        read().map(Some).map_err(io::Error::other)
    }

    /// Which cluster.
    pub fn id(&self) -> ClusterId {
        self.map.borrow().cluster
    }

    /// Ids of this process.
    pub fn me(&self) -> &[NodeId] {
        &self.me
    }

    /// The current map.
    pub fn map(&self) -> Arc<ClusterMap> {
        self.map.borrow().clone()
    }

    /// Notified of each new map.
    pub fn watch(&self) -> watch::Receiver<Arc<ClusterMap>> {
        self.map.subscribe()
    }

    /// Takes a map that came with another answer, if it is newer.
    pub fn offer_map(&self, new: ClusterMap) {
        self.take_map(new, None);
    }

    /// `asked_with`: the version that mgmt answered to with this map. mgmt's word counts even when its map is older (it
    /// was restored from a backup), unless ours has changed since the question.
    fn take_map(&self, new: ClusterMap, asked_with: Option<MapVersion>) {
        let taken = self.map.send_if_modified(|old| {
            let differs = new.version > old.version || (asked_with == Some(old.version) && new.version != old.version);
            let take = new.cluster == old.cluster && differs;
            if take {
                *old = Arc::new(new);
            }
            take
        });
        if taken {
            self.map_changed();
            self.save_map();
        }
    }

    /// The connection to a node, made on first use. `Unreachable` if the map has no address for it.
    pub fn peer(&self, node: NodeId) -> Result<Arc<Peer>, ErrorCode> {
        let addrs = self.addrs(&self.map(), node);
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(peer) = peers.get(&node) {
            return Ok(peer.clone());
        }
        if addrs.is_empty() {
            return Err(ErrorCode::Unreachable);
        }
        let peer = Peer::new(self.endpoint.clone(), node, addrs);
        peers.insert(node, peer.clone());
        Ok(peer)
    }

    /// Calls; repeats while the error is retryable or the outcome unknown (the method must be idempotent or
    /// deduplicated), until `wait` has passed. A node without an address is waited for as well.
    /// Logs once per outage, naming node and address, and once when it ends.
    /// `WrongNode` and `SessionUnknown` are returned at once: another node, or a new session, is the caller's to choose.
    /// Dropping the future gives the call up; the server may still carry it out.
    pub async fn call<C: Call>(
        &self,
        node: NodeId,
        ctx: &CallContext,
        request: &C,
        payload: Bytes,
        wait: Duration,
    ) -> Result<(C::Reply, Bytes), ErrorCode> {
        let started = Instant::now();
        let mut pause = BACKOFF_FIRST;
        let mut map = self.map.subscribe();
        loop {
            let left = wait.saturating_sub(started.elapsed());
            let attempt = async {
                let peer = self.peer(node)?;
                peer.call(ctx, request, payload.clone()).await
            };
            let error = tokio::select! {
                result = tokio::time::timeout(left, attempt) => match result {
                    Ok(Ok(reply)) => {
                        self.outage_ended(node);
                        return Ok(reply);
                    }
                    Ok(Err(error)) => error,
                    Err(_) => ErrorCode::Timeout,
                },
                () = self.cancel.cancelled() => return Err(ErrorCode::ShuttingDown),
            };
            if !is_worth_repeating(error) {
                if !matches!(error.class(), ErrorClass::Retryable | ErrorClass::OutcomeUnknown) {
                    self.outage_ended(node);
                }
                return Err(error);
            }
            // With a stale map the newer one is on its way: the subscription's open question is answered by it.
            if error != ErrorCode::StaleMap {
                self.outage_noticed(node, error, wait);
            }
            let left = wait.saturating_sub(started.elapsed());
            if left.is_zero() {
                tracing::error!(
                    "gave up a call to {} after {} s: {error}",
                    self.describe(node),
                    started.elapsed().as_secs()
                );
                return Err(error);
            }
            tokio::select! {
                () = tokio::time::sleep(pause.min(left)) => {}
                // A new map may name the node's new address.
                Ok(()) = map.changed() => {}
                () = self.cancel.cancelled() => return Err(ErrorCode::ShuttingDown),
            }
            pause = (pause * 2).min(BACKOFF_MAX);
        }
    }

    /// Addresses to try. For mgmt those given on the command line come first: they worked before there was a map.
    fn addrs(&self, map: &ClusterMap, node: NodeId) -> Vec<SocketAddr> {
        let mut addrs = if node == MGMT { self.mgmt.clone() } else { Vec::new() };
        for addr in map.node(node).map(|n| n.addrs.as_slice()).unwrap_or_default() {
            if addr.port() != 0 && !addrs.contains(addr) {
                addrs.push(*addr);
            }
        }
        addrs
    }

    /// Brings the peers in line with the map.
    fn map_changed(&self) {
        let map = self.map();
        {
            let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
            peers.retain(|node, peer| {
                let addrs = self.addrs(&map, *node);
                let known = !addrs.is_empty();
                if known {
                    peer.set_addrs(addrs);
                }
                known
            });
        }
        if !self.me.iter().any(|id| id.role == Role::Client) {
            return;
        }
        for node in map.nodes.iter().filter(|n| matches!(n.id.role, Role::Meta | Role::Storage)) {
            self.connect_ahead(node);
        }
    }

    /// Opens the connection before the first call needs it; failures show at that call.
    fn connect_ahead(&self, node: &NodeEntry) {
        let Ok(peer) = self.peer(node.id) else { return };
        if !peer.is_connected() {
            tokio::spawn(async move {
                if let Err(e) = peer.connect().await {
                    tracing::debug!("connecting ahead to {}: {e}", peer.node());
                }
            });
        }
    }

    fn save_map(&self) {
        let Some(path) = &self.map_file else { return };
        let _one = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let map = self.map();
        if map.version == MapVersion::default() {
            return; // nothing is known yet: what an earlier run kept may still be of use
        }
        let record = MapRecord { format: MAP_FORMAT, map: (*map).clone() };
        if let Err(e) = write_map(path, &record) {
            tracing::warn!(
                "cannot keep the cluster map in {}: {e}; a start without mgmt will not work",
                path.display()
            );
        }
    }

    /// The subscription. Ends with `cancel` only.
    async fn subscribe(&self) {
        let mut pause = BACKOFF_FIRST;
        let mut away_since: Option<Instant> = None;
        loop {
            let outcome = tokio::select! {
                outcome = self.ask_mgmt() => outcome,
                () = self.cancel.cancelled() => return,
            };
            let Err(error) = outcome else {
                if let Some(since) = away_since.take() {
                    tracing::info!("mgmt at {} is back after {} s", join(&self.mgmt), since.elapsed().as_secs());
                }
                pause = BACKOFF_FIRST;
                continue;
            };
            if away_since.is_none() {
                away_since = Some(Instant::now());
                let why = self.peer(MGMT).ok().and_then(|peer| peer.last_error()).unwrap_or_else(|| error.to_string());
                tracing::warn!(
                    "mgmt at {} does not answer: {why}; going on with map {}",
                    join(&self.mgmt),
                    self.map().version
                );
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.cancel.cancelled() => return,
            }
            pause = (pause * 2).min(BACKOFF_MAX);
        }
    }

    /// One long poll: reports this process as alive, and answers as soon as there is a newer map, or after 2 s.
    async fn ask_mgmt(&self) -> Result<(), ErrorCode> {
        let known = self.map().version;
        let request = SubscribeRequest { nodes: self.me.clone(), known, capacities: (self.capacities)() };
        let peer = self.peer(MGMT)?;
        let ctx = CallContext::default();
        let call = peer.call(&ctx, &request, Bytes::new());
        let (reply, _) = tokio::time::timeout(SUBSCRIBE_WAIT, call).await.map_err(|_| ErrorCode::Timeout)??;
        if let Some(map) = reply.map {
            self.take_map(map, Some(known));
        }
        Ok(())
    }

    fn outage_noticed(&self, node: NodeId, error: ErrorCode, wait: Duration) {
        let mut outages = self.outages.lock().unwrap_or_else(PoisonError::into_inner);
        if outages.contains_key(&node) {
            return;
        }
        outages.insert(node, Instant::now());
        drop(outages);
        let peer = self.peers.lock().unwrap_or_else(PoisonError::into_inner).get(&node).cloned();
        let why = peer.and_then(|peer| peer.last_error()).unwrap_or_else(|| error.to_string());
        tracing::warn!("{} does not answer: {why}; calls to it wait up to {} s", self.describe(node), wait.as_secs());
    }

    fn outage_ended(&self, node: NodeId) {
        let ended = self.outages.lock().unwrap_or_else(PoisonError::into_inner).remove(&node);
        if let Some(since) = ended {
            tracing::info!("{} answers again after {} s", self.describe(node), since.elapsed().as_secs());
        }
    }

    /// `storage:3 (name, 10.0.0.1:9003)` for messages.
    pub fn describe(&self, node: NodeId) -> String {
        let map = self.map();
        match map.node(node) {
            Some(entry) => format!("{node} ({}, {})", entry.name, join(&self.addrs(&map, node))),
            None if node == MGMT => format!("{node} ({})", join(&self.mgmt)),
            None => format!("{node} (not in map {})", map.version),
        }
    }
}

/// A repeat of the same call to the same node may succeed.
fn is_worth_repeating(error: ErrorCode) -> bool {
    matches!(error.class(), ErrorClass::Retryable | ErrorClass::OutcomeUnknown)
        && !matches!(error, ErrorCode::WrongNode | ErrorCode::SessionUnknown)
}

fn join(addrs: &[SocketAddr]) -> String {
    if addrs.is_empty() {
        return "no address".into();
    }
    addrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn write_map(path: &Path, record: &MapRecord) -> io::Result<()> {
    durable::write_file(path, &serde_json::to_vec_pretty(record)?, durable::SECRET)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_map_round_trips_and_missing_file_is_none() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("map.json");
        assert!(Cluster::saved_map(&path).expect("no file").is_none());
        let map = ClusterMap { cluster: ClusterId::random(), ..ClusterMap::default() };
        write_map(&path, &MapRecord { format: 1, map: map.clone() }).expect("write");
        assert_eq!(Cluster::saved_map(&path).expect("read"), Some(map));
        std::fs::write(&path, b"{").expect("write");
        assert!(Cluster::saved_map(&path).unwrap_err().to_string().contains("damaged"));
    }

    #[test]
    fn a_newer_saved_map_is_told_from_a_damaged_one() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("map.json");
        let read = |text: &str| {
            std::fs::write(&path, text).expect("write");
            Cluster::saved_map(&path).expect_err("unreadable").to_string()
        };
        let text = read(r#"{"format": 2, "map": ["other", "shape"]}"#);
        assert!(text.contains("version 2") && text.contains("up to 1") && text.contains("upgrade"), "{text}");
        for damaged in [r#"{"map": {}}"#, r#"{"format": 1, "map": {}}"#, r#"{"format": 0}"#, r#"{"format": 2, "ma"#] {
            let text = read(damaged);
            assert!(text.contains("damaged") && !text.contains("upgrade"), "{text}");
        }
    }

    #[test]
    fn answers_that_need_the_caller_are_not_repeated() {
        assert!(is_worth_repeating(ErrorCode::Unreachable));
        assert!(is_worth_repeating(ErrorCode::ConnectionLost));
        assert!(!is_worth_repeating(ErrorCode::WrongNode));
        assert!(!is_worth_repeating(ErrorCode::NotFound));
        assert!(!is_worth_repeating(ErrorCode::Forbidden));
    }
}
