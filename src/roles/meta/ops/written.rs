//! Reports of written bytes.

use super::super::db::{self, Env, RowsMut};
use crate::base::error::ErrorCode;
use crate::fs::attr::FileKind;
use crate::fs::perm;
use crate::limits;
use crate::net::msg::meta::{AttrReply, WrittenRequest};

/// The size becomes at least `end`; times move on.
pub fn written(db: &mut dyn RowsMut, env: &Env, r: &WrittenRequest) -> Result<AttrReply, ErrorCode> {
    let mut inode = db::inode(db, r.ino)?;
    if inode.kind != FileKind::Regular {
        return Err(ErrorCode::Invalid);
    }
    // A truncation has cut what was written: growing the size again would show zeros instead of the bytes.
    if inode.data_id != r.data_id || inode.data_epoch != r.data_epoch {
        return Err(ErrorCode::Stale);
    }
    if r.end > limits::FILE_BYTES_MAX {
        return Err(ErrorCode::FileTooBig);
    }
    inode.size = inode.size.max(r.end);
    inode.targets_with_data |= r.targets_with_data;
    if r.clear_suid {
        inode.mode = perm::without_suid(inode.mode);
    }
    inode.modified(env.now);
    db::put_inode(db, r.ino, &inode)?;
    Ok(AttrReply { attr: inode.attributes(r.ino) })
}
