//! Every bound of the system, with its unit last in its name, and the relations between them.

/// Largest encoded message body (the payload is apart from it). Bounds what a peer can make us allocate.
pub const MESSAGE_BODY_BYTES_MAX: usize = 4 << 20;
/// Largest payload of one frame. A FUSE request carries at most 1 MiB.
pub const PAYLOAD_BYTES_MAX: usize = 2 << 20;
/// Longest file name (POSIX NAME_MAX on Linux).
pub const FILE_NAME_BYTES_MAX: usize = 255;
/// Longest symbolic link target (PATH_MAX less the closing zero).
pub const SYMLINK_BYTES_MAX: usize = 4095;
/// Longest extended attribute value (XATTR_SIZE_MAX).
pub const XATTR_VALUE_BYTES_MAX: usize = 65536;
/// Longest list of extended attribute names (XATTR_LIST_MAX).
pub const XATTR_LIST_BYTES_MAX: usize = 65536;
/// Most names of one file (LINK_MAX of ext4).
pub const LINKS_MAX: u32 = 65_000;
/// Smallest chunk.
pub const CHUNK_BYTES_MIN: u32 = 64 << 10;
/// Largest chunk.
pub const CHUNK_BYTES_MAX: u32 = 64 << 20;
/// Chunk size when nothing else is said.
pub const CHUNK_BYTES_DEFAULT: u32 = 512 << 10;
/// Targets per file when nothing else is said.
pub const STRIPE_TARGETS_DEFAULT: u16 = 4;
/// Most targets of one file: the mask of targets that hold data has one bit for each.
pub const STRIPE_TARGETS_MAX: u16 = 64;
/// Largest file offset (16 TiB as on ext4 with 4 KiB blocks).
pub const FILE_BYTES_MAX: u64 = 16 << 40;
/// Entries in one readdir answer.
pub const READDIR_ENTRIES_MAX: usize = 1000;
/// Requests that one client session may have in flight at a meta server (its slots).
pub const SESSION_SLOTS_MAX: u32 = 256;
/// Calls in flight per connection, before the caller waits.
pub const CALLS_IN_FLIGHT_MAX: usize = 1024;
/// Most addresses of one process.
pub const ADDRS_PER_NODE_MAX: usize = 64;
/// UDP port of mgmt (BeeGFS's).
pub const PORT_MGMT: u16 = 9008;
/// UDP port of meta (BeeGFS's).
pub const PORT_META: u16 = 9005;
/// UDP port of storage (BeeGFS's).
pub const PORT_STORAGE: u16 = 9003;
/// How long a call waits for a server that is away before it fails.
pub const CALL_WAIT_SECONDS_DEFAULT: u64 = 60;

const _: () = assert!(PAYLOAD_BYTES_MAX >= (1 << 20), "one FUSE write fits one frame");
const _: () = assert!(CHUNK_BYTES_MIN <= CHUNK_BYTES_DEFAULT && CHUNK_BYTES_DEFAULT <= CHUNK_BYTES_MAX);
const _: () = assert!(READDIR_ENTRIES_MAX * (FILE_NAME_BYTES_MAX + 256) < MESSAGE_BODY_BYTES_MAX);
const _: () = assert!(XATTR_VALUE_BYTES_MAX < MESSAGE_BODY_BYTES_MAX);
