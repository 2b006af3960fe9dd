//! The identity of a state directory: the file `beeswarm.toml` in it says whose it is, so that a disk is never taken
//! for another, or for an empty one. Nothing here ever overwrites an identity.

use super::durable;
use super::ids::{ClusterId, NodeId, Role, TargetId};
use super::start::StartError;
use super::version::{self, Unreadable};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// The newest format that this version reads and writes.
pub const FORMAT: u32 = 1;
/// Name of the identity file.
pub const FORMAT_FILE: &str = "beeswarm.toml";
/// Name of the lock file.
pub const LOCK_FILE: &str = "lock";
/// A node's certificate, in the directory that a process calls its own.
pub const IDENTITY_DIR: &str = "identity";
/// The last cluster map, beside it.
pub const MAP_FILE: &str = "map.json";
/// What may lie in a directory before its identity: left by mkfs, by an interrupted first start, or because a process with
/// one role keeps its certificate and map in that role's directory.
const EARLY_FILES: [&str; 7] =
    ["lost+found", LOCK_FILE, "beeswarm.toml.new", IDENTITY_DIR, MAP_FILE, "map.json.new", "map.new"];
/// An identity file is short; what is longer is not one.
const FORMAT_FILE_BYTES_MAX: u64 = 64 << 10;

/// What `beeswarm.toml` says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FormatRecord {
    /// Version of the directory's layout.
    pub format: u32,
    /// Whose.
    pub cluster: ClusterId,
    /// What kind of state lies here.
    pub role: Role,
    /// Whose within the cluster; written `storage:3`.
    #[serde(with = "node_text")]
    pub node: NodeId,
    /// For a storage target: which.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<TargetId>,
    /// Of this directory alone.
    pub uuid: Uuid,
    /// Identity of the file system under it; absent where the file system has none that outlasts a reboot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs_uuid: Option<String>,
    /// When, UTC.
    pub created: String,
}

mod node_text {
    use crate::base::ids::NodeId;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(node: &NodeId, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(node)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<NodeId, D::Error> {
        String::deserialize(d)?.parse().map_err(D::Error::custom)
    }
}

impl FormatRecord {
    /// For a directory that is to be prepared now: reads the identity of the file system under it and the clock.
    pub fn new(
        dir: &Path,
        cluster: ClusterId,
        node: NodeId,
        target: Option<TargetId>,
        uuid: Uuid,
    ) -> Result<Self, StartError> {
        let fs_uuid = file_system_identity(dir).map_err(|e| cannot("read the file system of", dir, e))?;
        Ok(Self { format: FORMAT, cluster, role: node.role, node, target, uuid, fs_uuid, created: now_utc() })
    }
}

/// What a directory holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DirState {
    /// There is no such directory.
    Missing,
    /// Nothing but what may lie there before the identity.
    Empty,
    /// Files, but no identity: not ours to touch. Holds one of their names.
    Foreign(String),
    /// Has an identity.
    Ours(FormatRecord),
}

/// What a directory's identity must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Expected {
    /// Cluster; None: not known before reading (a server that starts offline).
    pub cluster: Option<ClusterId>,
    /// Role.
    pub role: Role,
    /// Node; None: not known before reading.
    pub node: Option<NodeId>,
    /// Target; None: not known, or not a target.
    pub target: Option<TargetId>,
}

fn cannot(verb: &str, dir: &Path, why: impl std::fmt::Display) -> StartError {
    StartError::new(
        format!("cannot {verb} {}", dir.display()),
        why,
        "check the disk (dmesg), the mount and the permissions of that directory",
    )
}

/// Looks at a directory; changes nothing.
pub fn inspect(dir: &Path) -> Result<DirState, StartError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(DirState::Missing),
        Err(e) => return Err(cannot("read", dir, e)),
    };
    let path = dir.join(FORMAT_FILE);
    match File::open(&path) {
        Ok(file) => return read_record(&path, file).map(DirState::Ours),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(cannot("read", &path, e)),
    }
    for entry in entries {
        let name = entry.map_err(|e| cannot("read", dir, e))?.file_name();
        if !EARLY_FILES.iter().any(|early| name == *early) {
            return Ok(DirState::Foreign(name.to_string_lossy().into_owned()));
        }
    }
    Ok(DirState::Empty)
}

