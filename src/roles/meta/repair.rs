//! What meta orders at targets apart from purges: cuts of truncated files and fences of evicted sessions. Each order is
//! durable before it is sent, and sent again until it is confirmed.

use super::MetaServer;
use super::ops::{session, setattr};
use super::records::{self, CutRecord, FLAG_TAIL_UNSURE, FenceRecord, InodeRecord};
use super::store::Table;
use super::{db, unpoison};
use crate::base::error::ErrorCode;
use crate::base::ids::{ClientInstance, InodeId};
use crate::net::msg::storage::{ChangeSpaceRequest, FenceRequest, SpaceChange};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// A session that was not renewed for so long ends.
pub(super) const SESSION_TIMEOUT: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_secs(5);

/// Ends sessions that are not renewed.
pub(super) async fn expire(server: Arc<MetaServer>) {
    loop {
        tokio::select! {
            () = server.cancel.cancelled() => return,
            () = tokio::time::sleep(TICK) => {}
        }
        server.expire_sessions(Instant::now()).await;
    }
}

/// Redoes fences and cuts, at the start and whenever some are left over.
pub(super) async fn run(server: Arc<MetaServer>) {
    loop {
        if let Err(e) = server.repair_all().await
            && !server.cancel.is_cancelled()
        {
            tracing::warn!(error = %e, "cuts or fences at targets put off");
        }
        tokio::select! {
            () = server.cancel.cancelled() => return,
            () = tokio::time::sleep(TICK) => {}
        }
    }
}

impl MetaServer {
    /// Evicts every session last heard of too long before `now`.
    pub(super) async fn expire_sessions(self: &Arc<Self>, now: Instant) {
        let old: Vec<ClientInstance> = unpoison(self.seen.lock())
            .iter()
            .filter(|(_, at)| now.saturating_duration_since(**at) > SESSION_TIMEOUT)
            .map(|(c, _)| *c)
            .collect();
        for client in old {
            tracing::warn!(%client, "session was not renewed and ends");
            if let Err(e) = self.end_session(client, true).await {
                tracing::warn!(%client, error = %e, "cannot end a session");
            }
        }
    }

    /// Ends a session.
    pub(super) async fn end_session(self: &Arc<Self>, client: ClientInstance, evicted: bool) -> Result<(), ErrorCode> {
        let trim = self.commit_own(move |db, _| session::end(db, client, evicted)).await?;
        unpoison(self.seen.lock()).remove(&client);
        self.purge_wake.notify_one();
        if evicted {
            let server = self.clone();
            self.tasks.spawn(async move {
                if let Err(e) = server.repair_all().await {
                    tracing::warn!(%client, error = %e, "fence of an evicted session put off");
                }
            });
        } else {
            for ino in trim {
                self.trim_later(ino);
            }
        }
        Ok(())
    }

    /// Sends all fences and cuts that are not confirmed.
    pub(super) async fn repair_all(&self) -> Result<(), ErrorCode> {
        let mut result = Ok(());
        for (key, value) in self.read(|db| db.scan(Table::Intents, b"F", b"F", usize::MAX))? {
            let client = records::client_at(&key, 1)?;
            result = result.and(self.fence(client, records::decode(Table::Intents, &key, &value)?).await);
        }
        for (key, _) in self.read(|db| db.scan(Table::Intents, b"T", b"T", usize::MAX))? {
            let ino = InodeId(records::number_at(&key, 1)?);
            result = result.and(self.redo_cut(ino).await);
        }
        result
    }

    async fn fence(&self, client: ClientInstance, fence: FenceRecord) -> Result<(), ErrorCode> {
        self.store.sync().await.map_err(|_| ErrorCode::DiskFailed)?;
        let mut sent = JoinSet::new();
        for target in fence.targets {
            sent.spawn(self.access.fence(FenceRequest { target, clients: vec![client] }));
        }
        self.all(sent).await?;
        self.commit_own(move |db, _| db.delete(Table::Intents, &records::fence_key(client))).await?;
        for ino in fence.inodes {
            self.trim(ino).await?;
        }
        Ok(())
    }

