//! renameat2(2).

use super::super::db::{self, Env, Rows, RowsMut};
use super::super::records::{InodeRecord, ParentLink};
use crate::base::error::ErrorCode;
use crate::base::ids::InodeId;
use crate::fs::attr::FileKind;
use crate::fs::perm;
use crate::limits;
use crate::net::msg::meta::RenameRequest;

/// Is `above` the directory `ino` itself or one of its ancestors?
fn is_ancestor(db: &dyn Rows, above: InodeId, mut ino: InodeId) -> Result<bool, ErrorCode> {
    loop {
        if ino == above {
            return Ok(true);
        }
        if ino == InodeId::ROOT {
            return Ok(false);
        }
        match db::inode(db, ino)?.parents.first() {
            Some(p) => ino = p.parent,
            None => return Ok(false),
        }
    }
}

fn move_link(inode: &mut InodeRecord, from: ParentLink, to: ParentLink) {
    match inode.parents.iter_mut().find(|p| **p == from) {
        Some(p) => *p = to,
        None => inode.parents.push(to),
    }
}

/// Moves a name, replacing or exchanging what is there. Checks come in the kernel's order, so that errors are Linux's.
pub fn rename(db: &mut dyn RowsMut, env: &Env, r: &RenameRequest) -> Result<(), ErrorCode> {
    if r.no_replace && r.exchange {
        return Err(ErrorCode::Invalid);
    }
    let from_dir = super::directory(db, r.parent, &r.cred, perm::EXEC)?;
    let to_dir = super::directory(db, r.new_parent, &r.cred, perm::EXEC)?;
    let same_dir = r.parent == r.new_parent;
    let source = db::dentry(db, env, r.parent, &r.name)?.ok_or(ErrorCode::NotFound)?;
    let dest = db::dentry(db, env, r.new_parent, &r.new_name)?;
    if r.no_replace && dest.is_some() {
        return Err(ErrorCode::Exists);
    }
    if r.exchange && dest.is_none() {
        return Err(ErrorCode::NotFound);
    }
    let source_is_dir = source.kind == FileKind::Directory;
    if source_is_dir && is_ancestor(db, source.ino, r.new_parent)? {
        return Err(ErrorCode::Invalid);
    }
    if let Some(d) = &dest
        && d.kind == FileKind::Directory
        && !same_dir
        && is_ancestor(db, d.ino, r.parent)?
    {
        return Err(if r.exchange { ErrorCode::Invalid } else { ErrorCode::NotEmpty });
    }
    if dest.as_ref().is_some_and(|d| d.ino == source.ino) {
        return Ok(());
    }
    let mut moved = db::inode(db, source.ino)?;
    perm::access(&from_dir.guarded(), &r.cred, perm::WRITE | perm::EXEC)?;
    perm::sticky(&from_dir.guarded(), &moved.guarded(), &r.cred)?;
    perm::access(&to_dir.guarded(), &r.cred, perm::WRITE | perm::EXEC)?;
    let replaced = match &dest {
        None => None,
        Some(d) => {
            let inode = db::inode(db, d.ino)?;
            perm::sticky(&to_dir.guarded(), &inode.guarded(), &r.cred)?;
            let dest_is_dir = inode.kind == FileKind::Directory;
            if !r.exchange && source_is_dir && !dest_is_dir {
                return Err(ErrorCode::NotDirectory);
            }
            if !r.exchange && !source_is_dir && dest_is_dir {
                return Err(ErrorCode::IsDirectory);
            }
            Some((d.clone(), inode))
        }
    };
    // The ".." of a moved directory changes.
    if !same_dir && source_is_dir {
        perm::access(&moved.guarded(), &r.cred, perm::WRITE)?;
    }
    if let Some((_, other)) = &replaced
        && r.exchange
        && !same_dir
        && other.kind == FileKind::Directory
    {
        perm::access(&other.guarded(), &r.cred, perm::WRITE)?;
    }
    let dest_is_dir = replaced.as_ref().is_some_and(|(d, _)| d.kind == FileKind::Directory);
    if !same_dir && source_is_dir && !dest_is_dir && to_dir.nlink >= limits::LINKS_MAX {
        return Err(ErrorCode::TooManyLinks);
    }
    if !same_dir && r.exchange && dest_is_dir && !source_is_dir && from_dir.nlink >= limits::LINKS_MAX {
        return Err(ErrorCode::TooManyLinks);
    }
    if let Some((d, _)) = &replaced
        && !r.exchange
        && dest_is_dir
        && !db::is_empty(db, d.ino)?
    {
        return Err(ErrorCode::NotEmpty);
    }

    let old = ParentLink { parent: r.parent, hash: env.hash(&r.name) };
    let new = ParentLink { parent: r.new_parent, hash: env.hash(&r.new_name) };
    db::remove_dentry(db, env, r.parent, &r.name)?;
    let (mut from_links, mut to_links, mut from_size, mut to_size) = (0i64, 0i64, -1i64, 1i64);
    if source_is_dir {
        from_links -= 1;
        to_links += 1;
    }
    if let Some((d, mut other)) = replaced {
        db::remove_dentry(db, env, r.new_parent, &r.new_name)?;
        to_size -= 1;
        if dest_is_dir {
            to_links -= 1;
        }
        if r.exchange {
            from_size += 1;
            if dest_is_dir {
                from_links += 1;
            }
            move_link(&mut other, new, old);
            other.changed(env.now);
            db::add_dentry(db, env, r.parent, &r.name, d.ino, other.kind)?;
            db::put_inode(db, d.ino, &other)?;
        } else {
            db::drop_link(db, env, d.ino, other, new)?;
        }
    }
    move_link(&mut moved, old, new);
    moved.changed(env.now);
    db::add_dentry(db, env, r.new_parent, &r.new_name, source.ino, moved.kind)?;
    db::put_inode(db, source.ino, &moved)?;
    adjust(db, env, r.parent, from_links, from_size)?;
    adjust(db, env, r.new_parent, to_links, to_size)
}

fn adjust(db: &mut dyn RowsMut, env: &Env, ino: InodeId, links: i64, entries: i64) -> Result<(), ErrorCode> {
    let mut dir = db::inode(db, ino)?;
    dir.nlink = u32::try_from(i64::from(dir.nlink) + links).unwrap_or(2);
    dir.size = dir.size.saturating_add_signed(entries);
    dir.modified(env.now);
    db::put_inode(db, ino, &dir)
}
