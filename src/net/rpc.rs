//! Calls over frames: the serving loop, and a connection to one node that renews itself.
//!
//! Each peer has two streams, control and bulk, so that a small call never waits behind a megabyte. A server that stops
//! answers what it has taken up, finishes its streams, and only then closes; so a call that is unanswered when the
//! server's stream *finished* was never taken up and may be sent again. One that is unanswered when the connection
//! *broke* may or may not have happened: `ConnectionLost`. Whether to repeat it is the caller's business.

use super::endpoint::{CLOSE_ABORTED, CLOSE_BAD_FRAME, CLOSE_SHUTDOWN, Connection, Endpoint};
use super::frame::{self, Frame, FrameError, FrameReader, Header, Kind};
use crate::base::codec;
use crate::base::error::ErrorCode;
use crate::base::ids::NodeId;
use crate::limits;
use bytes::Bytes;
use quinn::{ConnectionError, ReadError, VarInt};
use serde::{Serialize, de::DeserializeOwned};
use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use super::frame::CallContext;

/// How long a stopping server waits until the caller has its last answers; one that was killed never says so.
const DELIVERY_WAIT: Duration = Duration::from_secs(1);

/// How long a stopping server waits for the calls in flight.
const DRAIN_WAIT: Duration = Duration::from_secs(5);
/// Calls fail at once for this long after a failed attempt to connect.
const CONNECT_PAUSE: Duration = Duration::from_millis(200);
/// How long an attempt to connect has before the next address is tried beside it.
const CONNECT_STAGGER: Duration = Duration::from_millis(250);
/// Frames written together.
const WRITE_BATCH: usize = 64;
/// Streams and calls of a peer that has no certificate yet.
const UNAUTHENTICATED_CALLS_MAX: u32 = 8;

/// A request message.
pub trait Call: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// What the server answers.
    type Reply: Serialize + DeserializeOwned + Send + 'static;
    /// Number of the method.
    const METHOD: u16;
    /// Travels on the bulk stream.
    const BULK: bool;
}

/// Who calls, and with what.
#[derive(Clone, Debug)]
pub struct RequestContext {
    /// Nodes of the caller's certificate; empty for one that joins.
    pub peer: Vec<NodeId>,
    /// Where it is.
    pub peer_addr: SocketAddr,
    /// What its header says.
    pub call: CallContext,
    /// The connection it came on.
    pub connection: Connection,
}

/// An answer.
#[derive(Clone, Debug, Default)]
pub struct Response {
    /// Encoded message.
    pub body: Vec<u8>,
    /// Raw bytes.
    pub payload: Bytes,
}

impl Response {
    /// An answer without payload.
    pub fn ok<T: Serialize>(reply: &T) -> Response {
        Response { body: codec::encode(reply), payload: Bytes::new() }
    }

    /// The same with a payload.
    pub fn with_payload(mut self, payload: Bytes) -> Response {
        self.payload = payload;
        self
    }
}

/// What a service's `handle` returns.
pub type HandleFuture = Pin<Box<dyn Future<Output = Result<Response, ErrorCode>> + Send>>;

/// The same, by the name that the roles use.
pub type ServiceFuture = HandleFuture;

/// Answers requests.
pub trait Service: Send + Sync + 'static {
    /// Answers one request. Runs in a task of its own and is never cut short when the caller goes away.
    fn handle(self: Arc<Self>, ctx: RequestContext, method: u16, body: Bytes, payload: Bytes) -> HandleFuture;
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A frame on its way to the wire. The permit is given back once it is written.
struct Outgoing {
    head: Bytes,
    payload: Bytes,
    _permit: Option<OwnedSemaphorePermit>,
}

async fn write_batch(stream: &mut quinn::SendStream, batch: &mut Vec<Outgoing>) -> Result<(), quinn::WriteError> {
    let mut chunks = Vec::with_capacity(batch.len() * 2);
    for item in batch.iter() {
        chunks.push(item.head.clone());
        if !item.payload.is_empty() {
            chunks.push(item.payload.clone());
        }
    }
    let result = stream.write_all_chunks(&mut chunks).await;
    batch.clear();
    result
}

// ---- serving ----

