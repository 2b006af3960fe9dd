//! All operations of the mount. Knows nothing of FUSE.

use super::data::{self, Data, DataFile};
use super::handles::{DirBatch, Handles, OpenFile, OpenInode, lock};
use super::meta::MetaSession;
use crate::base::{
    error::ErrorCode,
    ids::{DataId, InodeId},
};
use crate::fs::attr::{Attributes, Credential, FileKind};
use crate::fs::chunkfile::ChunkKey;
use crate::fs::map::{Reachability, VolumeSpace};
use crate::fs::name::FileName;
use crate::limits;
use crate::net::cluster::Cluster;
use crate::net::msg::meta::*;
use crate::net::msg::storage::SpaceChange;
use bytes::Bytes;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, atomic::Ordering};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// How long a stat of the root may wait for the meta server before it is answered from memory: umount must not hang.
const ROOT_PATIENCE: Duration = Duration::from_secs(2);

/// How often an operation is tried again because the data was truncated under it.
const STALE_RETRIES_MAX: usize = 16;
/// Entries handed to one readdir answer.
const DIR_SLICE_MAX: usize = 512;
/// Entries asked for with attributes: about what one answer to the kernel holds.
const DIR_PLUS_BATCH: u32 = 200;
/// Attributes of a batch are not used after this.
const DIR_PLUS_AGE_MAX: Duration = Duration::from_secs(1);

/// How a file is opened, beyond what the server sees.
#[derive(Clone, Copy, Debug)]
pub struct OpenHow {
    /// For the server.
    pub mode: OpenMode,
    /// O_APPEND.
    pub append: bool,
}

/// Who writes and how.
#[derive(Clone, Copy, Debug)]
pub struct WriteHow {
    /// Set-user-id bits go.
    pub clear_suid: bool,
    /// At the end, whatever the offset.
    pub append: bool,
    /// Durable before the answer.
    pub sync: bool,
}

/// A directory entry for the kernel.
#[derive(Clone, Debug)]
pub struct DirItem {
    /// Inode.
    pub ino: InodeId,
    /// Type.
    pub kind: FileKind,
    /// Name.
    pub name: Vec<u8>,
    /// Continue after this.
    pub offset: u64,
    /// If asked for.
    pub attr: Option<Attributes>,
}

/// What fallocate does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceMode {
    /// Reserve, and grow the file.
    Allocate,
    /// Reserve beyond the end without growing it.
    AllocateKeepSize,
    /// Make a hole.
    Punch,
    /// Zeros, and grow the file.
    Zero,
    /// Zeros within the file.
    ZeroKeepSize,
}

/// Offsets of a directory stream: 0 start, 1 after ".", 2 after "..", then the server's cookies moved up by two.
fn offset_of_cookie(cookie: u64) -> u64 {
    cookie.saturating_add(2).min(i64::MAX.unsigned_abs())
}

/// The cookie after which to go on; none while the dots are due.
fn cookie_of_offset(offset: u64) -> Option<u64> {
    offset.checked_sub(2)
}

/// The mount.
#[derive(Debug)]
pub struct Vfs {
    cluster: Arc<Cluster>,
    /// Session at the meta server.
    pub meta: Arc<MetaSession>,
    data: Arc<Data>,
    handles: Arc<Handles>,
    root: Mutex<Option<Attributes>>,
}

impl Vfs {
    /// Over an open session.
    pub fn new(cluster: Arc<Cluster>, meta: Arc<MetaSession>, handles: Arc<Handles>, wait: Duration) -> Arc<Self> {
        let data = Arc::new(Data::new(cluster.clone(), wait));
        Arc::new(Self { cluster, meta, data, handles, root: Mutex::new(None) })
    }

    /// A name; "." and ".." as well.
    pub async fn lookup(&self, parent: InodeId, name: &[u8], cred: Credential) -> Result<Attributes, ErrorCode> {
        match name {
            b"." => self.getattr(parent).await,
            b".." => self.parent(parent).await,
            _ => Ok(self.meta.ask(&LookupRequest { parent, name: FileName::new(name)?, cred }).await?.attr),
        }
    }

    async fn parent(&self, ino: InodeId) -> Result<Attributes, ErrorCode> {
        Ok(self.meta.ask(&LookupParentRequest { ino }).await?.attr)
    }

