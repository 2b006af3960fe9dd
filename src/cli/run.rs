//! Starts the roles of a process, in this order: directories, identity, socket, mgmt, cluster view, registration,
//! storage, meta, client; and stops them in the reverse order, so that nothing loses a server that it still needs.

use super::discover::{RunFile, RunRecord};
use super::{join, start};
use crate::base::durable;
use crate::base::error::ErrorCode;
use crate::base::format::{self, DirLock, DirState, Expected, FormatRecord, IDENTITY_DIR, MAP_FILE};
use crate::base::ids::{ClusterId, NodeId, Role, TargetId, TargetUuid};
use crate::base::start::StartError;
use crate::config::Config;
use crate::fs::map::ClusterMap;
use crate::net::NetError;
use crate::net::cluster::{Capacities, Cluster, MGMT};
use crate::net::endpoint::Endpoint;
use crate::net::frame::CallContext;
use crate::net::identity::Identity;
use crate::net::msg::mgmt::{
    AnnouncedTarget, RegisterReply, RegisterRequest, TargetCapacity, TokenRequest, WantedNode,
};
use crate::net::router::Router;
use crate::roles::client::{self, Client, MountOptions};
use crate::roles::meta::MetaServer;
use crate::roles::mgmt::Mgmt;
use crate::roles::mgmt::store::OtherDir;
use crate::roles::storage::{OpenTarget, StorageServer};
use bytes::Bytes;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// How long a start waits for mgmt to answer the first time.
const REGISTER_WAIT: Duration = Duration::from_secs(60);
/// Targets that `--role all` makes when nothing is said.
const TARGETS_OF_ALL: u16 = 4;

