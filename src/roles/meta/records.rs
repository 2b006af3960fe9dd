//! Records of the meta store and their keys. Each record carries its version; an unknown one is refused, not guessed.

use super::store::Table;
use crate::base::codec;
use crate::base::error::ErrorCode;
use crate::base::ids::{ClientInstance, ClusterId, DataId, InodeId, TargetId};
use crate::base::version::{self, Unreadable};
use crate::fs::attr::{Attributes, FileKind, Timestamp};
use crate::fs::chunkfile::{ChunkHeaderRecord, ChunkKey};
use crate::fs::perm::Guarded;
use crate::fs::stripe::{StripeKind, StripePattern};
use crate::net::msg::meta::{Layout, StripePolicy};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Version of all records in this file.
pub const RECORD_VERSION: u16 = 1;

/// Bytes may lie beyond the size on the targets.
pub const FLAG_TAIL_UNSURE: u64 = 1;
/// Was open for writing under its data id: chunk files may exist.
pub const FLAG_MAY_HAVE_CHUNKS: u64 = 2;

/// One name of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParentLink {
    /// Directory.
    pub parent: InodeId,
    /// Hash of the name in it.
    pub hash: u64,
}

/// An inode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InodeRecord {
    /// `RECORD_VERSION`.
    pub version: u16,
    /// Type.
    pub kind: FileKind,
    /// 0o7777.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Names; directories: 2 + subdirectories.
    pub nlink: u32,
    /// Of devices.
    pub rdev: u32,
    /// Bytes; directories: entries.
    pub size: u64,
    /// Access time.
    pub atime: Timestamp,
    /// Modification time.
    pub mtime: Timestamp,
    /// Change time.
    pub ctime: Timestamp,
    /// Birth time.
    pub btime: Timestamp,
    /// Tells a re-used number apart (numbers are never re-used now).
    pub generation: u32,
    /// Grows with every change.
    pub change_version: u64,
    /// Raised when inline bytes move to chunks.
    pub layout_generation: u64,
    /// Names the data on the targets.
    pub data_id: DataId,
    /// Raised by truncations.
    pub data_epoch: u64,
    /// Bit per stripe index.
    pub targets_with_data: u64,
    /// Sessions that have it open for writing.
    pub open_for_write: u32,
    /// Quota project.
    pub project: u32,
    /// Snapshot epoch of the last change.
    pub snapshot_epoch: u64,
    /// `FLAG_*`.
    pub flags: u64,
    /// Where its names are.
    pub parents: Vec<ParentLink>,
    /// Of regular files.
    pub pattern: Option<StripePattern>,
    /// Target of a symbolic link.
    #[serde(with = "serde_bytes")]
    pub symlink: Vec<u8>,
    /// Directories: chunk size of new files.
    pub policy_chunk_bytes: Option<u32>,
    /// Directories: number of targets of new files.
    pub policy_targets: Option<u16>,
}

impl InodeRecord {
    /// A new inode without names.
    pub fn new(kind: FileKind, mode: u32, uid: u32, gid: u32, now: Timestamp) -> Self {
        Self {
            version: RECORD_VERSION,
            kind,
            mode,
            uid,
            gid,
            nlink: if kind == FileKind::Directory { 2 } else { 1 },
            rdev: 0,
            size: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            generation: 1,
            change_version: 1,
            layout_generation: 0,
            data_id: DataId(0),
            data_epoch: 0,
            targets_with_data: 0,
            open_for_write: 0,
            project: 0,
            snapshot_epoch: 0,
            flags: 0,
            parents: Vec::new(),
            pattern: None,
            symlink: Vec::new(),
            policy_chunk_bytes: None,
            policy_targets: None,
        }
    }

    /// What permission checks look at.
    pub fn guarded(&self) -> Guarded {
        Guarded { kind: self.kind, mode: self.mode, uid: self.uid, gid: self.gid }
    }

    /// Content changed: modification and change time move on, and never repeat.
    pub fn modified(&mut self, now: Timestamp) {
        self.mtime = now.max(self.mtime.successor());
        self.changed(now);
    }

    /// Attributes changed.
    pub fn changed(&mut self, now: Timestamp) {
        self.ctime = now.max(self.ctime.successor());
        self.change_version = self.change_version.saturating_add(1);
    }

    /// What stat(2) shows.
    pub fn attributes(&self, ino: InodeId) -> Attributes {
        Attributes {
            ino,
            kind: self.kind,
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            nlink: self.nlink,
            rdev: self.rdev,
            size: self.size,
            blocks: if self.kind == FileKind::Regular { self.size.div_ceil(512) } else { 0 },
            atime: self.atime,
            mtime: self.mtime,
            ctime: self.ctime,
            btime: self.btime,
            generation: self.generation,
            change_version: self.change_version,
        }
    }

