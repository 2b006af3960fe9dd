//! Listing directories.

use super::super::db::{self, Rows};
use super::super::records::{self, DentryRecord};
use super::super::store::Table;
use crate::base::error::ErrorCode;
use crate::fs::attr::FileKind;
use crate::fs::name::FileName;
use crate::limits;
use crate::net::msg::meta::{DirEntry, ReadDirReply, ReadDirRequest};

const ORDINAL_BITS: u32 = 15;

/// Entries after a cookie (hash << 15 | ordinal), in cookie order. Permission was checked when the directory was opened.
pub fn readdir(db: &dyn Rows, r: &ReadDirRequest) -> Result<ReadDirReply, ErrorCode> {
    if db::inode(db, r.ino)?.kind != FileKind::Directory {
        return Err(ErrorCode::NotDirectory);
    }
    if r.after >> 63 != 0 {
        return Err(ErrorCode::Invalid);
    }
    let wanted = usize::try_from(r.count_max).unwrap_or(usize::MAX).clamp(1, limits::READDIR_ENTRIES_MAX);
    let prefix = records::inode_key(r.ino);
    let mut from = records::dentry_prefix(r.ino, r.after >> ORDINAL_BITS);
    let mut entries: Vec<DirEntry> = Vec::new();
    // Names of one hash are stored by name but listed by ordinal: a hash is complete when the next one is seen.
    let mut group: Vec<DirEntry> = Vec::new();
    let mut group_hash = None;
    loop {
        let rows = db.scan(Table::Dentries, &prefix, &from, wanted + 1)?;
        let last = rows.len() <= wanted;
        for (key, value) in rows {
            let (hash, name) = records::split_dentry_key(&key).ok_or(ErrorCode::Corrupt)?;
            let record: DentryRecord = records::decode(Table::Dentries, &key, &value)?;
            if group_hash != Some(hash) {
                flush(&mut group, &mut entries);
                group_hash = Some(hash);
                if entries.len() >= wanted {
                    return reply(db, r, entries, wanted, false);
                }
            }
            let cookie = hash << ORDINAL_BITS | u64::from(record.ordinal);
            if cookie > r.after {
                let name = FileName::new(name.to_vec()).map_err(|_| ErrorCode::Corrupt)?;
                group.push(DirEntry { name, ino: record.ino, kind: record.kind, cookie, attr: None });
            }
            from.clone_from(&key);
            from.push(0);
        }
        if last {
            flush(&mut group, &mut entries);
            return reply(db, r, entries, wanted, true);
        }
    }
}

fn flush(group: &mut Vec<DirEntry>, entries: &mut Vec<DirEntry>) {
    group.sort_by_key(|e| e.cookie);
    entries.append(group);
}

fn reply(
    db: &dyn Rows,
    r: &ReadDirRequest,
    mut entries: Vec<DirEntry>,
    wanted: usize,
    mut end: bool,
) -> Result<ReadDirReply, ErrorCode> {
    if entries.len() > wanted {
        entries.truncate(wanted);
        end = false;
    }
    if r.with_attributes {
        for e in &mut entries {
            e.attr = match db::inode(db, e.ino) {
                Ok(inode) => Some(inode.attributes(e.ino)),
                Err(ErrorCode::NotFound) => None,
                Err(other) => return Err(other),
            };
        }
    }
    Ok(ReadDirReply { entries, end })
}