/// Runs the process until it is told to stop.
pub fn run(config: Config) -> Result<(), StartError> {
    start::init_log(&config.log_level)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| StartError::new("start", e, "Check the limits of threads and open files (ulimit -a)."))?;
    let result = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let cancel = CancellationToken::new();
        let mut running = Running::new(config, cancel);
        let started = tokio::select! {
            started = running.start() => started,
            () = signals.next() => Ok(()),
        };
        if started.is_ok() && running.is_up {
            tokio::select! {
                () = signals.next() => tracing::info!("told to stop"),
                () = running.unmounted() => tracing::info!("somebody unmounted the client; stopping"),
            }
        }
        tokio::select! {
            () = running.stop() => {}
            () = signals.next() => tracing::warn!("told to stop again: not waiting for the rest"),
        }
        started
    });
    runtime.shutdown_timeout(Duration::from_secs(2));
    result
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, StartError> {
        let listen = |kind| signal(kind).map_err(|e| StartError::new("listen for signals", e, ""));
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Directories of a process by role.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Dirs {
    mgmt: PathBuf,
    meta: PathBuf,
    targets: Vec<PathBuf>,
    /// Where identity and map lie.
    own: PathBuf,
    /// For the join token of `--role all`.
    shared: Option<PathBuf>,
    /// This program may make directories that are not there.
    may_make: bool,
}

impl Dirs {
    fn of(config: &Config) -> Self {
        let first = match config.paths.first() {
            Some(path) => path.clone(),
            None => client_dir(config.mount.as_deref()),
        };
        if !config.all && config.roles.len() == 1 {
            // An absent target is more often a disk that is not mounted than a wish for a new one.
            let may_make = !config.has(Role::Storage);
            return Self {
                mgmt: first.clone(),
                meta: first.clone(),
                targets: config.paths.clone(),
                own: first,
                shared: None,
                may_make,
            };
        }
        let storage = first.join("storage");
        let targets = match (config.targets, config.paths.get(1..).unwrap_or_default()) {
            (_, given) if !given.is_empty() => given.to_vec(),
            (None, _) if !config.all => vec![storage],
            (n, _) => (1..=n.unwrap_or(TARGETS_OF_ALL)).map(|n| storage.join(format!("target{n}"))).collect(),
        };
        let own = match config.roles.first() {
            Some(Role::Mgmt) => first.join("node"),
            Some(Role::Meta) => first.join("meta"),
            _ => first.join("client"),
        };
        Self { mgmt: first.join("mgmt"), meta: first.join("meta"), targets, own, shared: Some(first), may_make: true }
    }
}

/// A client's own directory when none is given: one per mount point.
fn client_dir(mount: Option<&Path>) -> PathBuf {
    let escaped: String = mount
        .map(|m| {
            m.to_string_lossy()
                .trim_matches('/')
                .chars()
                .map(|c| if c.is_alphanumeric() || "._".contains(c) { c } else { '-' })
                .collect()
        })
        .unwrap_or_default();
    PathBuf::from(format!("/var/lib/beeswarm/client-{escaped}"))
}

/// A locked state directory, before its role is opened.
struct StateDir {
    path: PathBuf,
    record: Option<FormatRecord>,
    uuid: uuid::Uuid,
    lock: DirLock,
    /// The directory had no lock file before.
    made_lock: bool,
}

/// A start that was refused leaves an empty directory empty.
impl Drop for StateDir {
    fn drop(&mut self) {
        if self.record.is_none() && self.made_lock {
            let _ = fs::remove_file(self.path.join(format::LOCK_FILE));
        }
    }
}

impl StateDir {
    fn take(path: &Path, role: Role) -> Result<Self, StartError> {
        // Looked at before the lock as well: nothing is to be made in a directory of somebody else.
        match format::inspect(path)? {
            DirState::Missing => return Err(format::missing(path)),
            DirState::Foreign(name) => return Err(format::foreign(path, &name)),
            DirState::Empty | DirState::Ours(_) => {}
        }
        let made_lock = !path.join(format::LOCK_FILE).exists();
        let lock = format::lock(path)?;
        let record = match format::inspect(path)? {
            DirState::Ours(record) => {
                let expected = Expected { cluster: None, role, node: None, target: None };
                format::verify(path, &record, &expected)?;
                Some(record)
            }
            DirState::Empty => None,
            DirState::Foreign(name) => return Err(format::foreign(path, &name)),
            DirState::Missing => return Err(format::missing(path)),
        };
        let uuid = record.as_ref().map_or_else(uuid::Uuid::new_v4, |r| r.uuid);
        Ok(Self { path: path.to_owned(), record, uuid, lock, made_lock })
    }

    /// Compares the identity with what the cluster says, or writes it.
    fn settle(&mut self, cluster: ClusterId, node: NodeId, target: Option<TargetId>) -> Result<(), StartError> {
        match &self.record {
            Some(record) => {
                let expected = Expected { cluster: Some(cluster), role: node.role, node: Some(node), target };
                format::verify(&self.path, record, &expected)
            }
            None => {
                let record = FormatRecord::new(&self.path, cluster, node, target, self.uuid)?;
                format::write_format(&self.path, &record)?;
                match target {
                    Some(target) => say(&format!("made target {target} of {node} in {}", self.path.display())),
                    None => say(&format!("made the state of {node} in {}", self.path.display())),
                }
                self.record = Some(record);
                Ok(())
            }
        }
    }
}

/// A directory beside mgmt's that is of a cluster already.
fn other_dir<'a>(mut state: impl Iterator<Item = &'a StateDir>, dirs: &Dirs) -> Option<OtherDir> {
    let known = |d: &StateDir| Some(OtherDir { path: d.path.clone(), cluster: d.record.as_ref()?.cluster });
    state.find_map(known).or_else(|| {
        // In mgmt's own directory it says nothing about the others.
        let map = Cluster::saved_map(&dirs.own.join(MAP_FILE)).ok().flatten().filter(|_| dirs.own != dirs.mgmt)?;
        Some(OtherDir { path: dirs.own.clone(), cluster: map.cluster })
    })
}

/// A line for the person who started it.
fn say(line: &str) {
    use std::io::Write;
    // stdout may be closed; that is no reason to stop.
    let _ = writeln!(std::io::stdout(), "beeswarm {line}");
}

