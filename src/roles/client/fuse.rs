//! Decodes the kernel's requests, hands each to a task, and answers. No logic.

use super::interrupt;
use super::vfs::{DirItem, OpenHow, SpaceMode, Vfs, WriteHow};
use crate::base::{error::ErrorCode, ids::InodeId};
use crate::fs::attr::{Attributes, Credential, FileKind, Timestamp};
use crate::fs::name::FileName;
use crate::net::msg::meta::{NewNode, OpenMode, RenameRequest, SetAttrRequest, SetTime, SetXattrRequest};
use bytes::Bytes;
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request,
    TimeOrNow, WriteFlags,
};
use rustix::fs::OFlags;
use std::ffi::OsStr;
use std::future::Future;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

/// The kernel keeps neither names nor attributes.
const TTL: Duration = Duration::ZERO;
const WRITE_BYTES_MAX: u32 = 1 << 20;
const READAHEAD_BYTES_MAX: u32 = 1 << 20;
const BACKGROUND_REQUESTS_MAX: u16 = 512;
/// The kernel's mark of an open for execution, passed through in the flags.
const FMODE_EXEC: u32 = 0x20;
const S_IFMT: u32 = 0o170_000;
const FALLOC_KEEP_SIZE: i32 = 1;
const FALLOC_PUNCH_HOLE: i32 = 2;
const FALLOC_ZERO_RANGE: i32 = 0x10;
const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;
const XATTR_CREATE: i32 = 1;
const XATTR_REPLACE: i32 = 2;
const NAME_BYTES_MAX: u32 = 255;
const BLOCK_BYTES: u32 = 4096;

/// The file system as fuser sees it.
#[derive(Debug)]
pub struct FuseFs {
    vfs: Arc<Vfs>,
    runtime: Handle,
    tasks: TaskTracker,
}

impl FuseFs {
    /// Over the operations; tasks run on `runtime` and are counted by `tasks`.
    pub fn new(vfs: Arc<Vfs>, runtime: Handle, tasks: TaskTracker) -> Self {
        Self { vfs, runtime, tasks }
    }

    /// Runs an operation and answers with its result, or with EINTR when the caller is interrupted; then the operation
    /// goes on to its end, and a late result passes to `late`.
    fn run<T, F, A, L, LF>(&self, pid: u32, operation: F, answer: A, late: L)
    where
        T: Send + 'static,
        F: Future<Output = Result<T, ErrorCode>> + Send + 'static,
        A: FnOnce(Result<T, Errno>) + Send + 'static,
        L: FnOnce(T) -> LF + Send + 'static,
        LF: Future<Output = ()> + Send + 'static,
    {
        self.tasks.spawn_on(
            async move {
                let mut operation = Box::pin(operation);
                tokio::select! {
                    biased;
                    result = &mut operation => answer(result.map_err(errno)),
                    () = interrupt::interrupted(pid) => {
                        answer(Err(Errno::EINTR));
                        if let Ok(value) = operation.await {
                            late(value).await;
                        }
                    }
                }
            },
            &self.runtime,
        );
    }

    /// As `run`, when a late result needs no care.
    fn simple<T, F, A>(&self, req: &Request, operation: F, answer: A)
    where
        T: Send + 'static,
        F: Future<Output = Result<T, ErrorCode>> + Send + 'static,
        A: FnOnce(Result<T, Errno>) + Send + 'static,
    {
        self.run(req.pid(), operation, answer, |_| std::future::ready(()));
    }

    fn entry<F>(&self, req: &Request, reply: ReplyEntry, operation: F)
    where
        F: Future<Output = Result<Attributes, ErrorCode>> + Send + 'static,
    {
        self.simple(req, operation, move |r| match r {
            Ok(a) => reply.entry(&TTL, &file_attr(&a), Generation(u64::from(a.generation))),
            Err(e) => reply.error(e),
        });
    }

