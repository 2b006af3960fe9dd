//! The chunk files of one target directory. Synchronous: called from a pool of workers.
//!
//! `chunks/xx/yy/<inode>-<data id>` holds the data, its xattr `user.beeswarm.chunk` says whose it is;
//! `purged/xx/<inode>-<data id>` are the tombstones of data that must not come back.

use crate::{
    base::{
        codec,
        error::ErrorCode,
        ids::{ClusterId, DataId, InodeId, TargetId, TargetUuid},
        version::{self, Unreadable},
    },
    fs::stripe::StripeKind,
};
use rustix::{
    fs::{FallocateFlags, Mode, OFlags, SeekFrom, XattrFlags},
    io::{Errno, IoSliceMut, ReadWriteFlags},
};
use serde::{Deserialize, Serialize};
use siphasher::sip::SipHasher13;
use std::{
    collections::{HashMap, HashSet},
    hash::Hasher,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

const XATTR: &str = "user.beeswarm.chunk";
const HEADER_VERSION: u16 = 1;
const OPEN_FILES_MAX: usize = 1024;
const GATES: usize = 64;
/// Directories that tombstones are spread over.
pub const PURGED_DIRS: usize = 256;
/// No request is on its way this long: a call waits a minute or so, a connection is given up after seconds.
const TOMBSTONE_AGE: std::time::Duration = std::time::Duration::from_secs(3600);

/// Names one chunk file of a target.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ChunkKey {
    /// The inode.
    pub ino: InodeId,
    /// The generation of its data.
    pub data_id: DataId,
}

/// What a chunk file says about itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ChunkHeaderRecord {
    /// Version of this record.
    pub version: u16,
    /// The file system.
    pub fs_id: ClusterId,
    /// The inode.
    pub ino: InodeId,
    /// The generation of its data.
    pub data_id: DataId,
    /// Position of this target in the pattern.
    pub stripe_index: u16,
    /// Bytes of one chunk.
    pub chunk_bytes: u32,
    /// Targets of the pattern.
    pub targets: Vec<TargetId>,
    /// How the data is kept.
    pub kind: StripeKind,
    /// Owner at creation.
    pub uid: u32,
    /// Group at creation.
    pub gid: u32,
    /// Project at creation.
    pub project: u32,
    /// Sequence of mirrored writes.
    pub mirror_sequence: u64,
}

/// Why the engine failed.
#[derive(Debug, thiserror::Error)]
pub enum ChunkError {
    /// The disk or its quota is full.
    #[error("no space left on the target ({path})")]
    NoSpace {
        /// The file.
        path: PathBuf,
    },
    /// No such chunk file.
    #[error("chunk file {path} is missing")]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// This data was purged; a late request must not bring it back.
    #[error("data of inode {} with data id {} was purged", key.ino, key.data_id)]
    Purged {
        /// The chunk.
        key: ChunkKey,
    },
    /// The file belongs to something else, or its header is damaged.
    #[error("chunk file {path}: {why}")]
    Header {
        /// The file.
        path: PathBuf,
        /// What differs.
        why: String,
    },
    /// A newer beeswarm wrote the file's header.
    #[error("chunk file {path}: its header: {source}; {}", version::UPGRADE)]
    Newer {
        /// The file.
        path: PathBuf,
        /// The versions.
        source: version::Newer,
    },
    /// The directory cannot be used as a target.
    #[error("{path} cannot hold a target: {why}")]
    Unsuitable {
        /// The directory.
        path: PathBuf,
        /// Why, and what to do.
        why: String,
    },
    /// A system call failed.
    #[error("{path} at offset {offset}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What the kernel said.
        source: Errno,
    },
}

impl ChunkError {
    /// The code that travels.
    pub fn code(&self) -> ErrorCode {
        match self {
            ChunkError::NoSpace { .. } => ErrorCode::NoSpace,
            ChunkError::Missing { .. } => ErrorCode::ChunkMissing,
            ChunkError::Purged { .. } => ErrorCode::Stale,
            ChunkError::Header { .. } => ErrorCode::Corrupt,
            ChunkError::Newer { .. } => ErrorCode::TooNew,
            ChunkError::Io { source: Errno::FBIG, .. } => ErrorCode::FileTooBig,
            ChunkError::Io { source: Errno::OPNOTSUPP, .. } => ErrorCode::NotSupported,
            ChunkError::Io { source: Errno::INVAL, .. } => ErrorCode::Invalid,
            ChunkError::Io { source: Errno::ROFS, .. } => ErrorCode::ReadOnly,
            ChunkError::Io { .. } | ChunkError::Unsuitable { .. } => ErrorCode::DiskFailed,
        }
    }
}

/// Size of a chunk file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkStat {
    /// Its length.
    pub size: u64,
    /// Bytes on disk.
    pub allocated_bytes: u64,
}

