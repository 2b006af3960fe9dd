//! What mgmt keeps on disk: `mgmt.redb` (the state, one record) and `ca/` (certificate and key of the authority).
//!
//! Order of a first start: the state without fingerprint, the authority, the state with its fingerprint. So an interrupted
//! first start is told from a lost authority. Every `put` is durable on return; the first that fails fences the store.

use super::state::State;
use crate::base::codec;
use crate::base::durable;
use crate::base::format::{self, DirLock, DirState, Expected, FormatRecord};
use crate::base::ids::{ClusterId, Role};
use crate::base::start::StartError;
use crate::base::version::{self, Unreadable};
use crate::net::cluster::MGMT;
use crate::net::identity::CertificateAuthority;
use redb::{Database, Durability, ReadableDatabase, TableDefinition};
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::fs::{DirBuilder, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use uuid::Uuid;

const TABLE: TableDefinition<&str, &[u8]> = TableDefinition::new("mgmt");
const STATE_KEY: &str = "state";
/// Of the record's layout; stands before it as four little-endian bytes.
const STATE_FORMAT: u32 = 1;
/// What a mgmt directory's identity must be; its cluster is compared with the state's.
const EXPECTED: Expected = Expected { cluster: None, role: Role::Mgmt, node: Some(MGMT), target: None };
const DATABASE_FILE: &str = "mgmt.redb";
const CA_DIR: &str = "ca";
const CA_CERT_FILE: &str = "cert.pem";
const CA_KEY_FILE: &str = "key.pem";

#[derive(Serialize, Deserialize)]
struct StateRecord {
    state: State,
    /// None while the first start is not finished.
    ca_fingerprint: Option<[u8; 32]>,
}

/// The open directory. Holds its lock.
pub struct Store {
    database: Database,
    ca_fingerprint: [u8; 32],
    fenced: bool,
    _lock: DirLock,
}

/// A directory of another role in the same process, and the cluster that it belongs to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OtherDir {
    /// Where.
    pub path: PathBuf,
    /// Whose.
    pub cluster: ClusterId,
}

/// Why a state was not kept.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PutError {
    /// It has grown too large; the one before is still there.
    #[error("mgmt's state cannot grow any more: {0}; nothing was changed, and no node, target or token can be added")]
    TooLong(#[from] codec::TooLong),
    /// The database could not be written.
    #[error("{0}")]
    Failed(String),
}

/// What `open` found or made.
pub struct Opened {
    /// For later changes.
    pub store: Store,
    /// The state as it was last put.
    pub state: State,
    /// The authority.
    pub authority: CertificateAuthority,
    /// Whether this start made the cluster.
    pub created: bool,
}