impl Endpoint {
    /// Serves until `cancel`: then takes up nothing new, answers what is in flight (5 s at most), and closes.
    pub async fn serve(&self, service: Arc<dyn Service>, cancel: CancellationToken) {
        let connections = TaskTracker::new();
        let force = CancellationToken::new();
        loop {
            let incoming = tokio::select! {
                () = cancel.cancelled() => break,
                incoming = self.incoming() => incoming,
            };
            let Some(incoming) = incoming else { break };
            let server = Server {
                endpoint: self.clone(),
                service: service.clone(),
                cancel: cancel.clone(),
                force: force.clone(),
            };
            connections.spawn(server.connection(incoming));
        }
        connections.close();
        let refuse = async {
            while let Some(incoming) = self.incoming().await {
                incoming.refuse();
            }
            std::future::pending::<()>().await;
        };
        let drained = tokio::time::timeout(DRAIN_WAIT, async {
            tokio::select! { () = connections.wait() => {}, () = refuse => {} }
        });
        if drained.await.is_err() {
            tracing::warn!("calls still in flight after {} s: closing their connections", DRAIN_WAIT.as_secs());
            force.cancel();
            connections.wait().await;
        }
    }
}

#[derive(Clone)]
struct Server {
    endpoint: Endpoint,
    service: Arc<dyn Service>,
    cancel: CancellationToken,
    force: CancellationToken,
}

impl Server {
    async fn connection(self, incoming: quinn::Incoming) {
        let connection = match self.endpoint.admit(incoming).await {
            Ok(connection) => connection,
            Err(e) => return tracing::warn!("{e}"),
        };
        tracing::debug!("connection of {}", connection.describe());
        let mut calls_max = limits::CALLS_IN_FLIGHT_MAX;
        if connection.nodes().is_empty() {
            connection.quic.set_max_concurrent_bi_streams(VarInt::from_u32(UNAUTHENTICATED_CALLS_MAX));
            calls_max = usize::try_from(UNAUTHENTICATED_CALLS_MAX).unwrap_or(1);
        }
        let permits = Arc::new(Semaphore::new(calls_max));
        let streams = TaskTracker::new();
        loop {
            tokio::select! {
                () = self.cancel.cancelled() => break,
                accepted = connection.quic.accept_bi() => match accepted {
                    Ok((send, recv)) => {
                        streams.spawn(self.clone().stream(connection.clone(), send, recv, permits.clone()));
                    }
                    Err(e) => {
                        tracing::debug!("connection of {} ended: {e}", connection.describe());
                        break;
                    }
                },
            }
        }
        streams.close();
        tokio::select! {
            () = streams.wait() => {
                connection.quic.close(VarInt::from_u32(CLOSE_SHUTDOWN), b"server is stopping");
            }
            () = self.force.cancelled() => {
                connection.quic.close(VarInt::from_u32(CLOSE_ABORTED), b"server stopped with calls in flight");
            }
        }
    }

    async fn stream(
        self,
        connection: Connection,
        send: quinn::SendStream,
        recv: quinn::RecvStream,
        permits: Arc<Semaphore>,
    ) {
        // Unbounded, but never longer than the permits: each reply holds one until it is written.
        let (replies, queue) = mpsc::unbounded_channel();
        let writer = tokio::spawn(write_replies(send, queue));
        let mut reader = FrameReader::new(recv);
        loop {
            let next = tokio::select! {
                biased;
                () = self.cancel.cancelled() => break,
                next = reader.next() => next,
            };
            let bad = match next {
                Ok(Some(frame)) if frame.header.kind == Kind::Request => {
                    let permit = tokio::select! {
                        biased;
                        () = self.cancel.cancelled() => break,
                        permit = permits.clone().acquire_owned() => permit,
                    };
                    let Ok(permit) = permit else { break };
                    self.take_up(&connection, frame, &replies, permit);
                    continue;
                }
                Ok(Some(_)) => "bad frame: a reply where a request was due".to_owned(),
                Ok(None) => break,
                Err(FrameError::Lost(e)) => {
                    tracing::debug!("stream of {} ended: {e}", connection.describe());
                    break;
                }
                Err(e) => e.to_string(),
            };
            tracing::warn!("{bad}; closing the connection of {}", connection.describe());
            connection.quic.close(VarInt::from_u32(CLOSE_BAD_FRAME), bad.as_bytes());
            break;
        }
        drop((reader, replies));
        let _ = writer.await;
    }

