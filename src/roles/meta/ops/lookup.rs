//! Names to inodes.

use super::super::db::{self, Env, Rows};
use crate::base::error::ErrorCode;
use crate::base::ids::InodeId;
use crate::fs::attr::FileKind;
use crate::fs::perm;
use crate::net::msg::meta::{AttrReply, LookupParentRequest, LookupRequest};

/// A name in a directory.
pub fn lookup(db: &dyn Rows, env: &Env, r: &LookupRequest) -> Result<AttrReply, ErrorCode> {
    super::directory(db, r.parent, &r.cred, perm::EXEC)?;
    let entry = db::dentry(db, env, r.parent, &r.name)?.ok_or(ErrorCode::NotFound)?;
    Ok(AttrReply { attr: db::inode(db, entry.ino)?.attributes(entry.ino) })
}

/// The directory above; the root is its own.
pub fn parent(db: &dyn Rows, r: &LookupParentRequest) -> Result<AttrReply, ErrorCode> {
    let dir = db::inode(db, r.ino)?;
    if dir.kind != FileKind::Directory {
        return Err(ErrorCode::NotDirectory);
    }
    let up = dir.parents.first().map_or(InodeId::ROOT, |p| p.parent);
    Ok(AttrReply { attr: db::inode(db, up)?.attributes(up) })
}