impl Store {
    /// Opens the directory; makes the cluster and its authority at the first start, unless another directory of this
    /// process is of a cluster already: then mgmt's is empty because its disk is not mounted.
    pub fn open(dir: &Path, others: Option<&OtherDir>) -> Result<Opened, StartError> {
        let fail = |why: &dyn Display, todo: &str| {
            StartError::new(format!("cannot open the mgmt directory {}", dir.display()), why, todo)
        };
        let io = |e: std::io::Error| fail(&e, "check that the directory exists, is mounted and may be written");
        let open = || {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            options
        };
        let lock = format::lock(dir)?;
        let ca_dir = dir.join(CA_DIR);
        let had_ca = ca_dir.join(CA_CERT_FILE).exists();
        let had_database = dir.join(DATABASE_FILE).exists();
        let record = match format::inspect(dir)? {
            DirState::Ours(record) => {
                format::verify(dir, &record, &EXPECTED)?;
                Some(record)
            }
            // Made by a version that gave mgmt's directory no identity, or a first start that was interrupted.
            DirState::Foreign(_) if had_ca || had_database => None,
            DirState::Foreign(name) => return Err(format::foreign(dir, &name)),
            DirState::Empty => None,
            DirState::Missing => return Err(format::missing(dir)),
        };
        if !had_database && (had_ca || record.is_some()) {
            let has = if had_ca { "a certificate authority" } else { "the identity of a cluster's mgmt" };
            return Err(fail(
                &format!("it holds {has} but no {DATABASE_FILE}"),
                "restore mgmt.redb from a backup; a new one would be a new cluster",
            ));
        }
        let not_mounted = |other: &OtherDir| {
            StartError::new(
                "refusing to make a new cluster",
                format!(
                    "{} is empty, but {} belongs to cluster {}",
                    dir.display(),
                    other.path.display(),
                    other.cluster
                ),
                "mount mgmt's disk there, or restore its directory from a backup; for a new cluster give every role an \
                 empty directory",
            )
        };
        if let Some(other) = others.filter(|_| !had_database) {
            return Err(not_mounted(other));
        }
        let database_file = open().open(dir.join(DATABASE_FILE)).map_err(io)?;
        let restore = "restore the directory from a backup";
        let database = redb::backends::FileBackend::new(database_file)
            .and_then(|file| redb::Builder::new().create_with_backend(file))
            .map_err(|e| fail(&e, restore))?;
        let found = read(&database).map_err(|e| match e {
            Unreadable::Newer(e) => fail(&format!("the state in {DATABASE_FILE}: {e}"), version::UPGRADE),
            Unreadable::Damaged(why) => fail(&format!("the state in {DATABASE_FILE}: {why}"), restore),
        })?;
        if let Some(StateRecord { state, ca_fingerprint: Some(fingerprint) }) = found {
            let authority = read_authority(&ca_dir).map_err(|e| fail(&e, "restore the directory ca from a backup"))?;
            if authority.fingerprint() != fingerprint {
                let why = "the certificate authority in ca is not the one of this cluster";
                return Err(fail(&why, "restore the directory ca from a backup"));
            }
            let cluster = state.map().cluster;
            match &record {
                Some(record) if record.cluster != cluster => {
                    let why = format!("{DATABASE_FILE} is of cluster {cluster}, the directory of {}", record.cluster);
                    return Err(fail(&why, restore));
                }
                Some(_) => {}
                None => {
                    write_identity(dir, cluster)?;
                    tracing::info!("gave the mgmt directory {} its identity: cluster {cluster}", dir.display());
                }
            }
            let store = Store { database, ca_fingerprint: fingerprint, fenced: false, _lock: lock };
            return Ok(Opened { store, state, authority, created: false });
        }
        if found.is_none() && had_ca {
            return Err(fail(&"it holds a certificate authority, but mgmt.redb is empty", restore));
        }
        if record.is_some() {
            return Err(fail(&"it belongs to a cluster, but mgmt.redb is empty or half made", restore));
        }
        if let Some(other) = others {
            return Err(not_mounted(other));
        }

        let state = found.map_or_else(|| State::new(ClusterId::random()), |record| record.state);
        let again = "free space or repair the disk, then start again";
        let authority = CertificateAuthority::generate(state.map().cluster).map_err(|e| fail(&e, "start again"))?;
        write(&database, &state, None).map_err(|e| fail(&e, again))?;
        write_authority(&ca_dir, &authority).map_err(|e| fail(&e, again))?;
        durable::sync_dir(dir).map_err(io)?;
        let ca_fingerprint = authority.fingerprint();
        write(&database, &state, Some(ca_fingerprint)).map_err(|e| fail(&e, again))?;
        // Last: a directory with an identity holds a whole cluster.
        write_identity(dir, state.map().cluster)?;
        let store = Store { database, ca_fingerprint, fenced: false, _lock: lock };
        Ok(Opened { store, state, authority, created: true })
    }

    /// Keeps the state; durable on return. A state too large to be read again is refused and nothing has changed. After
    /// any other failure every further call fails until the directory is reopened.
    pub fn put(&mut self, state: &State) -> Result<(), PutError> {
        if self.fenced {
            let why = "an earlier write failed; restart mgmt after its disk has been repaired";
            return Err(PutError::Failed(why.to_owned()));
        }
        let result = write(&self.database, state, Some(self.ca_fingerprint));
        if let Err(PutError::Failed(_)) = result {
            self.fenced = true;
        }
        result
    }

    /// Whether a write has failed.
    pub fn is_fenced(&self) -> bool {
        self.fenced
    }
}

fn write_identity(dir: &Path, cluster: ClusterId) -> Result<(), StartError> {
    format::write_format(dir, &FormatRecord::new(dir, cluster, MGMT, None, Uuid::new_v4())?)
}