    fn attributes<F>(&self, req: &Request, reply: ReplyAttr, operation: F)
    where
        F: Future<Output = Result<Attributes, ErrorCode>> + Send + 'static,
    {
        self.simple(req, operation, move |r| match r {
            Ok(a) => reply.attr(&TTL, &file_attr(&a)),
            Err(e) => reply.error(e),
        });
    }

    fn empty<F>(&self, req: &Request, reply: ReplyEmpty, operation: F)
    where
        F: Future<Output = Result<(), ErrorCode>> + Send + 'static,
    {
        self.simple(req, operation, move |r| match r {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(e),
        });
    }

    fn xattr<F>(&self, req: &Request, size: u32, reply: ReplyXattr, operation: F)
    where
        F: Future<Output = Result<Vec<u8>, ErrorCode>> + Send + 'static,
    {
        self.simple(req, operation, move |r| match r {
            Err(e) => reply.error(e),
            Ok(value) => match u32::try_from(value.len()) {
                Ok(len) if size == 0 => reply.size(len),
                Ok(len) if len <= size => reply.data(&value),
                _ => reply.error(Errno::ERANGE),
            },
        });
    }
}

/// The kernel's number of an error.
fn errno(code: ErrorCode) -> Errno {
    if matches!(code.class(), crate::base::error::ErrorClass::Bug | crate::base::error::ErrorClass::Fatal) {
        tracing::error!("an operation of the mount failed: {code}");
    }
    Errno::from_i32(code.errno().raw_os_error())
}

/// The caller, with all its groups.
fn credential(req: &Request) -> Credential {
    Credential { uid: req.uid(), gid: req.gid(), groups: interrupt::groups_of(req.pid(), req.uid()) }
}

fn system_time(t: Timestamp) -> SystemTime {
    let base = if t.seconds >= 0 {
        UNIX_EPOCH.checked_add(Duration::from_secs(t.seconds.unsigned_abs()))
    } else {
        UNIX_EPOCH.checked_sub(Duration::from_secs(t.seconds.unsigned_abs()))
    };
    base.and_then(|b| b.checked_add(Duration::from_nanos(u64::from(t.nanos)))).unwrap_or(UNIX_EPOCH)
}

fn timestamp(t: SystemTime) -> Timestamp {
    match t.duration_since(UNIX_EPOCH) {
        Ok(d) => Timestamp { seconds: i64::try_from(d.as_secs()).unwrap_or(i64::MAX), nanos: d.subsec_nanos() },
        Err(e) => {
            let before = e.duration();
            let seconds = i64::try_from(before.as_secs()).unwrap_or(i64::MAX).saturating_neg();
            match before.subsec_nanos() {
                0 => Timestamp { seconds, nanos: 0 },
                n => Timestamp { seconds: seconds.saturating_sub(1), nanos: 1_000_000_000 - n },
            }
        }
    }
}

fn set_time(t: TimeOrNow) -> SetTime {
    match t {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(t) => SetTime::To(timestamp(t)),
    }
}

fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::Regular => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