fn read_record(path: &Path, file: File) -> Result<FormatRecord, StartError> {
    #[derive(Deserialize)]
    struct Version {
        format: u32,
    }
    let damaged = |why: String| {
        StartError::new(
            format!("cannot use {}", path.display()),
            format!("it cannot be understood: {why}"),
            "restore this file from a backup; do not delete it: without it the directory's data cannot be assigned",
        )
    };
    let mut text = String::new();
    file.take(FORMAT_FILE_BYTES_MAX).read_to_string(&mut text).map_err(|e| {
        if e.kind() == io::ErrorKind::InvalidData { damaged(e.to_string()) } else { cannot("read", path, e) }
    })?;
    // The version first: a newer format may have other fields.
    let found: Version = toml::from_str(&text).map_err(|e| damaged(e.to_string()))?;
    match version::check(found.format, FORMAT) {
        Ok(()) => {}
        Err(Unreadable::Newer(e)) => {
            return Err(StartError::new(format!("cannot use {}", path.display()), e, version::UPGRADE));
        }
        Err(Unreadable::Damaged(why)) => return Err(damaged(why)),
    }
    toml::from_str(&text).map_err(|e| damaged(e.to_string()))
}

/// Gives a directory its identity, durably. Refuses if it has one already.
pub fn write_format(dir: &Path, record: &FormatRecord) -> Result<(), StartError> {
    let text = toml::to_string(record).map_err(|e| cannot("write the identity of", dir, e))?;
    let text = format!(
        "# Identity of this directory, written by beeswarm at its first use. Do not edit, copy or delete.\n{text}"
    );
    let path = dir.join(FORMAT_FILE);
    durable::create_file(&path, text.as_bytes(), durable::PUBLIC).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => StartError::new(
            format!("cannot prepare {}", dir.display()),
            format!("it has got a {FORMAT_FILE} already"),
            "another beeswarm is preparing the same directory: give each its own",
        ),
        _ => cannot("write", &path, e),
    })
}

/// Checks that a directory's identity is the expected one and that it lies on the file system it was made on.
pub fn verify(dir: &Path, record: &FormatRecord, expected: &Expected) -> Result<(), StartError> {
    let what = || format!("refusing to use {}", dir.display());
    if record.role != expected.role {
        return Err(StartError::new(
            what(),
            format!("it holds the state of a {} node, not of {}", record.role, expected.role),
            format!("give {} an empty directory, or the right one, in the configuration", expected.role),
        ));
    }
    if let Some(cluster) = expected.cluster
        && cluster != record.cluster
    {
        return Err(StartError::new(
            what(),
            format!("it belongs to cluster {}, this node to cluster {cluster}", record.cluster),
            "mount the right disk there; or, if its data is not needed any more, give an emptied directory",
        ));
    }
    if let Some(node) = expected.node
        && node != record.node
    {
        return Err(StartError::new(
            what(),
            format!("it belongs to node {}, this is node {node}", record.node),
            "check which disk is mounted where and the directories in the configuration",
        ));
    }
    if let Some(target) = expected.target
        && Some(target) != record.target
    {
        let found = record.target.map_or_else(|| "no target".to_owned(), |t| format!("target {t}"));
        return Err(StartError::new(
            what(),
            format!("it holds {found}, not target {target}"),
            "check which disk is mounted where (lsblk, findmnt)",
        ));
    }
    if let Some(recorded) = &record.fs_uuid {
        let found = file_system_identity(dir).map_err(|e| cannot("read the file system of", dir, e))?;
        if found.as_ref() != Some(recorded) {
            return Err(StartError::new(
                what(),
                format!(
                    "it was made on file system {recorded}, but lies now on {}",
                    found.as_deref().unwrap_or("one without an identity")
                ),
                format!(
                    "check that the right disk is mounted there (findmnt); if the directory was moved or copied on \
                     purpose and the original is not used any more, remove the line fs_uuid from {}",
                    dir.join(FORMAT_FILE).display()
                ),
            ));
        }
    }
    Ok(())
}

/// The refusal of a directory that is not there.
pub fn missing(dir: &Path) -> StartError {
    StartError::new(
        format!("cannot use {}", dir.display()),
        "there is no such directory",
        format!("mount its disk, or, for a new one: mkdir -p {}", dir.display()),
    )
}

/// The refusal of a directory with somebody else's files.
pub fn foreign(dir: &Path, name: &str) -> StartError {
    StartError::new(
        format!("refusing to use {}", dir.display()),
        format!("it is not empty (it holds '{name}') and has no {FORMAT_FILE}"),
        "check the path and that the right disk is mounted; beeswarm needs a directory of its own that is empty at first",
    )
}

/// Held until the last copy is dropped; the kernel releases it with the process.
#[derive(Clone, Debug)]
pub struct DirLock {
    _file: Arc<File>,
}

/// Locks a directory against other processes. Does not wait.
pub fn lock(dir: &Path) -> Result<DirLock, StartError> {
    let path = dir.join(LOCK_FILE);
    let mut file = match OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(missing(dir)),
        Err(e) => return Err(cannot("open", &path, e)),
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut text = String::new();
            let by = match (&file).take(32).read_to_string(&mut text) {
                Ok(_) if !text.trim().is_empty() => format!("process {}", text.trim()),
                _ => "another process".to_owned(),
            };
            return Err(StartError::new(
                format!("cannot use {}", dir.display()),
                format!("it is in use by {by}"),
                "stop that process first, or give this one a directory of its own",
            ));
        }
        Err(e) => return Err(cannot("lock", &path, e)),
    }
    let mut write = || -> io::Result<()> {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    };
    write().map_err(|e| cannot("write", &path, e))?;
    Ok(DirLock { _file: Arc::new(file) })
}