fn read(database: &Database) -> Result<Option<StateRecord>, Unreadable> {
    let text = |e: redb::Error| Unreadable::Damaged(e.to_string());
    let transaction = database.begin_read().map_err(|e| text(e.into()))?;
    let table = match transaction.open_table(TABLE) {
        Ok(table) => table,
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
        Err(e) => return Err(text(e.into())),
    };
    let Some(bytes) = table.get(STATE_KEY).map_err(|e| text(e.into()))? else { return Ok(None) };
    let Some((format, record)) = bytes.value().split_first_chunk::<4>() else {
        return Err(Unreadable::Damaged("it is cut short".to_owned()));
    };
    version::check(u32::from_le_bytes(*format), STATE_FORMAT)?;
    codec::decode(record).map(Some).map_err(|e| Unreadable::Damaged(e.to_string()))
}

fn write(database: &Database, state: &State, ca_fingerprint: Option<[u8; 32]>) -> Result<(), PutError> {
    let record = StateRecord { state: state.clone(), ca_fingerprint };
    let mut bytes = STATE_FORMAT.to_le_bytes().to_vec();
    bytes.extend_from_slice(&codec::encode_bounded(&record)?);
    write_bytes(database, &bytes).map_err(PutError::Failed)
}

fn write_bytes(database: &Database, bytes: &[u8]) -> Result<(), String> {
    let commit = || -> Result<(), redb::Error> {
        let mut transaction = database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        transaction.set_quick_repair(true);
        transaction.open_table(TABLE)?.insert(STATE_KEY, bytes)?;
        transaction.commit()?;
        Ok(())
    };
    commit().map_err(|e| e.to_string())
}

fn read_authority(dir: &Path) -> Result<CertificateAuthority, String> {
    let text = |name: &str| {
        let path = dir.join(name);
        std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))
    };
    CertificateAuthority::from_pem(&text(CA_CERT_FILE)?, &text(CA_KEY_FILE)?).map_err(|e| e.to_string())
}

