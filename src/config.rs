//! The configuration of a process: flags before environment before file before defaults.
//!
//! Each source is a `Layer` of words under the same keys; `Config::resolve` takes each key from the first layer that has
//! it, parses it, and says in an error which source the bad word came from. A `Config` holds valid values only.

use crate::base::{
    ids::{NodeNumber, Role, TargetId},
    start::StartError,
};
use crate::limits;
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

/// Every key: name (flag `--name`, environment `BEESWARM_NAME`, file `name`), and whether it is a list.
pub const KEYS: &[(&str, bool)] = &[
    ("role", true),
    ("path", true),
    ("node-id", false),
    ("node-name", false),
    ("target-id", true),
    ("mgmt", false),
    ("listen", false),
    ("mount", false),
    ("targets", false),
    ("join-token-file", false),
    ("log-level", false),
    ("call-timeout", false),
    ("read-only", false),
];

/// One source of settings.
#[derive(Clone, Debug, Default)]
pub struct Layer {
    /// For messages: `the command line`, `the environment`, or the file.
    pub source: String,
    /// Words by key.
    pub values: BTreeMap<&'static str, Vec<String>>,
}

impl Layer {
    /// An empty one.
    pub fn new(source: impl Into<String>) -> Self {
        Self { source: source.into(), values: BTreeMap::new() }
    }

    /// Adds words; none: nothing is set. Words of a list other than `path` may themselves be lists with commas.
    pub fn set(&mut self, key: &'static str, words: Vec<String>) {
        if !words.is_empty() {
            self.values.insert(key, words);
        }
    }

    /// What the environment says (`BEESWARM_NODE_ID` and so on; several paths with commas).
    pub fn from_env(get: impl Fn(&str) -> Option<String>) -> Self {
        let mut layer = Self::new("the environment");
        for &(key, list) in KEYS {
            let name = env_name(key);
            let Some(text) = get(&name).filter(|text| !text.is_empty()) else { continue };
            let words = if list { text.split(',').map(str::to_owned).collect() } else { vec![text] };
            layer.set(key, words);
        }
        layer
    }

    /// What a file in TOML says. An unknown key is an error that names the nearest known one.
    pub fn from_toml(file: &Path, text: &str) -> Result<Self, StartError> {
        let shown = file.display();
        let what = format!("configuration {shown}");
        let table: toml::Table = toml::from_str(text).map_err(|e| {
            StartError::new(&what, e.to_string().trim_end(), "Correct the file; the ones in conf/ are examples.")
        })?;
        let mut layer = Self::new(shown.to_string());
        for (name, value) in table {
            let Some(&(key, list)) = KEYS.iter().find(|(key, _)| *key == name) else {
                let todo = format!("Did you mean '{}'?", nearest_key(&name));
                return Err(StartError::new(&what, format!("unknown key '{name}'"), todo));
            };
            let words = match value {
                toml::Value::Array(items) if list => items.iter().map(word).collect::<Option<Vec<_>>>(),
                other => word(&other).map(|w| vec![w]),
            };
            let Some(words) = words else {
                let wanted =
                    if list { "a string, a number or a list of them" } else { "a string, a number or true/false" };
                return Err(StartError::new(
                    &what,
                    format!("key '{name}' has a value of the wrong kind"),
                    format!("Give {wanted}."),
                ));
            };
            layer.set(key, words);
        }
        Ok(layer)
    }
}

fn word(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(s) => Some(s.clone()),
        toml::Value::Integer(n) => Some(n.to_string()),
        toml::Value::Boolean(b) => Some(b.to_string()),
        _ => None,
    }
}

fn env_name(key: &str) -> String {
    format!("BEESWARM_{}", key.to_ascii_uppercase().replace('-', "_"))
}

/// The known key that differs from `name` by the fewest edits.
pub fn nearest_key(name: &str) -> &'static str {
    let name = name.to_ascii_lowercase().replace('_', "-");
    KEYS.iter().map(|(key, _)| *key).min_by_key(|key| edits(&name, key)).unwrap_or("role")
}

/// Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut previous = vec![i + 1];
        for (j, cb) in b.iter().enumerate() {
            let substitute = row.get(j).copied().unwrap_or(0) + usize::from(ca != *cb);
            let delete = row.get(j + 1).copied().unwrap_or(0) + 1;
            let insert = previous.last().copied().unwrap_or(0) + 1;
            previous.push(substitute.min(delete).min(insert));
        }
        row = previous;
    }
    row.last().copied().unwrap_or(0)
}

/// A valid configuration of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Roles, servers first in the order mgmt, meta, storage, client.
    pub roles: Vec<Role>,
    /// `--role all`: a whole cluster in one process.
    pub all: bool,
    /// Directories, in order given.
    pub paths: Vec<PathBuf>,
    /// Number wanted for the roles of this process.
    pub node_id: Option<NodeNumber>,
    /// Alias; none: the host's name.
    pub node_name: Option<String>,
    /// Numbers wanted for the targets, in the order of their directories.
    pub target_ids: Vec<TargetId>,
    /// `host` or `host:port` of mgmt.
    pub mgmt: Option<String>,
    /// Where to bind; port 0: the role's own.
    pub listen: Option<SocketAddr>,
    /// Where the client mounts.
    pub mount: Option<PathBuf>,
    /// Number of target directories made below a shared directory.
    pub targets: Option<u16>,
    /// Where the join token lies.
    pub join_token_file: Option<PathBuf>,
    /// Filter of the log.
    pub log_level: String,
    /// How long a call waits for a server that is away.
    pub call_timeout: Duration,
    /// Mount without write access.
    pub read_only: bool,
}

struct Layers<'a>(&'a [Layer]);

