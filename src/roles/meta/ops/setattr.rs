//! chmod, chown, utimens, truncate.

use super::super::db::{self, Env, RowsMut};
use super::super::records::{self, CutRecord, FLAG_MAY_HAVE_CHUNKS, FLAG_TAIL_UNSURE, InodeRecord, RECORD_VERSION};
use super::super::store::Table;
use crate::base::error::ErrorCode;
use crate::base::ids::InodeId;
use crate::fs::attr::FileKind;
use crate::fs::perm;
use crate::limits;
use crate::net::msg::meta::{AttrReply, SetAttrRequest, SetTime};

/// May the caller do all of this?
fn check(inode: &InodeRecord, r: &SetAttrRequest) -> Result<(), ErrorCode> {
    let object = inode.guarded();
    let owner = perm::owns(&object, &r.cred);
    if let Some(size) = r.size {
        match inode.kind {
            FileKind::Regular => {}
            FileKind::Directory => return Err(ErrorCode::IsDirectory),
            _ => return Err(ErrorCode::Invalid),
        }
        if !r.by_handle {
            perm::access(&object, &r.cred, perm::WRITE)?;
        }
        if size > limits::FILE_BYTES_MAX {
            return Err(ErrorCode::FileTooBig);
        }
    }
    if !r.cred.is_root() {
        if let Some(uid) = r.uid
            && !(r.cred.uid == inode.uid && uid == inode.uid)
        {
            return Err(ErrorCode::NotPermitted);
        }
        if let Some(gid) = r.gid
            && !(r.cred.uid == inode.uid && (gid == inode.gid || r.cred.in_group(gid)))
        {
            return Err(ErrorCode::NotPermitted);
        }
    }
    if r.mode.is_some() && !owner {
        return Err(ErrorCode::NotPermitted);
    }
    // Times that come along with a truncation are part of it.
    let through_size = r.size.is_some();
    for time in [r.atime, r.mtime].into_iter().flatten() {
        match time {
            SetTime::To(_) if !owner => return Err(ErrorCode::NotPermitted),
            SetTime::Now if !owner && !through_size => perm::access(&object, &r.cred, perm::WRITE)?,
            _ => {}
        }
    }
    Ok(())
}

/// Truncation, first step. `None`: nothing to cut, call `apply` in the same transaction. Otherwise targets are to be cut
/// by the durable record that was written, and then `apply` and `cut_done` come in a second one.
pub fn begin(db: &mut dyn RowsMut, env: &Env, r: &SetAttrRequest) -> Result<Option<(InodeRecord, u64)>, ErrorCode> {
    let mut inode = db::inode(db, r.ino)?;
    check(&inode, r)?;
    let Some(size) = r.size else { return Ok(None) };
    if size == 0 {
        return Ok(None);
    }
    let pending: Option<CutRecord> = db::get(db, Table::Intents, &records::cut_key(r.ino))?;
    let unsure = inode.flags & FLAG_TAIL_UNSURE != 0;
    if size >= inode.size && !unsure && pending.is_none() {
        return Ok(None);
    }
    let cut = size.min(inode.size).min(pending.map_or(u64::MAX, |p| p.size));
    inode.size = inode.size.min(size);
    inode.modified(env.now);
    write_cut(db, r.ino, &mut inode, cut)?;
    Ok(Some((inode, cut)))
}

/// Writes the order to cut the targets, and the inode.
pub fn write_cut(db: &mut dyn RowsMut, ino: InodeId, inode: &mut InodeRecord, size: u64) -> Result<(), ErrorCode> {
    inode.data_epoch = inode.data_epoch.saturating_add(1);
    let cut = CutRecord { version: RECORD_VERSION, size, data_epoch: inode.data_epoch };
    db::put(db, Table::Intents, &records::cut_key(ino), &cut)?;
    db::put_inode(db, ino, inode)
}

/// All targets have been cut.
pub fn cut_done(db: &mut dyn RowsMut, ino: InodeId, data_epoch: u64) -> Result<(), ErrorCode> {
    let key = records::cut_key(ino);
    let Some(cut) = db::get::<CutRecord>(db, Table::Intents, &key)? else { return Ok(()) };
    if cut.data_epoch != data_epoch {
        return Ok(());
    }
    db.delete(Table::Intents, &key)?;
    if let Ok(mut inode) = db::inode(db, ino)
        && inode.flags & FLAG_TAIL_UNSURE != 0
        && inode.open_for_write == 0
    {
        inode.flags &= !FLAG_TAIL_UNSURE;
        db::put_inode(db, ino, &inode)?;
    }
    Ok(())
}

/// Sets everything that is asked for.
pub fn apply(db: &mut dyn RowsMut, env: &Env, r: &SetAttrRequest) -> Result<AttrReply, ErrorCode> {
    let mut inode = db::inode(db, r.ino)?;
    check(&inode, r)?;
    if let Some(size) = r.size {
        if size == 0 && (inode.flags & FLAG_MAY_HAVE_CHUNKS != 0 || inode.size > 0) {
            db::reset_data(db, env, r.ino, &mut inode)?;
        }
        inode.size = size;
        if !r.cred.is_root() {
            inode.mode = perm::without_suid(inode.mode);
        }
        inode.modified(env.now);
    }
    if r.uid.is_some() || r.gid.is_some() {
        inode.uid = r.uid.unwrap_or(inode.uid);
        inode.gid = r.gid.unwrap_or(inode.gid);
        if inode.kind == FileKind::Regular {
            inode.mode = perm::without_suid(inode.mode);
        }
    }
    if let Some(mode) = r.mode {
        inode.mode = mode & perm::MODE_MASK;
        if !r.cred.is_root() && !r.cred.in_group(inode.gid) {
            inode.mode &= !perm::S_ISGID;
        }
    }
    inode.changed(env.now);
    match r.atime {
        Some(SetTime::Now) => inode.atime = env.now,
        Some(SetTime::To(t)) => inode.atime = t,
        None => {}
    }
    match r.mtime {
        Some(SetTime::Now) => inode.mtime = env.now.max(inode.mtime.successor()),
        Some(SetTime::To(t)) => inode.mtime = t,
        None => {}
    }
    db::put_inode(db, r.ino, &inode)?;
    Ok(AttrReply { attr: inode.attributes(r.ino) })
}
