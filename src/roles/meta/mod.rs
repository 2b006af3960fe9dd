//! The meta role: keeps the namespace of a meta group's shards.
//!
//! `service` takes the calls, `ops` holds the operations as pure functions of rows, `db` is their view of the `store`.
//! Whatever touches storage targets (cuts, fences, purges) is ordered by a durable record first, and redone from it.

pub mod db;
pub mod ops;
mod purge;
pub mod records;
mod repair;
mod service;
pub mod store;
pub mod target;
#[cfg(test)]
mod tests;

use crate::base::error::ErrorCode;
use crate::base::format::DirLock;
use crate::base::ids::{ClientInstance, ClusterId, InodeId, NodeId, TargetId};
use crate::base::start::StartError;
use crate::base::version;
use crate::fs::attr::{FileKind, Timestamp};
use crate::net::cluster::Cluster;
use db::{Env, Rows, RowsMut, TxnRows, ViewRows};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;
use store::{CommitError, IdAllocator, LogContext, Store, StoreConfig, StoreError, Table};
use target::{ClusterTargets, TargetAccess};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Inode numbers below are kept for special inodes; the root is 1.
const FIRST_ID: u64 = 16;
const ID_BATCH: u64 = 65_536;

fn unpoison<T>(r: Result<T, PoisonError<T>>) -> T {
    r.unwrap_or_else(PoisonError::into_inner)
}

/// The meta server of one group. It owns all shards (there is one, number 0).
pub struct MetaServer {
    store: Store,
    ids: IdAllocator,
    access: Arc<dyn TargetAccess>,
    fs_id: ClusterId,
    hash_key: [u8; 16],
    /// Truncations in flight, one at a time per inode. Locked for a look-up only.
    locks: Mutex<HashMap<InodeId, Weak<tokio::sync::Mutex<()>>>>,
    /// When each session was last heard of. Locked alone.
    seen: Mutex<HashMap<ClientInstance, Instant>>,
    /// Targets that purges wait for. Locked alone.
    blocked: Mutex<BTreeSet<TargetId>>,
    purge_wake: Notify,
    cancel: CancellationToken,
    tasks: TaskTracker,
}

impl std::fmt::Debug for MetaServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MetaServer").field("fs_id", &self.fs_id).finish_non_exhaustive()
    }
}

