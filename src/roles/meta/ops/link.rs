//! Hard links.

use super::super::db::{self, Env, RowsMut};
use super::super::records::ParentLink;
use crate::base::error::ErrorCode;
use crate::fs::attr::FileKind;
use crate::fs::perm;
use crate::limits;
use crate::net::msg::meta::{AttrReply, LinkRequest};

/// Another name for a file.
pub fn link(db: &mut dyn RowsMut, env: &Env, r: &LinkRequest) -> Result<AttrReply, ErrorCode> {
    let mut inode = db::inode(db, r.ino)?;
    let mut dir = super::directory(db, r.parent, &r.cred, perm::EXEC)?;
    if db::dentry(db, env, r.parent, &r.name)?.is_some() {
        return Err(ErrorCode::Exists);
    }
    perm::access(&dir.guarded(), &r.cred, perm::WRITE | perm::EXEC)?;
    if inode.kind == FileKind::Directory {
        return Err(ErrorCode::NotPermitted);
    }
    if inode.nlink == 0 {
        return Err(ErrorCode::NotFound);
    }
    if inode.nlink >= limits::LINKS_MAX {
        return Err(ErrorCode::TooManyLinks);
    }
    inode.nlink += 1;
    inode.parents.push(ParentLink { parent: r.parent, hash: env.hash(&r.name) });
    inode.changed(env.now);
    db::add_dentry(db, env, r.parent, &r.name, r.ino, inode.kind)?;
    db::put_inode(db, r.ino, &inode)?;
    dir.size = dir.size.saturating_add(1);
    dir.modified(env.now);
    db::put_inode(db, r.parent, &dir)?;
    Ok(AttrReply { attr: inode.attributes(r.ino) })
}