fn write_authority(dir: &Path, authority: &CertificateAuthority) -> Result<(), std::io::Error> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    for (name, text) in [(CA_KEY_FILE, authority.key_pem()), (CA_CERT_FILE, authority.cert_pem())] {
        durable::write_file(&dir.join(name), text.as_bytes(), durable::SECRET)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::state::Command;
    use super::*;
    use std::fs::File;

    #[test]
    fn reopen_gives_back_state_and_authority() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = Store::open(dir.path(), None).unwrap();
        assert!(first.created);
        let make = Command::MakeToken {
            id: [1; 8],
            secret: [2; 16],
            roles: vec![Role::Client],
            valid_seconds: None,
            uses: Some(3),
        };
        first.state.apply(5, make).unwrap();
        first.store.put(&first.state).unwrap();
        let fingerprint = first.authority.fingerprint();
        assert!(Store::open(dir.path(), None).is_err(), "locked");
        drop(first.store);
        let second = Store::open(dir.path(), None).unwrap();
        assert!(!second.created);
        assert_eq!(second.state, first.state);
        assert_eq!(second.authority.fingerprint(), fingerprint);
    }

    #[test]
    fn open_refuses_when_state_or_authority_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        drop(Store::open(dir.path(), None).unwrap());
        let database = dir.path().join(DATABASE_FILE);
        let aside = dir.path().join("aside");
        std::fs::rename(&database, &aside).unwrap();
        assert!(Store::open(dir.path(), None).is_err_and(|e| e.why.contains("no mgmt.redb")));
        File::create(&database).unwrap();
        assert!(Store::open(dir.path(), None).is_err(), "empty database");
        std::fs::rename(&aside, &database).unwrap();
        std::fs::remove_file(dir.path().join(CA_DIR).join(CA_KEY_FILE)).unwrap();
        assert!(Store::open(dir.path(), None).is_err_and(|e| e.todo.contains("ca")));
    }

    #[test]
    fn open_finishes_an_interrupted_first_start() {
        let dir = tempfile::tempdir().unwrap();
        let first = Store::open(dir.path(), None).unwrap();
        write(&first.store.database, &first.state, None).unwrap();
        std::fs::remove_file(dir.path().join(format::FORMAT_FILE)).unwrap();
        drop(first.store);
        let second = Store::open(dir.path(), None).unwrap();
        assert!(second.created);
        assert_eq!(second.state.map().cluster, first.state.map().cluster);
    }

    #[test]
    fn the_directory_has_an_identity_that_is_checked() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = Store::open(dir.path(), None).unwrap().state.map().cluster;
        let file = dir.path().join(format::FORMAT_FILE);
        let identity = || match format::inspect(dir.path()).unwrap() {
            DirState::Ours(record) => record,
            other => panic!("{other:?}"),
        };
        assert_eq!((identity().cluster, identity().role, identity().node), (cluster, Role::Mgmt, MGMT));
        let text = std::fs::read_to_string(&file).unwrap();

        // An older version made none: given one.
        std::fs::remove_file(&file).unwrap();
        assert!(!Store::open(dir.path(), None).unwrap().created);
        assert_eq!(identity().cluster, cluster);

        // Another role's directory, another file system, another cluster.
        for (from, to) in [
            ("role = \"mgmt\"", "role = \"meta\""),
            ("created", "fs_uuid = \"0123\"\ncreated"),
            (cluster.to_string().as_str(), ClusterId::random().to_string().as_str()),
        ] {
            let other: String =
                text.lines().filter(|l| !l.starts_with("fs_uuid")).fold(String::new(), |t, l| t + l + "\n");
            std::fs::write(&file, other.replace(from, to)).unwrap();
            assert!(Store::open(dir.path(), None).is_err(), "{to}");
        }
        std::fs::write(&file, &text).unwrap();
        assert_eq!(Store::open(dir.path(), None).unwrap().state.map().cluster, cluster);
        for name in [DATABASE_FILE, "ca/cert.pem"] {
            std::fs::remove_file(dir.path().join(name)).unwrap();
            assert!(Store::open(dir.path(), None).is_err_and(|e| e.todo.contains("new cluster")), "{name}");
            assert!(!dir.path().join(DATABASE_FILE).exists());
        }
    }

    #[test]
    fn no_new_cluster_beside_directories_of_a_cluster_or_in_a_foreign_directory() {
        let dir = tempfile::tempdir().unwrap();
        let other = OtherDir { path: "/disk/meta".into(), cluster: ClusterId::random() };
        let refused = Store::open(dir.path(), Some(&other)).err().unwrap();
        assert!(refused.why.contains("/disk/meta") && refused.why.contains(&other.cluster.to_string()));
        assert!(refused.todo.contains("mount"));
        assert!(!dir.path().join(DATABASE_FILE).exists());
        // An interrupted first start has made no directory of another role.
        File::create(dir.path().join(DATABASE_FILE)).unwrap();
        assert!(Store::open(dir.path(), Some(&other)).is_err_and(|e| e.todo.contains("mount")));
        let first = Store::open(dir.path(), None).unwrap();
        assert!(first.created);
        drop(first);
        assert!(!Store::open(dir.path(), Some(&other)).unwrap().created);

        let foreign = tempfile::tempdir().unwrap();
        std::fs::write(foreign.path().join("letter.txt"), "x").unwrap();
        assert!(Store::open(foreign.path(), None).is_err_and(|e| e.why.contains("letter.txt")));
    }

    #[test]
    fn a_newer_state_is_told_from_a_damaged_one() {
        let dir = tempfile::tempdir().unwrap();
        let refusal = |bytes: &[u8]| {
            let database = Database::create(dir.path().join(DATABASE_FILE)).unwrap();
            write_bytes(&database, bytes).unwrap();
            drop(database);
            Store::open(dir.path(), None).err().unwrap()
        };
        let newer = refusal(&[2, 0, 0, 0, 77]);
        assert!(newer.why.contains("version 2") && newer.why.contains("up to 1") && newer.why.contains("mgmt.redb"));
        assert!(newer.todo.contains("upgrade"));
        for damaged in [&[1, 0, 0, 0, 77][..], &[0, 0, 0, 0], &[1, 0]] {
            assert!(refusal(damaged).todo.contains("backup"));
        }
    }

    #[test]
    fn secrets_are_readable_by_the_owner_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        drop(Store::open(dir.path(), None).unwrap());
        for name in [DATABASE_FILE, "ca/key.pem"] {
            assert_eq!(std::fs::metadata(dir.path().join(name)).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
        }
    }
}