/// What runs; filled while starting, emptied while stopping.
struct Running {
    config: Config,
    cancel: CancellationToken,
    name: String,
    is_up: bool,
    /// Of the targets; meta and mgmt hold their own.
    locks: Vec<DirLock>,
    endpoint: Option<Endpoint>,
    serving: Option<tokio::task::JoinHandle<()>>,
    mgmt: Option<Arc<Mgmt>>,
    meta: Option<Arc<MetaServer>>,
    storage: Arc<OnceLock<Arc<StorageServer>>>,
    client: Option<Client>,
    run_file: Option<RunFile>,
    /// Where a certificate of this start lies that mgmt has not seen used yet.
    joined: Option<PathBuf>,
    /// Ends the cluster view; after the roles.
    view: CancellationToken,
}

impl Running {
    fn new(config: Config, cancel: CancellationToken) -> Self {
        let name = config.node_name.clone().unwrap_or_else(start::host_name);
        Self {
            config,
            cancel,
            name,
            is_up: false,
            locks: Vec::new(),
            endpoint: None,
            serving: None,
            mgmt: None,
            meta: None,
            storage: Arc::default(),
            client: None,
            run_file: None,
            joined: None,
            view: CancellationToken::new(),
        }
    }

    async fn start(&mut self) -> Result<(), StartError> {
        let config = self.config.clone();
        let dirs = Dirs::of(&config);
        // What can be refused without a look at the cluster, before anything is made.
        let bind = config.bind_addr();
        start::check_port(bind)?;
        if let Some(at) = &config.mount {
            client::check_mount_point(at).await?;
        }
        prepare_dirs(&config, &dirs)?;
        let meta_dir = if config.has(Role::Meta) { Some(StateDir::take(&dirs.meta, Role::Meta)?) } else { None };
        let mut targets = Vec::new();
        if config.has(Role::Storage) {
            for path in &dirs.targets {
                targets.push(StateDir::take(path, Role::Storage)?);
            }
        }
        if config.target_ids.len() > targets.len() {
            return Err(StartError::new(
                "start storage",
                "there are more target numbers than directories",
                "Give one -i per -p, in the same order.",
            ));
        }

        // Identity.
        let mut mgmt_addrs = match &config.mgmt {
            Some(host) if !config.has(Role::Mgmt) => start::lookup(host)?,
            _ => Vec::new(),
        };
        let identity = if config.has(Role::Mgmt) {
            let others = other_dir(meta_dir.iter().chain(&targets), &dirs);
            let mgmt = Mgmt::open(&dirs.mgmt, &self.name, others.as_ref())?;
            self.mgmt = Some(mgmt.clone());
            self.identity_from(&mgmt, &dirs)?
        } else {
            let dir = dirs.own.join(IDENTITY_DIR);
            let had = dir.exists();
            let identity = join::load_or_join(&config, &self.name, &dir, &mgmt_addrs).await?;
            self.joined = (!had).then(|| dirs.own.clone());
            identity
        };
        let identity = Arc::new(identity);
        let nodes = identity.nodes();

        // Socket and serving.
        let endpoint = Endpoint::bind(bind, identity.clone(), config.has(Role::Mgmt))
            .map_err(|e| start::cannot_listen(bind, e))?;
        let bound = endpoint.local_addr().map_err(|e| StartError::new("read the socket's address", e, ""))?;
        self.endpoint = Some(endpoint.clone());
        if self.joined.is_none() {
            check_trust(&endpoint, &mgmt_addrs).await?;
        }
        if config.has(Role::Mgmt) {
            let ip = if bound.ip().is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { bound.ip() };
            mgmt_addrs = vec![SocketAddr::new(ip, bound.port())];
        }
        let router = Router::new(config.roles.clone());
        let (serve_at, service, stop) = (endpoint.clone(), router.clone(), self.cancel.clone());
        self.serving = Some(tokio::spawn(async move { serve_at.serve(service, stop).await }));
        // Before the first line that says something is up: the operator's commands work from then on.
        self.leave_word(&dirs, &mgmt_addrs);
        if let Some(mgmt) = &self.mgmt {
            router.use_map(mgmt.watch());
            router.serve(Role::Mgmt, mgmt.clone());
            say(&format!("mgmt:1 ({}) is up: {bound}, cluster {}", self.name, mgmt.cluster()));
        }

        // View of the cluster.
        let map_file = dirs.own.join(MAP_FILE);
        let initial = self.initial_map(&identity, &map_file)?;
        let storage = self.storage.clone();
        let capacities: Capacities = Arc::new(move || storage.get().map(|s| s.capacities()).unwrap_or_default());
        let cluster = Cluster::start(
            endpoint.clone(),
            nodes.clone(),
            mgmt_addrs.clone(),
            initial,
            Some(map_file),
            capacities,
            self.view.clone(),
        );
        router.use_map(cluster.watch());
        tokio::spawn(join::renew_for_ever(
            endpoint.clone(),
            cluster.clone(),
            self.mgmt.clone(),
            dirs.own.join(IDENTITY_DIR),
            self.name.clone(),
            self.view.clone(),
        ));

        // Registration.
        let addrs = if config.roles == [Role::Client] { Vec::new() } else { start::announced(bound, &mgmt_addrs) };
        let request = RegisterRequest {
            nodes: nodes.clone(),
            name: self.name.clone(),
            addrs: addrs.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            targets: announce(&targets, &config)?,
        };
        let target_ids = self.register(&cluster, request, &targets).await?;
        cluster.follow();

        // Roles.
        let id_of = |role: Role| nodes.iter().find(|n| n.role == role).copied();
        if let Some(node) = id_of(Role::Storage) {
            let mut open = Vec::new();
            for (dir, id) in targets.iter_mut().zip(&target_ids) {
                dir.settle(identity.cluster, node, Some(*id))?;
                open.push(OpenTarget { id: *id, uuid: TargetUuid(dir.uuid), path: dir.path.clone() });
            }
            let shown: Vec<String> = open.iter().map(|t| format!("{}={}", t.id, t.path.display())).collect();
            let server = StorageServer::open(open, identity.cluster)?;
            router.serve(Role::Storage, server.clone());
            let _ = self.storage.set(server);
            say(&format!("{node} ({}) is up: {}, targets {}", self.name, list(&addrs), shown.join(" ")));
        }
        self.locks.extend(targets.iter().map(|dir| dir.lock.clone()));
        if let (Some(node), Some(mut dir)) = (id_of(Role::Meta), meta_dir) {
            dir.settle(identity.cluster, node, None)?;
            let server = MetaServer::open(&dir.path, dir.lock.clone(), identity.cluster, node, cluster.clone())?;
            router.serve(Role::Meta, server.clone());
            self.meta = Some(server);
            say(&format!("{node} ({}) is up: {}, state {}", self.name, list(&addrs), dir.path.display()));
        }
        if let (Some(node), Some(mount)) = (id_of(Role::Client), config.mount.clone()) {
            let options = MountOptions {
                wait: config.call_timeout,
                read_only: config.read_only,
                allow_other: rustix::process::geteuid().is_root(),
            };
            let shown = mount.display().to_string();
            self.client = Some(Client::mount(cluster.clone(), mount, options).await?);
            say(&format!("{node} ({}) is up: mounted on {shown}", self.name));
        }
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        self.is_up = true;
        Ok(())
    }

