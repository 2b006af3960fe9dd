//! The calls that storage serves.

use super::fence::Fence;
use super::workers::{self, Workers};
use crate::base::codec;
use crate::base::error::ErrorCode;
use crate::base::ids::{ClientInstance, ClusterId, TargetId, TargetUuid};
use crate::base::start::StartError;
use crate::fs::chunkfile::{ChunkError, ChunkHeaderRecord, ChunkKey, ChunkStore, PURGED_DIRS};
use crate::limits::{FILE_BYTES_MAX, PAYLOAD_BYTES_MAX};
use crate::net::frame::CallContext;
use crate::net::msg::mgmt::TargetCapacity;
use crate::net::msg::storage::{
    ChangeSpaceRequest, FenceRequest, PurgeRequest, ReadChunkRequest, SeekChunkReply, SeekChunkRequest, SpaceChange,
    StatChunkReply, StatChunkRequest, SyncChunkRequest, WriteChunkRequest, WriteReply,
};
use crate::net::rpc::{Call, RequestContext, Response, Service, ServiceFuture};
use bytes::Bytes;
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// How long a request without a deadline of its own waits for a place in the queue.
const QUEUE_WAIT_DEFAULT: Duration = Duration::from_secs(30);
/// Between looks into one directory of tombstones, of which there are `PURGED_DIRS`: each is seen about once an hour.
const SWEEP_INTERVAL: Duration = Duration::from_secs(14);
/// A full target says so in the log at most this often.
const NO_SPACE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A target that is to be served.
#[derive(Clone, Debug)]
pub struct OpenTarget {
    /// Its number.
    pub id: TargetId,
    /// Of its directory.
    pub uuid: TargetUuid,
    /// Its directory.
    pub path: PathBuf,
}

/// What a worker needs of a target.
struct Disk {
    id: TargetId,
    path: PathBuf,
    fs_id: ClusterId,
    store: ChunkStore,
    fence: Fence,
    /// An error of the disk was seen: nothing that it says is trusted until a restart.
    failed: AtomicBool,
    no_space_logged: Mutex<Option<Instant>>,
    no_space_count: AtomicU64,
}

struct Target {
    disk: Arc<Disk>,
    workers: Workers,
}

/// A storage node: its targets.
pub struct StorageServer {
    targets: BTreeMap<TargetId, Target>,
    sweeper: JoinHandle<()>,
}

/// Does the request change the target, so that an error of the disk means lost data?
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Change,
}

fn disk_is_gone(e: &ChunkError) -> bool {
    // EROFS: the kernel has remounted the file system read-only after an error.
    matches!(e, ChunkError::Io { source: Errno::IO | Errno::ROFS | Errno::NXIO | Errno::NODEV | Errno::UCLEAN, .. })
}

impl Disk {
    /// Logs what a person must know; gives the code that travels.
    fn answer(&self, access: Access, doing: &str, key: ChunkKey, e: &ChunkError) -> ErrorCode {
        let (target, dir) = (self.id, self.path.display());
        if disk_is_gone(e) {
            if access == Access::Read {
                tracing::error!(%target, %dir, ino = %key.ino, data_id = %key.data_id, "{doing}: {e}");
            } else if !self.failed.swap(true, Ordering::AcqRel) {
                tracing::error!(
                    %target, %dir, ino = %key.ino, data_id = %key.data_id,
                    "{doing}: {e}; the target is taken out of service until a restart: check its disk (dmesg, smartctl)"
                );
            }
            return ErrorCode::DiskFailed;
        }
        let code = e.code();
        match code {
            ErrorCode::NoSpace => {
                self.no_space_count.fetch_add(1, Ordering::Relaxed);
                let mut last = self.no_space_logged.lock().unwrap_or_else(PoisonError::into_inner);
                if last.is_none_or(|at| at.elapsed() >= NO_SPACE_LOG_INTERVAL) {
                    *last = Some(Instant::now());
                    let times = self.no_space_count.swap(0, Ordering::Relaxed);
                    tracing::warn!(%target, %dir, times, "target is full: {e}");
                }
            }
            ErrorCode::DiskFailed | ErrorCode::Corrupt | ErrorCode::TooNew | ErrorCode::Internal => {
                tracing::error!(%target, %dir, ino = %key.ino, data_id = %key.data_id, "{doing}: {e}");
            }
            _ => {}
        }
        code
    }