    /// Attributes. Those of the root are answered from memory while the meta server is away, so that umount never hangs.
    pub async fn getattr(&self, ino: InodeId) -> Result<Attributes, ErrorCode> {
        if ino != InodeId::ROOT {
            return Ok(self.meta.ask(&GetAttrRequest { ino }).await?.attr);
        }
        if !self.meta.is_connected()
            && let Some(known) = lock(&self.root).clone()
        {
            return Ok(known);
        }
        let request = GetAttrRequest { ino };
        let asked = self.meta.ask(&request);
        tokio::pin!(asked);
        loop {
            tokio::select! {
                reply = &mut asked => {
                    let attr = reply?.attr;
                    *lock(&self.root) = Some(attr.clone());
                    return Ok(attr);
                }
                // It may have been asked on a connection whose other end is gone without a word.
                () = tokio::time::sleep(ROOT_PATIENCE) => {
                    if let Some(known) = lock(&self.root).clone() {
                        return Ok(known);
                    }
                }
            }
        }
    }

    /// chmod, chown, utimens, truncate.
    pub async fn setattr(&self, mut request: SetAttrRequest, fh: Option<u64>) -> Result<Attributes, ErrorCode> {
        let nothing = request.mode.is_none()
            && request.uid.is_none()
            && request.gid.is_none()
            && request.size.is_none()
            && request.atime.is_none()
            && request.mtime.is_none();
        if nothing {
            return self.getattr(request.ino).await;
        }
        if request.size.is_some_and(|s| s > limits::FILE_BYTES_MAX) {
            return Err(ErrorCode::FileTooBig);
        }
        let cut = request.size.is_some();
        request.by_handle = cut && fh.and_then(|fh| self.handles.file(fh).ok()).is_some_and(|f| f.write);
        let result = self.meta.mutate(&request).await;
        if (cut || request.uid.is_some() || request.gid.is_some())
            && let Some(inode) = self.handles.inode(request.ino)
        {
            inode.forget_layout();
        }
        Ok(result?.attr)
    }

    /// Target of a symbolic link.
    pub async fn readlink(&self, ino: InodeId) -> Result<Vec<u8>, ErrorCode> {
        Ok(self.meta.ask(&ReadLinkRequest { ino }).await?.target)
    }

    /// mknod, mkdir, symlink.
    pub async fn make(
        &self,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        node: NewNode,
        cred: Credential,
    ) -> Result<Attributes, ErrorCode> {
        let request = MakeRequest { parent, name: FileName::new(name)?, cred, mode: mode & 0o7777, node };
        Ok(self.meta.mutate(&request).await?.attr)
    }

    /// unlink.
    pub async fn unlink(&self, parent: InodeId, name: &[u8], cred: Credential) -> Result<(), ErrorCode> {
        self.meta.mutate(&UnlinkRequest { parent, name: FileName::new(name)?, cred }).await
    }

    /// rmdir.
    pub async fn rmdir(&self, parent: InodeId, name: &[u8], cred: Credential) -> Result<(), ErrorCode> {
        self.meta.mutate(&RemoveDirRequest { parent, name: FileName::new(name)?, cred }).await
    }

    /// renameat2.
    pub async fn rename(&self, request: RenameRequest) -> Result<(), ErrorCode> {
        self.meta.mutate(&request).await
    }

    /// link.
    pub async fn link(
        &self,
        ino: InodeId,
        parent: InodeId,
        name: &[u8],
        cred: Credential,
    ) -> Result<Attributes, ErrorCode> {
        Ok(self.meta.mutate(&LinkRequest { ino, parent, name: FileName::new(name)?, cred }).await?.attr)
    }

    fn opened(&self, reply: &OpenReply, how: OpenHow) -> u64 {
        self.handles.add_file(reply, how.mode.write, how.append).0
    }

    /// open; answers a handle.
    pub async fn open(&self, ino: InodeId, how: OpenHow, cred: Credential) -> Result<u64, ErrorCode> {
        let reply = self.meta.mutate(&OpenRequest { ino, cred, open: how.mode }).await?;
        Ok(self.opened(&reply, how))
    }

    /// open(O_CREAT); answers attributes and a handle.
    pub async fn create(
        &self,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        exclusive: bool,
        how: OpenHow,
        cred: Credential,
    ) -> Result<(Attributes, u64), ErrorCode> {
        let request =
            CreateRequest { parent, name: FileName::new(name)?, cred, mode: mode & 0o7777, open: how.mode, exclusive };
        let reply = self.meta.mutate(&request).await?;
        let fh = self.opened(&reply, how);
        Ok((reply.attr, fh))
    }

