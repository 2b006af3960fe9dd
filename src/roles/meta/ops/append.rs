//! O_APPEND writes.

use super::super::db::{self, Env, RowsMut};
use crate::base::error::ErrorCode;
use crate::fs::attr::FileKind;
use crate::fs::perm;
use crate::limits;
use crate::net::msg::meta::{AppendReply, AppendRequest};

/// Reserves bytes at the end; the size grows at once, so appends never overlap.
pub fn append(db: &mut dyn RowsMut, env: &Env, r: &AppendRequest) -> Result<AppendReply, ErrorCode> {
    let mut inode = db::inode(db, r.ino)?;
    if inode.kind != FileKind::Regular {
        return Err(ErrorCode::Invalid);
    }
    let offset = inode.size;
    let end = offset.checked_add(r.length).filter(|e| *e <= limits::FILE_BYTES_MAX).ok_or(ErrorCode::FileTooBig)?;
    inode.size = end;
    if r.clear_suid {
        inode.mode = perm::without_suid(inode.mode);
    }
    inode.modified(env.now);
    db::put_inode(db, r.ino, &inode)?;
    Ok(AppendReply { offset, attr: inode.attributes(r.ino), layout: inode.layout()? })
}
