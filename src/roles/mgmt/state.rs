//! What mgmt knows, as a deterministic machine: commands in, new state out; `now` is an argument; no I/O.
//!
//! All checks of a command come before its first change, so a refused command changes nothing. The transitions of
//! reachability and consistency are two pure functions, [`reachability_after`] and [`consistency_after`]; docs/states.md
//! prints their tables and a test compares. Called by `Mgmt` alone, which stores the state before it answers.

use super::tokens::{TOKENS_MAX, TokenRecord};
use crate::base::error::ErrorCode;
use crate::base::ids::{ClusterId, NodeId, NodeNumber, Role, TargetId, TargetUuid};
use crate::fs::map::{ClusterMap, Consistency, NodeEntry, Reachability, ShardEntry, TargetEntry};
use crate::fs::placement::classify;
use crate::limits;
use crate::net::msg::mgmt::{AnnouncedTarget, TargetCapacity, WantedNode};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

/// Silence after which a node counts as probably offline. Five missed subscriptions of 2 s.
pub const PROBABLY_OFFLINE_AFTER_SECONDS: u64 = 10;
/// Silence after which a node counts as offline.
pub const OFFLINE_AFTER_SECONDS: u64 = 30;
/// Most roles of one process.
pub const ROLES_PER_PROCESS_MAX: usize = 8;
/// Most targets of one process.
pub const TARGETS_PER_NODE_MAX: usize = 1024;
/// Longest alias.
pub const NODE_NAME_BYTES_MAX: usize = 255;
/// Longest directory of a target (PATH_MAX).
pub const TARGET_PATH_BYTES_MAX: usize = 4096;
/// A change of free space is worth a new map if it exceeds this part (1 %) of the total.
const CAPACITY_STEP_DIVISOR: u64 = 100;

/// Whose key a node has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum MemberKey {
    /// Certified in mgmt's own process, which has the authority's key anyway.
    Local,
    /// SHA-256 of the public key (SubjectPublicKeyInfo) in its signing request.
    Fingerprint([u8; 32]),
}

/// A node that has been given an id.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Member {
    /// Alias with which it joined.
    pub name: String,
    /// Its key.
    pub key: MemberKey,
    /// When.
    pub joined_unix_seconds: u64,
}

/// Everything mgmt knows.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct State {
    map: ClusterMap,
    members: BTreeMap<NodeId, Member>,
    tokens: BTreeMap<[u8; 8], TokenRecord>,
    /// Targets that their node announced at its last start. The others are offline even if the node is not.
    served: BTreeSet<TargetId>,
    /// Target numbers up to here have been given out; inodes refer to them, so none is given out twice.
    target_number_high: u32,
    /// Silence counts from here at the earliest: while mgmt was down it heard nobody.
    #[serde(skip)]
    listening_since: u64,
}

/// What may happen.
#[derive(Clone, Debug)]
pub enum Command {
    /// mgmt starts to listen, or listens again after it was stopped or its clock jumped.
    Start,
    /// A process asks for ids.
    Join {
        /// Its roles, each at most once.
        wanted: Vec<WantedNode>,
        /// Alias.
        name: String,
        /// Its key.
        key: MemberKey,
        /// The proven token; none for mgmt's own process.
        token: Option<[u8; 8]>,
    },
    /// A member gets a certificate for a new key.
    Renew {
        /// All ids of its certificate.
        nodes: Vec<NodeId>,
        /// The new key.
        key: MemberKey,
    },
    /// A process is up.
    Register {
        /// Its ids.
        nodes: Vec<NodeId>,
        /// Alias.
        name: String,
        /// In order of preference.
        addrs: Vec<SocketAddr>,
        /// Of its software.
        version: String,
        /// Of its storage role.
        targets: Vec<AnnouncedTarget>,
    },
    /// A process is alive.
    Report {
        /// Its ids.
        nodes: Vec<NodeId>,
        /// Of its targets.
        capacities: Vec<TargetCapacity>,
    },
    /// Time has passed.
    Tick,
    /// The operator removes a node for good.
    RemoveNode(NodeId),
    /// The operator makes a join token.
    MakeToken {
        /// Random.
        id: [u8; 8],
        /// Random.
        secret: [u8; 16],
        /// Roles it admits.
        roles: Vec<Role>,
        /// None: for ever.
        valid_seconds: Option<u64>,
        /// None: any number of times.
        uses: Option<u32>,
    },
}

/// What a command answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing to say.
    Done,
    /// Ids in the order wanted.
    Joined(Vec<NodeId>),
    /// Ids of the targets in the order announced.
    Registered(Vec<TargetId>),
}

/// A refusal: what the peer is told and what the log is told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refused {
    /// For the peer.
    pub code: ErrorCode,
    /// For the log.
    pub reason: String,
}

impl From<Refused> for ErrorCode {
    fn from(refused: Refused) -> ErrorCode {
        refused.code
    }
}

fn refuse<T>(code: ErrorCode, reason: impl Into<String>) -> Result<T, Refused> {
    Err(Refused { code, reason: reason.into() })
}

/// What bears on reachability.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heard {
    /// It registered or reported.
    Now,
    /// Nothing for so many seconds.
    Silent(u64),
}