/// Space of a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkSpace {
    /// Device number of the file system (st_dev).
    pub device: u64,
    /// Size in bytes.
    pub total_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Free bytes that we may use.
    pub available_bytes: u64,
    /// Inodes.
    pub files_total: u64,
    /// Free inodes.
    pub files_free: u64,
}

#[derive(Debug)]
struct Open {
    fd: OwnedFd,
    header: ChunkHeaderRecord,
    used: AtomicU64,
    /// Its directories are not yet known to be on disk.
    dirs_dirty: AtomicBool,
    seek: Mutex<()>,
}

/// The chunk files of one target directory.
#[derive(Debug)]
pub struct ChunkStore {
    dir: PathBuf,
    fs_id: ClusterId,
    target: TargetUuid,
    boot: String,
    clock: AtomicU64,
    sync_errors: AtomicU64,
    /// Holds `sync_errors`, so that a restart does not take it back.
    error_file: OwnedFd,
    open: Mutex<HashMap<ChunkKey, Arc<Open>>>,
    failed: Mutex<HashSet<ChunkKey>>,
    /// Shared while a file is used, exclusive while it is created or purged.
    gates: Vec<RwLock<()>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fail(path: &Path, offset: u64, source: Errno) -> ChunkError {
    match source {
        Errno::NOSPC | Errno::DQUOT => ChunkError::NoSpace { path: path.into() },
        Errno::NOENT => ChunkError::Missing { path: path.into() },
        _ => ChunkError::Io { path: path.into(), offset, source },
    }
}

fn sync_dir(path: &Path) -> Result<(), ChunkError> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .and_then(rustix::fs::fsync)
        .map_err(|e| fail(path, 0, e))
}

/// Makes a directory; true to the caller only once its entry is on disk.
fn make_dir(path: &Path) -> Result<(), ChunkError> {
    match rustix::fs::mkdir(path, Mode::from_raw_mode(0o700)) {
        Ok(()) => path.parent().map_or(Ok(()), sync_dir),
        Err(Errno::EXIST) => Ok(()),
        Err(e) => Err(fail(path, 0, e)),
    }
}

/// Durable when it returns.
fn make_tombstone(path: &Path) -> Result<(), ChunkError> {
    let Some(dir) = path.parent() else { return Err(fail(path, 0, Errno::INVAL)) };
    make_dir(dir)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)).map_err(|e| fail(path, 0, e))?;
    sync_dir(dir)?;
    dir.parent().map_or(Ok(()), sync_dir)
}

fn read_header(bytes: &[u8]) -> Result<ChunkHeaderRecord, Unreadable> {
    version::check_u16(bytes, HEADER_VERSION)?;
    codec::decode(bytes).map_err(|e| Unreadable::Damaged(e.to_string()))
}