impl MetaServer {
    /// Opens (at the first start: makes) the store in `dir` and goes on with what was left undone. Must be called within
    /// a multi-thread runtime; blocks. `lock`: the directory's; kept until the last part of the server is gone.
    pub fn open(
        dir: &Path,
        lock: DirLock,
        fs_id: ClusterId,
        node: NodeId,
        cluster: Arc<Cluster>,
    ) -> Result<Arc<Self>, StartError> {
        let access = Arc::new(ClusterTargets(cluster));
        let opening = Self::open_with(dir, lock, fs_id, access);
        let server = tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(opening))?;
        tracing::info!(%node, dir = %dir.display(), "meta server is up");
        server.start();
        Ok(server)
    }

    /// Without background tasks, with any targets.
    async fn open_with(
        dir: &Path,
        lock: DirLock,
        fs_id: ClusterId,
        access: Arc<dyn TargetAccess>,
    ) -> Result<Arc<Self>, StartError> {
        let what = format!("cannot open the meta store in {}", dir.display());
        let fail = |e: &dyn std::fmt::Display| {
            StartError::new(what.clone(), e, "see the log; if the disk failed, restore the directory from a backup")
        };
        let upgrade = |e: &dyn std::fmt::Display| StartError::new(what.clone(), e, version::UPGRADE);
        let config = StoreConfig::new(dir.to_path_buf(), fs_id, 0);
        let opened = tokio::task::spawn_blocking(move || Store::open(config, lock)).await.map_err(|e| fail(&e))?;
        let store = opened.map_err(|e| if matches!(e, StoreError::Newer(_)) { upgrade(&e) } else { fail(&e) })?;
        let ids = store.id_allocator("ids", ID_BATCH).await.map_err(|e| fail(&e))?;
        let mut server = Self {
            store,
            ids,
            access,
            fs_id,
            hash_key: [0; 16],
            locks: Mutex::default(),
            seen: Mutex::default(),
            blocked: Mutex::default(),
            purge_wake: Notify::new(),
            cancel: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        let (hash_key, sessions) = server.commit_own(first_rows).await.map_err(|e| match e {
            ErrorCode::TooNew => upgrade(&e),
            _ => fail(&e),
        })?;
        server.hash_key = hash_key;
        server.store.sync().await.map_err(|e| fail(&e))?;
        let now = Instant::now();
        *unpoison(server.seen.lock()) = sessions.into_iter().map(|s| (s, now)).collect();
        Ok(Arc::new(server))
    }

    fn start(self: &Arc<Self>) {
        self.tasks.spawn(purge::run(self.clone()));
        self.tasks.spawn(repair::run(self.clone()));
        self.tasks.spawn(repair::expire(self.clone()));
    }

    /// Stops in order: what was answered is on disk.
    pub async fn shutdown(&self) {
        self.cancel.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        self.store.clone().close().await;
    }

    fn read<R>(&self, f: impl FnOnce(&dyn Rows) -> R) -> R {
        self.store.read(|view| f(&ViewRows(view)))
    }

    /// What an operation needs, with a fresh number.
    fn env(&self, client: ClientInstance) -> Result<Env, ErrorCode> {
        let fresh = self.ids.next().and_then(|n| n.checked_add(FIRST_ID)).ok_or(ErrorCode::Overloaded)?;
        Ok(self.env_for_reading(client, fresh))
    }

    fn env_for_reading(&self, client: ClientInstance, fresh: u64) -> Env {
        Env { fs_id: self.fs_id, hash_key: self.hash_key, now: Timestamp::now(), fresh, map: self.access.map(), client }
    }

    /// A transaction.
    async fn commit<R: Send + 'static>(
        &self,
        log: LogContext,
        env: Env,
        f: impl FnOnce(&mut dyn RowsMut, &Env) -> Result<R, ErrorCode> + Send + 'static,
    ) -> Result<R, ErrorCode> {
        match self.store.commit(log, move |txn| f(&mut TxnRows(txn), &env)).await {
            Ok((r, _)) => Ok(r),
            Err(CommitError::Refused(e)) => Err(e),
            Err(CommitError::Store(_)) if self.cancel.is_cancelled() => Err(ErrorCode::ShuttingDown),
            // Logged where room is looked for.
            Err(CommitError::Store(e)) if e.is_full() => Err(ErrorCode::NoSpace),
            Err(CommitError::Store(e)) => {
                tracing::error!(error = %e, "meta store refuses a transaction");
                Err(ErrorCode::DiskFailed)
            }
        }
    }

    /// A transaction of our own, for no client.
    async fn commit_own<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut dyn RowsMut, &Env) -> Result<R, ErrorCode> + Send + 'static,
    ) -> Result<R, ErrorCode> {
        let env = self.env(ClientInstance::default())?;
        self.commit(LogContext::default(), env, f).await
    }

    /// Waits until no truncation of the inode is in flight and keeps others out.
    async fn lock(&self, ino: InodeId) -> tokio::sync::OwnedMutexGuard<()> {
        let mutex = {
            let mut locks = unpoison(self.locks.lock());
            if locks.len() > 1024 {
                locks.retain(|_, m| m.strong_count() > 0);
            }
            match locks.get(&ino).and_then(Weak::upgrade) {
                Some(m) => m,
                None => {
                    let m = Arc::new(tokio::sync::Mutex::new(()));
                    locks.insert(ino, Arc::downgrade(&m));
                    m
                }
            }
        };
        mutex.lock_owned().await
    }

    /// Waits until no truncation of the inode is in flight.
    async fn quiesce(&self, ino: InodeId) {
        let busy = unpoison(self.locks.lock()).get(&ino).and_then(Weak::upgrade);
        if let Some(mutex) = busy {
            drop(mutex.lock().await);
        }
    }
}

/// Makes the root and the key of the name hash at the first start; cleans up orphans nobody holds any more. Returns the
/// key and the sessions.
fn first_rows(db: &mut dyn RowsMut, env: &Env) -> Result<([u8; 16], Vec<ClientInstance>), ErrorCode> {
    let key = match db.get(Table::Meta, b"hash-key")? {
        Some(k) => <[u8; 16]>::try_from(k).map_err(|_| ErrorCode::Corrupt)?,
        None => {
            let k = *ClientInstance::random().0.as_bytes();
            db.put(Table::Meta, b"hash-key", k.to_vec())?;
            k
        }
    };
    if db::inode(db, InodeId::ROOT).is_err_and(|e| e == ErrorCode::NotFound) {
        let root = records::InodeRecord::new(FileKind::Directory, 0o755, 0, 0, env.now);
        db::put_inode(db, InodeId::ROOT, &root)?;
        db::count_inodes(db, true)?;
    }
    for (row, _) in db.scan(Table::Orphans, &[], &[], usize::MAX)? {
        let ino = InodeId(records::number_at(&row, 0)?);
        if db::opens(db, ino)?.is_empty() {
            match db::inode(db, ino) {
                Ok(inode) => db::destroy(db, ino, &inode)?,
                Err(ErrorCode::NotFound) => db.delete(Table::Orphans, &row)?,
                Err(e) => return Err(e),
            }
        }
    }
    let sessions = db.scan(Table::Sessions, &[], &[], usize::MAX)?;
    let sessions = sessions.iter().map(|(k, _)| records::client_at(k, 0)).collect::<Result<_, _>>()?;
    Ok((key, sessions))
}
