//! Commands that ask mgmt: nodes, targets, health, tokens.

use super::units::{format_bytes, table};
use super::{Answer, ClusterCommand, Command, Common, HealthCommand, NodeCommand, TargetCommand, discover, start};
use crate::base::error::ErrorCode;
use crate::base::ids::{MapVersion, Role};
use crate::base::start::StartError;
use crate::fs::map::{ClusterMap, Consistency, NodeEntry, Reachability};
use crate::fs::placement::CapacityPool;
use crate::net::cluster::MGMT;
use crate::net::endpoint::Endpoint;
use crate::net::frame::CallContext;
use crate::net::identity::Identity;
use crate::net::msg::mgmt::{SubscribeRequest, TokenRequest};
use crate::net::rpc::{Call, Peer};
use bytes::Bytes;
use serde::Serialize;
use serde_json::json;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long a command waits for mgmt.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// Carries out one command.
pub async fn carry_out(command: Command) -> Result<Answer, StartError> {
    match command {
        Command::Node(NodeCommand::List { role, details, common }) => list_nodes(&common, role, details).await,
        Command::Target(TargetCommand::List { common }) => list_targets(&common).await,
        Command::Health(HealthCommand::Check { common }) => check(&common).await,
        Command::Health(HealthCommand::Capacity { common }) | Command::Df { common } => capacity(&common).await,
        Command::Health(HealthCommand::Network { common }) | Command::Net { common } => network(&common).await,
        Command::Cluster(ClusterCommand::Token { roles, valid, uses, common }) => {
            token(&common, roles, valid, uses).await
        }
        Command::Entry(_) => {
            Err(StartError::new("carry out the command", "it does not go to mgmt", "This is a fault; report it."))
        }
    }
}

/// A command's connection to the cluster.
struct Session {
    endpoint: Endpoint,
    mgmt: Arc<Peer>,
    shown: String,
}

impl Session {
    /// Does `work` on a session with mgmt, then says farewell: a server that stops would wait for a caller that is gone.
    async fn with<T>(common: &Common, work: impl AsyncFnOnce(&Self) -> Result<T, StartError>) -> Result<T, StartError> {
        let session = Self::open(common)?;
        let result = work(&session).await;
        session.endpoint.close().await;
        result
    }

    fn open(common: &Common) -> Result<Self, StartError> {
        let (shown, dir) = discover::find(common)?;
        let addrs = start::lookup(&shown)?;
        let identity = Identity::load(&dir).map_err(|e| {
            StartError::new(
                "read the certificate for this command",
                e,
                "Run the command as root, or give a readable directory with --identity DIR.",
            )
        })?;
        let any: SocketAddr = match addrs.first() {
            Some(SocketAddr::V6(_)) => (Ipv6Addr::UNSPECIFIED, 0).into(),
            _ => (Ipv4Addr::UNSPECIFIED, 0).into(),
        };
        let endpoint =
            Endpoint::bind(any, Arc::new(identity), false).map_err(|e| StartError::new("open a socket", e, ""))?;
        let mgmt = Peer::new(endpoint.clone(), MGMT, addrs);
        Ok(Self { endpoint, mgmt, shown })
    }

    async fn ask<C: Call>(&self, what: &str, request: &C) -> Result<C::Reply, StartError> {
        let ctx = CallContext::default();
        let call = self.mgmt.call(&ctx, request, Bytes::new());
        let error = match tokio::time::timeout(ANSWER_WAIT, call).await {
            Ok(Ok((reply, _))) => return Ok(reply),
            Ok(Err(error)) => error,
            Err(_) => ErrorCode::Timeout,
        };
        let todo = match error {
            ErrorCode::Forbidden => {
                "Use the operator's certificate: run the command as root on mgmt's machine, or give its directory 'admin' with --identity."
            }
            _ => "Check that mgmt runs there and that its UDP port is open; -m HOST asks another.",
        };
        let why =
            self.mgmt.last_error().filter(|_| error == ErrorCode::Unreachable).unwrap_or_else(|| error.to_string());
        Err(StartError::new(format!("{what} from mgmt at {}", self.shown), why, todo))
    }

