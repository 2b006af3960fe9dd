//! Calls that mgmt serves.

use crate::base::ids::{ClusterId, MapVersion, NodeId, NodeNumber, Role, TargetId, TargetUuid};
use crate::fs::map::ClusterMap;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// A role that wants into the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantedNode {
    /// As what.
    pub role: Role,
    /// With which number; none: mgmt hands one out.
    pub number: Option<NodeNumber>,
}

/// Asks for a certificate. Sent on a connection without client certificate whose server was checked by fingerprint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JoinRequest {
    /// Which token.
    pub token_id: [u8; 8],
    /// HMAC-SHA256 by the token's secret over the TLS exporter (label `beeswarm join`), then the signing request.
    pub proof: [u8; 32],
    /// PEM of the certificate signing request.
    pub csr_pem: String,
    /// All roles of the process.
    pub nodes: Vec<WantedNode>,
    /// Alias.
    pub name: String,
}

/// The certificate.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JoinReply {
    /// Which cluster.
    pub cluster: ClusterId,
    /// Ids given, in the order asked for.
    pub nodes: Vec<NodeId>,
    /// PEM.
    pub cert_pem: String,
    /// PEM.
    pub ca_pem: String,
}

/// Renews the caller's certificate under a new signing request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RenewRequest {
    /// PEM of the certificate signing request.
    pub csr_pem: String,
}

/// A target as its node announces it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnnouncedTarget {
    /// Number, once it has one or if `-i` chose it.
    pub id: Option<TargetId>,
    /// From its directory.
    pub uuid: TargetUuid,
    /// Directory.
    pub path: String,
    /// Device number of the file system under it (st_dev): targets of a node with the same one share its room.
    pub device: u64,
    /// Size of the file system under it.
    pub total_bytes: u64,
    /// Free to beeswarm.
    pub free_bytes: u64,
    /// Inodes.
    pub total_inodes: u64,
    /// Free inodes.
    pub free_inodes: u64,
    /// This start made the directory new; refused when the map already knows the number (the disk is probably not mounted).
    pub fresh: bool,
}

/// Announces a process that is up, with all of its roles. Sent at each start and when addresses change.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RegisterRequest {
    /// Must be ids of the caller's certificate.
    pub nodes: Vec<NodeId>,
    /// Alias.
    pub name: String,
    /// In order of preference; port 0 means none (a client does not listen).
    pub addrs: Vec<SocketAddr>,
    /// Software version.
    pub version: String,
    /// For storage.
    pub targets: Vec<AnnouncedTarget>,
}

/// Ids of the targets in the order announced, and the map.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RegisterReply {
    /// In the order announced.
    pub targets: Vec<TargetId>,
    /// The map with this node in it.
    pub map: ClusterMap,
}

/// The subscription: answered when the map is newer than `known`, or after 2 s; so it is a heartbeat as well.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SubscribeRequest {
    /// Who listens (ids of the caller's certificate).
    pub nodes: Vec<NodeId>,
    /// Version the caller has.
    pub known: MapVersion,
    /// Current capacities of the caller's targets.
    pub capacities: Vec<TargetCapacity>,
}

/// Room on a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetCapacity {
    /// Which.
    pub id: TargetId,
    /// Device number of the file system under it (st_dev): targets of a node with the same one share its room.
    pub device: u64,
    /// Size of the file system under it.
    pub total_bytes: u64,
    /// Free to beeswarm.
    pub free_bytes: u64,
    /// Inodes.
    pub total_inodes: u64,
    /// Free inodes.
    pub free_inodes: u64,
    /// The disk has failed and is fenced.
    pub failed: bool,
}

/// A newer map, or none.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SubscribeReply {
    /// None: nothing newer.
    pub map: Option<ClusterMap>,
}

/// Makes a join token.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TokenRequest {
    /// Roles that may join with it.
    pub roles: Vec<Role>,
    /// Seconds until it expires; none: never.
    pub valid_seconds: Option<u64>,
    /// Number of joins; none: any.
    pub uses: Option<u32>,
}

/// The token as text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TokenReply {
    /// What goes into the join token file.
    pub token: String,
}

/// Removes a node for good; its certificate is refused from then on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RemoveNodeRequest {
    /// Which.
    pub node: NodeId,
}

crate::calls! { Mgmt;
    JoinRequest -> JoinReply = 1, [], false, false;
    RenewRequest -> JoinReply = 2, [Mgmt, Meta, Storage, Client, Admin], false, true;
    RegisterRequest -> RegisterReply = 3, [Mgmt, Meta, Storage, Client], false, true;
    SubscribeRequest -> SubscribeReply = 4, [Mgmt, Meta, Storage, Client, Admin], false, true;
    TokenRequest -> TokenReply = 5, [Admin], false, false;
    RemoveNodeRequest -> () = 6, [Admin], false, true;
}
