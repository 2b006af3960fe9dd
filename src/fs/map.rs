//! The cluster map: who is in the cluster, where, in what state. mgmt makes it, everybody reads it.

use super::placement::CapacityPool;
use crate::base::ids::{ClusterId, MapVersion, NodeId, TargetId, TargetUuid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
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
    /// Device number of the file system under it (st_dev): targets of a node with the same one share its room.
    pub device: u64,
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

/// Room on a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeSpace {
    /// Bytes.
    pub total_bytes: u64,
    /// Bytes.
    pub free_bytes: u64,
    /// Inodes.
    pub total_inodes: u64,
    /// Inodes.
    pub free_inodes: u64,
}

impl ClusterMap {
    /// Room on the targets for which `counts` holds. Targets of a node that lie on one file system count once.
    pub fn space(&self, counts: impl Fn(&TargetEntry) -> bool) -> VolumeSpace {
        let mut seen = BTreeSet::new();
        let mut sum = VolumeSpace::default();
        for t in self.targets.iter().filter(|t| counts(t)) {
            if seen.insert((t.node, t.device)) {
                sum.total_bytes = sum.total_bytes.saturating_add(t.total_bytes);
                sum.free_bytes = sum.free_bytes.saturating_add(t.free_bytes);
                sum.total_inodes = sum.total_inodes.saturating_add(t.total_inodes);
                sum.free_inodes = sum.free_inodes.saturating_add(t.free_inodes);
            }
        }
        sum
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ids::Role;

    #[test]
    fn a_file_system_under_several_targets_counts_once() {
        let target = |id: u32, node: u32, device: u64, reachability| TargetEntry {
            id: TargetId(id),
            uuid: TargetUuid::random(),
            node: NodeId::new(Role::Storage, node),
            path: String::new(),
            reachability,
            consistency: Consistency::Good,
            device,
            total_bytes: 100,
            free_bytes: 40,
            total_inodes: 10,
            free_inodes: 5,
            pool: CapacityPool::Normal,
        };
        let targets = vec![
            target(1, 1, 7, Reachability::Online),
            target(2, 1, 7, Reachability::Online),
            target(3, 1, 8, Reachability::Offline),
            target(4, 2, 7, Reachability::Online),
        ];
        let map = ClusterMap { targets, ..ClusterMap::default() };
        assert_eq!(map.space(|_| true).total_bytes, 300);
        let online = map.space(|t| t.reachability == Reachability::Online);
        let expected = VolumeSpace { total_bytes: 200, free_bytes: 80, total_inodes: 20, free_inodes: 10 };
        assert_eq!(online, expected);
    }
}
