//! Calls that meta serves: the namespace.
//!
//! Each carries the caller's credential; permissions are checked by the server. Mutations are deduplicated by the slot
//! and sequence of the frame header.

use crate::base::ids::{DataId, InodeId, TargetId};
use crate::fs::attr::{Attributes, Credential, FileKind, Timestamp};
use crate::fs::name::FileName;
use crate::fs::stripe::StripePattern;
use serde::{Deserialize, Serialize};

/// Opens (or reclaims) the session of the client instance in the frame header.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OpenSessionRequest {
    /// For logs and `client list`.
    pub host: String,
    /// Files that this client still has open, to be registered again after a restart of the server.
    pub reclaim: Vec<ReclaimedOpen>,
}

/// A file that a client holds open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReclaimedOpen {
    /// Which.
    pub ino: InodeId,
    /// Number of handles open for reading only.
    pub readers: u32,
    /// Number of handles open for writing.
    pub writers: u32,
}

/// A session.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct OpenSessionReply {
    /// Goes into the frame header of every call.
    pub session_epoch: u64,
    /// Requests that may be in flight.
    pub slots: u32,
    /// Seconds without a renewal after which the session ends.
    pub timeout_seconds: u32,
}

/// Keeps the session alive; sent every few seconds. `SessionUnknown`: open it again.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct RenewSessionRequest {}

/// Ends the session in order (unmount): its opens are closed, orphans purged.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct CloseSessionRequest {}

/// A name in a directory. Needs search permission.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LookupRequest {
    /// Directory.
    pub parent: InodeId,
    /// "." and ".." are not names; use `LookupParentRequest`.
    pub name: FileName,
    /// Caller.
    pub cred: Credential,
}

/// The directory above (for handles that NFS re-exports).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LookupParentRequest {
    /// Directory.
    pub ino: InodeId,
}

/// Attributes of an inode.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GetAttrRequest {
    /// Which.
    pub ino: InodeId,
}

/// How a time is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetTime {
    /// To the server's clock (allowed to whoever may write).
    Now,
    /// To this (allowed to the owner).
    To(Timestamp),
}

/// chmod, chown, utimens and truncate in one, as the kernel sends them. Absent: unchanged.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SetAttrRequest {
    /// Which.
    pub ino: InodeId,
    /// Caller.
    pub cred: Credential,
    /// 0o7777.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Truncation; the server has the targets cut before it answers.
    pub size: Option<u64>,
    /// The truncation comes through a handle open for writing: no permission check.
    pub by_handle: bool,
    /// Access time.
    pub atime: Option<SetTime>,
    /// Modification time.
    pub mtime: Option<SetTime>,
}

/// Target of a symbolic link.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReadLinkRequest {
    /// Which.
    pub ino: InodeId,
}

/// Bytes of a path.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReadLinkReply {
    /// Target.
    #[serde(with = "serde_bytes")]
    pub target: Vec<u8>,
}

/// What `MakeRequest` makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NewNode {
    /// mknod of a regular file, FIFO, socket or device.
    Node {
        /// Not Directory, not Symlink.
        kind: FileKind,
        /// For devices.
        rdev: u32,
    },
    /// mkdir.
    Directory,
    /// symlink.
    Symlink {
        /// Target.
        #[serde(with = "serde_bytes")]
        target: Vec<u8>,
    },
}

/// mknod, mkdir, symlink.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MakeRequest {
    /// Directory.
    pub parent: InodeId,
    /// New name.
    pub name: FileName,
    /// Caller.
    pub cred: Credential,
    /// 0o7777, the umask already applied.
    pub mode: u32,
    /// What.
    pub node: NewNode,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenMode {
    /// Needs read permission.
    pub read: bool,
    /// Needs write permission; registered durably as open for writing.
    pub write: bool,
    /// O_TRUNC: new data id, size 0.
    pub truncate: bool,
    /// Opened to be executed: needs execute permission instead of read.
    pub execute: bool,
}

/// open(O_CREAT): makes the file, or opens the existing one unless exclusive.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CreateRequest {
    /// Directory.
    pub parent: InodeId,
    /// Name.
    pub name: FileName,
    /// Caller.
    pub cred: Credential,
    /// 0o7777, the umask already applied.
    pub mode: u32,
    /// How.
    pub open: OpenMode,
    /// O_EXCL.
    pub exclusive: bool,
}

/// Opens a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OpenRequest {
    /// Which.
    pub ino: InodeId,
    /// Caller.
    pub cred: Credential,
    /// How.
    pub open: OpenMode,
}