    /// With mgmt in the process: certificates for its roles and the operator, and the token of `--role all`.
    fn identity_from(&self, mgmt: &Mgmt, dirs: &Dirs) -> Result<Identity, StartError> {
        if mgmt.created() {
            say(&format!(
                "made the cluster {} and its certificate authority in {}",
                mgmt.cluster(),
                dirs.mgmt.display()
            ));
        }
        let admin_dir = dirs.mgmt.join("admin");
        let first = !admin_dir.exists();
        let admin = mgmt.issue_local(&[WantedNode { role: Role::Admin, number: None }], "admin")?;
        admin.save(&admin_dir).map_err(|e| {
            StartError::new("save the operator's certificate", e, "Check the disk and its permissions.")
        })?;
        if first {
            say(&format!("made the operator's certificate in {}", admin_dir.display()));
        }
        if let Some(shared) = dirs.shared.as_ref().filter(|_| self.config.all) {
            let file = shared.join("join.token");
            if !file.exists() {
                let roles = vec![Role::Meta, Role::Storage, Role::Client];
                let token = mgmt.make_token(&TokenRequest { roles, valid_seconds: None, uses: None })?;
                durable::create_file(&file, format!("{token}\n").as_bytes(), durable::SECRET).map_err(|e| {
                    StartError::new(format!("write {}", file.display()), e, "Check the disk and its permissions.")
                })?;
                say(&format!("made a join token for more machines in {}", file.display()));
            }
        } else if mgmt.created() {
            for line in mgmt.join_hint() {
                say(&line);
            }
        }
        let wanted: Vec<WantedNode> = self
            .config
            .roles
            .iter()
            .map(|&role| WantedNode { role, number: self.config.node_id.filter(|_| role != Role::Mgmt) })
            .collect();
        mgmt.issue_local(&wanted, &self.name)
    }

