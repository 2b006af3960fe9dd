//! Open files and directories of this mount: what the session must reclaim, and what fsync must compare.

use crate::base::{
    error::ErrorCode,
    ids::{DataId, InodeId, TargetId},
};
use crate::fs::attr::Attributes;
use crate::net::msg::meta::{DirEntry, Layout, OpenReply, ReclaimedOpen};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
use std::time::Instant;
use tokio::sync::oneshot;

/// Inodes whose unsynced writes are remembered after their last close.
const REMEMBERED_INODES_MAX: usize = 65_536;

/// Locks; a poisoned lock is taken as it is (its data is valid between statements).
pub(super) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Verifiers of the writes since the last fsync, by data id and stripe index.
pub type Unsynced = HashMap<(DataId, u16), (TargetId, BTreeSet<u64>)>;

/// One report of written bytes that waits to be sent.
#[derive(Debug)]
pub struct WrittenBatch {
    /// Under which data.
    pub data_id: DataId,
    /// Under which data epoch: a truncation between the write and its report refuses the report.
    pub data_epoch: u64,
    /// Largest end.
    pub end: u64,
    /// All stripe indexes.
    pub mask: u64,
    /// Any writer is not privileged.
    pub clear_suid: bool,
    /// Who waits.
    pub waiters: Vec<oneshot::Sender<Result<Attributes, ErrorCode>>>,
}

/// Reports of one file in order; one is in flight, the next gathers all that wait.
#[derive(Debug, Default)]
pub struct WrittenQueue {
    /// A task sends.
    pub running: bool,
    /// What waits.
    pub batches: VecDeque<WrittenBatch>,
}

impl WrittenQueue {
    /// Adds a report, to the last batch if that is of the same data.
    pub fn push(
        &mut self,
        (data_id, data_epoch): (DataId, u64),
        end: u64,
        mask: u64,
        clear_suid: bool,
        waiter: oneshot::Sender<Result<Attributes, ErrorCode>>,
    ) {
        match self.batches.back_mut() {
            Some(b) if (b.data_id, b.data_epoch) == (data_id, data_epoch) => {
                b.end = b.end.max(end);
                b.mask |= mask;
                b.clear_suid |= clear_suid;
                b.waiters.push(waiter);
            }
            _ => self.batches.push_back(WrittenBatch {
                data_id,
                data_epoch,
                end,
                mask,
                clear_suid,
                waiters: vec![waiter],
            }),
        }
    }
}

/// An inode that this mount has open at least once.
#[derive(Debug)]
pub struct OpenInode {
    /// Which.
    pub ino: InodeId,
    layout: Mutex<Option<(Layout, u32, u32)>>,
    /// Reports of written bytes.
    pub written: Mutex<WrittenQueue>,
    unsynced: Mutex<Unsynced>,
    /// Raised with each loss that an fsync found.
    pub losses: AtomicU64,
    counts: Mutex<(u32, u32)>,
    /// One fsync at a time: each must see the losses that the one before found.
    pub syncing: tokio::sync::Mutex<()>,
}

impl OpenInode {
    /// The layout as last heard, with owner and group; none after a truncation.
    pub fn layout(&self) -> Option<(Layout, u32, u32)> {
        lock(&self.layout).clone()
    }

    /// Takes over a layout that the server sent.
    pub fn heard(&self, layout: &Layout, attr: &Attributes) {
        *lock(&self.layout) = Some((layout.clone(), attr.uid, attr.gid));
    }

    /// The next write asks for the layout again.
    pub fn forget_layout(&self) {
        *lock(&self.layout) = None;
    }

    /// Remembers the verifier of a write.
    pub fn wrote(&self, data_id: DataId, stripe_index: u16, target: TargetId, verifier: u64) {
        lock(&self.unsynced)
            .entry((data_id, stripe_index))
            .or_insert_with(|| (target, BTreeSet::new()))
            .1
            .insert(verifier);
    }

    /// Takes the verifiers for an fsync.
    pub fn take_unsynced(&self) -> Unsynced {
        std::mem::take(&mut *lock(&self.unsynced))
    }

    /// Gives them back after an fsync that could not be done.
    pub fn restore_unsynced(&self, taken: Unsynced) {
        let mut now = lock(&self.unsynced);
        for (key, (target, verifiers)) in taken {
            now.entry(key).or_insert_with(|| (target, BTreeSet::new())).1.extend(verifiers);
        }
    }
}

/// An open file handle.
#[derive(Debug)]
pub struct OpenFile {
    /// Its inode.
    pub inode: Arc<OpenInode>,
    /// Open for writing.
    pub write: bool,
    /// O_APPEND at open.
    pub append: bool,
    /// A write failed half-way.
    pub tail_unsure: AtomicBool,
    seen_losses: AtomicU64,
}

impl OpenFile {
    /// True once for each loss since this handle was opened.
    pub fn take_loss(&self) -> bool {
        let now = self.inode.losses.load(Ordering::Acquire);
        self.seen_losses.swap(now, Ordering::AcqRel) < now
    }
}

/// Entries kept for a directory handle.
#[derive(Debug)]
pub struct DirBatch {
    /// Cookie after which they were asked.
    pub after: u64,
    /// Entries.
    pub entries: Vec<DirEntry>,
    /// Nothing follows.
    pub end: bool,
    /// They have attributes.
    pub with_attributes: bool,
    /// When.
    pub at: Instant,
}

