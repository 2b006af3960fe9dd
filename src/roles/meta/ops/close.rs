//! Closing handles.

use super::super::db::{self, RowsMut};
use super::super::records::{self, FLAG_TAIL_UNSURE, InodeRecord, OpensRecord};
use super::super::store::Table;
use crate::base::error::ErrorCode;
use crate::base::ids::{ClientInstance, InodeId};
use crate::net::msg::meta::CloseRequest;

/// Closes one handle. True: the tail is to be trimmed now.
pub fn close(db: &mut dyn RowsMut, client: ClientInstance, r: &CloseRequest) -> Result<bool, ErrorCode> {
    let key = records::opens_key(r.ino, client);
    // A handle that we do not know (closed with an expired session): nothing to do.
    let Some(mut o) = db::get::<OpensRecord>(db, Table::Opens, &key)? else { return Ok(false) };
    let Ok(mut inode) = db::inode(db, r.ino) else {
        db.delete(Table::Opens, &key)?;
        return Ok(false);
    };
    let had_writers = o.writers > 0;
    if r.write {
        o.writers = o.writers.saturating_sub(1);
    } else {
        o.readers = o.readers.saturating_sub(1);
    }
    let mut changed = false;
    if r.tail_unsure {
        inode.flags |= FLAG_TAIL_UNSURE;
        changed = true;
    }
    if had_writers && o.writers == 0 {
        inode.open_for_write = inode.open_for_write.saturating_sub(1);
        changed = true;
    }
    if o.readers == 0 && o.writers == 0 {
        db.delete(Table::Opens, &key)?;
    } else {
        db::put(db, Table::Opens, &key, &o)?;
    }
    finish(db, r.ino, &inode, changed)
}

/// Drops all handles of a session on one inode.
pub fn drop_session(
    db: &mut dyn RowsMut,
    client: ClientInstance,
    ino: InodeId,
    evicted: bool,
) -> Result<bool, ErrorCode> {
    let key = records::opens_key(ino, client);
    let o: Option<OpensRecord> = db::get(db, Table::Opens, &key)?;
    db.delete(Table::Opens, &key)?;
    let Ok(mut inode) = db::inode(db, ino) else { return Ok(false) };
    let wrote = o.is_some_and(|o| o.writers > 0);
    if wrote {
        inode.open_for_write = inode.open_for_write.saturating_sub(1);
        if evicted {
            inode.flags |= FLAG_TAIL_UNSURE;
        }
    }
    finish(db, ino, &inode, wrote)
}

fn finish(db: &mut dyn RowsMut, ino: InodeId, inode: &InodeRecord, changed: bool) -> Result<bool, ErrorCode> {
    if inode.nlink == 0 && db::opens(db, ino)?.is_empty() {
        db::destroy(db, ino, inode)?;
        return Ok(false);
    }
    if changed {
        db::put_inode(db, ino, inode)?;
    }
    Ok(inode.open_for_write == 0 && inode.flags & FLAG_TAIL_UNSURE != 0)
}
