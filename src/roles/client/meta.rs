//! The session at the meta server. Each mutation takes a slot and raises its sequence; it is repeated under the same
//! slot and sequence until it is answered, so that the server does it once.

use super::handles::{Handles, lock};
use crate::base::{error::ErrorCode, ids::{ClientInstance, InodeId, NodeId}};
use crate::limits;
use crate::net::cluster::Cluster;
use crate::net::frame::CallContext;
use crate::net::msg::meta::{CloseSessionRequest, OpenSessionRequest, RenewSessionRequest};
use crate::net::rpc::Call;
use bytes::Bytes;
use std::sync::{Arc, Mutex, atomic::{AtomicU64, Ordering}};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex as AsyncMutex, Semaphore};

/// Longest time between two renewals.
const RENEW_INTERVAL_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy)]
struct Slot {
    number: u32,
    sequence: u64,
}

/// The session of this mount.
#[derive(Debug)]
pub struct MetaSession {
    cluster: Arc<Cluster>,
    instance: ClientInstance,
    host: String,
    wait: Duration,
    handles: Arc<Handles>,
    epoch: AtomicU64,
    /// How often the session was opened.
    generation: AtomicU64,
    timeout_seconds: AtomicU64,
    reopening: AsyncMutex<()>,
    free: Mutex<Vec<Slot>>,
    permits: Semaphore,
    trace: AtomicU64,
}