    /// The map.
    async fn map(&self) -> Result<ClusterMap, StartError> {
        let nodes = self.endpoint.identity().nodes();
        let request = SubscribeRequest { nodes, known: MapVersion(0), capacities: Vec::new() };
        let reply = self.ask("read the cluster map", &request).await?;
        reply.map.ok_or_else(|| {
            StartError::new("read the cluster map", "mgmt has none yet", "Try again once a server has joined.")
        })
    }
}

fn print_json<T: Serialize>(value: &T) -> Result<(), StartError> {
    let text = serde_json::to_string_pretty(value).map_err(|e| StartError::new("print JSON", e, ""))?;
    println!("{text}");
    Ok(())
}

fn reachability(state: Reachability) -> &'static str {
    match state {
        Reachability::Online => "online",
        Reachability::ProbablyOffline => "probably-offline",
        Reachability::Offline => "offline",
    }
}

fn consistency(state: Consistency) -> &'static str {
    match state {
        Consistency::Good => "good",
        Consistency::NeedsResync => "needs-resync",
        Consistency::Bad => "bad",
    }
}

fn pool(pool: CapacityPool) -> &'static str {
    match pool {
        CapacityPool::Normal => "normal",
        CapacityPool::Low => "low",
        CapacityPool::Emergency => "emergency",
    }
}