    /// Closes a handle.
    pub async fn release(&self, fh: u64) {
        let Some(file) = self.handles.remove_file(fh) else { return };
        let request = CloseRequest {
            ino: file.inode.ino,
            write: file.write,
            tail_unsure: file.tail_unsure.load(Ordering::Acquire),
        };
        if let Err(e) = self.meta.mutate(&request).await {
            tracing::debug!("close of inode {} not told to the meta server: {e}", file.inode.ino);
        }
        self.handles.closed(&file);
    }

    async fn fresh_layout(&self, ino: InodeId) -> Result<(Attributes, Arc<DataFile>), ErrorCode> {
        let reply = self.meta.ask(&LayoutRequest { ino }).await?;
        if let Some(inode) = self.handles.inode(ino) {
            inode.heard(&reply.layout, &reply.attr);
        }
        let file = DataFile { ino, layout: reply.layout, uid: reply.attr.uid, gid: reply.attr.gid };
        Ok((reply.attr, Arc::new(file)))
    }

    async fn known_layout(&self, inode: &OpenInode) -> Result<Arc<DataFile>, ErrorCode> {
        match inode.layout() {
            Some((layout, uid, gid)) => Ok(Arc::new(DataFile { ino: inode.ino, layout, uid, gid })),
            None => Ok(self.fresh_layout(inode.ino).await?.1),
        }
    }

    /// Reads; short only at the end of the file.
    pub async fn read(&self, fh: u64, offset: u64, length: u32) -> Result<Bytes, ErrorCode> {
        let handle = self.handles.file(fh)?;
        let mut tried: Option<(DataId, u64)> = None;
        for _ in 0..STALE_RETRIES_MAX {
            let (attr, file) = self.fresh_layout(handle.inode.ino).await?;
            let left = attr.size.saturating_sub(offset).min(u64::from(length));
            let len = usize::try_from(left).map_err(|_| ErrorCode::Invalid)?;
            if len == 0 {
                return Ok(Bytes::new());
            }
            match self.data.read(&self.meta.context(), &file, offset, len).await {
                Err(e @ (ErrorCode::Stale | ErrorCode::ChunkMissing)) => {
                    // Truncated under us, unless the layout stays the same.
                    let now = (file.layout.data_id, file.layout.data_epoch);
                    if tried == Some(now) {
                        return Err(e);
                    }
                    tried = Some(now);
                }
                other => return other,
            }
        }
        Err(ErrorCode::Stale)
    }

    /// Writes all of `data`.
    pub async fn write(self: &Arc<Self>, fh: u64, offset: u64, data: Bytes, how: WriteHow) -> Result<(), ErrorCode> {
        let handle = self.handles.file(fh)?;
        let len = u64::try_from(data.len()).map_err(|_| ErrorCode::Invalid)?;
        if len == 0 {
            return Ok(());
        }
        // O_APPEND by fcntl after the open: the kernel's pages are at its own offset, so ours must be as well.
        let append = how.append && handle.append;
        if !append && offset.checked_add(len).is_none_or(|end| end > limits::FILE_BYTES_MAX) {
            return Err(ErrorCode::FileTooBig);
        }
        for _ in 0..STALE_RETRIES_MAX {
            let (file, at) = if append {
                let r = self
                    .meta
                    .mutate(&AppendRequest { ino: handle.inode.ino, length: len, clear_suid: how.clear_suid })
                    .await?;
                handle.inode.heard(&r.layout, &r.attr);
                (
                    Arc::new(DataFile { ino: handle.inode.ino, layout: r.layout, uid: r.attr.uid, gid: r.attr.gid }),
                    r.offset,
                )
            } else {
                (self.known_layout(&handle.inode).await?, offset)
            };
            match self.write_once(&handle, &file, at, &data, how.clear_suid).await {
                Err(ErrorCode::Stale) => handle.inode.forget_layout(),
                Err(e) => {
                    handle.tail_unsure.store(true, Ordering::Release);
                    return Err(e);
                }
                Ok(()) if how.sync => return self.fsync(fh, true).await,
                Ok(()) => return Ok(()),
            }
        }
        handle.tail_unsure.store(true, Ordering::Release);
        Err(ErrorCode::Stale)
    }