fn file_attr(a: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(a.ino.0),
        size: a.size,
        blocks: a.blocks,
        atime: system_time(a.atime),
        mtime: system_time(a.mtime),
        ctime: system_time(a.ctime),
        crtime: system_time(a.btime),
        kind: file_type(a.kind),
        perm: u16::try_from(a.mode & 0o7777).unwrap_or(0),
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        rdev: a.rdev,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

/// For "." and "..": the kernel takes no more than number and type from them.
fn dot_attr(ino: InodeId) -> FileAttr {
    FileAttr {
        ino: INodeNo(ino.0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::Directory,
        perm: 0,
        nlink: 2,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

fn oflags(flags: i32) -> OFlags {
    OFlags::from_bits_retain(flags.cast_unsigned())
}

/// Splits open flags into what the server and what the client must know, and how the kernel is to treat the handle.
fn open_how(flags: i32) -> (OpenHow, FopenFlags) {
    let bits = oflags(flags);
    let access = bits & OFlags::RWMODE;
    let mode = OpenMode {
        read: access != OFlags::WRONLY,
        write: access != OFlags::RDONLY,
        truncate: bits.contains(OFlags::TRUNC),
        execute: flags.cast_unsigned() & FMODE_EXEC != 0,
    };
    let how = OpenHow { mode, append: bits.contains(OFlags::APPEND) };
    let kernel = if bits.intersects(OFlags::DIRECT | OFlags::APPEND) {
        FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
    } else {
        FopenFlags::empty()
    };
    (how, kernel)
}

fn node_kind(mode: u32) -> Option<FileKind> {
    match mode & S_IFMT {
        0 | 0o100_000 => Some(FileKind::Regular),
        0o010_000 => Some(FileKind::Fifo),
        0o140_000 => Some(FileKind::Socket),
        0o020_000 => Some(FileKind::CharDevice),
        0o060_000 => Some(FileKind::BlockDevice),
        _ => None,
    }
}

fn space_mode(mode: i32) -> Option<SpaceMode> {
    const PUNCH: i32 = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
    const ZERO_KEEP: i32 = FALLOC_ZERO_RANGE | FALLOC_KEEP_SIZE;
    match mode {
        0 => Some(SpaceMode::Allocate),
        FALLOC_KEEP_SIZE => Some(SpaceMode::AllocateKeepSize),
        PUNCH => Some(SpaceMode::Punch),
        FALLOC_ZERO_RANGE => Some(SpaceMode::Zero),
        ZERO_KEEP => Some(SpaceMode::ZeroKeepSize),
        _ => None,
    }
}

impl Filesystem for FuseFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        // Each alone: an older kernel lacks some. FUSE_WRITEBACK_CACHE is never among them: with it the kernel would
        // ignore the server's sizes and times.
        for flag in [
            InitFlags::FUSE_AUTO_INVAL_DATA,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_HANDLE_KILLPRIV,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
            InitFlags::FUSE_EXPORT_SUPPORT,
        ] {
            if let Err(missing) = config.add_capabilities(flag) {
                tracing::debug!("the kernel lacks {missing:?}");
            }
        }
        for (what, result) in [
            ("max_write", config.set_max_write(WRITE_BYTES_MAX).map(|_| ())),
            ("max_background", config.set_max_background(BACKGROUND_REQUESTS_MAX).map(|_| ()).map_err(u32::from)),
        ] {
            if let Err(nearest) = result {
                tracing::warn!("the kernel takes {what} of {nearest} only");
            }
        }
        if let Err(nearest) = config.set_max_readahead(READAHEAD_BYTES_MAX) {
            // The kernel offers its own limit; take all of it.
            let _ = config.set_max_readahead(nearest);
        }
        Ok(())
    }

    fn lookup(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (vfs, cred, name) = (self.vfs.clone(), credential(req), name.as_bytes().to_vec());
        self.entry(req, reply, async move { vfs.lookup(InodeId(parent.0), &name, cred).await });
    }

    fn getattr(&self, req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let vfs = self.vfs.clone();
        self.attributes(req, reply, async move { vfs.getattr(InodeId(ino.0)).await });
    }

    fn setattr(
        &self, req: &Request, ino: INodeNo, mode: Option<u32>, uid: Option<u32>, gid: Option<u32>, size: Option<u64>,
        atime: Option<TimeOrNow>, mtime: Option<TimeOrNow>, _ctime: Option<SystemTime>, fh: Option<FileHandle>,
        _crtime: Option<SystemTime>, _chgtime: Option<SystemTime>, _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>, reply: ReplyAttr,
    ) {
        let request = SetAttrRequest {
            ino: InodeId(ino.0),
            cred: credential(req),
            mode: mode.map(|m| m & 0o7777),
            uid, gid, size,
            by_handle: false,
            atime: atime.map(set_time),
            mtime: mtime.map(set_time),
        };
        let vfs = self.vfs.clone();
        self.attributes(req, reply, async move { vfs.setattr(request, fh.map(|f| f.0)).await });
    }

    fn readlink(&self, req: &Request, ino: INodeNo, reply: ReplyData) {
        let vfs = self.vfs.clone();
        self.simple(req, async move { vfs.readlink(InodeId(ino.0)).await }, move |r| match r {
            Ok(target) => reply.data(&target),
            Err(e) => reply.error(e),
        });
    }

    fn mknod(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, rdev: u32, reply: ReplyEntry) {
        let Some(kind) = node_kind(mode) else { return reply.error(Errno::EINVAL) };
        let (vfs, cred, name) = (self.vfs.clone(), credential(req), name.as_bytes().to_vec());
        self.entry(req, reply, async move { vfs.make(InodeId(parent.0), &name, mode, NewNode::Node { kind, rdev }, cred).await });
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, reply: ReplyEntry) {
        let (vfs, cred, name) = (self.vfs.clone(), credential(req), name.as_bytes().to_vec());
        self.entry(req, reply, async move { vfs.make(InodeId(parent.0), &name, mode, NewNode::Directory, cred).await });
    }

    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (vfs, cred, name) = (self.vfs.clone(), credential(req), name.as_bytes().to_vec());
        self.empty(req, reply, async move { vfs.unlink(InodeId(parent.0), &name, cred).await });
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (vfs, cred, name) = (self.vfs.clone(), credential(req), name.as_bytes().to_vec());
        self.empty(req, reply, async move { vfs.rmdir(InodeId(parent.0), &name, cred).await });
    }

    fn symlink(&self, req: &Request, parent: INodeNo, link_name: &OsStr, target: &Path, reply: ReplyEntry) {
        let (vfs, cred, name) = (self.vfs.clone(), credential(req), link_name.as_bytes().to_vec());
        let node = NewNode::Symlink { target: target.as_os_str().as_bytes().to_vec() };
        self.entry(req, reply, async move { vfs.make(InodeId(parent.0), &name, 0o777, node, cred).await });
    }

    fn rename(&self, req: &Request, parent: INodeNo, name: &OsStr, newparent: INodeNo, newname: &OsStr, flags: RenameFlags, reply: ReplyEmpty) {
        if flags.contains(RenameFlags::RENAME_WHITEOUT) {
            return reply.error(Errno::EINVAL);
        }
        let (vfs, cred) = (self.vfs.clone(), credential(req));
        let (name, new_name) = (name.as_bytes().to_vec(), newname.as_bytes().to_vec());
        self.empty(req, reply, async move {
            vfs.rename(RenameRequest {
                parent: InodeId(parent.0),
                name: FileName::new(name)?,
                new_parent: InodeId(newparent.0),
                new_name: FileName::new(new_name)?,
                no_replace: flags.contains(RenameFlags::RENAME_NOREPLACE),
                exchange: flags.contains(RenameFlags::RENAME_EXCHANGE),
                cred,
            }).await
        });
    }

    fn link(&self, req: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let (vfs, cred, name) = (self.vfs.clone(), credential(req), newname.as_bytes().to_vec());
        self.entry(req, reply, async move { vfs.link(InodeId(ino.0), InodeId(newparent.0), &name, cred).await });
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let (how, kernel) = open_how(flags.0);
        let (vfs, late, cred) = (self.vfs.clone(), self.vfs.clone(), credential(req));
        self.run(
            req.pid(),
            async move { vfs.open(InodeId(ino.0), how, cred).await },
            move |r| match r {
                Ok(fh) => reply.opened(FileHandle(fh), kernel),
                Err(e) => reply.error(e),
            },
            move |fh| async move { late.release(fh).await },
        );
    }

    fn create(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, flags: i32, reply: ReplyCreate) {
        let (how, kernel) = open_how(flags);
        let exclusive = oflags(flags).contains(OFlags::EXCL);
        let (vfs, late, cred, name) = (self.vfs.clone(), self.vfs.clone(), credential(req), name.as_bytes().to_vec());
        self.run(
            req.pid(),
            async move { vfs.create(InodeId(parent.0), &name, mode, exclusive, how, cred).await },
            move |r| match r {
                Ok((a, fh)) => reply.created(&TTL, &file_attr(&a), Generation(u64::from(a.generation)), FileHandle(fh), kernel),
                Err(e) => reply.error(e),
            },
            move |(_, fh)| async move { late.release(fh).await },
        );
    }

    fn read(&self, req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, size: u32, _flags: OpenFlags, _lock_owner: Option<LockOwner>, reply: ReplyData) {
        let vfs = self.vfs.clone();
        self.simple(req, async move { vfs.read(fh.0, offset, size).await }, move |r| match r {
            Ok(data) => reply.data(&data),
            Err(e) => reply.error(e),
        });
    }

    fn write(
        &self, req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, data: &[u8], write_flags: WriteFlags,
        flags: OpenFlags, _lock_owner: Option<LockOwner>, reply: ReplyWrite,
    ) {
        let Ok(written) = u32::try_from(data.len()) else { return reply.error(Errno::EINVAL) };
        // Pages of a mapping carry neither the caller nor the flags of the one who dirtied them.
        let mapped = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let bits = oflags(flags.0);
        let how = WriteHow {
            clear_suid: (!mapped && req.uid() != 0) || write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID),
            append: !mapped && bits.contains(OFlags::APPEND),
            sync: !mapped && bits.contains(OFlags::DSYNC),
        };
        let (vfs, data) = (self.vfs.clone(), Bytes::copy_from_slice(data));
        self.simple(req, async move { vfs.write(fh.0, offset, data, how).await }, move |r| match r {
            Ok(()) => reply.written(written),
            Err(e) => reply.error(e),
        });
    }

    fn flush(&self, req: &Request, _ino: INodeNo, fh: FileHandle, _lock_owner: LockOwner, reply: ReplyEmpty) {
        let vfs = self.vfs.clone();
        self.empty(req, reply, async move { vfs.flush(fh.0).await });
    }

    fn release(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, _flags: OpenFlags, _lock_owner: Option<LockOwner>, _flush: bool, reply: ReplyEmpty) {
        let vfs = self.vfs.clone();
        self.tasks.spawn_on(async move { vfs.release(fh.0).await }, &self.runtime);
        reply.ok();
    }

    fn fsync(&self, req: &Request, _ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let vfs = self.vfs.clone();
        self.empty(req, reply, async move { vfs.fsync(fh.0, datasync).await });
    }

    fn opendir(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(self.vfs.opendir(InodeId(ino.0))), FopenFlags::empty());
    }

    fn readdir(&self, req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let vfs = self.vfs.clone();
        self.simple(req, async move { vfs.readdir(fh.0, offset, false).await }, move |r: Result<Vec<DirItem>, _>| match r {
            Ok(items) => {
                for i in &items {
                    if reply.add(INodeNo(i.ino.0), i.offset, file_type(i.kind), OsStr::from_bytes(&i.name)) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(e) => reply.error(e),
        });
    }

    fn readdirplus(&self, req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        let vfs = self.vfs.clone();
        self.simple(req, async move { vfs.readdir(fh.0, offset, true).await }, move |r: Result<Vec<DirItem>, _>| match r {
            Ok(items) => {
                for i in &items {
                    let (attr, generation) = match &i.attr {
                        Some(a) => (file_attr(a), Generation(u64::from(a.generation))),
                        None if matches!(i.name.as_slice(), b"." | b"..") => (dot_attr(i.ino), Generation(0)),
                        // The name has just been removed.
                        None => continue,
                    };
                    if reply.add(INodeNo(i.ino.0), i.offset, OsStr::from_bytes(&i.name), &TTL, &attr, generation) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(e) => reply.error(e),
        });
    }

    fn releasedir(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        self.vfs.releasedir(fh.0);
        reply.ok();
    }

    fn fsyncdir(&self, req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let vfs = self.vfs.clone();
        self.empty(req, reply, async move { vfs.sync_namespace().await });
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let s = self.vfs.statfs();
        let block = u64::from(BLOCK_BYTES);
        let free = s.free_bytes / block;
        reply.statfs(s.total_bytes / block, free, free, s.total_inodes, s.free_inodes, BLOCK_BYTES, NAME_BYTES_MAX, BLOCK_BYTES);
    }

    fn setxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, value: &[u8], flags: i32, _position: u32, reply: ReplyEmpty) {
        let request = SetXattrRequest {
            ino: InodeId(ino.0),
            name: name.as_bytes().to_vec(),
            value: value.to_vec(),
            create: flags & XATTR_CREATE != 0,
            replace: flags & XATTR_REPLACE != 0,
            cred: credential(req),
        };
        let vfs = self.vfs.clone();
        self.empty(req, reply, async move { vfs.setxattr(request).await });
    }

    fn getxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let (vfs, cred, name) = (self.vfs.clone(), credential(req), name.as_bytes().to_vec());
        self.xattr(req, size, reply, async move { vfs.getxattr(InodeId(ino.0), &name, cred).await });
    }

    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let (vfs, cred) = (self.vfs.clone(), credential(req));
        self.xattr(req, size, reply, async move { vfs.listxattr(InodeId(ino.0), cred).await });
    }

    fn removexattr(&self, req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (vfs, cred, name) = (self.vfs.clone(), credential(req), name.as_bytes().to_vec());
        self.empty(req, reply, async move { vfs.removexattr(InodeId(ino.0), &name, cred).await });
    }

    fn fallocate(&self, req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, length: u64, mode: i32, reply: ReplyEmpty) {
        let Some(mode) = space_mode(mode) else { return reply.error(Errno::EOPNOTSUPP) };
        let (vfs, clear_suid) = (self.vfs.clone(), req.uid() != 0);
        self.empty(req, reply, async move { vfs.change_space(fh.0, offset, length, mode, clear_suid).await });
    }

    fn lseek(&self, req: &Request, _ino: INodeNo, fh: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let hole = match whence {
            SEEK_DATA => false,
            SEEK_HOLE => true,
            _ => return reply.error(Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        let vfs = self.vfs.clone();
        self.simple(req, async move { vfs.seek(fh.0, offset, hole).await }, move |r| match r {
            Ok(at) => reply.offset(i64::try_from(at).unwrap_or(i64::MAX)),
            Err(e) => reply.error(e),
        });
    }

    fn copy_file_range(
        &self, _req: &Request, _ino_in: INodeNo, _fh_in: FileHandle, _offset_in: u64, _ino_out: INodeNo, _fh_out: FileHandle,
        _offset_out: u64, _len: u64, _flags: CopyFileRangeFlags, reply: ReplyWrite,
    ) {
        // The kernel then copies through its page cache.
        reply.error(Errno::ENOSYS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_survive() {
        for t in [Timestamp { seconds: -2, nanos: 250 }, Timestamp { seconds: 5, nanos: 0 }, Timestamp { seconds: -1, nanos: 0 }] {
            assert_eq!(timestamp(system_time(t)), t);
        }
    }

    #[test]
    fn open_flags_are_split() {
        let (how, kernel) = open_how((OFlags::WRONLY | OFlags::APPEND).bits().cast_signed());
        assert!(how.append && how.mode.write && !how.mode.read && kernel.contains(FopenFlags::FOPEN_DIRECT_IO));
        let (how, kernel) = open_how((OFlags::RDWR | OFlags::SYNC | OFlags::TRUNC).bits().cast_signed());
        assert!(how.mode.read && how.mode.write && how.mode.truncate && kernel.is_empty());
    }

    #[test]
    fn unknown_space_modes_are_refused() {
        assert_eq!(space_mode(FALLOC_PUNCH_HOLE), None, "a hole never changes the size");
        assert_eq!(space_mode(8), None);
        assert_eq!(space_mode(3), Some(SpaceMode::Punch));
    }
}