    fn take_up(
        &self,
        connection: &Connection,
        frame: Frame,
        replies: &mpsc::UnboundedSender<Outgoing>,
        permit: OwnedSemaphorePermit,
    ) {
        let ctx = RequestContext {
            peer: connection.nodes().to_vec(),
            peer_addr: connection.remote_address(),
            call: frame.header.call,
            connection: connection.clone(),
        };
        let mut answer = Answer { header: frame.header, replies: replies.clone(), permit: Some(permit) };
        let service = self.service.clone();
        tokio::spawn(async move {
            let result = service.handle(ctx, frame.header.method, frame.body, frame.payload).await;
            answer.send(result);
        });
    }
}

async fn write_replies(mut send: quinn::SendStream, mut queue: mpsc::UnboundedReceiver<Outgoing>) {
    let mut batch = Vec::with_capacity(WRITE_BATCH);
    while queue.recv_many(&mut batch, WRITE_BATCH).await > 0 {
        if write_batch(&mut send, &mut batch).await.is_err() {
            // The caller is gone; the handlers that still run find a closed queue.
            return;
        }
    }
    // A close would throw away what is not delivered yet.
    if send.finish().is_ok() {
        let _ = tokio::time::timeout(DELIVERY_WAIT, send.stopped()).await;
    }
}

/// Answers exactly once: a handler that panics is an `Internal`, so that no caller waits for nothing.
struct Answer {
    header: Header,
    replies: mpsc::UnboundedSender<Outgoing>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Answer {
    fn send(&mut self, result: Result<Response, ErrorCode>) {
        let Some(permit) = self.permit.take() else { return };
        let (status, response) = match result {
            Ok(response) => (0, response),
            Err(code) => (code.number(), Response::default()),
        };
        let header = |status| Header { kind: Kind::Reply, status, ..self.header };
        let (head, payload) = match frame::head(header(status), &response.body, &response.payload) {
            Some(head) => (head, response.payload),
            None => {
                tracing::error!(method = self.header.method, "answer is larger than a frame may be");
                match frame::head(header(ErrorCode::Internal.number()), &[], &Bytes::new()) {
                    Some(head) => (head, Bytes::new()),
                    None => return,
                }
            }
        };
        let _ = self.replies.send(Outgoing { head, payload, _permit: Some(permit) });
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if self.permit.is_some() {
            tracing::error!(method = self.header.method, "handler ended without an answer");
            self.send(Err(ErrorCode::Internal));
        }
    }
}

// ---- calling ----

/// What became of a call that has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lost {
    /// The server never took it up.
    Unprocessed,
    /// Not known.
    Unknown,
}

impl Lost {
    /// Of a stream that ended by this error.
    fn of(error: &FrameError) -> Lost {
        match error {
            FrameError::Lost(ReadError::ConnectionLost(ConnectionError::ApplicationClosed(close)))
                if close.error_code == VarInt::from_u32(CLOSE_SHUTDOWN) =>
            {
                Lost::Unprocessed
            }
            _ => Lost::Unknown,
        }
    }
}

#[derive(Default)]
struct Pending {
    ended: bool,
    waiting: HashMap<u64, oneshot::Sender<Result<Frame, Lost>>>,
}

/// One of the two streams.
struct Lane {
    queue: mpsc::Sender<Outgoing>,
    pending: Arc<Mutex<Pending>>,
}

/// Forgets a call whose future is dropped.
struct Forget<'a>(&'a Mutex<Pending>, u64);

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        lock(self.0).waiting.remove(&self.1);
    }
}

/// A connection with its two streams.
struct Link {
    connection: Connection,
    control: Lane,
    bulk: Lane,
    permits: Arc<Semaphore>,
    retired: Arc<AtomicBool>,
}

impl Link {
    async fn open(connection: Connection) -> Result<Arc<Link>, String> {
        let retired = Arc::new(AtomicBool::new(false));
        let control = Lane::open(&connection, &retired, 1).await?;
        let bulk = Lane::open(&connection, &retired, 0).await?;
        let permits = Arc::new(Semaphore::new(limits::CALLS_IN_FLIGHT_MAX));
        Ok(Arc::new(Link { connection, control, bulk, permits, retired }))
    }

    fn is_alive(&self) -> bool {
        !self.retired.load(Ordering::Acquire) && !self.connection.is_closed()
    }