    async fn write_once(
        self: &Arc<Self>,
        handle: &OpenFile,
        file: &Arc<DataFile>,
        at: u64,
        data: &Bytes,
        clear_suid: bool,
    ) -> Result<(), ErrorCode> {
        let written = self.data.write(&self.meta.context(), file, at, data).await?;
        let mut mask = 0;
        for (index, target, verifier) in written {
            handle.inode.wrote(file.layout.data_id, index, target, verifier);
            mask |= data::mask_of(index);
        }
        let end = at + u64::try_from(data.len()).map_err(|_| ErrorCode::Invalid)?;
        self.report(&handle.inode, (file.layout.data_id, file.layout.data_epoch), end, mask, clear_suid).await
    }

    /// Tells the meta server of written bytes; returns when it knows. One report per file is in flight.
    async fn report(
        self: &Arc<Self>,
        inode: &Arc<OpenInode>,
        data: (DataId, u64),
        end: u64,
        mask: u64,
        clear_suid: bool,
    ) -> Result<(), ErrorCode> {
        let (tx, rx) = oneshot::channel();
        let start = {
            let mut queue = lock(&inode.written);
            queue.push(data, end, mask, clear_suid, tx);
            !std::mem::replace(&mut queue.running, true)
        };
        if start {
            let (this, inode) = (self.clone(), inode.clone());
            tokio::spawn(async move { this.send_reports(&inode).await });
        }
        rx.await.map_err(|_| ErrorCode::Internal)?.map(|_| ())
    }

    async fn send_reports(&self, inode: &OpenInode) {
        loop {
            let batch = {
                let mut queue = lock(&inode.written);
                let Some(batch) = queue.batches.pop_front() else {
                    queue.running = false;
                    return;
                };
                batch
            };
            let request = WrittenRequest {
                ino: inode.ino,
                data_id: batch.data_id,
                data_epoch: batch.data_epoch,
                end: batch.end,
                targets_with_data: batch.mask,
                clear_suid: batch.clear_suid,
            };
            let result = self.meta.mutate(&request).await.map(|r| r.attr);
            for waiter in batch.waiters {
                // A waiter that has gone does not want to know.
                let _ = waiter.send(result.clone());
            }
        }
    }

    /// Returns when all that was written to the file is durable, or says that it is lost.
    pub async fn fsync(&self, fh: u64, _datasync: bool) -> Result<(), ErrorCode> {
        let handle = self.handles.file(fh)?;
        let inode = &handle.inode;
        let _one = inode.syncing.lock().await;
        let taken = inode.take_unsynced();
        let synced = self.sync_targets(inode, &taken).await;
        match synced {
            Err(e) => {
                inode.restore_unsynced(taken);
                return Err(e);
            }
            Ok(verifiers) => {
                let lost = taken.iter().any(|((data_id, index), (_, written))| {
                    verifiers.get(&(*data_id, *index)).is_some_and(|now| written.iter().any(|w| w != now))
                });
                if lost {
                    tracing::error!(
                        "writes to inode {} were lost by a restart or disk error of a storage server",
                        inode.ino
                    );
                    inode.losses.fetch_add(1, Ordering::AcqRel);
                }
            }
        }
        self.meta.ask(&SyncRequest {}).await?;
        if handle.take_loss() { Err(ErrorCode::DiskFailed) } else { Ok(()) }
    }

    async fn sync_targets(
        &self,
        inode: &OpenInode,
        taken: &super::handles::Unsynced,
    ) -> Result<HashMap<(DataId, u16), u64>, ErrorCode> {
        for _ in 0..STALE_RETRIES_MAX {
            let (_, file) = self.fresh_layout(inode.ino).await?;
            let layout = &file.layout;
            let written = taken.keys().filter(|(d, _)| *d == layout.data_id).fold(0, |m, (_, i)| m | data::mask_of(*i));
            let mask = layout.targets_with_data | written;
            let key = ChunkKey { ino: inode.ino, data_id: layout.data_id };
            // Data of an older id was truncated away: nothing of it is left to sync.
            let which = data::stripes(&layout.pattern)
                .filter(|(i, _)| data::has_data(mask, *i))
                .map(|(i, target)| (key, i, target))
                .collect();
            match self.data.sync(&self.meta.context(), which).await {
                Err(ErrorCode::Stale) => {}
                other => return Ok(other?.into_iter().map(|(key, i, v)| ((key.data_id, i), v)).collect()),
            }
        }
        Err(ErrorCode::Stale)
    }