    /// Where the data lies. What is not a regular file gets a placeholder (target 0).
    pub fn layout(&self) -> Result<Layout, ErrorCode> {
        let pattern = match &self.pattern {
            Some(p) => p.clone(),
            None => StripePattern::new(crate::limits::CHUNK_BYTES_DEFAULT, vec![TargetId(0)], StripeKind::Raid0)?,
        };
        Ok(Layout {
            pattern,
            data_id: self.data_id,
            data_epoch: self.data_epoch,
            layout_generation: self.layout_generation,
            targets_with_data: self.targets_with_data,
        })
    }

    /// Stripe policy of a directory.
    pub fn policy(&self) -> StripePolicy {
        StripePolicy { chunk_bytes: self.policy_chunk_bytes, targets: self.policy_targets }
    }

    /// Name of its chunk files.
    pub fn chunk_key(&self, ino: InodeId) -> ChunkKey {
        ChunkKey { ino, data_id: self.data_id }
    }

    /// Header for a chunk file of one stripe index.
    pub fn chunk_header(
        &self,
        ino: InodeId,
        fs_id: ClusterId,
        pattern: &StripePattern,
        index: u16,
    ) -> ChunkHeaderRecord {
        ChunkHeaderRecord {
            version: 1,
            fs_id,
            ino,
            data_id: self.data_id,
            stripe_index: index,
            chunk_bytes: pattern.chunk_bytes(),
            targets: pattern.targets().to_vec(),
            kind: pattern.kind(),
            uid: self.uid,
            gid: self.gid,
            project: self.project,
            mirror_sequence: 0,
        }
    }
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DentryRecord {
    /// `RECORD_VERSION`.
    pub version: u16,
    /// What it names.
    pub ino: InodeId,
    /// Its type.
    pub kind: FileKind,
    /// Tells names of one hash apart in cookies; from 1, 15 bits.
    pub ordinal: u16,
}

/// A session's handles on an inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpensRecord {
    /// `RECORD_VERSION`.
    pub version: u16,
    /// Handles for reading only.
    pub readers: u32,
    /// Handles for writing.
    pub writers: u32,
}

/// A client session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionRecord {
    /// `RECORD_VERSION`.
    pub version: u16,
    /// Host of the client.
    pub host: String,
    /// Its epoch.
    pub epoch: u64,
    /// When it was opened.
    pub opened: Timestamp,
}

/// The answer to the last mutation of a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DedupeRecord {
    /// `RECORD_VERSION`.
    pub version: u16,
    /// Of the request.
    pub sequence: u64,
    /// Encoded reply, if it succeeded.
    #[serde(with = "serde_bytes")]
    pub reply: Vec<u8>,
    /// Error number if it failed after a mutation; 0: it succeeded.
    pub error: u16,
}

/// An unlinked inode that is still open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrphanRecord {
    /// `RECORD_VERSION`.
    pub version: u16,
    /// Since when.
    pub since: Timestamp,
}

/// Chunk files to delete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PurgeRecord {
    /// `RECORD_VERSION`.
    pub version: u16,
    /// Targets that have not confirmed yet.
    pub targets: Vec<TargetId>,
}

/// A truncation whose targets have not all confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CutRecord {
    /// `RECORD_VERSION`.
    pub version: u16,
    /// Bytes beyond this go.
    pub size: u64,
    /// Under this data epoch.
    pub data_epoch: u64,
}

/// An evicted session that targets have not all heard of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FenceRecord {
    /// `RECORD_VERSION`.
    pub version: u16,
    /// Targets to tell.
    pub targets: Vec<TargetId>,
    /// Files whose tails are trimmed afterwards.
    pub inodes: Vec<InodeId>,
}

/// Every record starts with its version, two bytes: `decode` looks there first.
pub trait Record: Serialize + DeserializeOwned {}

macro_rules! records { ($($t:ty),*) => { $(impl Record for $t {})* } }
records!(
    InodeRecord,
    DentryRecord,
    OpensRecord,
    SessionRecord,
    DedupeRecord,
    OrphanRecord,
    PurgeRecord,
    CutRecord,
    FenceRecord
);

/// Decodes a row; logs which one cannot be read: `TooNew` if a newer beeswarm wrote it, `Corrupt` if it is damaged.
pub fn decode<T: Record>(table: Table, key: &[u8], bytes: &[u8]) -> Result<T, ErrorCode> {
    read(bytes).map_err(|e| {
        let key: String = key.iter().map(|b| format!("{b:02x}")).collect();
        tracing::error!("meta.redb, table {}, row {key}: {e}", table.name());
        match e {
            Unreadable::Newer(_) => ErrorCode::TooNew,
            Unreadable::Damaged(_) => ErrorCode::Corrupt,
        }
    })
}