    fn healthy(&self) -> Result<(), ErrorCode> {
        if self.failed.load(Ordering::Acquire) { Err(ErrorCode::DiskFailed) } else { Ok(()) }
    }

    /// One request on a worker: checks the fence and keeps it from closing until the request is done.
    fn work<T>(
        &self,
        client: ClientInstance,
        access: Access,
        doing: &str,
        key: ChunkKey,
        act: impl FnOnce(&ChunkStore) -> Result<T, ChunkError>,
    ) -> Result<T, ErrorCode> {
        self.healthy()?;
        let _passage = self.fence.pass(client).ok_or(ErrorCode::Fenced)?;
        act(&self.store).map_err(|e| self.answer(access, doing, key, &e))
    }

    fn fence(&self, clients: &[ClientInstance]) -> Result<(), ErrorCode> {
        self.healthy()?;
        match self.fence.add(clients) {
            Ok(()) => {
                tracing::info!(target = %self.id, clients = clients.len(), "fenced evicted clients");
                Ok(())
            }
            Err(e) if e.kind() == std::io::ErrorKind::StorageFull => {
                tracing::error!(target = %self.id, dir = %self.path.display(), "cannot record a fence: {e}");
                Err(ErrorCode::NoSpace)
            }
            Err(e) => {
                self.failed.store(true, Ordering::Release);
                tracing::error!(
                    target = %self.id, dir = %self.path.display(),
                    "cannot record a fence: {e}; the target is taken out of service until a restart"
                );
                Err(ErrorCode::DiskFailed)
            }
        }
    }

    fn check_header(&self, key: ChunkKey, header: &ChunkHeaderRecord) -> Result<(), ErrorCode> {
        let right = header.fs_id == self.fs_id && header.ino == key.ino && header.data_id == key.data_id;
        if right { Ok(()) } else { Err(ErrorCode::Invalid) }
    }
}

fn check_range(offset: u64, length: u64) -> Result<(), ErrorCode> {
    match offset.checked_add(length) {
        Some(end) if end <= FILE_BYTES_MAX => Ok(()),
        _ => Err(ErrorCode::FileTooBig),
    }
}

fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, ErrorCode> {
    codec::decode(body).map_err(|e| {
        tracing::warn!("{e}");
        ErrorCode::BadMessage
    })
}

/// No chunk file is the same as none of its bytes.
fn or_missing<T>(result: Result<T, ChunkError>, none: T) -> Result<T, ChunkError> {
    match result {
        Err(ChunkError::Missing { .. }) => Ok(none),
        other => other,
    }
}

/// Removes old tombstones, one directory at a time so that it costs nothing noticeable.
async fn sweep_for_ever(disks: Vec<Arc<Disk>>) {
    for x in (0..PURGED_DIRS).cycle() {
        tokio::time::sleep(SWEEP_INTERVAL).await;
        for disk in disks.iter().filter(|d| d.healthy().is_ok()).cloned() {
            let swept = tokio::task::spawn_blocking(move || {
                if let Err(e) = disk.store.sweep_tombstones(x) {
                    tracing::warn!(target = %disk.id, "cannot remove old tombstones: {e}");
                }
            });
            // It fails only while the process ends.
            let _ = swept.await;
        }
    }
}

