//! Identifiers. Each is a type of its own, so that an inode number never passes for a target id.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use uuid::Uuid;

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
        impl FromStr for $name {
            type Err = std::num::ParseIntError;
            fn from_str(s: &str) -> Result<Self, Self::Err> {
                s.parse().map($name)
            }
        }
    };
}

number_id!(
    /// A node's number, unique within its role.
    NodeNumber,
    u32
);
number_id!(
    /// A storage target's number, unique in the cluster.
    TargetId,
    u32
);
number_id!(
    /// An inode number: `shard << 48 | counter`. The root directory is 1.
    InodeId,
    u64
);
number_id!(
    /// Names one generation of a file's data on the targets; a truncation to zero takes a new one. 0: no data yet.
    DataId,
    u64
);
number_id!(
    /// A version of the cluster map; grows by one with each change.
    MapVersion,
    u64
);

impl InodeId {
    /// The root directory.
    pub const ROOT: InodeId = InodeId(1);

    /// The shard that holds this inode.
    pub fn shard(self) -> u16 {
        u16::try_from(self.0 >> 48).unwrap_or(u16::MAX)
    }
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);
        impl $name {
            /// A new random one.
            pub fn random() -> Self {
                Self(Uuid::new_v4())
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
        impl FromStr for $name {
            type Err = uuid::Error;
            fn from_str(s: &str) -> Result<Self, Self::Err> {
                Uuid::parse_str(s).map($name)
            }
        }
    };
}

uuid_id!(
    /// The cluster, made once by mgmt's first start.
    ClusterId
);
uuid_id!(
    /// One run of a client (a mount); names its session at the meta servers.
    ClientInstance
);
uuid_id!(
    /// Written into a target's own directory, so that a swapped disk is noticed.
    TargetUuid
);

/// What a process is in the cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Keeps the cluster map and the certificate authority.
    Mgmt,
    /// Keeps the namespace.
    Meta,
    /// Keeps chunk files on its targets.
    Storage,
    /// Mounts the volume.
    Client,
    /// The operator's commands; certificate made by mgmt in its own directory.
    Admin,
}

impl Role {
    /// The lower-case word used on the command line and in certificates.
    pub const fn as_str(self) -> &'static str {
        match self {
            Role::Mgmt => "mgmt",
            Role::Meta => "meta",
            Role::Storage => "storage",
            Role::Client => "client",
            Role::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "mgmt" => Ok(Role::Mgmt),
            "meta" => Ok(Role::Meta),
            "storage" => Ok(Role::Storage),
            "client" => Ok(Role::Client),
            "admin" => Ok(Role::Admin),
            other => Err(format!("unknown role '{other}': use mgmt, meta, storage or client")),
        }
    }
}

/// A node: its role and its number, written `storage:3`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct NodeId {
    /// What it is.
    pub role: Role,
    /// Which one of that role.
    pub number: NodeNumber,
}

impl NodeId {
    /// `role:number`.
    pub const fn new(role: Role, number: u32) -> Self {
        Self { role, number: NodeNumber(number) }
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.role, self.number)
    }
}

impl FromStr for NodeId {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let (role, number) = s.split_once(':').ok_or_else(|| format!("'{s}' is not of the form role:number"))?;
        let number = number.parse().map_err(|_| format!("'{number}' is not a node number"))?;
        Ok(NodeId { role: role.parse()?, number })
    }
}

/// Commit sequence number of a meta store: the log's epoch (raised at each start) and the record's number in it.
/// Watermarks compare only within one epoch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Csn {
    /// Raised durably at each start of the store.
    pub epoch: u64,
    /// Number of the log record.
    pub sequence: u64,
}