fn read<T: Record>(bytes: &[u8]) -> Result<T, Unreadable> {
    version::check_u16(bytes, RECORD_VERSION)?;
    codec::decode(bytes).map_err(|e| Unreadable::Damaged(e.to_string()))
}

/// Key of an inode.
pub fn inode_key(ino: InodeId) -> Vec<u8> {
    ino.0.to_be_bytes().to_vec()
}

/// Key of a name: directory, 48 bits of hash, name.
pub fn dentry_key(parent: InodeId, hash: u64, name: &[u8]) -> Vec<u8> {
    let mut k = dentry_prefix(parent, hash);
    k.extend_from_slice(name);
    k
}

/// Keys of all names of one hash.
pub fn dentry_prefix(parent: InodeId, hash: u64) -> Vec<u8> {
    let mut k = inode_key(parent);
    k.extend_from_slice(&hash.to_be_bytes()[2..]);
    k
}

/// Hash and name out of a key.
pub fn split_dentry_key(key: &[u8]) -> Option<(u64, &[u8])> {
    let hash = key.get(8..14)?;
    let mut b = [0u8; 8];
    b[2..].copy_from_slice(hash);
    Some((u64::from_be_bytes(b), key.get(14..)?))
}

/// Key of a session's opens of an inode.
pub fn opens_key(ino: InodeId, client: ClientInstance) -> Vec<u8> {
    let mut k = inode_key(ino);
    k.extend_from_slice(client.0.as_bytes());
    k
}

/// Key of a purge row.
pub fn purge_key(key: ChunkKey) -> Vec<u8> {
    let mut k = inode_key(key.ino);
    k.extend_from_slice(&key.data_id.0.to_be_bytes());
    k
}

/// Eight bytes of a key as a number.
pub fn number_at(key: &[u8], at: usize) -> Result<u64, ErrorCode> {
    let bytes = key.get(at..at + 8).and_then(|b| <[u8; 8]>::try_from(b).ok());
    bytes.map(u64::from_be_bytes).ok_or(ErrorCode::Corrupt)
}

/// Client instance in a key.
pub fn client_at(key: &[u8], at: usize) -> Result<ClientInstance, ErrorCode> {
    let bytes = key.get(at..at + 16).and_then(|b| <[u8; 16]>::try_from(b).ok());
    bytes.map(|b| ClientInstance(uuid::Uuid::from_bytes(b))).ok_or(ErrorCode::Corrupt)
}

/// Key of a slot's dedupe record.
pub fn dedupe_key(client: ClientInstance, slot: u32) -> Vec<u8> {
    let mut k = client.0.as_bytes().to_vec();
    k.extend_from_slice(&slot.to_be_bytes());
    k
}

/// Key of a cut.
pub fn cut_key(ino: InodeId) -> Vec<u8> {
    let mut k = vec![b'T'];
    k.extend_from_slice(&ino.0.to_be_bytes());
    k
}

/// Key of a fence.
pub fn fence_key(client: ClientInstance) -> Vec<u8> {
    let mut k = vec![b'F'];
    k.extend_from_slice(client.0.as_bytes());
    k
}

/// Key of an extended attribute.
pub fn xattr_key(ino: InodeId, name: &[u8]) -> Vec<u8> {
    let mut k = inode_key(ino);
    k.extend_from_slice(name);
    k
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_tells_a_newer_row_from_a_damaged_one() {
        let row = codec::encode(&OpensRecord { version: RECORD_VERSION, readers: 1, writers: 2 });
        let read = |bytes: &[u8]| decode::<OpensRecord>(Table::Opens, b"k", bytes);
        assert_eq!(read(&row).unwrap().writers, 2);
        // A newer one may be of any length.
        for newer in [&[2, 0][..], &[2, 0, 7], &[&[2, 0], &row[2..]].concat(), &[255, 0].repeat(50)] {
            assert_eq!(read(newer), Err(ErrorCode::TooNew), "{newer:?}");
        }
        let mut zeroed = row.clone();
        zeroed.fill(0);
        for damaged in [&[][..], &[1], &row[..5], &[row.as_slice(), &[0]].concat(), &zeroed, &[0xff; 10]] {
            assert_eq!(read(damaged), Err(ErrorCode::Corrupt), "{damaged:?}");
        }
        let text = super::read::<OpensRecord>(&[9, 0]).unwrap_err().to_string();
        assert!(text.contains("version 9") && text.contains("up to 1") && text.contains("upgrade"), "{text}");
    }
}