/// Next reachability of a node. Silence only ever makes it worse; only a report makes it better.
pub fn reachability_after(current: Reachability, heard: Heard) -> Reachability {
    use Reachability::{Offline, Online, ProbablyOffline};
    match (current, heard) {
        (_, Heard::Now) => Online,
        (_, Heard::Silent(s)) if s >= OFFLINE_AFTER_SECONDS => Offline,
        (Online, Heard::Silent(s)) if s >= PROBABLY_OFFLINE_AFTER_SECONDS => ProbablyOffline,
        (unchanged, Heard::Silent(_)) => unchanged,
    }
}

/// Next consistency of a target whose node reports the disk as failed, or not. A pending resync is never forgotten.
pub fn consistency_after(current: Consistency, disk_failed: bool) -> Consistency {
    match (current, disk_failed) {
        (Consistency::NeedsResync, _) => Consistency::NeedsResync,
        (Consistency::Good | Consistency::Bad, true) => Consistency::Bad,
        (Consistency::Good | Consistency::Bad, false) => Consistency::Good,
    }
}

impl State {
    /// Of a new cluster. The first map has version 1, so that 0 means "has none".
    pub fn new(cluster: ClusterId) -> Self {
        let mut state = State::default();
        state.map.cluster = cluster;
        state.map.version.0 = 1;
        state
    }

    /// The current map.
    pub fn map(&self) -> &ClusterMap {
        &self.map
    }

    /// A token by id.
    pub fn token(&self, id: &[u8; 8]) -> Option<&TokenRecord> {
        self.tokens.get(id)
    }

    /// A member by id.
    pub fn member(&self, id: NodeId) -> Option<&Member> {
        self.members.get(&id)
    }

    /// Carries out a command, or refuses it and changes nothing. `now` in seconds since 1970.
    pub fn apply(&mut self, now: u64, command: Command) -> Result<Outcome, Refused> {
        match command {
            Command::Start => {
                self.listening_since = now;
                Ok(Outcome::Done)
            }
            Command::Join { wanted, name, key, token } => self.join(now, &wanted, name, key, token),
            Command::Renew { nodes, key } => self.renew(&nodes, key),
            Command::Register { nodes, name, addrs, version, targets } => {
                self.register(now, &nodes, name, addrs, version, &targets)
            }
            Command::Report { nodes, capacities } => self.report(now, &nodes, &capacities),
            Command::Tick => {
                self.tick(now);
                Ok(Outcome::Done)
            }
            Command::RemoveNode(node) => self.remove_node(node),
            Command::MakeToken { id, secret, roles, valid_seconds, uses } => {
                self.make_token(now, id, secret, roles, valid_seconds, uses)
            }
        }
    }

    fn changed(&mut self) {
        self.map.version.0 = self.map.version.0.saturating_add(1);
    }

    fn join(
        &mut self,
        now: u64,
        wanted: &[WantedNode],
        name: String,
        key: MemberKey,
        token: Option<[u8; 8]>,
    ) -> Result<Outcome, Refused> {
        check_name(&name)?;
        if wanted.is_empty() || wanted.len() > ROLES_PER_PROCESS_MAX {
            return refuse(ErrorCode::Invalid, format!("{} roles wanted by one process", wanted.len()));
        }
        let roles: BTreeSet<Role> = wanted.iter().map(|w| w.role).collect();
        if roles.len() != wanted.len() {
            return refuse(ErrorCode::Invalid, "one role wanted twice by one process");
        }
        let mut nodes = Vec::with_capacity(wanted.len());
        for want in wanted {
            nodes.push(self.number_for(want, &name, key)?);
        }
        let again = nodes.iter().all(|id| self.members.get(id).is_some_and(|m| m.key == key));
        if let Some(id) = &token {
            let Some(record) = self.tokens.get_mut(id) else {
                return refuse(ErrorCode::BadToken, "the token is not known (any more)");
            };
            // A join repeated because its answer was lost does not use the token up again, but the other bounds hold.
            let used_up = record.uses_left == Some(0);
            let mut judged = record.clone();
            if again && used_up {
                judged.uses_left = None;
            }
            judged.admits(now, roles.into_iter()).map_err(|reason| Refused { code: ErrorCode::BadToken, reason })?;
            if !again {
                record.uses_left = record.uses_left.map(|n| n.saturating_sub(1));
            }
        }
        let mut visible = false;
        for id in &nodes {
            self.members.entry(*id).or_insert_with(|| Member { name: name.clone(), key, joined_unix_seconds: now });
            let before = self.map.revoked.len();
            self.map.revoked.retain(|r| r != id);
            visible |= self.map.revoked.len() != before;
        }
        if visible {
            self.changed();
        }
        Ok(Outcome::Joined(nodes))
    }