impl Layers<'_> {
    fn words(&self, key: &str) -> Option<(&str, &[String])> {
        self.0.iter().find_map(|layer| layer.values.get(key).map(|words| (layer.source.as_str(), words.as_slice())))
    }

    fn one<T>(&self, key: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, StartError> {
        let Some((source, words)) = self.words(key) else { return Ok(None) };
        let text = words.last().map(String::as_str).unwrap_or_default();
        parse(text).map(Some).map_err(|why| bad(source, key, &why))
    }

    fn list<T>(&self, key: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, StartError> {
        let Some((source, words)) = self.words(key) else { return Ok(Vec::new()) };
        let words = words.iter().flat_map(|w| w.split(',')).map(str::trim).filter(|w| !w.is_empty());
        words.map(|w| parse(w).map_err(|why| bad(source, key, &why))).collect()
    }
}

fn bad(source: &str, key: &str, why: &str) -> StartError {
    StartError::new(format!("setting '{key}' of {source}"), why, "`beeswarm --help` explains each setting.")
}

impl Config {
    /// The first layer that has a key decides it.
    pub fn resolve(layers: &[Layer]) -> Result<Self, StartError> {
        let from = Layers(layers);
        let words = from.list("role", |w| Ok(w.to_owned()))?;
        let all = words.iter().any(|w| w == "all");
        let mut roles: Vec<Role> = if all {
            vec![Role::Mgmt, Role::Meta, Role::Storage]
        } else {
            from.list("role", |w| match w.parse() {
                Ok(Role::Admin) | Err(_) => Err(format!("unknown role '{w}': use mgmt, meta, storage, client or all")),
                Ok(role) => Ok(role),
            })?
        };
        let mount: Option<PathBuf> = from.one("mount", absolute)?;
        if all && mount.is_some() {
            roles.push(Role::Client);
        }
        roles.sort();
        roles.dedup();
        if roles.is_empty() {
            return Err(StartError::new(
                "start",
                "no role given",
                "Say what this process is: --role mgmt, meta, storage, client or all. `beeswarm --help` shows more.",
            ));
        }
        let paths = match from.words("path") {
            Some((source, words)) => words
                .iter()
                .map(|w| absolute(w).map_err(|why| bad(source, "path", &why)))
                .collect::<Result<Vec<_>, _>>()?,
            None => Vec::new(),
        };
        let config = Self {
            all,
            paths,
            node_id: from.one("node-id", |w| positive(w).map(NodeNumber))?,
            node_name: from.one("node-name", |w| Ok(w.to_owned()))?,
            target_ids: from.list("target-id", |w| positive(w).map(TargetId))?,
            mgmt: from.one("mgmt", |w| if w.is_empty() { Err("is empty".into()) } else { Ok(w.to_owned()) })?,
            listen: from.one("listen", parse_listen)?,
            targets: from.one("targets", |w| match w.parse::<u16>() {
                Ok(n @ 1..=64) => Ok(n),
                _ => Err(format!("'{w}' is not a number from 1 to 64")),
            })?,
            join_token_file: from.one("join-token-file", absolute)?,
            log_level: from.one("log-level", |w| Ok(w.to_owned()))?.unwrap_or_else(|| "info".into()),
            call_timeout: from
                .one("call-timeout", |w| positive(w).map(|n| Duration::from_secs(u64::from(n))))?
                .unwrap_or(Duration::from_secs(limits::CALL_WAIT_SECONDS_DEFAULT)),
            read_only: from
                .one("read-only", |w| w.parse().map_err(|_| format!("'{w}' is neither true nor false")))?
                .unwrap_or(false),
            mount,
            roles,
        };
        config.check()?;
        Ok(config)
    }

    /// Settings that do not go together.
    fn check(&self) -> Result<(), StartError> {
        let error = |why: &str, todo: &str| Err(StartError::new("start", why, todo));
        let servers = self.roles.iter().any(|r| *r != Role::Client);
        if self.has(Role::Client) && self.mount.is_none() {
            return error("a client needs a mount point", "Add --mount DIR.");
        }
        if !self.has(Role::Client) && self.mount.is_some() {
            return error("--mount is for a client, and no client role is given", "Add client to --role.");
        }
        if servers && self.paths.is_empty() {
            return error("a server needs a directory for its state", "Add -p DIR (for storage one -p per target).");
        }
        if !self.has(Role::Mgmt) && self.mgmt.is_none() {
            return error(
                "it is not known where mgmt runs",
                "Add -m HOST (or HOST:PORT), or mgmt = \"HOST\" to the conf file.",
            );
        }
        if self.roles.len() == 1 && !self.has(Role::Storage) && self.paths.len() > 1 {
            return error("several directories are given, and only storage has several", "Give one -p.");
        }
        if self.all && self.paths.len() > 1 {
            return error(
                "--role all uses one directory",
                "Give one -p; --targets N says how many targets are made in it.",
            );
        }
        if !self.target_ids.is_empty() && !self.has(Role::Storage) {
            return error("target numbers are for storage", "Leave -i away.");
        }
        Ok(())
    }

    /// Is this one of the roles?
    pub fn has(&self, role: Role) -> bool {
        self.roles.contains(&role)
    }

    /// UDP address to bind: `--listen`, else the first role's port on all IPv4 addresses; for `--role all` on loopback
    /// only, for a client alone any free port.
    pub fn bind_addr(&self) -> SocketAddr {
        let port = match self.roles.first() {
            Some(Role::Mgmt) => limits::PORT_MGMT,
            Some(Role::Meta) => limits::PORT_META,
            Some(Role::Storage) => limits::PORT_STORAGE,
            _ => 0,
        };
        match self.listen {
            Some(addr) if addr.port() == 0 => SocketAddr::new(addr.ip(), port),
            Some(addr) => addr,
            None if self.all => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port),
            None => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port),
        }
    }
}

fn positive(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(format!("'{text}' is not a number above 0")),
    }
}

fn absolute(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() {
        return Err("is empty".into());
    }
    std::path::absolute(text).map_err(|e| format!("'{text}': {e}"))
}

/// `10.0.0.1`, `10.0.0.1:9008`, `::1`, `[::1]:9008`.
fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    if let Ok(addr) = text.parse() {
        return Ok(addr);
    }
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    let ip: IpAddr =
        bare.parse().map_err(|_| format!("'{text}' is not an address such as 10.0.0.1 or 10.0.0.1:9008"))?;
    Ok(SocketAddr::new(ip, 0))
}