impl ChunkStore {
    /// Opens a target directory, making its layout; refuses a file system without user xattrs.
    pub fn open(dir: &Path, fs_id: ClusterId, target: TargetUuid) -> Result<ChunkStore, ChunkError> {
        make_dir(&dir.join("chunks"))?;
        make_dir(&dir.join("purged"))?;
        let probe = dir.join("chunks");
        if let Err(e) = rustix::fs::setxattr(&probe, "user.beeswarm.probe", b"1", XattrFlags::empty()) {
            let why = format!("user extended attributes do not work ({e}); use ext4, XFS, btrfs or ZFS with xattr=sa");
            return Err(ChunkError::Unsuitable { path: dir.into(), why });
        }
        let path = Path::new("/proc/sys/kernel/random/boot_id");
        let boot = std::fs::read_to_string(path)
            .map_err(|e| ChunkError::Unsuitable { path: path.into(), why: format!("cannot read the boot id: {e}") })?;
        let path = dir.join("sync-errors");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let error_file = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600)).map_err(|e| fail(&path, 0, e))?;
        let mut count = [0u8; 8];
        rustix::io::pread(&error_file, &mut count, 0).map_err(|e| fail(&path, 0, e))?;
        rustix::io::pwrite(&error_file, &count, 0).map_err(|e| fail(&path, 0, e))?; // takes its block now
        Ok(ChunkStore {
            dir: dir.into(),
            fs_id,
            target,
            boot,
            clock: AtomicU64::new(0),
            sync_errors: AtomicU64::new(u64::from_le_bytes(count)),
            error_file,
            open: Mutex::default(),
            failed: Mutex::default(),
            gates: (0..GATES).map(|_| RwLock::new(())).collect(),
        })
    }

    fn spread(key: ChunkKey) -> u64 {
        let mut h = SipHasher13::new();
        h.write_u64(key.ino.0);
        h.finish()
    }

    fn path(&self, key: ChunkKey) -> PathBuf {
        let h = Self::spread(key);
        let (x, y) = (h & 255, (h >> 8) & 255);
        self.dir.join(format!("chunks/{x:02x}/{y:02x}/{:016x}-{:016x}", key.ino.0, key.data_id.0))
    }

    fn tombstone(&self, key: ChunkKey) -> PathBuf {
        let x = Self::spread(key) & 255;
        self.dir.join(format!("purged/{x:02x}/{:016x}-{:016x}", key.ino.0, key.data_id.0))
    }

    fn gate(&self, key: ChunkKey) -> &RwLock<()> {
        &self.gates[usize::try_from(Self::spread(key) % GATES as u64).unwrap_or(0)]
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    fn remember(&self, key: ChunkKey, file: Open) -> Arc<Open> {
        let mut open = lock(&self.open);
        if let Some(there) = open.get(&key) {
            return there.clone();
        }
        if open.len() >= OPEN_FILES_MAX {
            // Least recently used half at once, so that the search is paid for rarely.
            let mut ages: Vec<(u64, ChunkKey)> =
                open.iter().map(|(k, f)| (f.used.load(Ordering::Relaxed), *k)).collect();
            ages.sort_unstable();
            for (_, old) in ages.iter().take(OPEN_FILES_MAX / 2) {
                open.remove(old);
            }
        }
        let file = Arc::new(file);
        open.insert(key, file.clone());
        file
    }

    /// Opens an existing file. The caller holds the gate.
    fn existing(&self, key: ChunkKey) -> Result<Arc<Open>, ChunkError> {
        if let Some(file) = lock(&self.open).get(&key) {
            file.used.store(self.tick(), Ordering::Relaxed);
            return Ok(file.clone());
        }
        let path = self.path(key);
        // The tombstone counts even while the file is still there: a crash may have come between the two.
        let tomb = self.tombstone(key);
        match rustix::fs::stat(&tomb) {
            Ok(_) => return Err(ChunkError::Purged { key }),
            Err(Errno::NOENT) => {}
            Err(e) => return Err(fail(&tomb, 0, e)),
        }
        let fd = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
            .map_err(|e| fail(&path, 0, e))?;
        let mut bytes = vec![0u8; 4096];
        let len = rustix::fs::fgetxattr(&fd, XATTR, &mut bytes[..])
            .map_err(|e| ChunkError::Header { path: path.clone(), why: format!("no header: {e}") })?;
        let header = read_header(&bytes[..len]).map_err(|e| match e {
            Unreadable::Newer(source) => ChunkError::Newer { path: path.clone(), source },
            Unreadable::Damaged(why) => {
                ChunkError::Header { path: path.clone(), why: format!("damaged header: {why}") }
            }
        })?;
        if (header.fs_id, header.ino, header.data_id) != (self.fs_id, key.ino, key.data_id) {
            return Err(ChunkError::Header { path, why: "belongs to another file or file system".into() });
        }
        // A restart may have come between creation and the sync of the directory: sync it once more.
        let (used, dirs_dirty) = (AtomicU64::new(self.tick()), AtomicBool::new(true));
        Ok(self.remember(key, Open { fd, header, used, dirs_dirty, seek: Mutex::default() }))
    }

    /// Creates a file under a temporary name, so that none is ever seen without its header.
    fn create(&self, key: ChunkKey, header: &ChunkHeaderRecord) -> Result<(), ChunkError> {
        let _gate = self.gate(key).write().unwrap_or_else(PoisonError::into_inner);
        match self.existing(key) {
            Err(ChunkError::Missing { .. }) => {}
            other => return other.map(|_| ()),
        }
        let path = self.path(key);
        if (header.version, header.fs_id, header.ino, header.data_id)
            != (HEADER_VERSION, self.fs_id, key.ino, key.data_id)
        {
            return Err(ChunkError::Header { path, why: "the request's header names another file".into() });
        }
        if let Some(y) = path.parent() {
            y.parent().map_or(Ok(()), make_dir)?;
            make_dir(y)?;
        }
        let bytes =
            codec::encode_bounded(header).map_err(|e| ChunkError::Header { path: path.clone(), why: e.to_string() })?;
        let temporary = path.with_extension("new");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let made = rustix::fs::open(&temporary, flags, Mode::from_raw_mode(0o600)).and_then(|fd| {
            rustix::fs::fsetxattr(&fd, XATTR, &bytes, XattrFlags::empty())?;
            rustix::fs::rename(&temporary, &path)?;
            Ok(fd)
        });
        let fd = made.map_err(|e| {
            let _ = rustix::fs::unlink(&temporary); // a leftover is overwritten by the next try
            fail(&path, 0, e)
        })?;
        let (used, dirs_dirty) = (AtomicU64::new(self.tick()), AtomicBool::new(true));
        self.remember(key, Open { fd, header: header.clone(), used, dirs_dirty, seek: Mutex::default() });
        Ok(())
    }

    fn with<T>(
        &self,
        key: ChunkKey,
        create: Option<&ChunkHeaderRecord>,
        act: impl FnOnce(&Open, &Path) -> Result<T, ChunkError>,
    ) -> Result<T, ChunkError> {
        let enter = || self.gate(key).read().unwrap_or_else(PoisonError::into_inner);
        let mut gate = enter();
        let mut found = self.existing(key);
        if let (Err(ChunkError::Missing { .. }), Some(header)) = (&found, create) {
            drop(gate);
            self.create(key, header)?;
            gate = enter();
            found = self.existing(key);
        }
        let (file, path) = (found?, self.path(key));
        if let Some(h) = create {
            let mine = &file.header;
            if (h.fs_id, h.ino, h.data_id, h.stripe_index, h.chunk_bytes)
                != (mine.fs_id, mine.ino, mine.data_id, mine.stripe_index, mine.chunk_bytes)
            {
                return Err(ChunkError::Header { path, why: "the request's header differs from the file's".into() });
            }
        }
        let result = act(&file, &path);
        drop(gate);
        result
    }

    /// Writes all of `data`, or fails; the first write makes the file.
    pub fn write(&self, key: ChunkKey, header: &ChunkHeaderRecord, offset: u64, data: &[u8]) -> Result<(), ChunkError> {
        self.with(key, Some(header), |file, path| {
            let mut done = 0;
            while done < data.len() {
                let at = offset.saturating_add(done as u64);
                match rustix::io::pwrite(&file.fd, &data[done..], at) {
                    Ok(0) => return Err(fail(path, at, Errno::IO)),
                    Ok(n) => done += n,
                    Err(Errno::INTR) => {}
                    Err(e) => return Err(fail(path, at, e)),
                }
            }
            Ok(())
        })
    }

    /// Reads up to `len` bytes; fewer only at the end of the chunk file. Holes are zeros.
    pub fn read(&self, key: ChunkKey, offset: u64, len: usize) -> Result<Vec<u8>, ChunkError> {
        self.with(key, None, |file, path| {
            let mut buf = vec![0u8; len];
            let mut done = 0;
            while done < len {
                let at = offset.saturating_add(done as u64);
                match rustix::io::pread(&file.fd, &mut buf[done..], at) {
                    Ok(0) => break,
                    Ok(n) => done += n,
                    Err(Errno::INTR) => {}
                    Err(e) => return Err(fail(path, at, e)),
                }
            }
            buf.truncate(done);
            Ok(buf)
        })
    }

    /// Like `read` if the file is open and all of it is in the page cache; otherwise `None`. Does not wait for a disk.
    pub fn try_read_cached(&self, key: ChunkKey, offset: u64, len: usize) -> Option<Vec<u8>> {
        let _gate = self.gate(key).try_read().ok()?;
        let file = lock(&self.open).get(&key)?.clone();
        let mut buf = vec![0u8; len];
        let got =
            rustix::io::preadv2(&file.fd, &mut [IoSliceMut::new(&mut buf)], offset, ReadWriteFlags::NOWAIT).ok()?;
        (got == len).then_some(buf) // short: the end or not cached; `read` tells which
    }

    /// Sets the size of the chunk file.
    pub fn truncate(&self, key: ChunkKey, local_size: u64) -> Result<(), ChunkError> {
        self.with(key, None, |f, path| rustix::fs::ftruncate(&f.fd, local_size).map_err(|e| fail(path, local_size, e)))
    }

    /// Like `truncate`; a missing file is a hole already.
    pub fn truncate_missing_ok(&self, key: ChunkKey, local_size: u64) -> Result<(), ChunkError> {
        match self.truncate(key, local_size) {
            Err(ChunkError::Missing { .. }) => Ok(()),
            other => other,
        }
    }

    fn fallocate(file: &Open, path: &Path, flags: FallocateFlags, offset: u64, len: u64) -> Result<(), ChunkError> {
        rustix::fs::fallocate(&file.fd, flags, offset, len).map_err(|e| fail(path, offset, e))
    }

    /// Makes a hole; the size stays.
    pub fn punch(&self, key: ChunkKey, offset: u64, len: u64) -> Result<(), ChunkError> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        self.with(key, None, |f, path| Self::fallocate(f, path, flags, offset, len))
    }

    /// Reserves space, making the file if need be.
    pub fn allocate(
        &self,
        key: ChunkKey,
        header: &ChunkHeaderRecord,
        offset: u64,
        len: u64,
        keep_size: bool,
    ) -> Result<(), ChunkError> {
        let flags = if keep_size { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
        self.with(key, Some(header), |f, path| Self::fallocate(f, path, flags, offset, len))
    }

    /// Zeroes a range that stays reserved; grows the file unless `keep_size`.
    pub fn zero_range(&self, key: ChunkKey, offset: u64, len: u64, keep_size: bool) -> Result<(), ChunkError> {
        let keep = if keep_size { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
        self.with(key, None, |f, path| Self::fallocate(f, path, FallocateFlags::ZERO_RANGE | keep, offset, len))
    }

    fn seek(&self, key: ChunkKey, to: SeekFrom, offset: u64) -> Result<Option<u64>, ChunkError> {
        self.with(key, None, |file, path| {
            let _one = lock(&file.seek);
            match rustix::fs::seek(&file.fd, to) {
                Ok(at) => Ok(Some(at)),
                Err(Errno::NXIO) => Ok(None),
                Err(e) => Err(fail(path, offset, e)),
            }
        })
    }

    /// The next data at or after `offset`.
    pub fn seek_data(&self, key: ChunkKey, offset: u64) -> Result<Option<u64>, ChunkError> {
        self.seek(key, SeekFrom::Data(offset), offset)
    }

    /// The next hole at or after `offset` (the end counts as one).
    pub fn seek_hole(&self, key: ChunkKey, offset: u64) -> Result<Option<u64>, ChunkError> {
        self.seek(key, SeekFrom::Hole(offset), offset)
    }

    /// Size of the chunk file.
    pub fn stat(&self, key: ChunkKey) -> Result<ChunkStat, ChunkError> {
        self.with(key, None, |file, path| {
            let st = rustix::fs::fstat(&file.fd).map_err(|e| fail(path, 0, e))?;
            let number = |n: i64| u64::try_from(n).unwrap_or(0);
            Ok(ChunkStat { size: number(st.st_size), allocated_bytes: number(st.st_blocks).saturating_mul(512) })
        })
    }

    /// Makes data and name durable. After one failure it fails for this file until a restart: the kernel reports a lost
    /// page only once.
    pub fn sync(&self, key: ChunkKey) -> Result<(), ChunkError> {
        self.with(key, None, |file, path| {
            if lock(&self.failed).contains(&key) {
                return Err(fail(path, 0, Errno::IO));
            }
            let mut result = rustix::fs::fdatasync(&file.fd).map_err(|e| fail(path, 0, e));
            if result.is_ok() && file.dirs_dirty.load(Ordering::Acquire) {
                // All three levels: another thread or an earlier run may have made one without having synced it yet.
                result = path.ancestors().skip(1).take(3).try_for_each(sync_dir);
                if result.is_ok() {
                    file.dirs_dirty.store(false, Ordering::Release);
                }
            }
            if result.is_err() {
                lock(&self.failed).insert(key);
                self.count_sync_error();
            }
            result
        })
    }

    /// Changes the verifier, also for the next run of the process (a reboot changes it anyway, so no fsync here).
    fn count_sync_error(&self) {
        let count = self.sync_errors.fetch_add(1, Ordering::AcqRel) + 1;
        if let Err(e) = rustix::io::pwrite(&self.error_file, &count.to_le_bytes(), 0) {
            tracing::error!(dir = %self.dir.display(), "cannot record a failed sync: {e}; do not restart this target");
        }
    }

    /// Removes the data for good; may be repeated. Durable when it returns.
    pub fn purge(&self, key: ChunkKey) -> Result<(), ChunkError> {
        let _gate = self.gate(key).write().unwrap_or_else(PoisonError::into_inner);
        let (path, tomb) = (self.path(key), self.tombstone(key));
        match make_tombstone(&tomb) {
            Err(ChunkError::NoSpace { .. }) => {
                // A full target must still be able to delete: the data makes room for its tombstone.
                match rustix::fs::open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
                    Ok(file) => rustix::fs::ftruncate(&file, 0).map_err(|e| fail(&path, 0, e))?,
                    Err(Errno::NOENT) => {}
                    Err(e) => return Err(fail(&path, 0, e)),
                }
                make_tombstone(&tomb)?;
            }
            other => other?,
        }
        lock(&self.open).remove(&key);
        lock(&self.failed).remove(&key);
        match rustix::fs::unlink(&path) {
            Ok(()) => path.parent().map_or(Ok(()), sync_dir),
            Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(fail(&path, 0, e)),
        }
    }

    /// Removes the tombstones of one of the `PURGED_DIRS` directories that are older than `TOMBSTONE_AGE`; how many.
    pub fn sweep_tombstones(&self, x: usize) -> Result<u64, ChunkError> {
        let dir = self.dir.join(format!("purged/{x:02x}"));
        let io = |path: &Path, e: &std::io::Error| fail(path, 0, Errno::from_io_error(e).unwrap_or(Errno::IO));
        let entries = match std::fs::read_dir(&dir) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(0),
            entries => entries.map_err(|e| io(&dir, &e))?,
        };
        let mut removed = 0;
        for entry in entries {
            let path = entry.map_err(|e| io(&dir, &e))?.path();
            let made = path.metadata().and_then(|m| m.modified()).map_err(|e| io(&path, &e))?;
            // A clock that was set back: kept until it has caught up.
            if made.elapsed().is_ok_and(|age| age > TOMBSTONE_AGE) {
                std::fs::remove_file(&path).map_err(|e| io(&path, &e))?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// Space of the target.
    pub fn statfs(&self) -> Result<ChunkSpace, ChunkError> {
        let s = rustix::fs::statvfs(&self.dir).map_err(|e| fail(&self.dir, 0, e))?;
        let device = rustix::fs::stat(&self.dir).map_err(|e| fail(&self.dir, 0, e))?.st_dev;
        Ok(ChunkSpace {
            device,
            total_bytes: s.f_blocks.saturating_mul(s.f_frsize),
            free_bytes: s.f_bfree.saturating_mul(s.f_frsize),
            available_bytes: s.f_bavail.saturating_mul(s.f_frsize),
            files_total: s.f_files,
            files_free: s.f_ffree,
        })
    }

    /// The same as long as no written data can have been lost: changes with a reboot or a failed sync, not with a
    /// restart of the process.
    pub fn write_verifier(&self) -> u64 {
        let mut h = SipHasher13::new();
        h.write(self.boot.as_bytes());
        h.write(self.target.0.as_bytes());
        h.write_u64(self.sync_errors.load(Ordering::Acquire));
        h.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::stripe::StripePattern;

    fn key(ino: u64) -> ChunkKey {
        ChunkKey { ino: InodeId(ino), data_id: DataId(7) }
    }

    fn header(fs_id: ClusterId, k: ChunkKey, stripe_index: u16) -> ChunkHeaderRecord {
        ChunkHeaderRecord {
            version: 1,
            fs_id,
            ino: k.ino,
            data_id: k.data_id,
            stripe_index,
            chunk_bytes: 65536,
            targets: vec![TargetId(0), TargetId(1), TargetId(2)],
            kind: StripeKind::Raid0,
            uid: 0,
            gid: 0,
            project: 0,
            mirror_sequence: 0,
        }
    }

    #[test]
    fn life_of_a_chunk() {
        let dir = tempfile::tempdir().unwrap();
        let (fs, uuid, k) = (ClusterId::random(), TargetUuid::random(), key(5));
        let store = ChunkStore::open(dir.path(), fs, uuid).unwrap();
        let h = header(fs, k, 0);
        assert!(matches!(store.read(k, 0, 1), Err(ChunkError::Missing { .. })));
        store.write(k, &h, 1 << 20, b"hello").unwrap();
        store.sync(k).unwrap();
        assert_eq!(store.read(k, (1 << 20) - 2, 100).unwrap(), b"\0\0hello");
        assert!(store.stat(k).unwrap().allocated_bytes < 1 << 20);
        assert!(store.seek_data(k, 0).unwrap().unwrap() > 0);
        assert!(matches!(store.write(k, &header(fs, k, 1), 0, b"x"), Err(ChunkError::Header { .. })));
        let verifier = store.write_verifier();
        drop(store);
        let store = ChunkStore::open(dir.path(), fs, uuid).unwrap();
        assert_eq!(store.write_verifier(), verifier);
        store.count_sync_error();
        assert_ne!(store.write_verifier(), verifier);
        let after_error = store.write_verifier();
        drop(store);
        let store = ChunkStore::open(dir.path(), fs, uuid).unwrap();
        assert_eq!(store.write_verifier(), after_error);
        assert_eq!(store.read(k, 1 << 20, 5).unwrap(), b"hello");
        store.punch(k, 1 << 20, 2).unwrap();
        assert_eq!(store.read(k, 1 << 20, 5).unwrap(), b"\0\0llo");
        store.truncate(k, 3).unwrap();
        assert_eq!(store.read(k, 0, 9).unwrap(), [0; 3]);
        store.purge(k).unwrap();
        store.purge(k).unwrap();
        assert!(matches!(store.write(k, &h, 0, b"late"), Err(ChunkError::Purged { .. })));
        drop(store);
        let store = ChunkStore::open(dir.path(), fs, uuid).unwrap();
        assert!(matches!(store.write(k, &h, 0, b"late"), Err(ChunkError::Purged { .. })));
        assert!(store.statfs().unwrap().total_bytes > 0);
        // A young tombstone stays, an old one goes.
        let sweep = || (0..PURGED_DIRS).map(|x| store.sweep_tombstones(x).unwrap()).sum::<u64>();
        assert_eq!(sweep(), 0);
        let old = std::time::SystemTime::now() - TOMBSTONE_AGE - std::time::Duration::from_secs(1);
        std::fs::File::open(store.tombstone(k)).unwrap().set_modified(old).unwrap();
        assert_eq!(sweep(), 1);
        assert!(!store.tombstone(k).exists());
        assert_eq!(sweep(), 0);
    }

    #[test]
    fn a_newer_header_is_told_from_a_damaged_and_a_foreign_one() {
        let dir = tempfile::tempdir().unwrap();
        let (fs, uuid, k) = (ClusterId::random(), TargetUuid::random(), key(5));
        let store = ChunkStore::open(dir.path(), fs, uuid).unwrap();
        store.write(k, &header(fs, k, 0), 0, b"hello").unwrap();
        let path = store.path(k);
        let own = codec::encode(&header(fs, k, 0));
        let read_with = |bytes: &[u8]| {
            rustix::fs::setxattr(&path, XATTR, bytes, XattrFlags::empty()).unwrap();
            let store = ChunkStore::open(dir.path(), fs, uuid).unwrap();
            // Neither a read nor a write gets through, and the file stays.
            let written = store.write(k, &header(fs, k, 0), 0, b"x");
            let error = store.read(k, 0, 5).unwrap_err();
            assert_eq!(written.unwrap_err().to_string(), error.to_string());
            error
        };
        for newer in [&[2, 0][..], &[&[2, 0], &own[2..], b"more"].concat(), &[&[2, 0], &own[2..]].concat()] {
            let error = read_with(newer);
            assert_eq!(error.code(), ErrorCode::TooNew);
            let text = error.to_string();
            assert!(text.contains("version 2") && text.contains("up to 1") && text.contains("upgrade"), "{text}");
            assert!(text.contains(path.to_str().unwrap()), "{text}");
        }
        for damaged in [&[][..], &own[..20], &[&own[..], b"more"].concat(), &vec![0; own.len()]] {
            let error = read_with(damaged);
            assert_eq!(error.code(), ErrorCode::Corrupt);
            assert!(error.to_string().contains("damaged"), "{error}");
        }
        assert!(read_with(&codec::encode(&header(fs, key(6), 0))).to_string().contains("another file"));
        rustix::fs::setxattr(&path, XATTR, &own, XattrFlags::empty()).unwrap();
        assert_eq!(ChunkStore::open(dir.path(), fs, uuid).unwrap().read(k, 0, 5).unwrap(), b"hello");
    }

    #[test]
    fn allocate_reserves_and_seeks_find_holes() {
        let dir = tempfile::tempdir().unwrap();
        let (fs, k) = (ClusterId::random(), key(6));
        let store = ChunkStore::open(dir.path(), fs, TargetUuid::random()).unwrap();
        let h = header(fs, k, 0);
        assert!(matches!(store.seek_hole(k, 0), Err(ChunkError::Missing { .. })));
        store.allocate(k, &h, 0, 1 << 20, true).unwrap();
        let st = store.stat(k).unwrap();
        assert!(st.size == 0 && st.allocated_bytes >= 1 << 20, "{st:?}");
        store.allocate(k, &h, 0, 1 << 20, false).unwrap();
        assert_eq!(store.stat(k).unwrap().size, 1 << 20);
        assert!(store.read(k, 0, 1 << 20).unwrap().iter().all(|b| *b == 0));
        assert!(matches!(store.allocate(k, &header(fs, k, 1), 0, 1, false), Err(ChunkError::Header { .. })));
        // Another file: reserved blocks may count as data.
        let k = key(8);
        let h = header(fs, k, 0);
        store.write(k, &h, 0, &[1; 65536]).unwrap();
        store.write(k, &h, 1 << 19, &[2; 65536]).unwrap();
        store.sync(k).unwrap();
        assert_eq!(store.seek_hole(k, 0).unwrap(), Some(65536));
        assert_eq!(store.seek_data(k, 65536).unwrap(), Some(1 << 19));
        assert_eq!(store.seek_hole(k, 1 << 19).unwrap(), Some((1 << 19) + 65536));
        assert_eq!(store.seek_data(k, (1 << 19) + 65536).unwrap(), None);
        store.truncate(k, 65536).unwrap();
        assert_eq!(store.seek_hole(k, 0).unwrap(), Some(65536), "the end is a hole");
        assert_eq!((store.seek_hole(k, 65536).unwrap(), store.seek_data(k, 65536).unwrap()), (None, None));
        store.zero_range(k, 0, 4096, true).unwrap();
        assert_eq!(store.read(k, 4095, 2).unwrap(), [0, 1]);
    }

    #[test]
    fn more_files_than_descriptors_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let fs = ClusterId::random();
        let store = ChunkStore::open(dir.path(), fs, TargetUuid::random()).unwrap();
        let count = OPEN_FILES_MAX as u64 + 100;
        for n in 1..=count {
            store.write(key(n), &header(fs, key(n), 0), n, &n.to_le_bytes()).unwrap();
            store.read(key(1), 1, 8).unwrap(); // the first one stays in use
            assert!(lock(&store.open).len() <= OPEN_FILES_MAX);
        }
        let is_open = |n| lock(&store.open).contains_key(&key(n));
        assert!(is_open(1) && is_open(count) && !is_open(2));
        for n in 1..=count {
            assert_eq!(store.read(key(n), n, 8).unwrap(), n.to_le_bytes(), "file {n}");
            assert!(lock(&store.open).len() <= OPEN_FILES_MAX);
        }
        store.sync(key(2)).unwrap();
        store.purge(key(2)).unwrap();
        assert!(!is_open(2));
    }

    /// A small file system of its own; needs root.
    struct SmallDisk(tempfile::TempDir);

    impl SmallDisk {
        fn new() -> Option<SmallDisk> {
            if !rustix::process::geteuid().is_root() {
                eprintln!("not root: nothing tested");
                return None;
            }
            let disk = SmallDisk(tempfile::tempdir().unwrap());
            let script = "truncate -s 16M image && mkfs.ext4 -q -m 0 -F image && mkdir at && mount -o loop image at";
            let run = |s: &str| std::process::Command::new("sh").args(["-c", s]).current_dir(disk.0.path()).status();
            assert!(run(script).unwrap().success());
            Some(disk)
        }
        fn at(&self) -> PathBuf {
            self.0.path().join("at")
        }
    }

    impl Drop for SmallDisk {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(self.at(), rustix::mount::UnmountFlags::DETACH);
        }
    }

    #[test]
    fn full_disk_refuses_writes_and_keeps_the_rest() {
        let Some(disk) = SmallDisk::new() else { return };
        let fs = ClusterId::random();
        let store = ChunkStore::open(&disk.at(), fs, TargetUuid::random()).unwrap();
        let (k, block) = (key(3), vec![7; 1 << 20]);
        let mut kept = 0;
        let full = loop {
            match store.write(k, &header(fs, k, 0), kept, &block).and_then(|()| store.sync(k)) {
                Ok(()) => kept += 1 << 20,
                Err(e) => break e,
            }
        };
        assert!(full.code() == ErrorCode::NoSpace && kept >= 4 << 20, "{full} after {kept}");
        let verifier = store.write_verifier();
        // To the last block, by other means.
        let ballast = disk.at().join("ballast");
        let file = std::fs::File::create(&ballast).unwrap();
        let mut at = 0;
        for step in [65536, 4096, 1] {
            while std::os::unix::fs::FileExt::write_all_at(&file, &vec![1; step], at).is_ok() {
                at += step as u64;
            }
        }
        file.sync_all().unwrap();
        assert_eq!(store.statfs().unwrap().available_bytes, 0);
        assert!(store.read(k, 0, usize::try_from(kept).unwrap()).unwrap().iter().all(|b| *b == 7));
        store.write(k, &header(fs, k, 0), 0, b"over").unwrap();
        store.sync(k).unwrap();
        let e = store.allocate(k, &header(fs, k, 0), 32 << 20, 1 << 20, false).unwrap_err();
        assert_eq!(e.code(), ErrorCode::NoSpace, "{e}");
        assert_eq!(store.write_verifier(), verifier, "no written data was lost");
        // The data makes room for its own tombstone.
        store.purge(k).unwrap();
        assert!(matches!(store.read(k, 0, 1), Err(ChunkError::Purged { .. })));
        store.write(key(4), &header(fs, key(4), 0), 0, &block).unwrap();
        store.sync(key(4)).unwrap();
    }

    #[test]
    fn striped_random_writes_match_a_vector() {
        let dirs: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
        let fs = ClusterId::random();
        let stores: Vec<_> =
            dirs.iter().map(|d| ChunkStore::open(d.path(), fs, TargetUuid::random()).unwrap()).collect();
        let p = StripePattern::new(65536, (0..3).map(TargetId).collect(), StripeKind::Raid0).unwrap();
        let (k, mut model, mut seed) = (key(9), vec![0u8; 2_000_000], 1u64);
        let mut next = |n: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % n
        };
        for round in 0..200u64 {
            let (offset, len) = (next(1_700_000), next(300_000));
            let byte = round.to_le_bytes()[0];
            for e in p.extents(offset, len) {
                let store = &stores[usize::from(e.stripe_index)];
                let (from, n) = (e.file_offset as usize, e.len as usize);
                if round % 5 == 4 {
                    match store.punch(k, e.local_offset, e.len) {
                        Ok(()) | Err(ChunkError::Missing { .. }) => model[from..from + n].fill(0),
                        Err(e) => panic!("{e}"),
                    }
                } else {
                    store.write(k, &header(fs, k, e.stripe_index), e.local_offset, &vec![byte; n]).unwrap();
                    model[from..from + n].fill(byte);
                }
            }
        }
        for e in p.extents(0, 2_000_000) {
            let mut got = stores[usize::from(e.stripe_index)].read(k, e.local_offset, e.len as usize).unwrap();
            got.resize(e.len as usize, 0);
            assert!(got == model[e.file_offset as usize..(e.file_offset + e.len) as usize], "at {}", e.file_offset);
        }
    }
}