    /// Durability of the namespace.
    pub async fn sync_namespace(&self) -> Result<(), ErrorCode> {
        self.meta.ask(&SyncRequest {}).await
    }

    /// close(2) of one descriptor: writes are answered when they are done, so only losses remain to be told.
    pub async fn flush(&self, fh: u64) -> Result<(), ErrorCode> {
        if self.handles.file(fh)?.take_loss() { Err(ErrorCode::DiskFailed) } else { Ok(()) }
    }

    /// opendir; answers a handle.
    pub fn opendir(&self, ino: InodeId) -> u64 {
        self.handles.add_dir(ino)
    }

    /// closedir.
    pub fn releasedir(&self, fh: u64) {
        self.handles.remove_dir(fh);
    }

    /// Entries from an offset; none at the end.
    pub async fn readdir(&self, fh: u64, offset: u64, with_attributes: bool) -> Result<Vec<DirItem>, ErrorCode> {
        let dir = self.handles.dir(fh)?;
        let mut batch = dir.batch.lock().await;
        let mut items = Vec::new();
        if offset == 0 {
            // rewinddir: everything anew.
            *batch = None;
            items.push(DirItem { ino: dir.ino, kind: FileKind::Directory, name: b".".to_vec(), offset: 1, attr: None });
        }
        if offset <= 1 {
            let ino = if dir.ino == InodeId::ROOT {
                InodeId::ROOT
            } else {
                self.parent(dir.ino).await.map_or(dir.ino, |a| a.ino)
            };
            items.push(DirItem { ino, kind: FileKind::Directory, name: b"..".to_vec(), offset: 2, attr: None });
        }
        let after = cookie_of_offset(offset).unwrap_or(0);
        let held = batch.as_ref().and_then(|b| position(b, after, with_attributes));
        let from = match held {
            Some(from) => from,
            None => {
                let count_max = if with_attributes {
                    DIR_PLUS_BATCH
                } else {
                    u32::try_from(limits::READDIR_ENTRIES_MAX).unwrap_or(DIR_PLUS_BATCH)
                };
                let at = Instant::now();
                let reply = self.meta.ask(&ReadDirRequest { ino: dir.ino, after, count_max, with_attributes }).await?;
                *batch = Some(DirBatch { after, entries: reply.entries, end: reply.end, with_attributes, at });
                0
            }
        };
        if let Some(b) = batch.as_ref() {
            items.extend(b.entries.iter().skip(from).take(DIR_SLICE_MAX).map(|e| DirItem {
                ino: e.ino,
                kind: e.kind,
                name: e.name.as_bytes().to_vec(),
                offset: offset_of_cookie(e.cookie),
                attr: e.attr.clone(),
            }));
        }
        drop(batch);
        if with_attributes {
            let dots = |i: &DirItem| matches!(i.name.as_slice(), b"." | b"..");
            for item in items.iter_mut().filter(|i| i.attr.is_none() && !dots(i)) {
                match self.getattr(item.ino).await {
                    Ok(attr) => item.attr = Some(attr),
                    // Removed since the batch was made.
                    Err(ErrorCode::NotFound | ErrorCode::Stale) => {}
                    Err(e) => return Err(e),
                }
            }
        }
        Ok(items)
    }

    /// Space of the targets that are online.
    pub fn statfs(&self) -> VolumeSpace {
        self.cluster.map().space(|t| t.reachability == Reachability::Online)
    }

