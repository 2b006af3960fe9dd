//! The storage targets as meta needs them. A trait, so that tests can record what would have been sent.

use crate::base::error::ErrorCode;
use crate::base::ids::{NodeId, TargetId};
use crate::fs::map::ClusterMap;
use crate::net::cluster::Cluster;
use crate::net::frame::CallContext;
use crate::net::msg::storage::{ChangeSpaceRequest, FenceRequest, PurgeRequest};
use crate::net::rpc::Call;
use bytes::Bytes;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// An answer to come.
pub type Sent = Pin<Box<dyn Future<Output = Result<(), ErrorCode>> + Send>>;

/// How long one order waits for a target that is away.
const TARGET_WAIT: Duration = Duration::from_secs(20);

/// Orders to targets.
pub trait TargetAccess: Send + Sync + 'static {
    /// The current map.
    fn map(&self) -> Arc<ClusterMap>;
    /// Truncates chunk files.
    fn change_space(&self, request: ChangeSpaceRequest) -> Sent;
    /// Deletes chunk files.
    fn purge(&self, request: PurgeRequest) -> Sent;
    /// Shuts out clients.
    fn fence(&self, request: FenceRequest) -> Sent;
}

/// Over the network.
#[derive(Debug)]
pub struct ClusterTargets(pub Arc<Cluster>);

impl ClusterTargets {
    fn send<C: Call>(&self, target: TargetId, request: C, wait: Duration) -> Sent {
        let cluster = self.0.clone();
        Box::pin(async move {
            let node: Option<NodeId> = cluster.map().target(target).map(|t| t.node);
            // A target that was removed from the cluster holds nothing that matters.
            let Some(node) = node else { return Ok(()) };
            let ctx = CallContext::default();
            cluster.call(node, &ctx, &request, Bytes::new(), wait).await.map(|_| ())
        })
    }
}

impl TargetAccess for ClusterTargets {
    fn map(&self) -> Arc<ClusterMap> {
        self.0.map()
    }
    fn change_space(&self, request: ChangeSpaceRequest) -> Sent {
        self.send(request.target, request, TARGET_WAIT)
    }
    fn purge(&self, request: PurgeRequest) -> Sent {
        self.send(request.target, request, Duration::from_secs(2))
    }
    fn fence(&self, request: FenceRequest) -> Sent {
        self.send(request.target, request, TARGET_WAIT)
    }
}
