//! Removing names.

use super::super::db::{self, Env, RowsMut};
use super::super::records::ParentLink;
use crate::base::error::ErrorCode;
use crate::fs::attr::FileKind;
use crate::fs::perm;
use crate::net::msg::meta::UnlinkRequest;

/// Removes a name that is not a directory.
pub fn unlink(db: &mut dyn RowsMut, env: &Env, r: &UnlinkRequest) -> Result<(), ErrorCode> {
    let mut dir = super::directory(db, r.parent, &r.cred, perm::EXEC)?;
    let entry = db::dentry(db, env, r.parent, &r.name)?.ok_or(ErrorCode::NotFound)?;
    let inode = db::inode(db, entry.ino)?;
    perm::access(&dir.guarded(), &r.cred, perm::WRITE | perm::EXEC)?;
    perm::sticky(&dir.guarded(), &inode.guarded(), &r.cred)?;
    if inode.kind == FileKind::Directory {
        return Err(ErrorCode::IsDirectory);
    }
    db::remove_dentry(db, env, r.parent, &r.name)?;
    db::drop_link(db, env, entry.ino, inode, ParentLink { parent: r.parent, hash: env.hash(&r.name) })?;
    dir.size = dir.size.saturating_sub(1);
    dir.modified(env.now);
    db::put_inode(db, r.parent, &dir)
}