impl StorageServer {
    /// Opens all targets. Their directories are locked and their identity checked by the caller. Call within a runtime.
    pub fn open(targets: Vec<OpenTarget>, fs_id: ClusterId) -> Result<Arc<Self>, StartError> {
        let mut opened = BTreeMap::new();
        for OpenTarget { id, uuid, path } in targets {
            let what = format!("cannot open target {id} ({})", path.display());
            let todo = "check its disk (dmesg), its mount and permissions; or start without this target";
            let store = ChunkStore::open(&path, fs_id, uuid).map_err(|e| StartError::new(&what, e, todo))?;
            let fence = Fence::open(&path).map_err(|e| StartError::new(&what, e, todo))?;
            let workers = Workers::start(&format!("target-{id}"), workers::THREADS, workers::QUEUE_JOBS_MAX)
                .map_err(|e| StartError::new(&what, e, "raise the limit of threads (ulimit -u, TasksMax)"))?;
            let disk = Disk {
                id,
                path,
                fs_id,
                store,
                fence,
                failed: AtomicBool::new(false),
                no_space_logged: Mutex::new(None),
                no_space_count: AtomicU64::new(0),
            };
            if opened.insert(id, Target { disk: Arc::new(disk), workers }).is_some() {
                return Err(StartError::new(what, "this number is given twice", "correct the configuration"));
            }
        }
        let disks = opened.values().map(|t| t.disk.clone()).collect();
        Ok(Arc::new(Self { targets: opened, sweeper: tokio::spawn(sweep_for_ever(disks)) }))
    }

    /// Room on each target, for the report to mgmt.
    pub fn capacities(&self) -> Vec<TargetCapacity> {
        self.targets
            .values()
            .map(|t| {
                let mut capacity = TargetCapacity {
                    id: t.disk.id,
                    device: 0,
                    total_bytes: 0,
                    free_bytes: 0,
                    total_inodes: 0,
                    free_inodes: 0,
                    failed: t.disk.healthy().is_err(),
                };
                match t.disk.store.statfs() {
                    Ok(space) => {
                        capacity.device = space.device;
                        capacity.total_bytes = space.total_bytes;
                        capacity.free_bytes = space.available_bytes;
                        capacity.total_inodes = space.files_total;
                        capacity.free_inodes = space.files_free;
                    }
                    Err(e) => {
                        if !capacity.failed {
                            tracing::error!(target = %t.disk.id, "cannot read its free space: {e}");
                        }
                        capacity.failed = true;
                    }
                }
                capacity
            })
            .collect()
    }

    /// Finishes what is queued; later requests are answered `ShuttingDown`.
    pub async fn shutdown(&self) {
        self.sweeper.abort();
        for target in self.targets.values() {
            target.workers.shutdown().await;
        }
    }

    fn target(&self, id: TargetId) -> Result<&Target, ErrorCode> {
        let target = self.targets.get(&id).ok_or(ErrorCode::WrongNode)?;
        target.disk.healthy()?;
        Ok(target)
    }