/// The id of the file system under a path, in hex. None where the kernel makes it from the device number (XFS), at each
/// mount (tmpfs, overlay), or not at all: a comparison would refuse the right disk after a reboot.
pub fn file_system_identity(dir: &Path) -> io::Result<Option<String>> {
    const EXT4: i128 = 0xEF53;
    const BTRFS: i128 = 0x9123_683E;
    const ZFS: i128 = 0x2FC1_2FC1;
    const F2FS: i128 = 0xF2F5_2010;
    let kind = i128::from(rustix::fs::statfs(dir)?.f_type) & 0xFFFF_FFFF;
    let id = rustix::fs::statvfs(dir)?.f_fsid;
    Ok((id != 0 && [EXT4, BTRFS, ZFS, F2FS].contains(&kind)).then(|| format!("{id:016x}")))
}

fn now_utc() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Gregorian date of a day number: eras of 400 years that begin in March.
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = yoe + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(dir: &Path) -> FormatRecord {
        FormatRecord::new(dir, ClusterId::random(), NodeId::new(Role::Storage, 3), Some(TargetId(7)), Uuid::new_v4())
            .unwrap()
    }

    fn expected(r: &FormatRecord) -> Expected {
        Expected { cluster: Some(r.cluster), role: r.role, node: Some(r.node), target: r.target }
    }

    #[test]
    fn an_empty_directory_gets_its_identity() {
        let dir = tempfile::tempdir().unwrap();
        for early in ["lost+found", IDENTITY_DIR] {
            fs::create_dir(dir.path().join(early)).unwrap();
        }
        let _lock = lock(dir.path()).unwrap();
        let r = record(dir.path());
        assert_eq!(inspect(dir.path()).unwrap(), DirState::Empty);
        write_format(dir.path(), &r).unwrap();
        assert_eq!(inspect(dir.path()).unwrap(), DirState::Ours(r.clone()));
        verify(dir.path(), &r, &expected(&r)).unwrap();
    }

    #[test]
    fn missing_and_foreign_directories_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone");
        assert_eq!(inspect(&gone).unwrap(), DirState::Missing);
        assert!(lock(&gone).unwrap_err().todo.contains("mkdir"));
        fs::write(dir.path().join("photo.jpg"), "x").unwrap();
        assert_eq!(inspect(dir.path()).unwrap(), DirState::Foreign("photo.jpg".into()));
        assert!(!dir.path().join(FORMAT_FILE).exists());
    }

    #[test]
    fn refuses_other_cluster_role_node_target_and_file_system() {
        let dir = tempfile::tempdir().unwrap();
        let r = record(dir.path());
        let e = expected(&r);
        verify(dir.path(), &r, &e).unwrap();
        let refused = |e: Expected| verify(dir.path(), &r, &e).unwrap_err();
        assert!(refused(Expected { cluster: Some(ClusterId::random()), ..e }).why.contains("cluster"));
        assert!(refused(Expected { role: Role::Meta, ..e }).why.contains("storage node"));
        assert!(refused(Expected { node: Some(NodeId::new(Role::Storage, 4)), ..e }).why.contains("storage:3"));
        assert!(refused(Expected { target: Some(TargetId(8)), ..e }).why.contains("target 7"));
        let moved = FormatRecord { fs_uuid: Some("0123".into()), ..r.clone() };
        assert!(verify(dir.path(), &moved, &e).unwrap_err().todo.contains("findmnt"));
    }

    #[test]
    fn refuses_newer_and_damaged_formats_and_never_overwrites() {
        let dir = tempfile::tempdir().unwrap();
        let r = record(dir.path());
        write_format(dir.path(), &r).unwrap();
        assert!(write_format(dir.path(), &r).unwrap_err().why.contains("already"));
        fs::write(dir.path().join(FORMAT_FILE), "format = 2\nshape = \"new\"\n").unwrap();
        assert!(inspect(dir.path()).unwrap_err().todo.contains("upgrade"));
        fs::write(dir.path().join(FORMAT_FILE), "format = 0\n").unwrap();
        assert!(inspect(dir.path()).unwrap_err().todo.contains("backup"));
        fs::write(dir.path().join(FORMAT_FILE), "").unwrap();
        assert!(inspect(dir.path()).unwrap_err().todo.contains("backup"));
    }

    #[test]
    fn lock_names_the_holder() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path()).unwrap();
        assert!(lock(dir.path()).unwrap_err().why.contains(&std::process::id().to_string()));
        drop(held);
        lock(dir.path()).unwrap();
    }
}
