//! How a command finds mgmt and a certificate to show there.
//!
//! Each running process leaves a file in `/run/beeswarm` (`BEESWARM_RUN_DIR`) that says where mgmt is and where its
//! certificate lies. A command takes, in this order: its flags and their environment, the mount point that it is run in,
//! the files of running processes (mgmt's own first: its certificate is the admin's), the files in /etc/beeswarm.

use super::{Common, entry};
use crate::base::{durable, ids::Role, start::StartError};
use crate::config::{Layer, with_port};
use crate::limits;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// What a running process says about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    /// `address:port` of mgmt.
    pub mgmt: String,
    /// Directory of the certificate that commands shall use.
    pub identity: PathBuf,
    /// Roles of the process.
    pub roles: Vec<Role>,
    /// Mount point of its client.
    pub mount: Option<PathBuf>,
}

/// A run file; removed when dropped.
#[derive(Debug)]
pub struct RunFile(PathBuf);

impl RunFile {
    /// Writes the file of this process, readable by its user only.
    pub fn write(record: &RunRecord) -> io::Result<Self> {
        let dir = run_dir();
        fs::DirBuilder::new().recursive(true).mode(0o755).create(&dir)?;
        let path = dir.join(format!("{}.json", std::process::id()));
        durable::write_file(&path, &serde_json::to_vec_pretty(record)?, durable::SECRET)?;
        Ok(Self(path))
    }
}

impl Drop for RunFile {
    fn drop(&mut self) {
        // What stays behind is recognised by its process being gone.
        let _ = fs::remove_file(&self.0);
    }
}

fn run_dir() -> PathBuf {
    std::env::var_os("BEESWARM_RUN_DIR").map_or_else(|| PathBuf::from("/run/beeswarm"), PathBuf::from)
}

/// Records of processes that run, those with an admin certificate first.
fn running() -> Vec<RunRecord> {
    let Ok(entries) = fs::read_dir(run_dir()) else { return Vec::new() };
    let mut records: Vec<RunRecord> = entries.flatten().filter_map(|entry| alive(&entry.path())).collect();
    records.sort_by_key(|record| !record.roles.contains(&Role::Mgmt));
    records
}

fn alive(path: &Path) -> Option<RunRecord> {
    let pid: u32 = path.file_name()?.to_str()?.strip_suffix(".json")?.parse().ok()?;
    if !Path::new("/proc").join(pid.to_string()).exists() {
        return None;
    }
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// mgmt's address as text and the directory of the certificate.
pub fn find(common: &Common) -> Result<(String, PathBuf), StartError> {
    let mut mgmt = common.mgmt.clone();
    let mut identity = common.identity.clone();
    let mut candidates: Vec<(Option<String>, Option<PathBuf>)> = Vec::new();
    if mgmt.is_none() || identity.is_none() {
        candidates.extend(mounted_here());
        candidates.extend(running().into_iter().map(|r| (Some(r.mgmt), Some(r.identity))));
        candidates.extend(configured());
    }
    for (address, dir) in candidates {
        // A certificate fits only the cluster that it was found with.
        if identity.is_none()
            && (common.mgmt.is_none() || address.as_deref().is_some_and(|a| same_host(a, common.mgmt.as_deref())))
        {
            identity = dir.filter(|dir| readable(dir));
        }
        if mgmt.is_none() {
            mgmt = address;
        }
        if mgmt.is_some() && identity.is_some() {
            break;
        }
    }
    let Some(mgmt) = mgmt else {
        return Err(StartError::new(
            "find the cluster",
            "no flag, environment, mount point, running process of this user or file in /etc/beeswarm says where mgmt is",
            "Add -m HOST --identity DIR, or run the command as root on a machine of the cluster.",
        ));
    };
    let Some(identity) = identity else {
        return Err(StartError::new(
            format!("use mgmt at {mgmt}"),
            "no readable certificate of that cluster was found",
            "Add --identity DIR (on mgmt's machine: the directory 'admin' in its state directory), or run the command as root.",
        ));
    };
    Ok((with_port(&mgmt, limits::PORT_MGMT), identity))
}

fn readable(dir: &Path) -> bool {
    fs::File::open(dir.join("node.key")).is_ok()
}

fn same_host(found: &str, wanted: Option<&str>) -> bool {
    wanted.is_some_and(|wanted| with_port(wanted, limits::PORT_MGMT) == with_port(found, limits::PORT_MGMT))
}

/// What the mount says that the current directory lies on.
fn mounted_here() -> Option<(Option<String>, Option<PathBuf>)> {
    #[derive(Deserialize)]
    struct Mounted {
        mgmt: Option<String>,
        identity: Option<PathBuf>,
    }
    if let Ok(text) = entry::read_attribute(Path::new("."), "beeswarm.mount")
        && let Ok(mounted) = serde_json::from_slice::<Mounted>(&text)
    {
        return Some((mounted.mgmt, mounted.identity));
    }
    let here = std::env::current_dir().ok()?;
    let record = running().into_iter().find(|r| r.mount.as_ref().is_some_and(|mount| here.starts_with(mount)))?;
    Some((Some(record.mgmt), Some(record.identity)))
}

/// What the configuration files say.
fn configured() -> Vec<(Option<String>, Option<PathBuf>)> {
    let Ok(entries) = fs::read_dir("/etc/beeswarm") else { return Vec::new() };
    let mut files: Vec<PathBuf> =
        entries.flatten().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "toml")).collect();
    files.sort();
    let mut found = Vec::new();
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else { continue };
        let Ok(layer) = Layer::from_toml(&file, &text) else { continue };
        let first = |key: &str| layer.values.get(key).and_then(|words| words.first()).cloned();
        let is_mgmt = first("role").is_some_and(|role| role.contains("mgmt"));
        let dir = first("path").map(PathBuf::from);
        if is_mgmt {
            found.insert(0, (Some("127.0.0.1".to_owned()), dir.map(|d| d.join("admin"))));
        } else if let Some(mgmt) = first("mgmt") {
            found.push((Some(mgmt), dir.map(|d| d.join("identity"))));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_alone_are_enough() {
        let common = Common { mgmt: Some("host".into()), identity: Some("/dir".into()), json: false };
        assert_eq!(find(&common).expect("found"), ("host:9008".to_owned(), PathBuf::from("/dir")));
    }

    #[test]
    fn run_file_of_a_gone_process_is_ignored() {
        let dir = tempfile::tempdir().expect("directory");
        let record =
            RunRecord { mgmt: "127.0.0.1:9008".into(), identity: "/x".into(), roles: vec![Role::Mgmt], mount: None };
        let text = serde_json::to_vec(&record).expect("encodes");
        let (here, gone) =
            (dir.path().join(format!("{}.json", std::process::id())), dir.path().join("4294967295.json"));
        fs::write(&here, &text).expect("write");
        fs::write(&gone, &text).expect("write");
        assert_eq!(alive(&here), Some(record));
        assert_eq!(alive(&gone), None);
    }
}