    /// One request.
    pub(super) async fn dispatch(
        &self,
        call: &CallContext,
        method: u16,
        body: &[u8],
        payload: Bytes,
    ) -> Result<Response, ErrorCode> {
        match method {
            WriteChunkRequest::METHOD => self.write(call, decode(body)?, payload).await,
            ReadChunkRequest::METHOD => self.read(call, decode(body)?).await,
            ChangeSpaceRequest::METHOD => self.change_space(call, decode(body)?).await,
            SyncChunkRequest::METHOD => {
                let SyncChunkRequest { target, key } = decode(body)?;
                // The verifier after the sync: one that failed changes it. A chunk file that is not there holds nothing
                // that could be lost unnoticed: reads of data that must exist are refused.
                let verifier = self
                    .on_disk(call, target, Access::Change, "sync", key, move |s| {
                        or_missing(s.sync(key), ()).map(|()| s.write_verifier())
                    })
                    .await?;
                Ok(Response::ok(&WriteReply { verifier }))
            }
            StatChunkRequest::METHOD => {
                let StatChunkRequest { target, key } = decode(body)?;
                let reply = self
                    .on_disk(call, target, Access::Read, "stat", key, move |s| {
                        let stat =
                            s.stat(key).map(|st| StatChunkReply { size: st.size, allocated: st.allocated_bytes });
                        or_missing(stat, StatChunkReply::default())
                    })
                    .await?;
                Ok(Response::ok(&reply))
            }
            SeekChunkRequest::METHOD => {
                let SeekChunkRequest { target, key, offset, hole } = decode(body)?;
                check_range(offset, 0)?;
                let offset = self
                    .on_disk(call, target, Access::Read, "seek", key, move |s| {
                        or_missing(if hole { s.seek_hole(key, offset) } else { s.seek_data(key, offset) }, None)
                    })
                    .await?;
                Ok(Response::ok(&SeekChunkReply { offset }))
            }
            PurgeRequest::METHOD => {
                let PurgeRequest { target, keys } = decode(body)?;
                let Some(&first) = keys.first() else { return Ok(Response::ok(&())) };
                self.on_disk(call, target, Access::Change, "purge", first, move |s| {
                    keys.iter().try_for_each(|&key| s.purge(key))
                })
                .await?;
                Ok(Response::ok(&()))
            }
            FenceRequest::METHOD => {
                let FenceRequest { target, clients } = decode(body)?;
                // The nil instance is what servers call with.
                if clients.contains(&ClientInstance::default()) {
                    return Err(ErrorCode::Invalid);
                }
                let target = self.target(target)?;
                let disk = target.disk.clone();
                target.workers.run(wait(call), move || disk.fence(&clients)).await?;
                Ok(Response::ok(&()))
            }
            _ => Err(ErrorCode::UnknownMethod),
        }
    }

    async fn on_disk<T: Send + 'static>(
        &self,
        call: &CallContext,
        target: TargetId,
        access: Access,
        doing: &'static str,
        key: ChunkKey,
        act: impl FnOnce(&ChunkStore) -> Result<T, ChunkError> + Send + 'static,
    ) -> Result<T, ErrorCode> {
        let target = self.target(target)?;
        let (disk, client) = (target.disk.clone(), call.client_instance);
        target.workers.run(wait(call), move || disk.work(client, access, doing, key, act)).await
    }

    async fn write(&self, call: &CallContext, r: WriteChunkRequest, payload: Bytes) -> Result<Response, ErrorCode> {
        self.target(r.target)?.disk.check_header(r.key, &r.header)?;
        if payload.is_empty() || payload.len() > PAYLOAD_BYTES_MAX {
            return Err(ErrorCode::Invalid);
        }
        check_range(r.offset, payload.len() as u64)?;
        let (key, header, offset) = (r.key, r.header, r.offset);
        let verifier = self
            .on_disk(call, r.target, Access::Change, "write", key, move |s| {
                // Read before the write: if a sync fails in between, the answer must carry the older one.
                let verifier = s.write_verifier();
                s.write(key, &header, offset, &payload).map(|()| verifier)
            })
            .await?;
        Ok(Response::ok(&WriteReply { verifier }))
    }

    async fn read(&self, call: &CallContext, r: ReadChunkRequest) -> Result<Response, ErrorCode> {
        let ReadChunkRequest { target, key, offset, length, must_exist } = r;
        let length = usize::try_from(length).map_err(|_| ErrorCode::Invalid)?;
        if length > PAYLOAD_BYTES_MAX {
            return Err(ErrorCode::Invalid);
        }
        check_range(offset, length as u64)?;
        let disk = &self.target(target)?.disk;
        // Without waiting: this is a thread of the runtime. The worker tells a fenced client why.
        if let Some(_passage) = disk.fence.try_pass(call.client_instance)
            && let Some(data) = disk.store.try_read_cached(key, offset, length)
        {
            return Ok(Response::ok(&()).with_payload(data.into()));
        }
        let data = self
            .on_disk(call, target, Access::Read, "read", key, move |s| match s.read(key, offset, length) {
                Err(ChunkError::Missing { .. }) if !must_exist => Ok(Vec::new()),
                other => other,
            })
            .await
            .inspect_err(|&code| {
                if code == ErrorCode::ChunkMissing {
                    tracing::error!(%target, ino = %key.ino, data_id = %key.data_id, offset, "a chunk file is missing");
                }
            })?;
        Ok(Response::ok(&()).with_payload(data.into()))
    }

    async fn change_space(&self, call: &CallContext, r: ChangeSpaceRequest) -> Result<Response, ErrorCode> {
        let ChangeSpaceRequest { target, key, header, change, .. } = r;
        match change {
            SpaceChange::Truncate(size) => check_range(size, 0)?,
            SpaceChange::Punch { offset, length } => {
                check_range(offset, length)?;
                if length == 0 {
                    return Err(ErrorCode::Invalid);
                }
            }
            SpaceChange::Allocate { offset, length, .. } => {
                check_range(offset, length)?;
                if length == 0 {
                    return Err(ErrorCode::Invalid);
                }
                self.target(target)?.disk.check_header(key, &header)?;
            }
        }
        let verifier = self
            .on_disk(call, target, Access::Change, "change of space", key, move |s| {
                let verifier = s.write_verifier();
                match change {
                    SpaceChange::Truncate(size) => s.truncate_missing_ok(key, size),
                    SpaceChange::Punch { offset, length } => or_missing(s.punch(key, offset, length), ()),
                    SpaceChange::Allocate { offset, length, keep_size } => {
                        s.allocate(key, &header, offset, length, keep_size)
                    }
                }
                .map(|()| verifier)
            })
            .await?;
        Ok(Response::ok(&WriteReply { verifier }))
    }
}

