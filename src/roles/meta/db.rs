//! What operations see of the store: typed rows. Operations run inside a transaction and know nothing of logs and disks.

use super::records::{
    self, DedupeRecord, DentryRecord, InodeRecord, OpensRecord, OrphanRecord, PurgeRecord, RECORD_VERSION, Record,
};
use super::store::Table;
use crate::base::codec;
use crate::base::error::ErrorCode;
use crate::base::ids::{ClientInstance, ClusterId, DataId, InodeId};
use crate::fs::attr::Timestamp;
use crate::fs::map::ClusterMap;
use crate::fs::name::{FileName, name_hash};
use std::sync::Arc;

/// A key and its value.
pub type Row = (Vec<u8>, Vec<u8>);

/// Reading rows.
pub trait Rows {
    /// One row.
    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, ErrorCode>;
    /// Rows with `prefix` from `from` on, in order, at most `limit`.
    fn scan(&self, table: Table, prefix: &[u8], from: &[u8], limit: usize) -> Result<Vec<Row>, ErrorCode>;
}

/// Changing rows.
pub trait RowsMut: Rows {
    /// Writes a row.
    fn put(&mut self, table: Table, key: &[u8], value: Vec<u8>) -> Result<(), ErrorCode>;
    /// Removes a row.
    fn delete(&mut self, table: Table, key: &[u8]) -> Result<(), ErrorCode>;
}

/// What an operation needs besides the rows. Numbers are reserved before the transaction.
#[derive(Clone, Debug)]
pub struct Env {
    /// Volume.
    pub fs_id: ClusterId,
    /// Key of the hash of names.
    pub hash_key: [u8; 16],
    /// Clock, read once.
    pub now: Timestamp,
    /// A fresh number: for a new inode and for new data (the two are separate spaces).
    pub fresh: u64,
    /// For placement.
    pub map: Arc<ClusterMap>,
    /// Who asks.
    pub client: ClientInstance,
}

impl Env {
    /// A data id never used before.
    pub fn data_id(&self) -> DataId {
        DataId(self.fresh)
    }

    /// An inode number never used before.
    pub fn inode(&self) -> InodeId {
        InodeId(self.fresh)
    }

    /// Hash of a name.
    pub fn hash(&self, name: &FileName) -> u64 {
        name_hash(&self.hash_key, name)
    }
}

/// A typed row.
pub fn get<T: Record>(db: &dyn Rows, table: Table, key: &[u8]) -> Result<Option<T>, ErrorCode> {
    db.get(table, key)?.map(|b| records::decode(table, key, &b)).transpose()
}

/// Writes a typed row.
pub fn put<T: Record>(db: &mut dyn RowsMut, table: Table, key: &[u8], record: &T) -> Result<(), ErrorCode> {
    let value = codec::encode_bounded(record).map_err(|e| {
        tracing::error!("a row of table {} cannot be written: {e}", table.name());
        ErrorCode::NoSpace
    })?;
    db.put(table, key, value)
}

/// An inode; `NotFound` if it is not there.
pub fn inode(db: &dyn Rows, ino: InodeId) -> Result<InodeRecord, ErrorCode> {
    get(db, Table::Inodes, &records::inode_key(ino))?.ok_or(ErrorCode::NotFound)
}

/// Writes an inode.
pub fn put_inode(db: &mut dyn RowsMut, ino: InodeId, record: &InodeRecord) -> Result<(), ErrorCode> {
    put(db, Table::Inodes, &records::inode_key(ino), record)
}

/// A name in a directory.
pub fn dentry(db: &dyn Rows, env: &Env, dir: InodeId, name: &FileName) -> Result<Option<DentryRecord>, ErrorCode> {
    get(db, Table::Dentries, &records::dentry_key(dir, env.hash(name), name.as_bytes()))
}

/// Adds a name, which must not be there.
pub fn add_dentry(
    db: &mut dyn RowsMut,
    env: &Env,
    dir: InodeId,
    name: &FileName,
    ino: InodeId,
    kind: crate::fs::attr::FileKind,
) -> Result<(), ErrorCode> {
    let hash = env.hash(name);
    let prefix = records::dentry_prefix(dir, hash);
    let mut used = Vec::new();
    for (key, value) in db.scan(Table::Dentries, &prefix, &prefix, 0x7fff)? {
        used.push(records::decode::<DentryRecord>(Table::Dentries, &key, &value)?.ordinal);
    }
    let ordinal = (1..=0x7fffu16).find(|o| !used.contains(o)).ok_or(ErrorCode::NoSpace)?;
    let record = DentryRecord { version: RECORD_VERSION, ino, kind, ordinal };
    put(db, Table::Dentries, &records::dentry_key(dir, hash, name.as_bytes()), &record)
}

/// Removes a name.
pub fn remove_dentry(db: &mut dyn RowsMut, env: &Env, dir: InodeId, name: &FileName) -> Result<(), ErrorCode> {
    db.delete(Table::Dentries, &records::dentry_key(dir, env.hash(name), name.as_bytes()))
}

/// Has the directory no entries?
pub fn is_empty(db: &dyn Rows, dir: InodeId) -> Result<bool, ErrorCode> {
    let prefix = records::inode_key(dir);
    Ok(db.scan(Table::Dentries, &prefix, &prefix, 1)?.is_empty())
}

/// Sessions that have an inode open, with their handles.
pub fn opens(db: &dyn Rows, ino: InodeId) -> Result<Vec<(ClientInstance, OpensRecord)>, ErrorCode> {
    let prefix = records::inode_key(ino);
    let rows = db.scan(Table::Opens, &prefix, &prefix, usize::MAX)?;
    rows.iter().map(|(k, v)| Ok((records::client_at(k, 8)?, records::decode(Table::Opens, k, v)?))).collect()
}