    /// fallocate.
    pub async fn change_space(
        self: &Arc<Self>,
        fh: u64,
        offset: u64,
        length: u64,
        mode: SpaceMode,
        clear_suid: bool,
    ) -> Result<(), ErrorCode> {
        let handle = self.handles.file(fh)?;
        let end = offset.checked_add(length).filter(|e| *e <= limits::FILE_BYTES_MAX).ok_or(ErrorCode::FileTooBig)?;
        for _ in 0..STALE_RETRIES_MAX {
            let (_, file) = self.fresh_layout(handle.inode.ino).await?;
            let pattern = &file.layout.pattern;
            let allocate = matches!(mode, SpaceMode::Allocate | SpaceMode::AllocateKeepSize);
            let changes: Vec<_> = data::stripes(pattern)
                .filter(|(i, _)| allocate || data::has_data(file.layout.targets_with_data, *i))
                .filter_map(|(i, target)| {
                    let from = pattern.local_size(offset, i);
                    let length = pattern.local_size(end, i).saturating_sub(from);
                    let change = if allocate {
                        SpaceChange::Allocate { offset: from, length, keep_size: mode == SpaceMode::AllocateKeepSize }
                    } else {
                        SpaceChange::Punch { offset: from, length }
                    };
                    (length > 0).then_some((i, target, change))
                })
                .collect();
            let grown = if matches!(mode, SpaceMode::Allocate | SpaceMode::Zero) { end } else { 0 };
            let result = async {
                let done = self.data.change_space(&self.meta.context(), &file, changes).await?;
                let mut mask = 0;
                for (index, target, verifier) in done {
                    handle.inode.wrote(file.layout.data_id, index, target, verifier);
                    mask |= data::mask_of(index);
                }
                self.report(&handle.inode, (file.layout.data_id, file.layout.data_epoch), grown, mask, clear_suid).await
            };
            match result.await {
                Err(ErrorCode::Stale) => {}
                Err(e) => {
                    handle.tail_unsure.store(true, Ordering::Release);
                    return Err(e);
                }
                Ok(()) => return Ok(()),
            }
        }
        Err(ErrorCode::Stale)
    }

    /// SEEK_DATA and SEEK_HOLE.
    pub async fn seek(&self, fh: u64, offset: u64, hole: bool) -> Result<u64, ErrorCode> {
        let handle = self.handles.file(fh)?;
        let (attr, file) = self.fresh_layout(handle.inode.ino).await?;
        if offset >= attr.size {
            return Err(ErrorCode::NoSuchDevice);
        }
        let (layout, ctx) = (&file.layout, self.meta.context());
        let ask = |_index, target, local| self.data.seek(&ctx, &file, target, local, hole);
        if hole {
            data::next_hole(&layout.pattern, layout.targets_with_data, attr.size, offset, ask).await
        } else {
            data::next_data(&layout.pattern, layout.targets_with_data, attr.size, offset, ask)
                .await?
                .ok_or(ErrorCode::NoSuchDevice)
        }
    }

    /// Reads an extended attribute, or one of those that the client itself answers.
    pub async fn getxattr(&self, ino: InodeId, name: &[u8], cred: Credential) -> Result<Vec<u8>, ErrorCode> {
        match name {
            b"beeswarm.entry" => self.entry_json(ino).await,
            b"beeswarm.mount" => Ok(self.mount_json()),
            b"beeswarm.policy" => {
                let reply = self.meta.ask(&EntryInfoRequest { ino }).await?;
                serde_json::to_vec(&reply.policy).map_err(|_| ErrorCode::Internal)
            }
            // Access control lists are not enforced, so they are not stored either.
            n if n.starts_with(b"system.posix_acl_") => Err(ErrorCode::NotSupported),
            _ => Ok(self.meta.ask(&GetXattrRequest { ino, name: name.to_vec(), cred }).await?.value),
        }
    }

    /// Sets an extended attribute, or the stripe policy of a directory.
    pub async fn setxattr(&self, request: SetXattrRequest) -> Result<(), ErrorCode> {
        if request.name == b"beeswarm.policy" {
            let policy: StripePolicy = serde_json::from_slice(&request.value).map_err(|_| ErrorCode::Invalid)?;
            return self.meta.mutate(&SetPolicyRequest { ino: request.ino, policy, cred: request.cred }).await;
        }
        if request.name.starts_with(b"beeswarm.") {
            return Err(ErrorCode::NotPermitted);
        }
        if request.name.starts_with(b"system.posix_acl_") {
            return Err(ErrorCode::NotSupported);
        }
        if request.value.len() > limits::XATTR_VALUE_BYTES_MAX {
            return Err(ErrorCode::XattrTooBig);
        }
        self.meta.mutate(&request).await
    }

    /// Names of the extended attributes, each closed by a zero byte.
    pub async fn listxattr(&self, ino: InodeId, cred: Credential) -> Result<Vec<u8>, ErrorCode> {
        Ok(self.meta.ask(&ListXattrRequest { ino, cred }).await?.value)
    }

    /// Removes an extended attribute.
    pub async fn removexattr(&self, ino: InodeId, name: &[u8], cred: Credential) -> Result<(), ErrorCode> {
        if name.starts_with(b"beeswarm.") {
            return Err(ErrorCode::NotPermitted);
        }
        self.meta.mutate(&RemoveXattrRequest { ino, name: name.to_vec(), cred }).await
    }