    /// The id that a wanted role gets, or why it gets none.
    fn number_for(&self, want: &WantedNode, name: &str, key: MemberKey) -> Result<NodeId, Refused> {
        let of_role = || self.members.iter().filter(|(id, _)| id.role == want.role);
        let id = match want.number {
            Some(NodeNumber(0)) => return refuse(ErrorCode::Invalid, "node numbers begin with 1"),
            Some(number) => {
                let id = NodeId { role: want.role, number };
                match self.members.get(&id) {
                    Some(m) if m.key != key => {
                        return refuse(
                            ErrorCode::Conflict,
                            format!("{id} is taken by '{}', which has another key; remove that node first", m.name),
                        );
                    }
                    _ => id, // free, or its own under whatever name: the key tells
                }
            }
            None if want.role == Role::Mgmt => NodeId::new(Role::Mgmt, 1),
            // Of mgmt's own process there is one; it is still the same server after its host was renamed.
            None => match of_role().find(|(id, m)| m.key == key && (m.name == name || one_of_process(key, id.role))) {
                Some((id, _)) => *id,
                None => self.free_number(want.role)?,
            },
        };
        if want.role == Role::Meta {
            let holder = self.map.shard_primary(0).or_else(|| of_role().map(|(id, _)| *id).next());
            if let Some(holder) = holder.filter(|h| *h != id) {
                return refuse(
                    ErrorCode::Conflict,
                    format!("this version serves one metadata server, and that is {holder}"),
                );
            }
        }
        Ok(id)
    }

    /// The lowest number that no member has and no removed node had. A meta node takes over what shard 0 refers to.
    fn free_number(&self, role: Role) -> Result<NodeId, Refused> {
        let free = (1..=u32::MAX)
            .map(|n| NodeId::new(role, n))
            .find(|id| !self.members.contains_key(id) && !self.map.revoked.contains(id));
        free.map_or_else(|| refuse(ErrorCode::NoSpace, format!("no number left for the role {role}")), Ok)
    }

    fn renew(&mut self, nodes: &[NodeId], key: MemberKey) -> Result<Outcome, Refused> {
        self.check_members(nodes)?;
        for id in nodes {
            if let Some(member) = self.members.get_mut(id)
                && member.key != MemberKey::Local
            {
                member.key = key;
            }
        }
        Ok(Outcome::Done)
    }

    fn check_members(&self, nodes: &[NodeId]) -> Result<(), Refused> {
        if nodes.is_empty() || nodes.len() > ROLES_PER_PROCESS_MAX {
            return refuse(ErrorCode::Invalid, format!("{} ids of one process", nodes.len()));
        }
        match nodes.iter().find(|id| self.map.revoked.contains(id) || !self.members.contains_key(id)) {
            Some(id) if self.map.revoked.contains(id) => {
                refuse(ErrorCode::Forbidden, format!("{id} has been removed from the cluster"))
            }
            Some(id) => refuse(ErrorCode::Forbidden, format!("{id} is not a member of the cluster")),
            None => Ok(()),
        }
    }

    fn register(
        &mut self,
        now: u64,
        nodes: &[NodeId],
        name: String,
        addrs: Vec<SocketAddr>,
        version: String,
        targets: &[AnnouncedTarget],
    ) -> Result<Outcome, Refused> {
        check_name(&name)?;
        self.check_members(nodes)?;
        if addrs.len() > limits::ADDRS_PER_NODE_MAX || version.len() > NODE_NAME_BYTES_MAX {
            return refuse(ErrorCode::Invalid, "too many addresses, or a version too long");
        }
        let storage = nodes.iter().copied().find(|n| n.role == Role::Storage);
        let mut ids = Vec::new();
        if let Some(node) = storage {
            ids = self.target_ids(node, &name, targets)?;
        } else if !targets.is_empty() {
            return refuse(ErrorCode::Invalid, "targets announced by a process without the storage role");
        }
        if let Some(id) = nodes.iter().find(|n| n.role == Role::Meta)
            && let Some(holder) = self.map.shard_primary(0)
            && holder != *id
        {
            return refuse(
                ErrorCode::Conflict,
                format!("this version serves one metadata server, and that is {holder}"),
            );
        }

        let mut visible = false;
        for &id in nodes {
            let entry = NodeEntry {
                id,
                name: name.clone(),
                addrs: addrs.clone(),
                reachability: Reachability::Online,
                version: version.clone(),
                last_seen_unix_seconds: now,
            };
            match self.map.nodes.binary_search_by_key(&id, |n| n.id) {
                Ok(at) => {
                    if let Some(old) = self.map.nodes.get_mut(at) {
                        old.last_seen_unix_seconds = now;
                        visible |= *old != entry;
                        *old = entry;
                    }
                }
                Err(at) => {
                    self.map.nodes.insert(at, entry);
                    visible = true;
                }
            }
            if id.role == Role::Meta && self.map.shards.is_empty() {
                self.map.shards.push(ShardEntry { shard: 0, primary: id, epoch: 1 });
                visible = true;
            }
        }
        if let Some(node) = storage {
            let announced: BTreeSet<TargetId> = ids.iter().copied().collect();
            for old in self.map.targets.iter().filter(|t| t.node == node && !announced.contains(&t.id)) {
                self.served.remove(&old.id);
            }
            for (id, target) in ids.iter().zip(targets) {
                visible |= self.put_target(node, *id, target);
            }
            self.served.extend(announced);
        }
        visible |= self.targets_follow_nodes();
        if visible {
            self.changed();
        }
        Ok(Outcome::Registered(ids))
    }