/// Counts inodes up or down.
pub fn count_inodes(db: &mut dyn RowsMut, up: bool) -> Result<(), ErrorCode> {
    let n = inode_count(db)?;
    let n = if up { n.saturating_add(1) } else { n.saturating_sub(1) };
    db.put(Table::Meta, b"inode-count", n.to_be_bytes().to_vec())
}

/// Number of inodes.
pub fn inode_count(db: &dyn Rows) -> Result<u64, ErrorCode> {
    db.get(Table::Meta, b"inode-count")?.map_or(Ok(0), |v| records::number_at(&v, 0))
}

/// Puts the chunk files of an inode's present data on the purge queue.
pub fn purge_data(db: &mut dyn RowsMut, ino: InodeId, record: &InodeRecord) -> Result<(), ErrorCode> {
    let Some(pattern) = &record.pattern else { return Ok(()) };
    if record.flags & records::FLAG_MAY_HAVE_CHUNKS == 0 && record.targets_with_data == 0 {
        return Ok(());
    }
    let row = PurgeRecord { version: RECORD_VERSION, targets: pattern.targets().to_vec() };
    put(db, Table::Purge, &records::purge_key(record.chunk_key(ino)), &row)
}

/// Truncates to nothing: new data id, the old chunk files to the purge queue.
pub fn reset_data(db: &mut dyn RowsMut, env: &Env, ino: InodeId, record: &mut InodeRecord) -> Result<(), ErrorCode> {
    purge_data(db, ino, record)?;
    record.data_id = env.data_id();
    record.data_epoch = record.data_epoch.saturating_add(1);
    record.targets_with_data = 0;
    record.size = 0;
    record.flags &= !records::FLAG_TAIL_UNSURE;
    if record.open_for_write == 0 {
        record.flags &= !records::FLAG_MAY_HAVE_CHUNKS;
    }
    db.delete(Table::Intents, &records::cut_key(ino))
}

/// Removes an inode without names and handles, and all that belongs to it.
pub fn destroy(db: &mut dyn RowsMut, ino: InodeId, record: &InodeRecord) -> Result<(), ErrorCode> {
    purge_data(db, ino, record)?;
    let prefix = records::inode_key(ino);
    for (key, _) in db.scan(Table::Xattrs, &prefix, &prefix, usize::MAX)? {
        db.delete(Table::Xattrs, &key)?;
    }
    db.delete(Table::Inline, &prefix)?;
    db.delete(Table::Orphans, &prefix)?;
    db.delete(Table::Intents, &records::cut_key(ino))?;
    db.delete(Table::Inodes, &prefix)?;
    count_inodes(db, false)
}

/// Takes a name from an inode (its dentry is gone already): the last one makes it an orphan or destroys it.
pub fn drop_link(
    db: &mut dyn RowsMut,
    env: &Env,
    ino: InodeId,
    mut record: InodeRecord,
    link: records::ParentLink,
) -> Result<(), ErrorCode> {
    if let Some(at) = record.parents.iter().position(|p| *p == link) {
        record.parents.remove(at);
    }
    if record.kind == crate::fs::attr::FileKind::Directory {
        return destroy(db, ino, &record);
    }
    record.nlink = record.nlink.saturating_sub(1);
    record.changed(env.now);
    if record.nlink == 0 {
        if opens(db, ino)?.is_empty() {
            return destroy(db, ino, &record);
        }
        let orphan = OrphanRecord { version: RECORD_VERSION, since: env.now };
        put(db, Table::Orphans, &records::inode_key(ino), &orphan)?;
    }
    put_inode(db, ino, &record)
}

/// The reply kept for a slot.
pub fn kept_reply(db: &dyn Rows, client: ClientInstance, slot: u32) -> Result<Option<DedupeRecord>, ErrorCode> {
    get(db, Table::Dedupe, &records::dedupe_key(client, slot))
}

fn store_error(e: super::store::StoreError) -> ErrorCode {
    tracing::error!(error = %e, "meta store");
    ErrorCode::DiskFailed
}

/// The first key behind all with this prefix; empty: the end.
fn behind(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            break;
        }
    }
    end
}

/// Rows of a read view.
pub struct ViewRows<'a, 'b>(pub &'a super::store::ReadView<'b>);

impl Rows for ViewRows<'_, '_> {
    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, ErrorCode> {
        self.0.get(table, key).map_err(store_error)
    }
    fn scan(&self, table: Table, prefix: &[u8], from: &[u8], limit: usize) -> Result<Vec<Row>, ErrorCode> {
        self.0.scan(table, from.max(prefix), &behind(prefix), limit).map_err(store_error)
    }
}

/// Rows of a transaction.
pub struct TxnRows<'a, 'b>(pub &'a mut super::store::Txn<'b>);

impl Rows for TxnRows<'_, '_> {
    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, ErrorCode> {
        self.0.get(table, key).map_err(store_error)
    }
    fn scan(&self, table: Table, prefix: &[u8], from: &[u8], limit: usize) -> Result<Vec<Row>, ErrorCode> {
        self.0.scan(table, from.max(prefix), &behind(prefix), limit).map_err(store_error)
    }
}

impl RowsMut for TxnRows<'_, '_> {
    fn put(&mut self, table: Table, key: &[u8], value: Vec<u8>) -> Result<(), ErrorCode> {
        self.0.put(table, key, &value);
        Ok(())
    }
    fn delete(&mut self, table: Table, key: &[u8]) -> Result<(), ErrorCode> {
        self.0.delete(table, key);
        Ok(())
    }
}
