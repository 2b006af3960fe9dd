//! Room on the disk: enough must be left to flush what the log holds, and to remove things.

use super::{Overlay, Shared, Store, StoreError, open_snapshot, overlay, unpoison, without_redb};
use redb::Database;
use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Kept free for what does not make the store grow for good: this part of the disk, and at most so much.
const RESERVE_PART: u64 = 8;
const RESERVE_BYTES_MAX: u64 = 256 << 20;
const PAGE_BYTES: u64 = 4096;
/// Of each flush, besides the rows.
const FLUSH_BYTES: u64 = 256 << 10;
/// A flush of so much may make room by itself: the log is cut.
const WORTH_A_FLUSH_BYTES: usize = 1 << 20;
const FLUSH_PAUSE: Duration = Duration::from_secs(1);
const LOG_PAUSE: Duration = Duration::from_secs(60);

/// What is known about room.
#[derive(Default, Debug)]
pub(super) struct Room {
    /// Bytes that redb's file has on disk and does not use. Counted only while the disk is nearly full.
    slack: AtomicU64,
    flushed: Mutex<Option<Instant>>,
    told: Mutex<Option<Instant>>,
}

/// True at most once in `pause`.
fn is_due(last: &Mutex<Option<Instant>>, pause: Duration) -> bool {
    let mut last = unpoison(last.lock());
    let due = last.is_none_or(|at| at.elapsed() >= pause);
    if due {
        *last = Some(Instant::now());
    }
    due
}

fn io(e: impl Into<std::io::Error>) -> StoreError {
    StoreError::io("read the free space", &e.into())
}

impl Shared {
    /// Bytes that can be written, and the size of the disk.
    fn space(&self) -> Result<(u64, u64), StoreError> {
        let s = rustix::fs::statvfs(&self.config.dir).map_err(io)?;
        let free = s.f_bavail.saturating_mul(s.f_frsize);
        Ok((free.saturating_add(self.room.slack.load(Ordering::Relaxed)), s.f_blocks.saturating_mul(s.f_frsize)))
    }

    fn redb_on_disk(&self) -> Result<u64, StoreError> {
        Ok(std::fs::metadata(self.config.dir.join("meta.redb")).map_err(io)?.blocks().saturating_mul(512))
    }

    /// Bytes that a flush of this takes while the old pages are still there: each row in a page of its own at worst, but
    /// each page that is there is written anew only once.
    fn need(&self, overlay: &Overlay, redb: u64) -> u64 {
        if overlay.is_empty() {
            return 0;
        }
        let (bytes, rows) = (overlay.bytes as u64, overlay.count() as u64);
        bytes.saturating_mul(2).saturating_add(rows.saturating_mul(PAGE_BYTES).min(redb)).saturating_add(FLUSH_BYTES)
    }

    /// How many of these rows of the overlay may be written in one transaction; `Full`: none.
    pub(super) fn fit(&self, overlay: &Overlay, rows: &[overlay::Row<'_>]) -> Result<usize, StoreError> {
        let (need, (free, _)) = (self.need(overlay, self.redb_on_disk()?), self.space()?);
        if need <= free {
            return Ok(rows.len());
        }
        let mut cost = FLUSH_BYTES;
        let fitting = rows.iter().take_while(|(_, key, entry)| {
            let bytes = key.len() + entry.value.as_ref().map_or(0, Vec::len);
            cost = cost.saturating_add(2 * bytes as u64 + PAGE_BYTES);
            cost <= free
        });
        match fitting.count() {
            0 => Err(StoreError::Full(format!("flush to redb: {free} bytes are free"))),
            n => Ok(n),
        }
    }

    /// Is there too little room to let the store grow?
    fn is_low(&self) -> Result<bool, StoreError> {
        let ((free, total), redb) = (self.space()?, self.redb_on_disk()?);
        let view = unpoison(self.view.read());
        let need = self.need(&view.active, redb) + view.frozen.as_deref().map_or(0, |f| self.need(f, redb));
        Ok(free < need.saturating_add((total / RESERVE_PART).min(RESERVE_BYTES_MAX)))
    }

    /// While the disk is nearly full, counts what redb does not use: its file does not shrink when rows are removed.
    pub(super) fn recount(&self) -> Result<(), StoreError> {
        if !self.is_low()? && self.room.slack.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        let guard = unpoison(self.db.lock());
        let db = guard.as_ref().ok_or_else(without_redb)?;
        let txn = db.begin_write().map_err(StoreError::redb)?;
        let stats = txn.stats().map_err(StoreError::redb)?;
        txn.abort().map_err(StoreError::redb)?;
        drop(guard);
        let used = stats.allocated_pages().saturating_mul(stats.page_size() as u64);
        self.room.slack.store(self.redb_on_disk()?.saturating_sub(used), Ordering::Relaxed);
        Ok(())
    }

    /// Opens redb afresh, which it wants after an error. Readers wait meanwhile.
    pub(super) fn reopen(&self) -> Result<(), StoreError> {
        let again = || -> Result<(), StoreError> {
            let mut view = unpoison(self.view.write());
            let mut db = unpoison(self.db.lock());
            view.snapshot.clear();
            *db = None;
            let new = Database::create(self.config.dir.join("meta.redb")).map_err(StoreError::redb)?;
            view.snapshot = open_snapshot(&new)?;
            *db = Some(new);
            Ok(())
        };
        again().map_err(|e| self.fence(&e))
    }
}

impl Store {
    /// Is there room for what makes the store grow? Removing needs no such question: something is kept back for it.
    pub async fn has_room(&self) -> bool {
        let shared = &self.0.shared;
        // A disk that cannot be asked will fail at the next write.
        let is_low = || shared.is_low().unwrap_or(false);
        if !is_low() {
            return true;
        }
        let large = unpoison(shared.view.read()).active.bytes > WORTH_A_FLUSH_BYTES;
        if (large || is_due(&shared.room.flushed, FLUSH_PAUSE)) && self.flush().await.is_ok() && !is_low() {
            return true;
        }
        if is_due(&shared.room.told, LOG_PAUSE) {
            let dir = shared.config.dir.display();
            tracing::error!("the disk of {dir} is full: nothing new can be made there until space is freed");
        }
        false
    }
}
