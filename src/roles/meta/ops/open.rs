//! Opening files.

use super::super::db::{self, Env, RowsMut};
use super::super::records::{self, FLAG_MAY_HAVE_CHUNKS, InodeRecord, OpensRecord, RECORD_VERSION};
use super::super::store::Table;
use crate::base::error::ErrorCode;
use crate::base::ids::{ClientInstance, InodeId};
use crate::fs::attr::FileKind;
use crate::fs::perm;
use crate::net::msg::meta::{OpenReply, OpenRequest};

/// Registers one handle; the caller writes the inode.
pub(in crate::roles::meta) fn register(
    db: &mut dyn RowsMut,
    client: ClientInstance,
    ino: InodeId,
    inode: &mut InodeRecord,
    write: bool,
) -> Result<(), ErrorCode> {
    let key = records::opens_key(ino, client);
    let mut o: OpensRecord = db::get(db, Table::Opens, &key)?.unwrap_or_default();
    o.version = RECORD_VERSION;
    if write {
        if o.writers == 0 {
            inode.open_for_write = inode.open_for_write.saturating_add(1);
        }
        inode.flags |= FLAG_MAY_HAVE_CHUNKS;
        o.writers = o.writers.saturating_add(1);
    } else {
        o.readers = o.readers.saturating_add(1);
    }
    db::put(db, Table::Opens, &key, &o)
}

/// Opens a file.
pub fn open(db: &mut dyn RowsMut, env: &Env, r: &OpenRequest) -> Result<OpenReply, ErrorCode> {
    let mut inode = db::inode(db, r.ino)?;
    if inode.kind == FileKind::Symlink {
        return Err(ErrorCode::Loop);
    }
    if inode.kind == FileKind::Directory && (r.open.write || r.open.truncate) {
        return Err(ErrorCode::IsDirectory);
    }
    let mut want = 0;
    if r.open.execute {
        want |= perm::EXEC;
    } else if r.open.read {
        want |= perm::READ;
    }
    if r.open.write || r.open.truncate {
        want |= perm::WRITE;
    }
    perm::access(&inode.guarded(), &r.cred, want)?;
    if inode.kind == FileKind::Regular {
        if r.open.truncate {
            if inode.flags & FLAG_MAY_HAVE_CHUNKS != 0 || inode.size > 0 {
                db::reset_data(db, env, r.ino, &mut inode)?;
            }
            if !r.cred.is_root() {
                inode.mode = perm::without_suid(inode.mode);
            }
            inode.modified(env.now);
        }
        register(db, env.client, r.ino, &mut inode, r.open.write)?;
        db::put_inode(db, r.ino, &inode)?;
    }
    Ok(OpenReply { attr: inode.attributes(r.ino), layout: inode.layout()? })
}