impl MetaSession {
    /// Opens the session.
    pub async fn open(cluster: Arc<Cluster>, instance: ClientInstance, handles: Arc<Handles>, wait: Duration) -> Result<Arc<Self>, ErrorCode> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let session = Self {
            cluster, instance, host, wait, handles,
            epoch: AtomicU64::new(0),
            generation: AtomicU64::new(0),
            timeout_seconds: AtomicU64::new(15),
            reopening: AsyncMutex::new(()),
            free: Mutex::default(),
            permits: Semaphore::new(0),
            trace: AtomicU64::new(0),
        };
        let slots = session.open_once(Instant::now() + wait).await?.clamp(1, limits::SESSION_SLOTS_MAX);
        *lock(&session.free) = (0..slots).rev().map(|number| Slot { number, sequence: 0 }).collect();
        session.permits.add_permits(usize::try_from(slots).unwrap_or(1));
        Ok(Arc::new(session))
    }

    /// The node that serves the root's shard.
    pub fn node(&self) -> Result<NodeId, ErrorCode> {
        self.cluster.map().shard_primary(InodeId::ROOT.shard()).ok_or(ErrorCode::NotReady)
    }

    /// Names this mount at the servers.
    pub fn instance(&self) -> ClientInstance {
        self.instance
    }

    /// Is there a connection to the meta server at this moment?
    pub fn is_connected(&self) -> bool {
        self.node().and_then(|n| self.cluster.peer(n)).is_ok_and(|p| p.is_connected())
    }

    /// The header of calls that need no slot (storage's as well).
    pub fn context(&self) -> CallContext {
        let map = self.cluster.map();
        CallContext {
            client_instance: self.instance,
            session_epoch: self.epoch.load(Ordering::Acquire),
            map_version: map.version.0,
            trace_id: self.trace.fetch_add(1, Ordering::Relaxed),
            deadline_ms: u32::try_from(self.wait.as_millis()).unwrap_or(u32::MAX),
            ..CallContext::default()
        }
    }

    async fn node_by(&self, deadline: Instant) -> Result<NodeId, ErrorCode> {
        loop {
            match self.node() {
                Err(_) if Instant::now() < deadline => tokio::time::sleep(Duration::from_millis(200)).await,
                other => return other,
            }
        }
    }

    async fn open_once(&self, deadline: Instant) -> Result<u32, ErrorCode> {
        let node = self.node_by(deadline).await?;
        let request = OpenSessionRequest { host: self.host.clone(), reclaim: self.handles.reclaim() };
        let left = deadline.saturating_duration_since(Instant::now());
        let (reply, _) = self.cluster.call(node, &self.context(), &request, Bytes::new(), left).await?;
        self.epoch.store(reply.session_epoch, Ordering::Release);
        self.timeout_seconds.store(u64::from(reply.timeout_seconds), Ordering::Release);
        self.generation.fetch_add(1, Ordering::AcqRel);
        Ok(reply.slots)
    }

    /// Opens the session again, unless somebody has done so since `seen`.
    async fn reopen(&self, seen: u64, deadline: Instant) -> Result<(), ErrorCode> {
        let _one = self.reopening.lock().await;
        if self.generation.load(Ordering::Acquire) != seen {
            return Ok(());
        }
        tracing::warn!("the meta server does not know the session of this mount any more; opening it again");
        self.open_once(deadline).await?;
        tracing::info!("the session at the meta server is open again");
        Ok(())
    }

    async fn repeat<C: Call>(&self, request: &C, slot: Option<Slot>) -> Result<C::Reply, ErrorCode> {
        let deadline = Instant::now() + self.wait;
        loop {
            let seen = self.generation.load(Ordering::Acquire);
            let node = self.node_by(deadline).await?;
            let mut ctx = self.context();
            if let Some(slot) = slot {
                ctx.slot = slot.number;
                ctx.slot_sequence = slot.sequence;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.cluster.call(node, &ctx, request, Bytes::new(), left).await {
                Err(ErrorCode::SessionUnknown) if Instant::now() < deadline => {
                    self.reopen(seen, deadline).await?;
                    // A server that forgets at once must not be hammered.
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                Err(ErrorCode::WrongNode) if Instant::now() < deadline => tokio::time::sleep(Duration::from_millis(100)).await,
                other => return other.map(|(reply, _)| reply),
            }
        }
    }

    /// A call that may be repeated without harm.
    pub async fn ask<C: Call>(&self, request: &C) -> Result<C::Reply, ErrorCode> {
        self.repeat(request, None).await
    }

    /// A call that changes something: done once, however often it has to be sent.
    pub async fn mutate<C: Call>(&self, request: &C) -> Result<C::Reply, ErrorCode> {
        // Every slot is taken while the server is away: that wait is bounded as well.
        let permit = tokio::time::timeout(self.wait, self.permits.acquire()).await.map_err(|_| ErrorCode::Unreachable)?;
        let _permit = permit.map_err(|_| ErrorCode::ShuttingDown)?;
        let mut slot = lock(&self.free).pop().ok_or(ErrorCode::Internal)?;
        slot.sequence += 1;
        let guard = SlotGuard { session: self, slot };
        self.repeat(request, Some(guard.slot)).await
    }

    /// Renews until dropped.
    pub async fn keep_alive(self: Arc<Self>) {
        loop {
            let timeout = Duration::from_secs(self.timeout_seconds.load(Ordering::Acquire));
            tokio::time::sleep((timeout / 3).clamp(Duration::from_secs(1), RENEW_INTERVAL_MAX)).await;
            match self.ask(&RenewSessionRequest {}).await {
                Ok(()) => {}
                Err(ErrorCode::Fenced) => {
                    tracing::error!("this mount was evicted by the meta server: unmount and mount again");
                    return;
                }
                Err(e) => tracing::debug!("session not renewed: {e}"),
            }
        }
    }

    /// Ends the session in order.
    pub async fn close(&self, wait: Duration) {
        let Ok(node) = self.node() else { return };
        let ctx = self.context();
        let call = self.cluster.call(node, &ctx, &CloseSessionRequest {}, Bytes::new(), wait);
        if !matches!(tokio::time::timeout(wait, call).await, Ok(Ok(_))) {
            tracing::warn!("the meta server could not be told of the unmount; it ends the session by itself");
        }
    }
}

struct SlotGuard<'a> {
    session: &'a MetaSession,
    slot: Slot,
}

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        lock(&self.session.free).push(self.slot);
    }
}