/// Where a file's data lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Chunk size and targets.
    pub pattern: StripePattern,
    /// Generation of the data.
    pub data_id: DataId,
    /// Raised by truncations; data requests carry it.
    pub data_epoch: u64,
    /// Raised when inline bytes move to chunks.
    pub layout_generation: u64,
    /// Bit per stripe index: that target holds data.
    pub targets_with_data: u64,
}

/// An open file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OpenReply {
    /// Attributes after the open.
    pub attr: Attributes,
    /// Where its data lies.
    pub layout: Layout,
}

/// The layout of a file that is open already (after a truncation by somebody, or a restart).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayoutRequest {
    /// Which.
    pub ino: InodeId,
}

/// Closes one handle.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CloseRequest {
    /// Which.
    pub ino: InodeId,
    /// The handle was open for writing.
    pub write: bool,
    /// A write failed half-way: bytes may lie beyond the size and must be trimmed when the last writer has closed.
    pub tail_unsure: bool,
}

/// Reports written bytes, before the write is answered to the program.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WrittenRequest {
    /// Which.
    pub ino: InodeId,
    /// Under which data.
    pub data_id: DataId,
    /// Under which data epoch. `Stale` if a truncation came between: the bytes may have been cut, write again.
    pub data_epoch: u64,
    /// End of the written range; the size becomes at least this. 0: only the times change.
    pub end: u64,
    /// Stripe indexes that hold data now.
    pub targets_with_data: u64,
    /// The writer is not privileged: set-user-id and set-group-id bits go.
    pub clear_suid: bool,
}

/// Reserves `length` bytes at the end for an O_APPEND write; the size grows at once, so appends never overlap.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AppendRequest {
    /// Which.
    pub ino: InodeId,
    /// Bytes.
    pub length: u64,
    /// The writer is not privileged: set-user-id and set-group-id bits go.
    pub clear_suid: bool,
}

/// Where to write.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AppendReply {
    /// Start of the reserved range.
    pub offset: u64,
    /// Attributes after it.
    pub attr: Attributes,
    /// Current layout.
    pub layout: Layout,
}

/// Attributes after an operation, or of a looked-up name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AttrReply {
    /// Attributes.
    pub attr: Attributes,
}

/// Removes a name that is not a directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct UnlinkRequest {
    /// Directory.
    pub parent: InodeId,
    /// Name.
    pub name: FileName,
    /// Caller.
    pub cred: Credential,
}

/// Removes an empty directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RemoveDirRequest {
    /// Directory above.
    pub parent: InodeId,
    /// Name.
    pub name: FileName,
    /// Caller.
    pub cred: Credential,
}

/// renameat2(2).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RenameRequest {
    /// From this directory.
    pub parent: InodeId,
    /// This name.
    pub name: FileName,
    /// To this directory.
    pub new_parent: InodeId,
    /// This name.
    pub new_name: FileName,
    /// RENAME_NOREPLACE.
    pub no_replace: bool,
    /// RENAME_EXCHANGE.
    pub exchange: bool,
    /// Caller.
    pub cred: Credential,
}

/// Another name for a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LinkRequest {
    /// The file.
    pub ino: InodeId,
    /// Directory.
    pub parent: InodeId,
    /// New name.
    pub name: FileName,
    /// Caller.
    pub cred: Credential,
}

/// Entries after a cookie, in cookie order.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReadDirRequest {
    /// Directory.
    pub ino: InodeId,
    /// Of the last entry that the caller has; 0: from the start. Below 2^63.
    pub after: u64,
    /// At most `READDIR_ENTRIES_MAX`.
    pub count_max: u32,
    /// Bring attributes as well.
    pub with_attributes: bool,
}

/// One name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DirEntry {
    /// Name.
    pub name: FileName,
    /// What it names.
    pub ino: InodeId,
    /// Its type.
    pub kind: FileKind,
    /// Continue after this.
    pub cookie: u64,
    /// If asked for (absent when the inode lives in another shard).
    pub attr: Option<Attributes>,
}

/// A batch of entries.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReadDirReply {
    /// In cookie order; "." and ".." are the client's to add.
    pub entries: Vec<DirEntry>,
    /// Nothing comes after these.
    pub end: bool,
}

/// Sets an extended attribute.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SetXattrRequest {
    /// Which.
    pub ino: InodeId,
    /// With its namespace, such as `user.x`.
    #[serde(with = "serde_bytes")]
    pub name: Vec<u8>,
    /// Value.
    #[serde(with = "serde_bytes")]
    pub value: Vec<u8>,
    /// XATTR_CREATE.
    pub create: bool,
    /// XATTR_REPLACE.
    pub replace: bool,
    /// Caller.
    pub cred: Credential,
}

