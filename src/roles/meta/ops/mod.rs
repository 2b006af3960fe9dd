//! The operations, one file each. Each is a pure function of rows: checks first, then changes.

pub mod append;
pub mod close;
pub mod create;
pub mod getattr;
pub mod link;
pub mod lookup;
pub mod make;
pub mod open;
pub mod policy;
pub mod readdir;
pub mod rename;
pub mod rmdir;
pub mod session;
pub mod setattr;
pub mod unlink;
pub mod written;
pub mod xattr;

use super::db::{self, Rows};
use super::records::InodeRecord;
use crate::base::error::ErrorCode;
use crate::base::ids::InodeId;
use crate::fs::attr::{Credential, FileKind};
use crate::fs::perm;

/// A directory in which the caller may do `want`.
pub(super) fn directory(db: &dyn Rows, ino: InodeId, cred: &Credential, want: u32) -> Result<InodeRecord, ErrorCode> {
    let dir = db::inode(db, ino)?;
    if dir.kind != FileKind::Directory {
        return Err(ErrorCode::NotDirectory);
    }
    perm::access(&dir.guarded(), cred, want)?;
    Ok(dir)
}