    fn initial_map(&self, identity: &Identity, file: &Path) -> Result<ClusterMap, StartError> {
        if let Some(mgmt) = &self.mgmt {
            return Ok((**mgmt.watch().borrow()).clone());
        }
        match Cluster::saved_map(file) {
            Ok(Some(map)) if map.cluster == identity.cluster => return Ok(map),
            Ok(_) => {}
            Err(e) => tracing::warn!("the saved cluster map {} is of no use: {e}; asking mgmt", file.display()),
        }
        Ok(ClusterMap { cluster: identity.cluster, ..ClusterMap::default() })
    }

    /// Registers with mgmt. When mgmt is away and the last map knows everything of this process, goes on and registers later.
    async fn register(
        &mut self,
        cluster: &Arc<Cluster>,
        request: RegisterRequest,
        dirs: &[StateDir],
    ) -> Result<Vec<TargetId>, StartError> {
        let map = cluster.map();
        let known: Vec<TargetId> = dirs.iter().filter_map(|d| d.record.as_ref()?.target).collect();
        let complete = known.len() == dirs.len()
            && request.nodes.iter().all(|n| map.node(*n).is_some())
            && known.iter().all(|id| map.target(*id).is_some());
        let wait = if complete { Duration::from_secs(5) } else { REGISTER_WAIT };
        let what = format!("register with {}", cluster.describe(MGMT));
        match cluster.call(MGMT, &CallContext::default(), &request, Bytes::new(), wait).await {
            Ok((RegisterReply { targets, map }, _)) => {
                cluster.offer_map(map);
                if targets.len() != dirs.len() {
                    return Err(StartError::new(
                        "register with mgmt",
                        "mgmt answered with another number of targets",
                        "Both must be of the same version.",
                    ));
                }
                Ok(targets)
            }
            Err(e) if complete && is_away(e) => {
                tracing::warn!("starting without mgmt, with map {}", map.version);
                let (cluster, view) = (cluster.clone(), self.view.clone());
                tokio::spawn(async move {
                    let ctx = CallContext::default();
                    let day = Duration::from_secs(86400);
                    while let Err(e) = cluster.call(MGMT, &ctx, &request, Bytes::new(), day).await {
                        if view.is_cancelled() || !is_away(e) {
                            tracing::error!("mgmt refused the registration: {e}; see its log");
                            return;
                        }
                    }
                });
                Ok(known)
            }
            Err(e) => {
                if !is_away(e)
                    && let Some(own) = self.joined.take()
                {
                    // The next start joins again.
                    let _ = fs::remove_dir_all(own.join(IDENTITY_DIR));
                    let _ = fs::remove_file(own.join(MAP_FILE));
                }
                Err(StartError::new(what, e, advice(e)))
            }
        }
    }

    /// For the commands on this host.
    fn leave_word(&mut self, dirs: &Dirs, mgmt: &[SocketAddr]) {
        let Some(mgmt) = mgmt.first() else { return };
        let identity = if self.config.has(Role::Mgmt) { dirs.mgmt.join("admin") } else { dirs.own.join(IDENTITY_DIR) };
        let record = RunRecord {
            mgmt: mgmt.to_string(),
            identity,
            roles: self.config.roles.clone(),
            mount: self.config.mount.clone(),
        };
        match RunFile::write(&record) {
            Ok(file) => self.run_file = Some(file),
            Err(e) => {
                tracing::info!("commands on this host will need -m and --identity: cannot write the run file: {e}")
            }
        }
    }