    /// The numbers that announced targets get, or why one is refused. Changes nothing.
    fn target_ids(&self, node: NodeId, name: &str, targets: &[AnnouncedTarget]) -> Result<Vec<TargetId>, Refused> {
        if targets.len() > TARGETS_PER_NODE_MAX {
            return refuse(ErrorCode::Invalid, format!("{} targets of one node", targets.len()));
        }
        let uuids: BTreeSet<TargetUuid> = targets.iter().map(|t| t.uuid).collect();
        if uuids.len() != targets.len() {
            return refuse(ErrorCode::Conflict, "two of the announced directories carry the same uuid; one is a copy");
        }
        let mut next = self.target_number_high;
        let chosen = targets.iter().filter_map(|t| t.id).map(|t| t.0).collect::<BTreeSet<u32>>();
        let mut ids = Vec::with_capacity(targets.len());
        for target in targets {
            if target.path.len() > TARGET_PATH_BYTES_MAX {
                return refuse(ErrorCode::Invalid, "path of a target too long");
            }
            let id = match self.map.targets.iter().find(|t| t.uuid == target.uuid) {
                Some(known) => self.known_target_id(node, target, known)?,
                None => match target.id {
                    Some(id) => {
                        self.new_target_id(target, id)?;
                        id
                    }
                    None => {
                        self.check_not_unmounted(node, name, target)?;
                        loop {
                            let Some(n) = next.checked_add(1) else {
                                return refuse(ErrorCode::NoSpace, "no target number left");
                            };
                            next = n;
                            if !chosen.contains(&n) {
                                break TargetId(n);
                            }
                        }
                    }
                },
            };
            if ids.contains(&id) {
                return refuse(ErrorCode::Conflict, format!("target number {id} announced for two directories"));
            }
            ids.push(id);
        }
        Ok(ids)
    }

    fn known_target_id(
        &self,
        node: NodeId,
        target: &AnnouncedTarget,
        known: &TargetEntry,
    ) -> Result<TargetId, Refused> {
        if let Some(id) = target.id.filter(|id| *id != known.id) {
            return refuse(
                ErrorCode::Conflict,
                format!("{} announces number {id}, but the target with its uuid is number {}", target.path, known.id),
            );
        }
        if known.node != node && known.reachability == Reachability::Online {
            return refuse(
                ErrorCode::Conflict,
                format!("target {} is being served by {}; {} of {node} is a copy", known.id, known.node, target.path),
            );
        }
        Ok(known.id)
    }

    /// Whether a directory with a uuid that the map does not know may have this number.
    fn new_target_id(&self, target: &AnnouncedTarget, id: TargetId) -> Result<(), Refused> {
        if id.0 == 0 {
            return refuse(ErrorCode::Invalid, "target numbers begin with 1");
        }
        let Some(known) = self.map.target(id) else { return Ok(()) };
        let hint = if target.fresh { "; the new directory is empty: its disk is probably not mounted" } else { "" };
        refuse(
            ErrorCode::Conflict,
            format!("target number {id} belongs to {} of {} (uuid {}){hint}", known.path, known.node, known.uuid),
        )
    }

    /// A fresh directory in the place of a target that the map knows: refused, whatever its number. Also when another
    /// node announces it under the same name: a node whose identity lay on that disk has joined anew.
    fn check_not_unmounted(&self, node: NodeId, name: &str, target: &AnnouncedTarget) -> Result<(), Refused> {
        let same_host = |of: NodeId| of == node || self.map.node(of).is_some_and(|n| n.name == name);
        match self.map.targets.iter().find(|t| target.fresh && t.path == target.path && same_host(t.node)) {
            Some(known) => refuse(
                ErrorCode::Conflict,
                format!(
                    "{} of '{name}' is empty but was target {} of {}: its disk is probably not mounted",
                    known.path, known.id, known.node
                ),
            ),
            None => Ok(()),
        }
    }

    fn put_target(&mut self, node: NodeId, id: TargetId, target: &AnnouncedTarget) -> bool {
        self.target_number_high = self.target_number_high.max(id.0);
        let free_bytes = target.free_bytes.min(target.total_bytes);
        let entry = TargetEntry {
            id,
            uuid: target.uuid,
            node,
            path: target.path.clone(),
            reachability: Reachability::Online,
            consistency: Consistency::Good,
            device: target.device,
            total_bytes: target.total_bytes,
            free_bytes,
            total_inodes: target.total_inodes,
            free_inodes: target.free_inodes.min(target.total_inodes),
            pool: classify(free_bytes, target.total_bytes),
        };
        match self.map.targets.binary_search_by_key(&id, |t| t.id) {
            Ok(at) => match self.map.targets.get_mut(at) {
                Some(old) => {
                    let entry = TargetEntry { consistency: old.consistency, ..entry };
                    let visible = *old != entry;
                    *old = entry;
                    visible
                }
                None => false,
            },
            Err(at) => {
                self.map.targets.insert(at, entry);
                true
            }
        }
    }

    fn report(&mut self, now: u64, nodes: &[NodeId], capacities: &[TargetCapacity]) -> Result<Outcome, Refused> {
        self.check_members(nodes)?;
        if capacities.len() > TARGETS_PER_NODE_MAX {
            return refuse(ErrorCode::Invalid, "too many targets reported");
        }
        if let Some(id) = nodes.iter().find(|id| id.role != Role::Admin && self.map.node(**id).is_none()) {
            return refuse(ErrorCode::NotFound, format!("{id} reports but has not registered"));
        }
        let mut visible = false;
        for node in self.map.nodes.iter_mut().filter(|n| nodes.contains(&n.id)) {
            node.last_seen_unix_seconds = now;
            let next = reachability_after(node.reachability, Heard::Now);
            visible |= next != node.reachability;
            node.reachability = next;
        }
        for capacity in capacities {
            // A target that has moved to another node meanwhile is that node's to report.
            if let Some(target) = self.map.targets.iter_mut().find(|t| t.id == capacity.id && nodes.contains(&t.node)) {
                visible |= take_capacity(target, capacity);
            }
        }
        visible |= self.targets_follow_nodes();
        if visible {
            self.changed();
        }
        Ok(Outcome::Done)
    }