    async fn exchange(
        &self,
        bulk: bool,
        id: u64,
        head: Bytes,
        payload: Bytes,
        stage: &AtomicU8,
    ) -> Result<Frame, Lost> {
        let lane = if bulk { &self.bulk } else { &self.control };
        stage.store(STAGE_QUEUED, Ordering::Relaxed);
        let _permit = self.permits.acquire().await.map_err(|_| Lost::Unprocessed)?;
        let (answer, answered) = oneshot::channel();
        {
            let mut pending = lock(&lane.pending);
            if pending.ended {
                return Err(Lost::Unprocessed);
            }
            pending.waiting.insert(id, answer);
        }
        let _forget = Forget(&lane.pending, id);
        let slot = lane.queue.reserve().await.map_err(|_| Lost::Unprocessed)?;
        slot.send(Outgoing { head, payload, _permit: None });
        stage.store(STAGE_SENT, Ordering::Relaxed);
        answered.await.unwrap_or(Err(Lost::Unknown))
    }
}

impl Lane {
    async fn open(connection: &Connection, retired: &Arc<AtomicBool>, priority: i32) -> Result<Lane, String> {
        let (mut send, recv) = connection.quic.open_bi().await.map_err(|e| format!("cannot open a stream: {e}"))?;
        let _ = send.set_priority(priority);
        let (queue, mut queued) = mpsc::channel::<Outgoing>(WRITE_BATCH);
        tokio::spawn(async move {
            let mut batch = Vec::with_capacity(WRITE_BATCH);
            while queued.recv_many(&mut batch, WRITE_BATCH).await > 0 {
                if write_batch(&mut send, &mut batch).await.is_err() {
                    // The reader learns why, and tells those who wait.
                    return;
                }
            }
            let _ = send.finish();
        });
        let pending = Arc::new(Mutex::new(Pending::default()));
        tokio::spawn(read_replies(connection.clone(), FrameReader::new(recv), pending.clone(), retired.clone()));
        Ok(Lane { queue, pending })
    }
}

async fn read_replies(
    connection: Connection,
    mut reader: FrameReader,
    pending: Arc<Mutex<Pending>>,
    retired: Arc<AtomicBool>,
) {
    let lost = loop {
        let bad = match reader.next().await {
            Ok(Some(frame)) if frame.header.kind == Kind::Reply => {
                // Nobody waits any more for the answer of a call that was dropped.
                if let Some(waiting) = lock(&pending).waiting.remove(&frame.header.request_id) {
                    let _ = waiting.send(Ok(frame));
                }
                continue;
            }
            Ok(Some(_)) => "bad frame: a request where a reply was due".to_owned(),
            Ok(None) => break Lost::Unprocessed,
            Err(e @ FrameError::Lost(_)) => {
                tracing::debug!("stream to {} ended: {e}", connection.describe());
                break Lost::of(&e);
            }
            Err(e) => e.to_string(),
        };
        tracing::warn!("{bad}; closing the connection to {}", connection.describe());
        connection.quic.close(VarInt::from_u32(CLOSE_BAD_FRAME), bad.as_bytes());
        break Lost::Unknown;
    };
    retired.store(true, Ordering::Release);
    let waiting = {
        let mut pending = lock(&pending);
        pending.ended = true;
        std::mem::take(&mut pending.waiting)
    };
    for (_, waiting) in waiting {
        let _ = waiting.send(Err(lost));
    }
}

const STAGE_CONNECTING: u8 = 0;
const STAGE_QUEUED: u8 = 1;
const STAGE_SENT: u8 = 2;

fn deadline_of(ctx: &CallContext) -> Duration {
    match ctx.deadline_ms {
        0 => Duration::from_secs(limits::CALL_WAIT_SECONDS_DEFAULT),
        ms => Duration::from_millis(u64::from(ms)),
    }
}

fn request_head<C: Call>(ctx: &CallContext, id: u64, request: &C, payload: &Bytes) -> Result<Bytes, ErrorCode> {
    let header = Header {
        kind: Kind::Request,
        method: C::METHOD,
        status: 0,
        request_id: id,
        body_len: 0,
        payload_len: 0,
        call: *ctx,
    };
    frame::head(header, &codec::encode(request), payload).ok_or_else(|| {
        tracing::error!(method = C::METHOD, payload = payload.len(), "request is larger than a frame may be");
        ErrorCode::Invalid
    })
}