/// An open directory.
#[derive(Debug)]
pub struct OpenDir {
    /// Which.
    pub ino: InodeId,
    /// Last batch. Held over the call: a directory stream is read by one at a time.
    pub batch: tokio::sync::Mutex<Option<DirBatch>>,
}

#[derive(Debug, Default)]
struct Remembered {
    map: HashMap<InodeId, Unsynced>,
    order: VecDeque<InodeId>,
}

/// All handles.
#[derive(Debug, Default)]
pub struct Handles {
    next: AtomicU64,
    files: Mutex<HashMap<u64, Arc<OpenFile>>>,
    dirs: Mutex<HashMap<u64, Arc<OpenDir>>>,
    inodes: Mutex<HashMap<InodeId, Arc<OpenInode>>>,
    remembered: Mutex<Remembered>,
}

impl Handles {
    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Registers a file that the server has opened.
    pub fn add_file(&self, reply: &OpenReply, write: bool, append: bool) -> (u64, Arc<OpenFile>) {
        let ino = reply.attr.ino;
        let inode = {
            let mut inodes = lock(&self.inodes);
            let inode = inodes.entry(ino).or_insert_with(|| {
                let unsynced = lock(&self.remembered).map.remove(&ino).unwrap_or_default();
                Arc::new(OpenInode {
                    ino,
                    layout: Mutex::default(),
                    written: Mutex::default(),
                    unsynced: Mutex::new(unsynced),
                    losses: AtomicU64::new(0),
                    counts: Mutex::new((0, 0)),
                    syncing: tokio::sync::Mutex::new(()),
                })
            });
            let mut counts = lock(&inode.counts);
            if write {
                counts.1 += 1
            } else {
                counts.0 += 1
            }
            drop(counts);
            inode.clone()
        };
        inode.heard(&reply.layout, &reply.attr);
        let seen = inode.losses.load(Ordering::Acquire);
        let file = Arc::new(OpenFile {
            inode,
            write,
            append,
            tail_unsure: AtomicBool::new(false),
            seen_losses: AtomicU64::new(seen),
        });
        let fh = self.number();
        lock(&self.files).insert(fh, file.clone());
        (fh, file)
    }

    /// A file by its handle.
    pub fn file(&self, fh: u64) -> Result<Arc<OpenFile>, ErrorCode> {
        lock(&self.files).get(&fh).cloned().ok_or(ErrorCode::Stale)
    }

    /// An inode, if open.
    pub fn inode(&self, ino: InodeId) -> Option<Arc<OpenInode>> {
        lock(&self.inodes).get(&ino).cloned()
    }

    /// Takes a handle away; it still counts as open for a reclaim until `closed`.
    pub fn remove_file(&self, fh: u64) -> Option<Arc<OpenFile>> {
        lock(&self.files).remove(&fh)
    }

    /// The server knows that the handle is closed.
    pub fn closed(&self, file: &OpenFile) {
        let mut inodes = lock(&self.inodes);
        let mut counts = lock(&file.inode.counts);
        let count = if file.write { &mut counts.1 } else { &mut counts.0 };
        *count = count.saturating_sub(1);
        if *counts != (0, 0) {
            return;
        }
        drop(counts);
        inodes.remove(&file.inode.ino);
        let left = file.inode.take_unsynced();
        if left.is_empty() {
            return;
        }
        let mut remembered = lock(&self.remembered);
        if remembered.map.insert(file.inode.ino, left).is_none() {
            remembered.order.push_back(file.inode.ino);
        }
        while remembered.order.len() > REMEMBERED_INODES_MAX {
            if let Some(old) = remembered.order.pop_front() {
                remembered.map.remove(&old);
            }
        }
    }

    /// What a new session must register again.
    pub fn reclaim(&self) -> Vec<ReclaimedOpen> {
        lock(&self.inodes)
            .values()
            .map(|i| {
                let (readers, writers) = *lock(&i.counts);
                ReclaimedOpen { ino: i.ino, readers, writers }
            })
            .collect()
    }

    /// Registers a directory.
    pub fn add_dir(&self, ino: InodeId) -> u64 {
        let fh = self.number();
        lock(&self.dirs).insert(fh, Arc::new(OpenDir { ino, batch: tokio::sync::Mutex::new(None) }));
        fh
    }

    /// A directory by its handle.
    pub fn dir(&self, fh: u64) -> Result<Arc<OpenDir>, ErrorCode> {
        lock(&self.dirs).get(&fh).cloned().ok_or(ErrorCode::Stale)
    }

    /// Takes a directory away.
    pub fn remove_dir(&self, fh: u64) {
        lock(&self.dirs).remove(&fh);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_reports_of_one_data_id_become_one() {
        let mut q = WrittenQueue::default();
        let tx = || oneshot::channel().0;
        q.push((DataId(1), 1), 10, 1, false, tx());
        q.push((DataId(1), 1), 5, 2, true, tx());
        q.push((DataId(2), 1), 7, 4, false, tx());
        assert_eq!(q.batches.len(), 2);
        let b = &q.batches[0];
        assert_eq!((b.end, b.mask, b.clear_suid, b.waiters.len()), (10, 3, true, 2));
    }
}