    /// Resolves when the mount of a process that is only a client has gone.
    async fn unmounted(&self) {
        match &self.client {
            Some(client) => {
                client.ended().await;
                if self.config.roles != [Role::Client] {
                    tracing::warn!("somebody unmounted the client; the servers go on");
                    std::future::pending::<()>().await;
                }
            }
            None => std::future::pending().await,
        }
    }

    async fn stop(&mut self) {
        if self.is_up {
            let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        }
        self.run_file = None;
        if let Some(client) = self.client.take() {
            client.unmount().await;
        }
        if let Some(storage) = self.storage.get() {
            storage.shutdown().await;
        }
        if let Some(meta) = self.meta.take() {
            meta.shutdown().await;
        }
        self.view.cancel();
        if let Some(mgmt) = self.mgmt.take() {
            mgmt.shutdown().await;
        }
        self.cancel.cancel();
        if let Some(serving) = self.serving.take() {
            let _ = serving.await;
        }
        if let Some(endpoint) = self.endpoint.take() {
            endpoint.close().await;
        }
        self.locks.clear();
        if self.is_up {
            say("stopped");
        }
    }
}

/// Refuses when every process that -m names shows or wants a certificate of another cluster, or is not mgmt: unlike one that
/// is away, it does not become the right one. The map of an earlier run may know a better address; -m is wrong all the same.
async fn check_trust(endpoint: &Endpoint, mgmt: &[SocketAddr]) -> Result<(), StartError> {
    let mut last = None;
    for addr in mgmt {
        match endpoint.connect(*addr, MGMT).await {
            Err(NetError::Untrusted(why)) => last = Some(why),
            Ok(connection) => {
                connection.close("checked");
                return Ok(());
            }
            Err(_) => return Ok(()),
        }
    }
    last.map_or(Ok(()), |why| {
        let todo =
            "Correct -m, or the directory of this node: both must be of the same cluster. The log there says more.";
        Err(StartError::new("use mgmt", why, todo))
    })
}

fn is_away(error: ErrorCode) -> bool {
    use crate::base::error::ErrorClass;
    matches!(error.class(), ErrorClass::Retryable | ErrorClass::OutcomeUnknown)
}

/// What to do about a refused registration.
fn advice(error: ErrorCode) -> &'static str {
    match error {
        ErrorCode::Conflict => {
            "The number or the directory is known to the cluster as somebody else's; or a known target's directory is empty now \
             (is its disk mounted?). mgmt's log names it."
        }
        ErrorCode::Forbidden => {
            "This node was removed from the cluster, or its directory is another node's. mgmt's log names it."
        }
        e if is_away(e) => {
            "Check that mgmt runs, that -m names it, and that its UDP port is open between the two hosts."
        }
        _ => "mgmt's log says more.",
    }
}