fn addrs(node: &NodeEntry) -> String {
    if node.addrs.is_empty() {
        return "-".into();
    }
    node.addrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

async fn list_nodes(common: &Common, role: Option<Role>, details: bool) -> Result<Answer, StartError> {
    let map = Session::with(common, async |s| s.map().await).await?;
    let nodes: Vec<&NodeEntry> = map.nodes.iter().filter(|n| role.is_none_or(|role| n.id.role == role)).collect();
    if common.json {
        print_json(&nodes)?;
        return Ok(Answer::Yes);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let row = |n: &&NodeEntry| {
        let mut row = vec![n.id.to_string(), n.name.clone(), reachability(n.reachability).into()];
        if details {
            row.extend([
                addrs(n),
                n.version.clone(),
                format!("{} s ago", now.saturating_sub(n.last_seen_unix_seconds)),
            ]);
        }
        row
    };
    let rows: Vec<Vec<String>> = nodes.iter().map(row).collect();
    let heading: &[&str] =
        if details { &["NODE", "NAME", "STATE", "ADDRESSES", "VERSION", "SEEN"] } else { &["NODE", "NAME", "STATE"] };
    print!("{}", table(heading, &rows));
    Ok(Answer::Yes)
}

async fn list_targets(common: &Common) -> Result<Answer, StartError> {
    let map = Session::with(common, async |s| s.map().await).await?;
    if common.json {
        print_json(&map.targets)?;
        return Ok(Answer::Yes);
    }
    let row = |t: &crate::fs::map::TargetEntry| {
        vec![
            t.id.to_string(),
            t.node.to_string(),
            reachability(t.reachability).into(),
            consistency(t.consistency).into(),
            pool(t.pool).into(),
            t.path.clone(),
        ]
    };
    let rows: Vec<Vec<String>> = map.targets.iter().map(row).collect();
    print!("{}", table(&["TARGET", "NODE", "REACHABLE", "CONSISTENCY", "CAPACITY", "PATH"], &rows));
    Ok(Answer::Yes)
}

async fn capacity(common: &Common) -> Result<Answer, StartError> {
    let map = Session::with(common, async |s| s.map().await).await?;
    let volume = map.space(|_| true);
    let (total, free) = (volume.total_bytes, volume.free_bytes);
    if common.json {
        print_json(&json!({ "total_bytes": total, "free_bytes": free, "targets": map.targets }))?;
        return Ok(Answer::Yes);
    }
    let row = |name: String, node: String, total: u64, free: u64, inodes: String, class: String| {
        let percent = u128::from(total.saturating_sub(free)) * 100 / u128::from(total.max(1));
        vec![name, node, format_bytes(total), format_bytes(free), format!("{percent} %"), inodes, class]
    };
    let mut rows: Vec<Vec<String>> = map
        .targets
        .iter()
        .map(|t| {
            row(
                t.id.to_string(),
                t.node.to_string(),
                t.total_bytes,
                t.free_bytes,
                t.free_inodes.to_string(),
                pool(t.pool).into(),
            )
        })
        .collect();
    rows.push(row("all".into(), String::new(), total, free, String::new(), String::new()));
    print!("{}", table(&["TARGET", "NODE", "SIZE", "FREE", "USED", "FREE INODES", "CLASS"], &rows));
    Ok(Answer::Yes)
}

/// What is wrong with a map, one line each.
fn troubles(map: &ClusterMap) -> Vec<String> {
    let mut troubles = Vec::new();
    for role in [Role::Meta, Role::Storage] {
        if !map.nodes.iter().any(|n| n.id.role == role) {
            troubles.push(format!("no {role} server has joined: files cannot be used"));
        }
    }
    for node in map.nodes.iter().filter(|n| n.id.role != Role::Client && n.reachability != Reachability::Online) {
        troubles.push(format!(
            "{} ({}) is {}: look whether it runs and reaches mgmt",
            node.id,
            node.name,
            reachability(node.reachability)
        ));
    }
    for t in &map.targets {
        let place = format!("target {} ({}, {})", t.id, t.node, t.path);
        if t.reachability != Reachability::Online {
            troubles.push(format!("{place} is {}: look at its server's log", reachability(t.reachability)));
        }
        if t.consistency != Consistency::Good {
            troubles.push(format!(
                "{place} is {}: its disk has failed or missed writes; see its server's log",
                consistency(t.consistency)
            ));
        }
        if t.pool != CapacityPool::Normal {
            troubles.push(format!("{place} is short of space ({}): {} free", pool(t.pool), format_bytes(t.free_bytes)));
        }
    }
    for shard in map.shards.iter().filter(|s| map.node(s.primary).is_none()) {
        troubles.push(format!("shard {} has no server: {} is not in the map", shard.shard, shard.primary));
    }
    troubles
}

async fn check(common: &Common) -> Result<Answer, StartError> {
    let (map, probes) = probe_all(common).await?;
    let mut found = troubles(&map);
    for probe in probes {
        if probe.online && !probe.paths.iter().any(|p| p.answer.is_ok()) {
            let why = probe
                .paths
                .first()
                .and_then(|p| p.answer.as_ref().err().cloned())
                .unwrap_or_else(|| "it has no address".into());
            found.push(format!("{} ({}) is online but cannot be reached from here: {why}", probe.node, probe.name));
        }
    }
    let count = |role: Role| map.nodes.iter().filter(|n| n.id.role == role).count();
    if common.json {
        print_json(&json!({ "healthy": found.is_empty(), "troubles": found, "map_version": map.version }))?;
    } else if found.is_empty() {
        println!(
            "all is well: {} meta, {} storage with {} targets, {} clients",
            count(Role::Meta),
            count(Role::Storage),
            map.targets.len(),
            count(Role::Client)
        );
    } else {
        for trouble in &found {
            println!("{trouble}");
        }
    }
    Ok(if found.is_empty() { Answer::Yes } else { Answer::No })
}

/// One address of a node, tried from here.
struct Path {
    addr: SocketAddr,
    /// Round trip time, or why there is no connection.
    answer: Result<Duration, String>,
}

struct Probe {
    node: crate::base::ids::NodeId,
    name: String,
    online: bool,
    paths: Vec<Path>,
}

/// Tries every address of every server, all nodes at once.
async fn probe_all(common: &Common) -> Result<(ClusterMap, Vec<Probe>), StartError> {
    Session::with(common, async |session| {
        let map = session.map().await?;
        let probes = probe_nodes(session, &map).await;
        Ok((map, probes))
    })
    .await
}

async fn probe_nodes(session: &Session, map: &ClusterMap) -> Vec<Probe> {
    let mut tasks = Vec::new();
    for node in map.nodes.iter().filter(|n| n.id.role != Role::Client).cloned() {
        let endpoint = session.endpoint.clone();
        tasks.push(tokio::spawn(async move {
            let mut paths = Vec::new();
            for addr in node.addrs {
                let begun = Instant::now();
                let answer = match endpoint.connect(addr, node.id).await {
                    Ok(connection) => {
                        let rtt = connection.rtt().min(begun.elapsed());
                        connection.close("probe");
                        Ok(rtt)
                    }
                    Err(e) => Err(e.to_string()),
                };
                paths.push(Path { addr, answer });
            }
            Probe { node: node.id, name: node.name, online: node.reachability == Reachability::Online, paths }
        }));
    }
    let mut probes = Vec::new();
    for task in tasks {
        if let Ok(probe) = task.await {
            probes.push(probe);
        }
    }
    probes
}

async fn network(common: &Common) -> Result<Answer, StartError> {
    let (_, probes) = probe_all(common).await?;
    let mut rows = Vec::new();
    let mut values = Vec::new();
    let mut all_reached = true;
    for probe in probes {
        // Callers try the addresses in order: the first that answers is the one in use.
        let used = probe.paths.iter().position(|p| p.answer.is_ok());
        all_reached &= used.is_some();
        for (i, path) in probe.paths.iter().enumerate() {
            let in_use = used == Some(i);
            let (rtt, why) = match &path.answer {
                Ok(rtt) => (
                    format!("{:.1} ms", rtt.as_secs_f64() * 1e3),
                    if in_use { "in use: first that answers" } else { "answers, not needed" },
                ),
                Err(e) => ("-".into(), e.as_str()),
            };
            rows.push(vec![probe.node.to_string(), probe.name.clone(), path.addr.to_string(), rtt, why.to_owned()]);
            values.push(json!({
                "node": probe.node.to_string(), "name": probe.name, "address": path.addr, "in_use": in_use,
                "rtt_ms": path.answer.as_ref().ok().map(|rtt| rtt.as_secs_f64() * 1e3), "error": path.answer.as_ref().err(),
            }));
        }
        if probe.paths.is_empty() {
            rows.push(vec![
                probe.node.to_string(),
                probe.name.clone(),
                "-".into(),
                "-".into(),
                "has announced no address".into(),
            ]);
        }
    }
    if common.json {
        print_json(&values)?;
    } else {
        print!("{}", table(&["NODE", "NAME", "ADDRESS", "RTT", "STATE"], &rows));
    }
    Ok(if all_reached { Answer::Yes } else { Answer::No })
}

async fn token(
    common: &Common,
    roles: Vec<Role>,
    valid_seconds: Option<u64>,
    uses: Option<u32>,
) -> Result<Answer, StartError> {
    if roles.iter().any(|r| matches!(r, Role::Mgmt | Role::Admin)) {
        return Err(StartError::new(
            "make a join token",
            "mgmt and admin do not join by token",
            "Use --roles with meta, storage and client.",
        ));
    }
    let request = TokenRequest { roles, valid_seconds, uses };
    let reply = Session::with(common, async |s| s.ask("get a join token", &request).await).await?;
    if common.json {
        print_json(&json!({ "token": reply.token }))?;
    } else {
        println!("{}", reply.token);
    }
    Ok(Answer::Yes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ids::NodeId;

    fn node(role: Role, reachability: Reachability) -> NodeEntry {
        NodeEntry {
            id: NodeId::new(role, 1),
            name: "n".into(),
            addrs: Vec::new(),
            reachability,
            version: String::new(),
            last_seen_unix_seconds: 0,
        }
    }

    #[test]
    fn troubles_of_empty_cluster_name_the_missing_roles() {
        assert_eq!(troubles(&ClusterMap::default()).len(), 2);
    }

    #[test]
    fn troubles_are_none_when_all_is_online() {
        let nodes = vec![
            node(Role::Meta, Reachability::Online),
            node(Role::Storage, Reachability::Online),
            node(Role::Client, Reachability::Offline),
        ];
        assert!(troubles(&ClusterMap { nodes, ..ClusterMap::default() }).is_empty());
    }

    #[test]
    fn troubles_name_an_offline_server() {
        let nodes = vec![node(Role::Meta, Reachability::Online), node(Role::Storage, Reachability::Offline)];
        let found = troubles(&ClusterMap { nodes, ..ClusterMap::default() });
        assert!(found.iter().any(|t| t.contains("storage:1 (n) is offline")), "{found:?}");
    }
}
