//! mgmt: keeps the cluster map and the certificate authority, admits nodes, watches who is alive.
//!
//! `state` decides (no I/O), `store` keeps, `service` speaks, `tokens` admits. A change of membership or of the map is durable
//! before anybody sees it. Started by the command line; its map is watched by the roles of the same process as well.

pub mod service;
pub mod state;
pub mod store;
pub mod tokens;

use crate::base::error::ErrorCode;
use crate::base::ids::{ClusterId, NodeId, Role};
use crate::base::start::StartError;
use crate::fs::map::ClusterMap;
use crate::net::identity::{CertificateAuthority, Identity};
use crate::net::join::JoinToken;
use crate::net::msg::mgmt::{TokenRequest, WantedNode};
use state::{Command, MemberKey, Outcome, Refused, State};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use store::{OtherDir, PutError, Store};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How long a token of `join_hint` is valid.
const HINT_TOKEN_SECONDS: u64 = 24 * 3600;
const TICK: Duration = Duration::from_secs(1);
/// A tick so much later than the last by the wall clock tells of a clock that jumped or a machine that slept. Then nobody's
/// silence counts before that tick, or the whole cluster would go offline at once.
const TICK_GAP_SECONDS_MAX: u64 = 5;

struct Inner {
    state: State,
    store: Store,
}

/// The mgmt role.
pub struct Mgmt {
    /// Never held across an await; nothing else is locked under it. A commit of the store runs under it.
    inner: Mutex<Inner>,
    authority: CertificateAuthority,
    cluster: ClusterId,
    created: bool,
    map: watch::Sender<Arc<ClusterMap>>,
    stop: CancellationToken,
}

impl Mgmt {
    /// Opens the directory, at the first start making cluster id and authority. Starts the clock of reachability, which
    /// needs the tokio runtime. `name` is mgmt's alias. `others`: another role's directory of this process that is of a
    /// cluster already; then no new cluster is made.
    pub fn open(dir: &Path, name: &str, others: Option<&OtherDir>) -> Result<Arc<Mgmt>, StartError> {
        let runtime = tokio::runtime::Handle::try_current()
            .map_err(|e| StartError::new("cannot start mgmt", e, "this is a fault of the program; report it"))?;
        let store::Opened { store, mut state, authority, created } = Store::open(dir, others)?;
        let cluster = state.map().cluster;
        if let Err(refused) = state.apply(unix_seconds(), Command::Start) {
            return Err(StartError::new("cannot start mgmt", refused, "report this"));
        }
        let map = watch::Sender::new(Arc::new(state.map().clone()));
        let stop = CancellationToken::new();
        let mgmt = Arc::new(Mgmt {
            inner: Mutex::new(Inner { state, store }),
            authority,
            cluster,
            created,
            map,
            stop: stop.clone(),
        });
        if created {
            tracing::info!("mgmt '{name}' made the new cluster {cluster} in {}", dir.display());
        } else {
            tracing::info!("mgmt '{name}' serves cluster {cluster} from {}", dir.display());
        }
        runtime.spawn(tick(Arc::downgrade(&mgmt), stop));
        Ok(mgmt)
    }

    /// Whether this start made the cluster.
    pub fn created(&self) -> bool {
        self.created
    }

    /// The cluster.
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// SHA-256 of the authority's certificate.
    pub fn ca_fingerprint(&self) -> [u8; 32] {
        self.authority.fingerprint()
    }

    /// An identity for a role of this same process (or the operator's, role admin). The same name and roles get the same
    /// numbers again, under a new key.
    pub fn issue_local(&self, wanted: &[WantedNode], name: &str) -> Result<Identity, StartError> {
        let what = format!("cannot give '{name}' an identity");
        let join = Command::Join { wanted: wanted.to_vec(), name: name.to_owned(), key: MemberKey::Local, token: None };
        let nodes = match self.execute(join) {
            Ok(Outcome::Joined(nodes)) => nodes,
            Ok(_) => return Err(StartError::new(what, "no ids were given", "report this")),
            Err(e) => return Err(StartError::new(what, e, "choose another number, or remove the node that has it")),
        };
        self.authority.issue_self(&nodes).map_err(|e| StartError::new(what, e, "look into the log of mgmt"))
    }

    /// Makes a join token; returns its text, which contains the secret.
    pub fn make_token(&self, request: &TokenRequest) -> Result<String, StartError> {
        let (id, secret) = tokens::random_token()?;
        self.execute(Command::MakeToken {
            id,
            secret,
            roles: request.roles.clone(),
            valid_seconds: request.valid_seconds,
            uses: request.uses,
        })
        .map_err(|e| StartError::new("cannot make a join token", e, ""))?;
        Ok(JoinToken { id, secret, ca_fingerprint: self.authority.fingerprint() }.to_text())
    }