fn wait(call: &CallContext) -> Duration {
    match call.deadline_ms {
        0 => QUEUE_WAIT_DEFAULT,
        ms => Duration::from_millis(u64::from(ms)),
    }
}

impl Service for StorageServer {
    fn handle(self: Arc<Self>, ctx: RequestContext, method: u16, body: Bytes, payload: Bytes) -> ServiceFuture {
        Box::pin(async move { self.dispatch(&ctx.call, method, &body, payload).await })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ids::{DataId, InodeId};
    use crate::fs::stripe::StripeKind;
    use std::path::Path;

    const T: TargetId = TargetId(7);

    struct Fixture {
        dir: tempfile::TempDir,
        fs_id: ClusterId,
        uuid: TargetUuid,
        server: Arc<StorageServer>,
        ctx: CallContext,
    }

    fn open(dir: &Path, fs_id: ClusterId, uuid: TargetUuid) -> Arc<StorageServer> {
        StorageServer::open(vec![OpenTarget { id: T, uuid, path: dir.to_owned() }], fs_id).unwrap()
    }

    impl Fixture {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let (fs_id, uuid) = (ClusterId::random(), TargetUuid::random());
            let server = open(dir.path(), fs_id, uuid);
            let ctx = CallContext { client_instance: ClientInstance::random(), ..CallContext::default() };
            Self { dir, fs_id, uuid, server, ctx }
        }

        async fn restart(&mut self) {
            self.server.shutdown().await;
            self.server = open(self.dir.path(), self.fs_id, self.uuid);
        }

        async fn call<C: Call>(&self, request: &C, payload: &[u8]) -> Result<(C::Reply, Bytes), ErrorCode> {
            let body = codec::encode(request);
            let r = self.server.dispatch(&self.ctx, C::METHOD, &body, Bytes::copy_from_slice(payload)).await?;
            Ok((codec::decode(&r.body).unwrap(), r.payload))
        }

        fn header(&self, key: ChunkKey) -> ChunkHeaderRecord {
            ChunkHeaderRecord {
                version: 1,
                fs_id: self.fs_id,
                ino: key.ino,
                data_id: key.data_id,
                stripe_index: 0,
                chunk_bytes: 1 << 19,
                targets: vec![T],
                kind: StripeKind::Raid0,
                uid: 0,
                gid: 0,
                project: 0,
                mirror_sequence: 0,
            }
        }

        async fn write(&self, key: ChunkKey, offset: u64, data: &[u8]) -> Result<u64, ErrorCode> {
            let r = WriteChunkRequest { target: T, data_epoch: 1, key, header: self.header(key), offset };
            self.call(&r, data).await.map(|(r, _)| r.verifier)
        }

        async fn read(&self, key: ChunkKey, offset: u64, length: u32, must_exist: bool) -> Result<Bytes, ErrorCode> {
            let r = ReadChunkRequest { target: T, key, offset, length, must_exist };
            self.call(&r, b"").await.map(|(_, payload)| payload)
        }

        async fn space(&self, key: ChunkKey, change: SpaceChange) -> Result<u64, ErrorCode> {
            let r = ChangeSpaceRequest { target: T, data_epoch: 1, key, header: self.header(key), change };
            self.call(&r, b"").await.map(|(r, _)| r.verifier)
        }
    }