    async fn entry_json(&self, ino: InodeId) -> Result<Vec<u8>, ErrorCode> {
        let info = self.meta.ask(&EntryInfoRequest { ino }).await?;
        let map = self.cluster.map();
        let targets: Vec<_> = info
            .layout
            .iter()
            .flat_map(|l| {
                data::stripes(&l.pattern)
                    .map(|(i, id)| {
                        let target = map.target(id);
                        let node = target.and_then(|t| map.node(t.node));
                        serde_json::json!({
                            "target": id,
                            "stripe_index": i,
                            "has_data": data::has_data(l.targets_with_data, i),
                            "node": target.map(|t| t.node.to_string()),
                            "node_name": node.map(|n| n.name.clone()),
                            "addresses": node.map(|n| n.addrs.clone()),
                            "path": target.map(|t| t.path.clone()),
                            "reachability": target.map(|t| t.reachability),
                            "consistency": target.map(|t| t.consistency),
                        })
                    })
                    .collect::<Vec<_>>()
            })
            .collect();
        let owner = map.shard_primary(ino.shard());
        let owner_node = owner.and_then(|o| map.node(o));
        let json = serde_json::json!({
            "ino": ino,
            "kind": info.attr.kind,
            "size": info.attr.size,
            "generation": info.attr.generation,
            "meta": {
                "shard": ino.shard(),
                "node": owner.map(|o| o.to_string()),
                "node_name": owner_node.map(|n| n.name.clone()),
                "addresses": owner_node.map(|n| n.addrs.clone()),
            },
            "pattern": info.layout.as_ref().map(|l| serde_json::json!({
                "kind": l.pattern.kind(),
                "chunk_bytes": l.pattern.chunk_bytes(),
                "targets": l.pattern.targets(),
            })),
            "data_id": info.layout.as_ref().map(|l| l.data_id),
            "data_epoch": info.layout.as_ref().map(|l| l.data_epoch),
            "targets": targets,
            "policy": info.policy,
            "open": { "readers": info.open.0, "writers": info.open.1 },
        });
        serde_json::to_vec(&json).map_err(|_| ErrorCode::Internal)
    }

    fn mount_json(&self) -> Vec<u8> {
        let map = self.cluster.map();
        let mgmt: Vec<_> = map
            .nodes
            .iter()
            .filter(|n| n.id.role == crate::base::ids::Role::Mgmt)
            .flat_map(|n| n.addrs.clone())
            .collect();
        let json = serde_json::json!({
            "cluster": self.cluster.id(),
            "mgmt": mgmt,
            "client": self.meta.instance(),
            "pid": std::process::id(),
        });
        serde_json::to_vec(&json).unwrap_or_default()
    }
}

/// Where in a batch the entries after a cookie begin; none if it must be asked for.
fn position(batch: &DirBatch, after: u64, with_attributes: bool) -> Option<usize> {
    if with_attributes && (!batch.with_attributes || batch.at.elapsed() > DIR_PLUS_AGE_MAX) {
        return None;
    }
    let from = if after == batch.after { 0 } else { batch.entries.iter().position(|e| e.cookie == after)? + 1 };
    (from < batch.entries.len() || batch.end).then_some(from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_offsets_leave_room_for_the_dots() {
        assert_eq!(cookie_of_offset(0), None);
        assert_eq!(cookie_of_offset(1), None);
        assert_eq!(cookie_of_offset(2), Some(0));
        assert_eq!(cookie_of_offset(offset_of_cookie(77)), Some(77));
        assert!(i64::try_from(offset_of_cookie(u64::MAX)).is_ok());
    }

    #[test]
    fn a_batch_serves_what_it_holds_and_no_more() {
        let entry = |cookie| DirEntry {
            name: FileName::new(&b"x"[..]).unwrap(),
            ino: InodeId(2),
            kind: FileKind::Regular,
            cookie,
            attr: None,
        };
        let mut b = DirBatch {
            after: 0,
            entries: vec![entry(5), entry(9)],
            end: false,
            with_attributes: false,
            at: Instant::now(),
        };
        assert_eq!(position(&b, 0, false), Some(0));
        assert_eq!(position(&b, 5, false), Some(1));
        assert_eq!(position(&b, 9, false), None, "the next batch is due");
        assert_eq!(position(&b, 7, false), None);
        assert_eq!(position(&b, 0, true), None);
        b.end = true;
        assert_eq!(position(&b, 9, false), Some(2), "the end");
    }
}