    /// Does an open for writing have to wait for a fence?
    pub(super) fn fence_pending(&self, ino: InodeId) -> Result<bool, ErrorCode> {
        for (key, value) in self.read(|db| db.scan(Table::Intents, b"F", b"F", usize::MAX))? {
            if records::decode::<FenceRecord>(Table::Intents, &key, &value)?.inodes.contains(&ino) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn redo_cut(&self, ino: InodeId) -> Result<(), ErrorCode> {
        let _guard = self.lock(ino).await;
        let found = self.read(|db| {
            let cut: Option<CutRecord> = db::get(db, Table::Intents, &records::cut_key(ino))?;
            match db::inode(db, ino) {
                Err(ErrorCode::NotFound) => Ok(None),
                inode => Ok::<_, ErrorCode>(cut.zip(Some(inode?))),
            }
        })?;
        let Some((cut, inode)) = found else { return Ok(()) };
        self.cut(ino, &inode, cut.size).await?;
        self.commit_own(move |db, _| setattr::cut_done(db, ino, cut.data_epoch)).await
    }

    /// Trims what lies beyond the size, in the background.
    pub(super) fn trim_later(self: &Arc<Self>, ino: InodeId) {
        let server = self.clone();
        self.tasks.spawn(async move {
            if let Err(e) = server.trim(ino).await {
                tracing::warn!(%ino, error = %e, "trim of a file's tail put off");
            }
        });
    }

    /// Trims what lies beyond the size, if that is unsure and nobody writes.
    pub(super) async fn trim(&self, ino: InodeId) -> Result<(), ErrorCode> {
        let _guard = self.lock(ino).await;
        let begun = self.commit_own(move |db, _| {
            let Ok(mut inode) = db::inode(db, ino) else { return Ok(None) };
            if inode.flags & FLAG_TAIL_UNSURE == 0 || inode.open_for_write > 0 {
                return Ok(None);
            }
            let size = inode.size;
            setattr::write_cut(db, ino, &mut inode, size)?;
            Ok(Some(inode))
        });
        let Some(inode) = begun.await? else { return Ok(()) };
        self.cut(ino, &inode, inode.size).await?;
        self.commit_own(move |db, _| setattr::cut_done(db, ino, inode.data_epoch)).await
    }

    /// Has the targets cut a file, once the order is durable.
    pub(super) async fn cut(&self, ino: InodeId, inode: &InodeRecord, size: u64) -> Result<(), ErrorCode> {
        self.store.sync().await.map_err(|_| ErrorCode::DiskFailed)?;
        let Some(pattern) = &inode.pattern else { return Ok(()) };
        // Somebody may have written to a target and not said so yet.
        let all_targets = inode.flags & FLAG_TAIL_UNSURE != 0 || inode.open_for_write > 0;
        let mut sent = JoinSet::new();
        for (index, target) in (0u16..).zip(pattern.targets()) {
            if !all_targets && inode.targets_with_data >> index & 1 == 0 {
                continue;
            }
            sent.spawn(self.access.change_space(ChangeSpaceRequest {
                target: *target,
                data_epoch: inode.data_epoch,
                key: inode.chunk_key(ino),
                header: inode.chunk_header(ino, self.fs_id, pattern, index),
                change: SpaceChange::Truncate(pattern.local_size(size, index)),
            }));
        }
        self.all(sent).await
    }

    /// Waits for all answers, but not longer than the server runs: what is not confirmed is redone at the next start.
    async fn all(&self, mut sent: JoinSet<Result<(), ErrorCode>>) -> Result<(), ErrorCode> {
        let mut result = Ok(());
        loop {
            tokio::select! {
                () = self.cancel.cancelled() => return Err(ErrorCode::ShuttingDown),
                answer = sent.join_next() => match answer {
                    Some(answer) => result = result.and(answer.unwrap_or(Err(ErrorCode::Internal))),
                    None => return result,
                },
            }
        }
    }
}
