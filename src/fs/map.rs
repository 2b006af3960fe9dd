//! The cluster map: who is in the cluster, where, in what state. mgmt makes it, everybody reads it.

use super::placement::CapacityPool;
use crate::base::ids::{ClusterId, MapVersion, NodeId, TargetId, TargetUuid};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Can it be reached? (First axis of a state, as in BeeGFS.)
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reachability {
    /// Reports to mgmt.
    Online,
    /// Has missed reports; not yet given up.
    ProbablyOffline,
    /// Given up until it reports again.
    Offline,
}

/// Is what it holds right? (Second axis.)
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Consistency {
    /// May be read and written.
    Good,
    /// Has missed writes; the buddy has them.
    NeedsResync,
    /// Must not be used until a person has looked.
    Bad,
}

/// A process of the cluster in one of its roles.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NodeEntry {
    /// Role and number.
    pub id: NodeId,
    /// Alias (`-S`), by default the host name.
    pub name: String,
    /// In order of preference.
    pub addrs: Vec<SocketAddr>,
    /// State.
    pub reachability: Reachability,
    /// Version of its software.
    pub version: String,
    /// When it last reported, seconds since 1970.
    pub last_seen_unix_seconds: u64,
}

/// A storage target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TargetEntry {
    /// Number.
    pub id: TargetId,
    /// The uuid in its directory.
    pub uuid: TargetUuid,
    /// The storage node that serves it.
    pub node: NodeId,
    /// Directory on that node.
    pub path: String,
    /// State.
    pub reachability: Reachability,
    /// State.
    pub consistency: Consistency,
    /// Size of the file system under it.
    pub total_bytes: u64,
    /// Free to beeswarm.
    pub free_bytes: u64,
    /// Inodes of the file system under it.
    pub total_inodes: u64,
    /// Free inodes.
    pub free_inodes: u64,
    /// Class by free space.
    pub pool: CapacityPool,
}

/// Which meta node serves which shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ShardEntry {
    /// Shard number: the upper 16 bits of an inode number.
    pub shard: u16,
    /// Who serves it now.
    pub primary: NodeId,
    /// Raised with each change of the primary.
    pub epoch: u64,
}

/// The whole map.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ClusterMap {
    /// Which cluster.
    pub cluster: ClusterId,
    /// Grows with each change.
    pub version: MapVersion,
    /// All nodes, ordered by id.
    pub nodes: Vec<NodeEntry>,
    /// All targets, ordered by id.
    pub targets: Vec<TargetEntry>,
    /// All shards, ordered by number.
    pub shards: Vec<ShardEntry>,
    /// Nodes removed for good: their certificates are refused.
    pub revoked: Vec<NodeId>,
}

impl ClusterMap {
    /// A node by id.
    pub fn node(&self, id: NodeId) -> Option<&NodeEntry> {
        self.nodes.iter().find(|n| n.id == id)
    }

    /// A target by id.
    pub fn target(&self, id: TargetId) -> Option<&TargetEntry> {
        self.targets.iter().find(|t| t.id == id)
    }

    /// The meta node that serves a shard.
    pub fn shard_primary(&self, shard: u16) -> Option<NodeId> {
        self.shards.iter().find(|s| s.shard == shard).map(|s| s.primary)
    }
}
