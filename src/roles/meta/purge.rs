//! The purge worker: deletes chunk files of removed or truncated files at their targets, in the background.

use super::MetaServer;
use super::db::{self, RowsMut};
use super::records::{self, PurgeRecord};
use super::store::Table;
use crate::base::error::ErrorCode;
use crate::base::ids::{DataId, InodeId, TargetId};
use crate::fs::chunkfile::ChunkKey;
use crate::net::msg::storage::PurgeRequest;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Rows of one pass; also the most keys of one request.
const BATCH: usize = 512;
const IDLE: Duration = Duration::from_secs(5);
const GATHER: Duration = Duration::from_millis(200);
const BACKOFF_FIRST: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// Targets that do not answer, and when they are asked again.
#[derive(Debug, Default)]
pub(super) struct Backoff(HashMap<TargetId, (Duration, Instant)>);

/// Works until the server stops.
pub(super) async fn run(server: Arc<MetaServer>) {
    let mut backoff = Backoff::default();
    loop {
        tokio::select! {
            () = server.cancel.cancelled() => return,
            // A moment for more to come: each pass costs a sync.
            () = server.purge_wake.notified() => tokio::time::sleep(GATHER).await,
            () = tokio::time::sleep(if backoff.0.is_empty() { IDLE } else { BACKOFF_FIRST }) => {}
        }
        if let Err(e) = pass(&server, &mut backoff).await
            && !server.cancel.is_cancelled()
        {
            tracing::warn!(error = %e, "purge of chunk files put off");
        }
    }
}

/// Goes once through the queue.
pub(super) async fn pass(server: &Arc<MetaServer>, backoff: &mut Backoff) -> Result<(), ErrorCode> {
    let mut from = Vec::new();
    loop {
        let rows = server.read(|db| db.scan(Table::Purge, &[], &from, BATCH))?;
        let Some((last, _)) = rows.last() else { break };
        from.clone_from(last);
        from.push(0);
        // No destructive order leaves before the record that orders it is durable.
        server.store.sync().await.map_err(|_| ErrorCode::DiskFailed)?;
        let mut wanted: BTreeMap<TargetId, Vec<ChunkKey>> = BTreeMap::new();
        for (key, value) in &rows {
            let chunk =
                ChunkKey { ino: InodeId(records::number_at(key, 0)?), data_id: DataId(records::number_at(key, 8)?) };
            for t in records::decode::<PurgeRecord>(Table::Purge, key, value)?.targets {
                wanted.entry(t).or_default().push(chunk);
            }
        }
        let now = Instant::now();
        let mut sent = JoinSet::new();
        for (target, keys) in wanted {
            if backoff.0.get(&target).is_some_and(|(_, at)| *at > now) {
                continue;
            }
            let order = server.access.purge(PurgeRequest { target, keys: keys.clone() });
            sent.spawn(async move { (target, order.await) });
        }
        let mut done: BTreeSet<TargetId> = BTreeSet::new();
        while let Some(answer) = sent.join_next().await {
            let Ok((target, result)) = answer else { continue };
            match result {
                Ok(()) => {
                    if backoff.0.remove(&target).is_some() {
                        tracing::info!(%target, "purge goes on");
                    }
                    done.insert(target);
                }
                Err(e) => {
                    let first = !backoff.0.contains_key(&target);
                    if first {
                        tracing::warn!(%target, error = %e, "target does not purge, trying again later");
                    }
                    let pause = backoff.0.get(&target).map_or(BACKOFF_FIRST, |(d, _)| (*d * 2).min(BACKOFF_MAX));
                    backoff.0.insert(target, (pause, Instant::now() + pause));
                }
            }
        }
        *super::unpoison(server.blocked.lock()) = backoff.0.keys().copied().collect();
        if !done.is_empty() {
            let keys: Vec<Vec<u8>> = rows.into_iter().map(|(k, _)| k).collect();
            server.commit_own(move |db, _| confirm(db, &keys, &done)).await?;
        }
    }
    Ok(())
}

fn confirm(db: &mut dyn RowsMut, keys: &[Vec<u8>], done: &BTreeSet<TargetId>) -> Result<(), ErrorCode> {
    for key in keys {
        let Some(mut row) = db::get::<PurgeRecord>(db, Table::Purge, key)? else { continue };
        row.targets.retain(|t| !done.contains(t));
        if row.targets.is_empty() {
            db.delete(Table::Purge, key)?;
        } else {
            db::put(db, Table::Purge, key, &row)?;
        }
    }
    Ok(())
}