fn list(addrs: &[SocketAddr]) -> String {
    addrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// Makes what this program may make.
fn prepare_dirs(config: &Config, dirs: &Dirs) -> Result<(), StartError> {
    let mut wanted = vec![(&dirs.own, 0o700)];
    if config.has(Role::Mgmt) {
        wanted.push((&dirs.mgmt, 0o700));
    }
    if config.has(Role::Meta) {
        wanted.push((&dirs.meta, 0o700));
    }
    if config.has(Role::Storage) {
        wanted.extend(dirs.targets.iter().map(|t| (t, 0o700)));
    }
    for (dir, mode) in wanted {
        if dir.exists() {
            continue;
        }
        let below_given = dirs.shared.as_ref().is_some_and(|shared| dir.starts_with(shared));
        if !dirs.may_make || (dirs.shared.is_some() && !below_given) {
            return Err(format::missing(dir));
        }
        let make = fs::DirBuilder::new().recursive(true).mode(mode).create(dir);
        make.map_err(|e| {
            StartError::new(
                format!("make directory {}", dir.display()),
                e,
                "Check the path given with -p and its permissions.",
            )
        })?;
        say(&format!("made directory {}", dir.display()));
    }
    Ok(())
}

/// The targets as mgmt is told of them.
fn announce(dirs: &[StateDir], config: &Config) -> Result<Vec<AnnouncedTarget>, StartError> {
    let mut targets = Vec::new();
    for (i, dir) in dirs.iter().enumerate() {
        let room = room(&dir.path)?;
        let known = dir.record.as_ref().and_then(|r| r.target);
        let chosen = config.target_ids.get(i).copied();
        if let (Some(known), Some(chosen)) = (known, chosen)
            && known != chosen
        {
            return Err(StartError::new(
                format!("use {} as target {chosen}", dir.path.display()),
                format!("it is target {known}"),
                "Correct -i or the order of -p: the numbers belong to the directories in the order given.",
            ));
        }
        targets.push(AnnouncedTarget {
            id: known.or(chosen),
            uuid: TargetUuid(dir.uuid),
            path: dir.path.to_string_lossy().into_owned(),
            device: room.device,
            total_bytes: room.total_bytes,
            free_bytes: room.free_bytes,
            total_inodes: room.total_inodes,
            free_inodes: room.free_inodes,
            fresh: dir.record.is_none(),
        });
    }
    Ok(targets)
}

fn room(path: &Path) -> Result<TargetCapacity, StartError> {
    let failed = |e| {
        StartError::new(
            format!("read the free space of {}", path.display()),
            std::io::Error::from(e),
            "Check the disk (dmesg) and the mount.",
        )
    };
    let stat = rustix::fs::statvfs(path).map_err(failed)?;
    let device = rustix::fs::stat(path).map_err(failed)?.st_dev;
    Ok(TargetCapacity {
        id: TargetId(0),
        device,
        total_bytes: stat.f_blocks.saturating_mul(stat.f_frsize),
        free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
        total_inodes: stat.f_files,
        free_inodes: stat.f_favail,
        failed: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Layer;

    fn config(pairs: &[(&'static str, &[&str])]) -> Config {
        let mut layer = Layer::new("test");
        for (key, words) in pairs {
            layer.set(key, words.iter().map(|w| (*w).to_owned()).collect());
        }
        Config::resolve(&[layer]).expect("valid")
    }

    #[test]
    fn dirs_of_one_role_are_those_given() {
        let dirs = Dirs::of(&config(&[("role", &["storage"]), ("path", &["/a", "/b"]), ("mgmt", &["h"])]));
        assert_eq!(dirs.targets, [PathBuf::from("/a"), PathBuf::from("/b")]);
        assert_eq!(dirs.own, Path::new("/a"));
        assert!(!dirs.may_make);
    }

    #[test]
    fn dirs_of_all_lie_below_one() {
        let dirs = Dirs::of(&config(&[("role", &["all"]), ("path", &["/d"]), ("targets", &["2"])]));
        assert_eq!(dirs.mgmt, Path::new("/d/mgmt"));
        assert_eq!(dirs.targets, [PathBuf::from("/d/storage/target1"), PathBuf::from("/d/storage/target2")]);
    }

    #[test]
    fn client_dir_is_one_per_mount_point() {
        assert_eq!(client_dir(Some(Path::new("/mnt/a b"))), Path::new("/var/lib/beeswarm/client-mnt-a-b"));
    }

    #[test]
    fn take_refuses_foreign_directory_and_accepts_a_begun_one() {
        let dir = tempfile::tempdir().expect("directory");
        fs::create_dir(dir.path().join(IDENTITY_DIR)).expect("mkdir");
        assert!(StateDir::take(dir.path(), Role::Storage).is_ok_and(|d| d.record.is_none()));
        fs::write(dir.path().join("letter.txt"), "x").expect("write");
        assert!(StateDir::take(dir.path(), Role::Storage).is_err());
        assert!(StateDir::take(&dir.path().join("gone"), Role::Storage).is_err());
    }
}