    fn tick(&mut self, now: u64) {
        let mut visible = false;
        self.listening_since = self.listening_since.min(now);
        for node in &mut self.map.nodes {
            // A clock set back must not make a node that is gone look alive until it has caught up.
            node.last_seen_unix_seconds = node.last_seen_unix_seconds.min(now);
            let silence = now.saturating_sub(node.last_seen_unix_seconds.max(self.listening_since));
            let next = reachability_after(node.reachability, Heard::Silent(silence));
            visible |= next != node.reachability;
            node.reachability = next;
        }
        self.tokens.retain(|_, token| !token.is_expired(now));
        visible |= self.targets_follow_nodes();
        if visible {
            self.changed();
        }
    }

    /// Targets are as reachable as their node, if it serves them at all.
    fn targets_follow_nodes(&mut self) -> bool {
        let nodes: BTreeMap<NodeId, Reachability> = self.map.nodes.iter().map(|n| (n.id, n.reachability)).collect();
        let mut visible = false;
        for target in &mut self.map.targets {
            let of_node = nodes.get(&target.node).filter(|_| self.served.contains(&target.id));
            let next = of_node.copied().unwrap_or(Reachability::Offline);
            visible |= next != target.reachability;
            target.reachability = next;
        }
        visible
    }

    /// Its targets stay in the map, offline: files refer to them, and another node may bring their disks back.
    fn remove_node(&mut self, node: NodeId) -> Result<Outcome, Refused> {
        if self.map.revoked.contains(&node) {
            return Ok(Outcome::Done);
        }
        if matches!(node.role, Role::Mgmt | Role::Admin) {
            return refuse(ErrorCode::NotPermitted, format!("{node} cannot be removed"));
        }
        if self.members.remove(&node).is_none() {
            return refuse(ErrorCode::NotFound, format!("{node} is not a member of the cluster"));
        }
        self.map.nodes.retain(|n| n.id != node);
        let at = self.map.revoked.partition_point(|r| *r < node);
        self.map.revoked.insert(at, node);
        self.targets_follow_nodes();
        self.changed();
        Ok(Outcome::Done)
    }

    fn make_token(
        &mut self,
        now: u64,
        id: [u8; 8],
        secret: [u8; 16],
        mut roles: Vec<Role>,
        valid_seconds: Option<u64>,
        uses: Option<u32>,
    ) -> Result<Outcome, Refused> {
        roles.sort_unstable();
        roles.dedup();
        if roles.is_empty() || roles.iter().any(|r| matches!(r, Role::Mgmt | Role::Admin)) {
            return refuse(ErrorCode::Invalid, "a join token is for one or more of meta, storage, client");
        }
        if uses == Some(0) || valid_seconds == Some(0) {
            return refuse(ErrorCode::Invalid, "a join token that is never valid");
        }
        let expired = |t: &TokenRecord| t.is_expired(now) || t.uses_left == Some(0);
        if self.tokens.values().filter(|t| !expired(t)).count() >= TOKENS_MAX {
            return refuse(ErrorCode::NoSpace, format!("there are {TOKENS_MAX} valid join tokens already"));
        }
        if self.tokens.contains_key(&id) {
            return refuse(ErrorCode::Conflict, "a token with this id exists");
        }
        if self.tokens.len() >= TOKENS_MAX {
            self.tokens.retain(|_, t| !expired(t));
        }
        let expires_unix_seconds = valid_seconds.map(|s| now.saturating_add(s));
        self.tokens.insert(id, TokenRecord { secret, roles, expires_unix_seconds, uses_left: uses });
        Ok(Outcome::Done)
    }
}

/// Whether a key can have only one node of this role: mgmt's own process serves each role once, but may issue to many mounts.
fn one_of_process(key: MemberKey, role: Role) -> bool {
    key == MemberKey::Local && matches!(role, Role::Meta | Role::Storage)
}

/// Aliases go into logs and tables: no control characters, not empty, not endless.
fn check_name(name: &str) -> Result<(), Refused> {
    if name.is_empty() || name.len() > NODE_NAME_BYTES_MAX || name.chars().any(char::is_control) {
        return refuse(ErrorCode::Invalid, "a node's name must have 1 to 255 bytes and no control characters");
    }
    Ok(())
}