    fn key(n: u64) -> ChunkKey {
        ChunkKey { ino: InodeId(n), data_id: DataId(1) }
    }

    #[tokio::test]
    async fn writes_read_back_also_after_a_restart() {
        let mut f = Fixture::new();
        let verifier = f.write(key(2), 3, b"hello").await.unwrap();
        assert_eq!(f.read(key(2), 0, 100, true).await.unwrap(), &b"\0\0\0hello"[..]);
        assert_eq!(f.read(key(2), 3, 5, true).await.unwrap(), &b"hello"[..]);
        let synced = f.call(&SyncChunkRequest { target: T, key: key(2) }, b"").await.unwrap().0.verifier;
        assert_eq!(verifier, synced);
        f.restart().await;
        assert_eq!(f.read(key(2), 4, 2, true).await.unwrap(), &b"el"[..]);
        let stat = f.call(&StatChunkRequest { target: T, key: key(2) }, b"").await.unwrap().0;
        assert_eq!(stat.size, 8);
        assert_eq!(f.write(key(2), 0, b"x").await.unwrap(), verifier);
        let seek = SeekChunkRequest { target: T, key: key(2), offset: 0, hole: true };
        assert_eq!(f.call(&seek, b"").await.unwrap().0.offset, Some(8));
    }

    #[tokio::test]
    async fn missing_chunk_files() {
        let f = Fixture::new();
        assert_eq!(f.read(key(2), 0, 10, true).await, Err(ErrorCode::ChunkMissing));
        assert_eq!(f.read(key(2), 0, 10, false).await.unwrap().len(), 0);
        f.space(key(2), SpaceChange::Truncate(4)).await.unwrap();
        f.space(key(2), SpaceChange::Punch { offset: 0, length: 4096 }).await.unwrap();
        assert_eq!(f.call(&StatChunkRequest { target: T, key: key(2) }, b"").await.unwrap().0.size, 0);
        assert_eq!(f.read(key(2), 0, 10, true).await, Err(ErrorCode::ChunkMissing));
        let seek = SeekChunkRequest { target: T, key: key(2), offset: 0, hole: false };
        assert_eq!(f.call(&seek, b"").await.unwrap().0.offset, None);
    }