    /// Makes a token of a day and returns what to print so that a person knows how other hosts join.
    pub fn join_hint(&self) -> Vec<String> {
        let request = TokenRequest {
            roles: vec![Role::Storage, Role::Client],
            valid_seconds: Some(HINT_TOKEN_SECONDS),
            uses: None,
        };
        match self.make_token(&request) {
            Ok(token) => vec![
                "To join storage servers and clients, put this line into a token file on each (valid for 24 hours):"
                    .to_owned(),
                format!("  {token}"),
                "Whoever has it can join. Make others with: beeswarm cluster token".to_owned(),
            ],
            Err(e) => vec![format!("No join token could be made: {e}"), "Try: beeswarm cluster token".to_owned()],
        }
    }

    /// The map, and notice of each new one. Heartbeats alone make no new map.
    pub fn watch(&self) -> watch::Receiver<Arc<ClusterMap>> {
        self.map.subscribe()
    }

    /// Stops the clock and ends waiting subscriptions. Everything answered is on disk already.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        tracing::info!("mgmt of cluster {} stopped", self.cluster);
    }

    /// Carries a command out: decides, keeps, publishes. Blocks for a disk commit if anything but a heartbeat changed.
    fn execute(&self, command: Command) -> Result<Outcome, Refused> {
        let may_change_members = !matches!(command, Command::Report { .. } | Command::Tick);
        let mut inner = self.lock();
        if inner.store.is_fenced() {
            let reason = "a write to mgmt.redb failed earlier; restart mgmt after its disk has been repaired";
            return Err(Refused { code: ErrorCode::DiskFailed, reason: reason.to_owned() });
        }
        let before = inner.state.map().version;
        let Inner { state, store } = &mut *inner;
        // What may make the state grow is tried on a copy: what is not kept has not happened.
        let mut next = may_change_members.then(|| state.clone());
        let outcome = next.as_mut().unwrap_or(state).apply(unix_seconds(), command)?;
        let after = next.as_ref().unwrap_or(state).map().version;
        if may_change_members || before != after {
            match store.put(next.as_ref().unwrap_or(state)) {
                Ok(()) => {}
                Err(e @ PutError::TooLong(_)) => {
                    tracing::error!("{e}");
                    return Err(Refused { code: ErrorCode::NoSpace, reason: e.to_string() });
                }
                Err(PutError::Failed(why)) => {
                    tracing::error!("mgmt cannot write mgmt.redb and serves no more until it is restarted: {why}");
                    return Err(Refused { code: ErrorCode::DiskFailed, reason: why });
                }
            }
        }
        if let Some(next) = next {
            *state = next;
        }
        if before != after {
            log_transitions(&self.map.borrow(), inner.state.map());
            self.map.send_replace(Arc::new(inner.state.map().clone()));
        }
        Ok(outcome)
    }

    /// The map as of now, with the latest heartbeats.
    fn map_now(&self) -> ClusterMap {
        self.lock().state.map().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic under the lock aborts a release build; tests may go on.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Mgmt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mgmt").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

/// Says once who came, went and came back.
fn log_transitions(old: &ClusterMap, new: &ClusterMap) {
    for node in &new.nodes {
        let before: Option<&crate::fs::map::NodeEntry> = old.node(node.id);
        if before.map(|n| n.reachability) != Some(node.reachability) {
            tracing::info!("node {} '{}' is {:?}", node.id, node.name, node.reachability);
        }
    }
    for target in &new.targets {
        let before = old.target(target.id);
        if before.is_some_and(|t| t.consistency != target.consistency) {
            tracing::warn!("target {} of {} is {:?}", target.id, target.node, target.consistency);
        }
        if before.is_some_and(|t| t.pool != target.pool) {
            tracing::warn!("target {} of {} is in the capacity pool {:?}", target.id, target.node, target.pool);
        }
    }
    let gone = |id: &NodeId| !old.revoked.contains(id);
    for node in new.revoked.iter().filter(|id| gone(id)) {
        tracing::info!("node {node} has been removed; its certificate is refused from now on");
    }
}

async fn tick(mgmt: Weak<Mgmt>, stop: CancellationToken) {
    let mut interval = tokio::time::interval(TICK);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut last = unix_seconds();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = interval.tick() => {}
        }
        let Some(mgmt) = mgmt.upgrade() else { return };
        let now = unix_seconds();
        let jumped = now.saturating_sub(last) > TICK_GAP_SECONDS_MAX;
        if jumped {
            tracing::warn!("mgmt's clock jumped by {} s, or it was stopped: silence counts from now", now - last);
        }
        last = now;
        // Its only failure is a fenced store, which has been logged.
        let ticked = tokio::task::spawn_blocking(move || {
            (!jumped || mgmt.execute(Command::Start).is_ok()) && mgmt.execute(Command::Tick).is_ok()
        })
        .await;
        if !matches!(ticked, Ok(true)) {
            tracing::debug!("mgmt's clock stands still");
        }
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