/// Adds the port if `host[:port]` has none.
pub fn with_port(host: &str, port: u16) -> String {
    if host.parse::<SocketAddr>().is_ok() {
        return host.to_owned();
    }
    if let Ok(ip) = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>() {
        return SocketAddr::new(ip, port).to_string();
    }
    match host.rsplit_once(':') {
        Some((_, p)) if p.parse::<u16>().is_ok() => host.to_owned(),
        _ => format!("{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(source: &str, pairs: &[(&'static str, &str)]) -> Layer {
        let mut layer = Layer::new(source);
        for (key, value) in pairs {
            layer.set(key, vec![(*value).to_owned()]);
        }
        layer
    }

    #[test]
    fn resolve_takes_each_key_from_the_first_layer_that_has_it() {
        let flags = layer("the command line", &[("role", "meta"), ("node-id", "3")]);
        let env = Layer::from_env(|name| match name {
            "BEESWARM_NODE_ID" => Some("4".into()),
            "BEESWARM_MGMT" => Some("env-host".into()),
            "BEESWARM_CALL_TIMEOUT" => Some(String::new()),
            _ => None,
        });
        let file = Layer::from_toml(
            Path::new("x.toml"),
            "node-id = 5\nmgmt = 'file-host'\npath = ['/srv/meta']\ncall-timeout = 7",
        )
        .expect("file");
        let config = Config::resolve(&[flags, env, file]).expect("valid");
        assert_eq!(config.node_id, Some(NodeNumber(3)));
        assert_eq!(config.mgmt.as_deref(), Some("env-host"));
        assert_eq!(config.paths, [PathBuf::from("/srv/meta")]);
        assert_eq!(config.call_timeout, Duration::from_secs(7));
        assert_eq!(config.log_level, "info");
        assert_eq!(config.bind_addr().port(), limits::PORT_META);
    }

    #[test]
    fn unknown_key_of_a_file_names_the_nearest() {
        let error = Layer::from_toml(Path::new("x.toml"), "node_id = 5").expect_err("unknown");
        assert!(error.to_string().contains("unknown key 'node_id'"), "{error}");
        assert!(error.to_string().contains("'node-id'"), "{error}");
        assert_eq!(nearest_key("mgmtd"), "mgmt");
        assert_eq!(nearest_key("call_timout"), "call-timeout");
    }

    #[test]
    fn error_names_its_source() {
        let error =
            Config::resolve(&[layer("the command line", &[("role", "mgmt"), ("path", "/x"), ("node-id", "zero")])]);
        assert!(error.expect_err("bad number").to_string().contains("'node-id' of the command line"));
        let error = Config::resolve(&[layer("the command line", &[("role", "mgmd"), ("path", "/x")])]);
        assert!(error.expect_err("bad role").to_string().contains("unknown role 'mgmd'"));
    }

    #[test]
    fn role_all_has_a_client_only_with_a_mount_point() {
        let all = Config::resolve(&[layer("f", &[("role", "all"), ("path", "/x")])]).expect("valid");
        assert_eq!(all.roles, [Role::Mgmt, Role::Meta, Role::Storage]);
        assert!(all.bind_addr().ip().is_loopback());
        let all = Config::resolve(&[layer("f", &[("role", "all"), ("path", "/x"), ("mount", "/m")])]).expect("valid");
        assert!(all.has(Role::Client));
    }

    #[test]
    fn client_without_mount_or_mgmt_is_refused() {
        assert!(Config::resolve(&[layer("f", &[("role", "client"), ("mgmt", "h")])]).is_err());
        assert!(Config::resolve(&[layer("f", &[("role", "client"), ("mount", "/m")])]).is_err());
        assert!(Config::resolve(&[layer("f", &[("role", "client"), ("mount", "/m"), ("mgmt", "h")])]).is_ok());
    }

    #[test]
    fn addresses_get_their_port() {
        assert_eq!(with_port("host", 9008), "host:9008");
        assert_eq!(with_port("host:1", 9008), "host:1");
        assert_eq!(with_port("10.0.0.1", 9008), "10.0.0.1:9008");
        assert_eq!(with_port("::1", 9008), "[::1]:9008");
        assert_eq!(with_port("[::1]:7", 9008), "[::1]:7");
        assert_eq!(parse_listen("10.0.0.1").map(|a| a.port()), Ok(0));
        assert!(parse_listen("here").is_err());
    }
}