/// Takes a report over if it is worth a new map.
fn take_capacity(target: &mut TargetEntry, new: &TargetCapacity) -> bool {
    let free_bytes = new.free_bytes.min(new.total_bytes);
    let free_inodes = new.free_inodes.min(new.total_inodes);
    let pool = classify(free_bytes, new.total_bytes);
    let consistency = consistency_after(target.consistency, new.failed);
    let differs = |a: u64, b: u64, total: u64| a.abs_diff(b) > total / CAPACITY_STEP_DIVISOR;
    let visible = pool != target.pool
        || consistency != target.consistency
        || new.device != target.device
        || new.total_bytes != target.total_bytes
        || differs(free_bytes, target.free_bytes, new.total_bytes)
        || differs(free_inodes, target.free_inodes, new.total_inodes);
    if visible {
        target.device = new.device;
        target.total_bytes = new.total_bytes;
        target.free_bytes = free_bytes;
        target.total_inodes = new.total_inodes;
        target.free_inodes = free_inodes;
        target.pool = pool;
        target.consistency = consistency;
    }
    visible
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: MemberKey = MemberKey::Fingerprint([1; 32]);
    const OTHER_KEY: MemberKey = MemberKey::Fingerprint([2; 32]);
    const TIB: u64 = 1 << 40;

    fn state() -> State {
        State::new(ClusterId::random())
    }

    fn join_as(role: Role, number: Option<u32>, name: &str, key: MemberKey, token: Option<[u8; 8]>) -> Command {
        let wanted = vec![WantedNode { role, number: number.map(NodeNumber) }];
        Command::Join { wanted, name: name.to_owned(), key, token }
    }

    fn joined(state: &mut State, command: Command) -> Result<u32, ErrorCode> {
        match state.apply(0, command)? {
            Outcome::Joined(ids) => Ok(ids[0].number.0),
            other => panic!("{other:?}"),
        }
    }

    fn announced(id: Option<u32>, uuid: TargetUuid, path: &str, fresh: bool) -> AnnouncedTarget {
        AnnouncedTarget {
            id: id.map(TargetId),
            uuid,
            path: path.to_owned(),
            device: 1,
            total_bytes: TIB,
            free_bytes: TIB,
            total_inodes: 1000,
            free_inodes: 1000,
            fresh,
        }
    }

    fn register(state: &mut State, now: u64, id: NodeId, targets: Vec<AnnouncedTarget>) -> Result<Vec<u32>, ErrorCode> {
        let addrs = vec![SocketAddr::from(([127, 0, 0, 1], 9))];
        let (name, version) = ("host".to_owned(), "0".to_owned());
        match state.apply(now, Command::Register { nodes: vec![id], name, addrs, version, targets })? {
            Outcome::Registered(ids) => Ok(ids.iter().map(|t| t.0).collect()),
            other => panic!("{other:?}"),
        }
    }

    fn storage(state: &mut State, number: u32) -> NodeId {
        let key = MemberKey::Fingerprint([u8::try_from(number).unwrap(); 32]);
        joined(state, join_as(Role::Storage, Some(number), "host", key, None)).unwrap();
        NodeId::new(Role::Storage, number)
    }

    fn report(id: NodeId, capacities: Vec<TargetCapacity>) -> Command {
        Command::Report { nodes: vec![id], capacities }
    }

    fn capacity(id: u32, free_bytes: u64, failed: bool) -> TargetCapacity {
        let (total_bytes, total_inodes, free_inodes) = (TIB, 1000, 1000);
        TargetCapacity { id: TargetId(id), device: 1, total_bytes, free_bytes, total_inodes, free_inodes, failed }
    }

    #[test]
    fn join_numbers_are_given_kept_and_guarded() {
        let mut s = state();
        let client = |number, name, key| join_as(Role::Client, number, name, key, None);
        assert_eq!(joined(&mut s, client(None, "a", KEY)), Ok(1));
        assert_eq!(joined(&mut s, client(None, "a", KEY)), Ok(1), "the same again");
        assert_eq!(joined(&mut s, client(None, "a", OTHER_KEY)), Ok(2), "names may repeat");
        assert_eq!(joined(&mut s, client(Some(1), "a", OTHER_KEY)), Err(ErrorCode::Conflict));
        assert_eq!(joined(&mut s, client(Some(1), "a", KEY)), Ok(1));
        assert_eq!(joined(&mut s, client(Some(0), "a", KEY)), Err(ErrorCode::Invalid));
        assert_eq!(joined(&mut s, client(Some(7), "b", OTHER_KEY)), Ok(7));
        assert_eq!(joined(&mut s, client(None, "bad\nname", KEY)), Err(ErrorCode::Invalid));
        s.apply(0, Command::RemoveNode(NodeId::new(Role::Client, 1))).unwrap();
        assert_eq!(s.map().revoked, vec![NodeId::new(Role::Client, 1)]);
        assert_eq!(
            joined(&mut s, client(None, "c", MemberKey::Fingerprint([9; 32]))),
            Ok(3),
            "removed ones are not reused"
        );
        assert_eq!(joined(&mut s, client(Some(1), "a", OTHER_KEY)), Ok(1), "unless asked for");
        assert!(s.map().revoked.is_empty());
    }

    #[test]
    fn local_joins_repeat_their_numbers() {
        let mut s = state();
        for name in ["old-name", "new-name"] {
            for (role, number) in [(Role::Mgmt, 1), (Role::Meta, 1), (Role::Storage, 1)] {
                assert_eq!(joined(&mut s, join_as(role, None, name, MemberKey::Local, None)), Ok(number));
            }
        }
    }

    #[test]
    fn join_second_meta_is_refused() {
        let mut s = state();
        let meta = |number, key| join_as(Role::Meta, number, "m", key, None);
        assert_eq!(joined(&mut s, meta(None, KEY)), Ok(1));
        assert_eq!(joined(&mut s, meta(None, OTHER_KEY)), Err(ErrorCode::Conflict));
        let id = NodeId::new(Role::Meta, 1);
        register(&mut s, 1, id, vec![]).unwrap();
        assert_eq!(s.map().shard_primary(0), Some(id));
        s.apply(2, Command::RemoveNode(id)).unwrap();
        assert_eq!(joined(&mut s, meta(Some(2), OTHER_KEY)), Err(ErrorCode::Conflict));
        assert_eq!(joined(&mut s, meta(Some(1), OTHER_KEY)), Ok(1), "takes the place of the removed one");
    }

    #[test]
    fn tokens_bind_role_time_and_uses() {
        let mut s = state();
        let make = |id: u8, valid_seconds, uses| Command::MakeToken {
            id: [id; 8],
            secret: [id; 16],
            roles: vec![Role::Client],
            valid_seconds,
            uses,
        };
        s.apply(100, make(1, Some(10), None)).unwrap();
        s.apply(100, make(2, None, Some(1))).unwrap();
        assert!(s.apply(100, make(2, None, None)).is_err(), "same id");
        assert!(s.apply(100, make(3, Some(0), None)).is_err());
        let key = |n| MemberKey::Fingerprint([n; 32]);
        let mut join = |now, role, n, token: u8| {
            s.apply(now, join_as(role, None, "x", key(n), Some([token; 8]))).map_err(|r| r.code)
        };
        assert_eq!(join(100, Role::Storage, 1, 1), Err(ErrorCode::BadToken), "role");
        assert!(join(109, Role::Client, 1, 1).is_ok());
        assert_eq!(join(110, Role::Client, 2, 1), Err(ErrorCode::BadToken), "expired");
        assert_eq!(join(100, Role::Client, 3, 9), Err(ErrorCode::BadToken), "unknown");
        assert!(join(100, Role::Client, 3, 2).is_ok());
        assert!(join(100, Role::Client, 3, 2).is_ok(), "its answer was lost");
        assert_eq!(join(100, Role::Client, 4, 2), Err(ErrorCode::BadToken), "used up");
        assert!(s.member(NodeId::new(Role::Client, 3)).is_none());
        s.apply(110, Command::Tick).unwrap();
        assert!(s.token(&[1; 8]).is_none() && s.token(&[2; 8]).is_some());
        let admin = Command::MakeToken {
            id: [5; 8],
            secret: [5; 16],
            roles: vec![Role::Admin],
            valid_seconds: None,
            uses: None,
        };
        assert_eq!(s.apply(0, admin).map_err(|r| r.code), Err(ErrorCode::Invalid));
    }

    #[test]
    fn register_target_numbers_follow_uuids() {
        let mut s = state();
        let (one, two) = (storage(&mut s, 1), storage(&mut s, 2));
        let uuids: Vec<TargetUuid> = (0..6).map(|_| TargetUuid::random()).collect();
        let first = vec![announced(None, uuids[0], "/a", true), announced(Some(1), uuids[1], "/b", true)];
        assert_eq!(register(&mut s, 1, one, first.clone()), Ok(vec![2, 1]));
        assert_eq!(register(&mut s, 1, one, first), Ok(vec![2, 1]), "repeated: the answer was lost");
        let version = s.map().version;
        let refused = |s: &mut State, node, t| assert_eq!(register(s, 1, node, vec![t]), Err(ErrorCode::Conflict));
        refused(&mut s, one, announced(Some(5), uuids[0], "/a", false));
        refused(&mut s, two, announced(Some(1), uuids[2], "/c", true));
        refused(&mut s, one, announced(None, uuids[2], "/a", true));
        refused(&mut s, two, announced(None, uuids[0], "/copy", false));
        assert_eq!(s.map().version, version, "refusals change nothing");
        let same = announced(None, uuids[3], "/x", true);
        assert_eq!(register(&mut s, 1, two, vec![same.clone(), same]), Err(ErrorCode::Conflict));
        assert_eq!(register(&mut s, 1, two, vec![announced(None, uuids[3], "/x", true)]), Ok(vec![3]));
        let gone = NodeId::new(Role::Storage, 9);
        assert_eq!(register(&mut s, 1, gone, vec![]), Err(ErrorCode::Forbidden));
    }

    #[test]
    fn target_missing_at_start_stays_offline_and_may_move_with_a_removed_node() {
        let mut s = state();
        let (one, two) = (storage(&mut s, 1), storage(&mut s, 2));
        let (a, b) = (TargetUuid::random(), TargetUuid::random());
        register(&mut s, 1, one, vec![announced(None, a, "/a", true), announced(None, b, "/b", true)]).unwrap();
        register(&mut s, 2, one, vec![announced(Some(1), a, "/a", false)]).unwrap();
        s.apply(3, report(one, vec![])).unwrap();
        let reach = |s: &State, id| s.map().target(TargetId(id)).unwrap().reachability;
        assert_eq!((reach(&s, 1), reach(&s, 2)), (Reachability::Online, Reachability::Offline));
        s.apply(4, Command::RemoveNode(one)).unwrap();
        assert_eq!(reach(&s, 1), Reachability::Offline);
        assert_eq!(s.apply(4, report(one, vec![])).map_err(|r| r.code), Err(ErrorCode::Forbidden));
        assert_eq!(register(&mut s, 5, two, vec![announced(Some(1), a, "/moved", false)]), Ok(vec![1]));
        assert_eq!((reach(&s, 1), s.map().target(TargetId(1)).unwrap().node), (Reachability::Online, two));
    }

    #[test]
    fn silence_walks_node_and_targets_through_reachability() {
        let mut s = state();
        let one = storage(&mut s, 1);
        register(&mut s, 100, one, vec![announced(None, TargetUuid::random(), "/a", true)]).unwrap();
        let mut version = s.map().version;
        let mut expect = |s: &mut State, now, command, reachability, changes: bool| {
            s.apply(now, command).unwrap();
            assert_eq!(s.map().node(one).unwrap().reachability, reachability, "at {now}");
            assert_eq!(s.map().target(TargetId(1)).unwrap().reachability, reachability, "at {now}");
            assert_eq!(s.map().version != version, changes, "version at {now}");
            version = s.map().version;
        };
        use Reachability::{Offline, Online, ProbablyOffline};
        expect(&mut s, 109, Command::Tick, Online, false);
        expect(&mut s, 109, report(one, vec![capacity(1, TIB, false)]), Online, false);
        expect(&mut s, 118, Command::Tick, Online, false);
        expect(&mut s, 119, Command::Tick, ProbablyOffline, true);
        expect(&mut s, 138, Command::Tick, ProbablyOffline, false);
        expect(&mut s, 139, Command::Tick, Offline, true);
        expect(&mut s, 150, report(one, vec![]), Online, true);
        expect(&mut s, 1000, Command::Start, Online, false);
        expect(&mut s, 1009, Command::Tick, Online, false);
        expect(&mut s, 1030, Command::Tick, Offline, true);
    }

    #[test]
    fn report_makes_a_new_map_only_if_room_changed_by_one_percent() {
        let mut s = state();
        let one = storage(&mut s, 1);
        register(&mut s, 1, one, vec![announced(None, TargetUuid::random(), "/a", true)]).unwrap();
        let mut version = s.map().version.0;
        for (free, failed, grows) in [
            (TIB - TIB / 200, false, 0),
            (TIB - TIB / 50, false, 1),
            (TIB - TIB / 50 - 1, false, 0),
            (0, false, 1),
            (0, true, 1),
            (0, true, 0),
            (0, false, 1),
        ] {
            s.apply(2, report(one, vec![capacity(1, free, failed)])).unwrap();
            version += grows;
            assert_eq!(s.map().version.0, version, "{free} {failed}");
        }
        assert_eq!(s.map().targets[0].pool, classify(0, TIB));
        assert_eq!(s.map().targets[0].consistency, Consistency::Good);
    }

    #[test]
    fn renew_replaces_the_key_of_members_alone() {
        let mut s = state();
        let id = storage(&mut s, 1);
        s.apply(0, Command::Renew { nodes: vec![id], key: OTHER_KEY }).unwrap();
        assert_eq!(s.member(id).unwrap().key, OTHER_KEY);
        s.apply(0, Command::RemoveNode(id)).unwrap();
        assert_eq!(
            s.apply(0, Command::Renew { nodes: vec![id], key: KEY }).map_err(|r| r.code),
            Err(ErrorCode::Forbidden)
        );
    }

    #[test]
    fn tables_of_the_states_page_match_the_code() {
        use Consistency::{Bad, Good, NeedsResync};
        use Reachability::{Offline, Online, ProbablyOffline};
        let reachability = |word: &str| match word {
            "online" => Some(Online),
            "probably-offline" => Some(ProbablyOffline),
            "offline" => Some(Offline),
            _ => None,
        };
        let consistency = |word: &str| match word {
            "good" => Some(Good),
            "bad" => Some(Bad),
            "needs-resync" => Some(NeedsResync),
            _ => None,
        };
        let (mut reach_rows, mut consistency_rows) = (0, BTreeSet::new());
        for line in include_str!("../../../docs/states.md").lines() {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let [_, from, event, to, _] = cells[..] else { continue };
            if let (Some(from), Some(to)) = (reachability(from), reachability(to)) {
                let heard = match event.strip_prefix("silent ").and_then(|e| e.strip_suffix(" s")) {
                    Some(seconds) => Heard::Silent(seconds.parse().unwrap()),
                    None => Heard::Now,
                };
                assert_eq!(reachability_after(from, heard), to, "{line}");
                reach_rows += 1;
            } else if let (Some(state), Some(to)) = (consistency(from), consistency(to)) {
                assert_eq!(consistency_after(state, event == "failed"), to, "{line}");
                consistency_rows.insert((from, event));
            }
        }
        assert_eq!((reach_rows, consistency_rows.len()), (12, 6));
        // Exhaustively: between the steps of the table nothing changes, and silence never improves anything.
        let rank = |r| match r {
            Online => 0,
            ProbablyOffline => 1,
            Offline => 2,
        };
        for from in [Online, ProbablyOffline, Offline] {
            assert_eq!(reachability_after(from, Heard::Now), Online);
            for seconds in 0..100 {
                let by_silence = if seconds >= 30 { 2 } else { i32::from(seconds >= 10) };
                assert_eq!(rank(reachability_after(from, Heard::Silent(seconds))), by_silence.max(rank(from)));
            }
        }
    }
}