/// Reads an extended attribute.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GetXattrRequest {
    /// Which.
    pub ino: InodeId,
    /// Name.
    #[serde(with = "serde_bytes")]
    pub name: Vec<u8>,
    /// Caller.
    pub cred: Credential,
}

/// A value, or the names, each closed by a zero byte.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct XattrReply {
    /// Value or names.
    #[serde(with = "serde_bytes")]
    pub value: Vec<u8>,
}

/// Names of the extended attributes that the caller may see.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ListXattrRequest {
    /// Which.
    pub ino: InodeId,
    /// Caller.
    pub cred: Credential,
}

/// Removes an extended attribute.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RemoveXattrRequest {
    /// Which.
    pub ino: InodeId,
    /// Name.
    #[serde(with = "serde_bytes")]
    pub name: Vec<u8>,
    /// Caller.
    pub cred: Credential,
}

/// Returns when everything answered before is durable.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SyncRequest {}

/// How new files below a directory are striped. Absent: inherited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripePolicy {
    /// Bytes, a power of two.
    pub chunk_bytes: Option<u32>,
    /// Number of targets.
    pub targets: Option<u16>,
}

/// `beeswarm entry info`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EntryInfoRequest {
    /// Which.
    pub ino: InodeId,
}

/// Everything about one inode's place.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EntryInfoReply {
    /// Attributes.
    pub attr: Attributes,
    /// Of a regular file.
    pub layout: Option<Layout>,
    /// In force for new files (directories).
    pub policy: StripePolicy,
    /// Sessions that have it open (readers, writers).
    pub open: (u32, u32),
}

/// `beeswarm entry set`: root or the owner of the directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SetPolicyRequest {
    /// Directory.
    pub ino: InodeId,
    /// What to change.
    pub policy: StripePolicy,
    /// Caller.
    pub cred: Credential,
}

/// Targets that a purge still waits for (health).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct MetaStatusRequest {}

/// Counters of a meta server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MetaStatusReply {
    /// Inodes in the store.
    pub inodes: u64,
    /// Chunk files waiting to be purged.
    pub purge_queue: u64,
    /// Targets that purges wait for.
    pub purge_blocked_by: Vec<TargetId>,
    /// Sessions.
    pub sessions: u32,
}

crate::calls! { Meta;
    OpenSessionRequest -> OpenSessionReply = 100, [Client], false, true;
    RenewSessionRequest -> () = 101, [Client], false, true;
    CloseSessionRequest -> () = 102, [Client], false, true;
    LookupRequest -> AttrReply = 103, [Client], false, true;
    LookupParentRequest -> AttrReply = 104, [Client], false, true;
    GetAttrRequest -> AttrReply = 105, [Client], false, true;
    SetAttrRequest -> AttrReply = 106, [Client], false, false;
    ReadLinkRequest -> ReadLinkReply = 107, [Client], false, true;
    MakeRequest -> AttrReply = 108, [Client], false, false;
    CreateRequest -> OpenReply = 109, [Client], false, false;
    OpenRequest -> OpenReply = 110, [Client], false, false;
    LayoutRequest -> OpenReply = 111, [Client], false, true;
    CloseRequest -> () = 112, [Client], false, false;
    WrittenRequest -> AttrReply = 113, [Client], false, false;
    AppendRequest -> AppendReply = 114, [Client], false, false;
    UnlinkRequest -> () = 115, [Client], false, false;
    RemoveDirRequest -> () = 116, [Client], false, false;
    RenameRequest -> () = 117, [Client], false, false;
    LinkRequest -> AttrReply = 118, [Client], false, false;
    ReadDirRequest -> ReadDirReply = 119, [Client], false, true;
    SetXattrRequest -> () = 120, [Client], false, false;
    GetXattrRequest -> XattrReply = 121, [Client], false, true;
    ListXattrRequest -> XattrReply = 122, [Client], false, true;
    RemoveXattrRequest -> () = 123, [Client], false, false;
    SyncRequest -> () = 124, [Client], false, true;
    EntryInfoRequest -> EntryInfoReply = 125, [Client], false, true;
    SetPolicyRequest -> () = 126, [Client], false, false;
    MetaStatusRequest -> MetaStatusReply = 127, [Client, Admin, Mgmt, Storage, Meta], false, true;
}