fn read_reply<C: Call>(frame: Frame, from: &Connection) -> Result<(C::Reply, Bytes), ErrorCode> {
    if frame.header.status != 0 {
        return Err(ErrorCode::from_number(frame.header.status));
    }
    match codec::decode(&frame.body) {
        Ok(reply) if frame.header.method == C::METHOD => Ok((reply, frame.payload)),
        Ok(_) => {
            tracing::error!("{} answered method {} for {}", from.describe(), frame.header.method, C::METHOD);
            Err(ErrorCode::BadMessage)
        }
        Err(e) => {
            tracing::error!("answer of {} to method {}: {e}", from.describe(), C::METHOD);
            Err(ErrorCode::BadMessage)
        }
    }
}

impl Connection {
    /// One call on a stream of its own: for a node that joins, which has no `Peer` yet.
    pub async fn call_once<C: Call>(
        &self,
        ctx: &CallContext,
        request: &C,
        payload: Bytes,
    ) -> Result<(C::Reply, Bytes), ErrorCode> {
        let head = request_head(ctx, 1, request, &payload)?;
        let attempt = async {
            let (mut send, recv) = self.quic.open_bi().await.map_err(|_| ErrorCode::Unreachable)?;
            let mut batch = vec![Outgoing { head, payload, _permit: None }];
            write_batch(&mut send, &mut batch).await.map_err(|_| ErrorCode::ConnectionLost)?;
            let _ = send.finish();
            match FrameReader::new(recv).next().await {
                Ok(Some(frame)) if frame.header.kind == Kind::Reply => read_reply::<C>(frame, self),
                Ok(None) => Err(ErrorCode::ShuttingDown),
                Ok(Some(_)) => Err(ErrorCode::BadMessage),
                Err(e) => {
                    tracing::warn!("call to {}: {e}", self.describe());
                    Err(ErrorCode::ConnectionLost)
                }
            }
        };
        tokio::time::timeout(deadline_of(ctx), attempt).await.unwrap_or(Err(ErrorCode::Timeout))
    }
}

#[derive(Default)]
struct PeerState {
    addrs: Vec<SocketAddr>,
    link: Option<Arc<Link>>,
    failed: Option<Instant>,
    last_error: Option<String>,
}

struct PeerInner {
    endpoint: Endpoint,
    node: NodeId,
    next_id: AtomicU64,
    state: Mutex<PeerState>,
    /// Held while connecting, so that all callers wait for one attempt. Never taken while `state` is locked.
    connecting: tokio::sync::Mutex<()>,
}

/// A connection to one node, made when it is first needed and again after it broke.
pub struct Peer {
    inner: Arc<PeerInner>,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("node", &self.inner.node).field("connected", &self.is_connected()).finish()
    }
}

impl PeerInner {
    fn live_link(&self) -> Option<Arc<Link>> {
        lock(&self.state).link.clone().filter(|link| link.is_alive())
    }

    async fn connected(&self) -> Result<Arc<Link>, String> {
        let _one_at_a_time = self.connecting.lock().await;
        if let Some(link) = self.live_link() {
            return Ok(link);
        }
        let addrs = {
            let mut state = lock(&self.state);
            state.link = None;
            if state.failed.is_some_and(|at| at.elapsed() < CONNECT_PAUSE) {
                return Err(state.last_error.clone().unwrap_or_default());
            }
            state.addrs.clone()
        };
        let result = self.try_addresses(&addrs).await;
        let mut state = lock(&self.state);
        match &result {
            Ok(link) => {
                tracing::info!("connected to {} at {}", self.node, link.connection.remote_address());
                state.link = Some(link.clone());
                state.failed = None;
                state.last_error = None;
            }
            Err(e) => {
                if state.last_error.as_ref() != Some(e) {
                    tracing::warn!("{}: {e}", self.node);
                }
                state.failed = Some(Instant::now());
                state.last_error = Some(e.clone());
            }
        }
        result
    }

    /// Tries the addresses in their order, each `CONNECT_STAGGER` after the one before it or as soon as that has failed,
    /// so that a dead network costs little (RFC 8305). The first that answers as this node is taken.
    async fn try_addresses(&self, addrs: &[SocketAddr]) -> Result<Arc<Link>, String> {
        let mut errors = Vec::new();
        let mut attempts = JoinSet::new();
        let mut rest = addrs.iter();
        loop {
            if let Some(&addr) = rest.next() {
                let (endpoint, node) = (self.endpoint.clone(), self.node);
                attempts.spawn(async move {
                    let connection = endpoint.connect(addr, node).await.map_err(|e| e.to_string())?;
                    Link::open(connection).await.map_err(|e| format!("{addr}: {e}"))
                });
            }
            let stagger = if rest.len() == 0 { Duration::MAX } else { CONNECT_STAGGER };
            match tokio::time::timeout(stagger, attempts.join_next()).await {
                Ok(Some(Ok(Ok(link)))) => return Ok(link),
                Ok(Some(Ok(Err(e)))) => errors.push(e),
                Ok(Some(Err(e))) => errors.push(e.to_string()),
                Ok(None) => break,
                Err(_) => {}
            }
        }
        if errors.is_empty() {
            return Err(format!("no address of {} is known", self.node));
        }
        Err(errors.join("; "))
    }
}

