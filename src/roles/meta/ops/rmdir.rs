//! Removing directories.

use super::super::db::{self, Env, RowsMut};
use super::super::records::ParentLink;
use crate::base::error::ErrorCode;
use crate::fs::attr::FileKind;
use crate::fs::perm;
use crate::net::msg::meta::RemoveDirRequest;

/// Removes an empty directory.
pub fn rmdir(db: &mut dyn RowsMut, env: &Env, r: &RemoveDirRequest) -> Result<(), ErrorCode> {
    let mut dir = super::directory(db, r.parent, &r.cred, perm::EXEC)?;
    let entry = db::dentry(db, env, r.parent, &r.name)?.ok_or(ErrorCode::NotFound)?;
    let inode = db::inode(db, entry.ino)?;
    perm::access(&dir.guarded(), &r.cred, perm::WRITE | perm::EXEC)?;
    perm::sticky(&dir.guarded(), &inode.guarded(), &r.cred)?;
    if inode.kind != FileKind::Directory {
        return Err(ErrorCode::NotDirectory);
    }
    if !db::is_empty(db, entry.ino)? {
        return Err(ErrorCode::NotEmpty);
    }
    db::remove_dentry(db, env, r.parent, &r.name)?;
    db::drop_link(db, env, entry.ino, inode, ParentLink { parent: r.parent, hash: env.hash(&r.name) })?;
    dir.nlink = dir.nlink.saturating_sub(1);
    dir.size = dir.size.saturating_sub(1);
    dir.modified(env.now);
    db::put_inode(db, r.parent, &dir)
}