    #[tokio::test]
    async fn truncate_and_purge() {
        let mut f = Fixture::new();
        f.write(key(2), 0, b"hello").await.unwrap();
        f.space(key(2), SpaceChange::Truncate(2)).await.unwrap();
        assert_eq!(f.read(key(2), 0, 10, true).await.unwrap(), &b"he"[..]);
        f.space(key(3), SpaceChange::Allocate { offset: 0, length: 8192, keep_size: false }).await.unwrap();
        assert_eq!(f.read(key(3), 0, 10_000, true).await.unwrap().len(), 8192);
        f.call(&PurgeRequest { target: T, keys: vec![key(2), key(9)] }, b"").await.unwrap();
        assert_eq!(f.write(key(2), 0, b"late").await, Err(ErrorCode::Stale));
        f.restart().await;
        assert_eq!(f.write(key(2), 0, b"late").await, Err(ErrorCode::Stale));
        assert_eq!(f.write(key(9), 0, b"late").await, Err(ErrorCode::Stale));
        f.write(key(4), 0, b"other").await.unwrap();
    }

    #[tokio::test]
    async fn a_fence_outlasts_a_restart() {
        let mut f = Fixture::new();
        f.write(key(2), 0, b"hello").await.unwrap();
        let fence = FenceRequest { target: T, clients: vec![f.ctx.client_instance] };
        f.call(&fence, b"").await.unwrap();
        for _ in 0..2 {
            assert_eq!(f.write(key(2), 0, b"x").await, Err(ErrorCode::Fenced));
            assert_eq!(f.read(key(2), 0, 5, true).await, Err(ErrorCode::Fenced));
            f.restart().await;
        }
        f.ctx.client_instance = ClientInstance::random();
        assert_eq!(f.read(key(2), 0, 5, true).await.unwrap(), &b"hello"[..]);
    }

    #[tokio::test]
    async fn refusals() {
        let f = Fixture::new();
        let r = ReadChunkRequest { target: TargetId(8), key: key(2), offset: 0, length: 1, must_exist: false };
        assert_eq!(f.call(&r, b"").await.unwrap_err(), ErrorCode::WrongNode);
        assert_eq!(f.read(key(2), 0, u32::MAX, false).await, Err(ErrorCode::Invalid));
        assert_eq!(f.read(key(2), u64::MAX, 1, false).await, Err(ErrorCode::FileTooBig));
        assert_eq!(f.write(key(2), FILE_BYTES_MAX, b"x").await, Err(ErrorCode::FileTooBig));
        let header = ChunkHeaderRecord { fs_id: ClusterId::random(), ..f.header(key(2)) };
        let foreign = WriteChunkRequest { target: T, data_epoch: 1, key: key(2), header, offset: 0 };
        assert_eq!(f.call(&foreign, b"x").await.unwrap_err(), ErrorCode::Invalid);
        let bad = f.server.dispatch(&f.ctx, ReadChunkRequest::METHOD, b"short", Bytes::new()).await;
        assert_eq!(bad.unwrap_err(), ErrorCode::BadMessage);
        assert_eq!(f.server.dispatch(&f.ctx, 1, b"", Bytes::new()).await.unwrap_err(), ErrorCode::UnknownMethod);
        f.server.shutdown().await;
        assert_eq!(f.write(key(2), 0, b"x").await, Err(ErrorCode::ShuttingDown));
    }

    #[tokio::test]
    async fn a_failed_disk_is_out_of_service_until_a_restart() {
        let mut f = Fixture::new();
        f.write(key(2), 0, b"hello").await.unwrap();
        let capacity = &f.server.capacities()[0];
        assert!(!capacity.failed && capacity.total_bytes > 0 && capacity.id == T);
        let disk = &f.server.targets[&T].disk;
        let e = ChunkError::Io { path: PathBuf::from("x"), offset: 0, source: Errno::IO };
        assert_eq!(disk.answer(Access::Read, "read", key(2), &e), ErrorCode::DiskFailed);
        disk.healthy().unwrap();
        assert_eq!(disk.answer(Access::Change, "write", key(2), &e), ErrorCode::DiskFailed);
        assert_eq!(f.read(key(2), 0, 5, true).await, Err(ErrorCode::DiskFailed));
        assert!(f.server.capacities()[0].failed);
        f.restart().await;
        assert_eq!(f.read(key(2), 0, 5, true).await.unwrap(), &b"hello"[..]);
    }
}