impl Peer {
    /// A peer that is not connected yet; its addresses in order of preference.
    pub fn new(endpoint: Endpoint, node: NodeId, addrs: Vec<SocketAddr>) -> Arc<Peer> {
        let state = Mutex::new(PeerState { addrs, ..PeerState::default() });
        let connecting = tokio::sync::Mutex::new(());
        Arc::new(Peer { inner: Arc::new(PeerInner { endpoint, node, next_id: AtomicU64::new(1), state, connecting }) })
    }

    /// The node.
    pub fn node(&self) -> NodeId {
        self.inner.node
    }

    /// Addresses for the next attempt to connect.
    pub fn set_addrs(&self, addrs: Vec<SocketAddr>) {
        let mut state = lock(&self.inner.state);
        if state.addrs != addrs {
            state.addrs = addrs;
            state.failed = None;
        }
    }

    /// Connects now, unless it is connected.
    pub async fn connect(&self) -> Result<(), String> {
        self.link().await.map(|_| ())
    }

    /// Whether a connection stands.
    pub fn is_connected(&self) -> bool {
        self.inner.live_link().is_some()
    }

    /// The address in use.
    pub fn remote(&self) -> Option<SocketAddr> {
        self.inner.live_link().map(|link| link.connection.remote_address())
    }

    /// Smoothed round trip time.
    pub fn rtt(&self) -> Option<Duration> {
        self.inner.live_link().map(|link| link.connection.rtt())
    }

    /// Why the last attempt to connect failed; `None` once one succeeds.
    pub fn last_error(&self) -> Option<String> {
        lock(&self.inner.state).last_error.clone()
    }

    async fn link(&self) -> Result<Arc<Link>, String> {
        if let Some(link) = self.inner.live_link() {
            return Ok(link);
        }
        // In a task of its own: the attempt goes on for the others when this caller gives up.
        let inner = self.inner.clone();
        tokio::spawn(async move { inner.connected().await }).await.map_err(|e| e.to_string())?
    }

    /// One call. `Unreachable`, `Overloaded`: nothing was sent. `ConnectionLost`, `Timeout`: sent, no answer, the effect is
    /// not known. A server that stops in good order has not taken the call up: then it is sent once more, over a new
    /// connection. Dropping the future is safe, but the call may still happen.
    pub async fn call<C: Call>(
        &self,
        ctx: &CallContext,
        request: &C,
        payload: Bytes,
    ) -> Result<(C::Reply, Bytes), ErrorCode> {
        let id = self.inner.next_id.fetch_add(1, Ordering::Relaxed);
        let head = request_head(ctx, id, request, &payload)?;
        let stage = AtomicU8::new(STAGE_CONNECTING);
        let attempt = async {
            for _ in 0..2 {
                stage.store(STAGE_CONNECTING, Ordering::Relaxed);
                let link = self.link().await.map_err(|_| ErrorCode::Unreachable)?;
                match link.exchange(C::BULK, id, head.clone(), payload.clone(), &stage).await {
                    Ok(frame) => return read_reply::<C>(frame, &link.connection),
                    Err(Lost::Unprocessed) => link.retired.store(true, Ordering::Release),
                    Err(Lost::Unknown) => return Err(ErrorCode::ConnectionLost),
                }
            }
            Err(ErrorCode::Unreachable)
        };
        match tokio::time::timeout(deadline_of(ctx), attempt).await {
            Ok(result) => result,
            Err(_) => Err(match stage.load(Ordering::Relaxed) {
                STAGE_SENT => ErrorCode::Timeout,
                STAGE_QUEUED => ErrorCode::Overloaded,
                _ => ErrorCode::Unreachable,
            }),
        }
    }
}

#[cfg(test)]
#[path = "rpc_tests.rs"]
mod tests;
