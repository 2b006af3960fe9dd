//! File attributes, credentials and times, as the namespace keeps them and programs see them.

use crate::base::ids::InodeId;
use serde::{Deserialize, Serialize};

/// A point in time with nanoseconds, before or after 1970.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Timestamp {
    /// Seconds since 1970, negative before.
    pub seconds: i64,
    /// 0 to 999,999,999, always forward from `seconds`.
    pub nanos: u32,
}

impl Timestamp {
    /// From nanoseconds since 1970.
    pub fn from_unix_nanos(ns: i64) -> Self {
        let nanos = u32::try_from(ns.rem_euclid(1_000_000_000)).unwrap_or(0);
        Self { seconds: ns.div_euclid(1_000_000_000), nanos }
    }

    /// Now, by the wall clock.
    pub fn now() -> Self {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        Self { seconds: t.tv_sec, nanos: u32::try_from(t.tv_nsec).unwrap_or(0) }
    }

    /// The next representable instant: modification times never repeat, so that a cache can tell one version from the next.
    pub fn successor(self) -> Self {
        if self.nanos >= 999_999_999 {
            Self { seconds: self.seconds.saturating_add(1), nanos: 0 }
        } else {
            Self { seconds: self.seconds, nanos: self.nanos + 1 }
        }
    }
}

/// What a name may stand for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A unix socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

/// What stat(2) shows, and the versions that caches compare.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Attributes {
    /// Inode number.
    pub ino: InodeId,
    /// Type.
    pub kind: FileKind,
    /// Permission bits, 0o7777.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of names (directories: 2 + subdirectories).
    pub nlink: u32,
    /// Device number of device nodes, as the kernel's `dev_t` of 32 bits.
    pub rdev: u32,
    /// Bytes.
    pub size: u64,
    /// Allocated bytes in units of 512 (an estimate for striped files: the size rounded up).
    pub blocks: u64,
    /// Access time.
    pub atime: Timestamp,
    /// Modification time; never repeats.
    pub mtime: Timestamp,
    /// Change time.
    pub ctime: Timestamp,
    /// Birth time.
    pub btime: Timestamp,
    /// Tells a re-used inode number apart.
    pub generation: u32,
    /// Grows with every change of the inode.
    pub change_version: u64,
}

/// Who asks: the caller's ids, as the kernel of the client saw them.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Credential {
    /// File system user id.
    pub uid: u32,
    /// File system group id.
    pub gid: u32,
    /// Supplementary groups, all of them.
    pub groups: Vec<u32>,
}

impl Credential {
    /// Is the caller the superuser?
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }

    /// Is the caller in this group?
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }
}
