//! mknod, mkdir, symlink, and what they share with create.

use super::super::db::{self, Env, RowsMut};
use super::super::records::{InodeRecord, ParentLink};
use crate::base::error::ErrorCode;
use crate::base::ids::InodeId;
use crate::fs::attr::{Credential, FileKind};
use crate::fs::map::{ClusterMap, Consistency, Reachability};
use crate::fs::name::FileName;
use crate::fs::perm;
use crate::fs::placement::{Candidate, choose};
use crate::fs::stripe::{StripeKind, StripePattern};
use crate::limits;
use crate::net::msg::meta::{AttrReply, MakeRequest, NewNode};

/// Targets and chunk size for a new file below `dir`.
pub fn place(dir: &InodeRecord, map: &ClusterMap, seed: u64) -> Result<StripePattern, ErrorCode> {
    let chunk = dir.policy_chunk_bytes.unwrap_or(limits::CHUNK_BYTES_DEFAULT);
    let count = dir.policy_targets.unwrap_or(limits::STRIPE_TARGETS_DEFAULT);
    let candidates: Vec<Candidate> = map
        .targets
        .iter()
        .map(|t| Candidate {
            target: t.id,
            node: t.node.number,
            free_bytes: t.free_bytes,
            total_bytes: t.total_bytes,
            pool: t.pool,
            usable: t.reachability == Reachability::Online && t.consistency == Consistency::Good,
        })
        .collect();
    let targets = choose(&candidates, usize::from(count), seed);
    if targets.is_empty() {
        // The client tries again: targets may be starting.
        return Err(if map.targets.is_empty() { ErrorCode::NoSpace } else { ErrorCode::NotReady });
    }
    StripePattern::new(chunk, targets, StripeKind::Raid0)
}

/// Everything by which a new inode is made.
pub(in crate::roles::meta) struct NewInode<'a> {
    /// Directory.
    pub parent: InodeId,
    /// Name in it, not there yet.
    pub name: &'a FileName,
    /// Caller.
    pub cred: &'a Credential,
    /// Type.
    pub kind: FileKind,
    /// 0o7777.
    pub mode: u32,
}

/// Makes an inode and its name; the caller has checked that the name is free. Returns the record as written.
pub(in crate::roles::meta) fn add_inode(
    db: &mut dyn RowsMut,
    env: &Env,
    mut dir: InodeRecord,
    new: &NewInode<'_>,
    fill: impl FnOnce(&mut InodeRecord) -> Result<(), ErrorCode>,
) -> Result<(InodeId, InodeRecord), ErrorCode> {
    perm::access(&dir.guarded(), new.cred, perm::WRITE | perm::EXEC)?;
    let is_dir = new.kind == FileKind::Directory;
    if is_dir && dir.nlink >= limits::LINKS_MAX {
        return Err(ErrorCode::TooManyLinks);
    }
    let (gid, mode) = perm::inherit(&dir.guarded(), new.kind, new.mode, new.cred);
    let ino = env.inode();
    let mut record = InodeRecord::new(new.kind, mode, new.cred.uid, gid, env.now);
    record.project = dir.project;
    record.parents.push(ParentLink { parent: new.parent, hash: env.hash(new.name) });
    if is_dir {
        record.policy_chunk_bytes = dir.policy_chunk_bytes;
        record.policy_targets = dir.policy_targets;
    }
    if new.kind == FileKind::Regular {
        record.pattern = Some(place(&dir, &env.map, env.fresh)?);
        record.data_id = env.data_id();
    }
    fill(&mut record)?;
    db::add_dentry(db, env, new.parent, new.name, ino, new.kind)?;
    db::put_inode(db, ino, &record)?;
    db::count_inodes(db, true)?;
    if is_dir {
        dir.nlink += 1;
    }
    dir.size = dir.size.saturating_add(1);
    dir.modified(env.now);
    db::put_inode(db, new.parent, &dir)?;
    Ok((ino, record))
}

/// mknod, mkdir, symlink.
pub fn make(db: &mut dyn RowsMut, env: &Env, r: &MakeRequest) -> Result<AttrReply, ErrorCode> {
    let kind = match &r.node {
        NewNode::Node { kind: FileKind::Directory | FileKind::Symlink, .. } => return Err(ErrorCode::Invalid),
        NewNode::Node { kind, .. } => *kind,
        NewNode::Directory => FileKind::Directory,
        NewNode::Symlink { target } if target.is_empty() => return Err(ErrorCode::NotFound),
        NewNode::Symlink { target } if target.len() > limits::SYMLINK_BYTES_MAX => return Err(ErrorCode::NameTooLong),
        NewNode::Symlink { target } if target.contains(&0) => return Err(ErrorCode::Invalid),
        NewNode::Symlink { .. } => FileKind::Symlink,
    };
    let dir = super::directory(db, r.parent, &r.cred, perm::EXEC)?;
    if db::dentry(db, env, r.parent, &r.name)?.is_some() {
        return Err(ErrorCode::Exists);
    }
    if matches!(kind, FileKind::CharDevice | FileKind::BlockDevice) && !r.cred.is_root() {
        return Err(ErrorCode::NotPermitted);
    }
    let mode = if kind == FileKind::Symlink { 0o777 } else { r.mode };
    let new = NewInode { parent: r.parent, name: &r.name, cred: &r.cred, kind, mode };
    let (ino, record) = add_inode(db, env, dir, &new, |record| {
        match &r.node {
            NewNode::Symlink { target } => {
                record.size = u64::try_from(target.len()).unwrap_or(0);
                record.symlink.clone_from(target);
            }
            NewNode::Node { kind: FileKind::CharDevice | FileKind::BlockDevice, rdev } => record.rdev = *rdev,
            _ => {}
        }
        Ok(())
    })?;
    Ok(AttrReply { attr: record.attributes(ino) })
}
