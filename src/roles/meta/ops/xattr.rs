//! Extended attributes.

use super::super::db::{self, Env, Rows, RowsMut};
use super::super::records::{self, InodeRecord};
use super::super::store::Table;
use crate::base::error::ErrorCode;
use crate::base::ids::InodeId;
use crate::fs::attr::{Credential, FileKind};
use crate::fs::perm;
use crate::limits;
use crate::net::msg::meta::{GetXattrRequest, ListXattrRequest, RemoveXattrRequest, SetXattrRequest, XattrReply};

const NAME_BYTES_MAX: usize = 255;

fn check(inode: &InodeRecord, name: &[u8], cred: &Credential, write: bool) -> Result<(), ErrorCode> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(ErrorCode::RangeTooSmall);
    }
    if name.contains(&0) {
        return Err(ErrorCode::Invalid);
    }
    let refused = if write { ErrorCode::NotPermitted } else { ErrorCode::NoXattr };
    if let Some(rest) = name.strip_prefix(b"user.") {
        if rest.is_empty() {
            return Err(ErrorCode::Invalid);
        }
        if !matches!(inode.kind, FileKind::Regular | FileKind::Directory) {
            return Err(refused);
        }
        if write
            && inode.kind == FileKind::Directory
            && inode.mode & perm::S_ISVTX != 0
            && !perm::owns(&inode.guarded(), cred)
        {
            return Err(ErrorCode::NotPermitted);
        }
        return perm::access(&inode.guarded(), cred, if write { perm::WRITE } else { perm::READ });
    }
    if name.starts_with(b"trusted.") {
        return if cred.is_root() { Ok(()) } else { Err(refused) };
    }
    if name.starts_with(b"security.") {
        return if !write || cred.is_root() { Ok(()) } else { Err(ErrorCode::NotPermitted) };
    }
    Err(ErrorCode::NotSupported)
}

fn names(db: &dyn Rows, ino: InodeId) -> Result<Vec<Vec<u8>>, ErrorCode> {
    let prefix = records::inode_key(ino);
    let rows = db.scan(Table::Xattrs, &prefix, &prefix, usize::MAX)?;
    Ok(rows.into_iter().map(|(k, _)| k.get(8..).unwrap_or_default().to_vec()).collect())
}

/// Sets one.
pub fn set(db: &mut dyn RowsMut, env: &Env, r: &SetXattrRequest) -> Result<(), ErrorCode> {
    let mut inode = db::inode(db, r.ino)?;
    check(&inode, &r.name, &r.cred, true)?;
    if r.create && r.replace {
        return Err(ErrorCode::Invalid);
    }
    if r.value.len() > limits::XATTR_VALUE_BYTES_MAX {
        return Err(ErrorCode::XattrTooBig);
    }
    let key = records::xattr_key(r.ino, &r.name);
    match db.get(Table::Xattrs, &key)? {
        Some(_) if r.create => return Err(ErrorCode::Exists),
        Some(_) => {}
        None if r.replace => return Err(ErrorCode::NoXattr),
        None => {
            let listed: usize = names(db, r.ino)?.iter().map(|n| n.len() + 1).sum();
            if listed + r.name.len() + 1 > limits::XATTR_LIST_BYTES_MAX {
                return Err(ErrorCode::NoXattrSpace);
            }
        }
    }
    db.put(Table::Xattrs, &key, r.value.clone())?;
    inode.changed(env.now);
    db::put_inode(db, r.ino, &inode)
}

/// Reads one.
pub fn get(db: &dyn Rows, r: &GetXattrRequest) -> Result<XattrReply, ErrorCode> {
    check(&db::inode(db, r.ino)?, &r.name, &r.cred, false)?;
    let value = db.get(Table::Xattrs, &records::xattr_key(r.ino, &r.name))?.ok_or(ErrorCode::NoXattr)?;
    Ok(XattrReply { value })
}

/// Names that the caller may see, each closed by a zero byte.
pub fn list(db: &dyn Rows, r: &ListXattrRequest) -> Result<XattrReply, ErrorCode> {
    db::inode(db, r.ino)?;
    let mut value = Vec::new();
    for name in names(db, r.ino)? {
        if r.cred.is_root() || !name.starts_with(b"trusted.") {
            value.extend_from_slice(&name);
            value.push(0);
        }
    }
    Ok(XattrReply { value })
}

/// Removes one.
pub fn remove(db: &mut dyn RowsMut, env: &Env, r: &RemoveXattrRequest) -> Result<(), ErrorCode> {
    let mut inode = db::inode(db, r.ino)?;
    check(&inode, &r.name, &r.cred, true)?;
    let key = records::xattr_key(r.ino, &r.name);
    if db.get(Table::Xattrs, &key)?.is_none() {
        return Err(ErrorCode::NoXattr);
    }
    db.delete(Table::Xattrs, &key)?;
    inode.changed(env.now);
    db::put_inode(db, r.ino, &inode)
}
