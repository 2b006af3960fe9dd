//! mgmt's calls. The router has checked the caller's role; that a caller speaks for itself only is checked here.

use super::Mgmt;
use super::state::{Command, MemberKey, Outcome, Refused};
use crate::base::codec;
use crate::base::error::ErrorCode;
use crate::base::ids::{MapVersion, NodeId};
use crate::net::identity::CERTIFICATE_DAYS;
use crate::net::join;
use crate::net::msg::mgmt::{
    JoinReply, JoinRequest, RegisterReply, RegisterRequest, RemoveNodeRequest, RenewRequest, SubscribeReply,
    SubscribeRequest, TokenReply, TokenRequest,
};
use crate::net::rpc::{Call, RequestContext, Response, Service};
use bytes::Bytes;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// How long a subscription waits for a newer map. A fifth of the silence that makes a node probably offline.
const SUBSCRIPTION_WAIT: Duration = Duration::from_secs(2);
/// Largest signing request; ours have about 400 bytes.
const CSR_BYTES_MAX: usize = 16 << 10;

type Answer = Pin<Box<dyn Future<Output = Result<Response, ErrorCode>> + Send>>;

impl Service for Mgmt {
    fn handle(self: Arc<Self>, ctx: RequestContext, method: u16, body: Bytes, _payload: Bytes) -> Answer {
        Box::pin(async move {
            if self.stop.is_cancelled() {
                return Err(ErrorCode::ShuttingDown);
            }
            match method {
                JoinRequest::METHOD => {
                    let exporter = exporter(&ctx)?;
                    let request: JoinRequest = parse(&body, &ctx)?;
                    let addr = ctx.peer_addr;
                    self.blocking(move |mgmt| mgmt.admit(&request, &exporter, addr)).await
                }
                RenewRequest::METHOD => {
                    let request: RenewRequest = parse(&body, &ctx)?;
                    self.blocking(move |mgmt| mgmt.renew(&request, &ctx)).await
                }
                RegisterRequest::METHOD => {
                    let request: RegisterRequest = parse(&body, &ctx)?;
                    self.blocking(move |mgmt| mgmt.register(request, &ctx)).await
                }
                SubscribeRequest::METHOD => self.subscription(parse(&body, &ctx)?, ctx).await,
                TokenRequest::METHOD => {
                    let request: TokenRequest = parse(&body, &ctx)?;
                    self.blocking(move |mgmt| mgmt.token(&request, &ctx)).await
                }
                RemoveNodeRequest::METHOD => {
                    let request: RemoveNodeRequest = parse(&body, &ctx)?;
                    self.blocking(move |mgmt| {
                        let done = mgmt.execute(Command::RemoveNode(request.node));
                        done.map_err(|r| log_refusal("remove a node", &ctx, &r))?;
                        Ok(Response::ok(&()))
                    })
                    .await
                }
                _ => Err(ErrorCode::UnknownMethod),
            }
        })
    }
}

impl Mgmt {
    /// Runs what may wait for the disk beside the runtime's threads.
    async fn blocking<F>(self: Arc<Self>, run: F) -> Result<Response, ErrorCode>
    where
        F: FnOnce(&Mgmt) -> Result<Response, ErrorCode> + Send + 'static,
    {
        match tokio::task::spawn_blocking(move || run(&self)).await {
            Ok(result) => result,
            Err(e) => {
                tracing::error!("mgmt: a call ended without an answer: {e}");
                Err(ErrorCode::Internal)
            }
        }
    }

    fn admit(&self, request: &JoinRequest, exporter: &[u8; 32], addr: SocketAddr) -> Result<Response, ErrorCode> {
        match self.join(request, exporter) {
            Ok(reply) => {
                tracing::info!("'{}' at {addr} has joined as {}", request.name, list(&reply.nodes));
                Ok(Response::ok(&reply))
            }
            Err(refused) => {
                let roles: Vec<&str> = request.nodes.iter().map(|n| n.role.as_str()).collect();
                let (name, roles, token) = (&request.name, roles.join(" "), join::hex(&request.token_id));
                tracing::warn!("join refused: {name:?} at {addr} as {roles}, token {token}: {refused}");
                Err(refused.code)
            }
        }
    }

    /// Checks the proof, gives out ids, signs. A join that failed after its ids were given gets the same ones again.
    pub(super) fn join(&self, request: &JoinRequest, exporter: &[u8; 32]) -> Result<JoinReply, Refused> {
        let bad_token = |reason: &str| Refused { code: ErrorCode::BadToken, reason: reason.to_owned() };
        let secret = self.lock().state.token(&request.token_id).map(|t| t.secret);
        let Some(secret) = secret else {
            return Err(bad_token("the token is not known, or has expired"));
        };
        if !join::verify(&secret, exporter, &request.csr_pem, &request.proof) {
            return Err(bad_token("the proof of the token's secret is wrong"));
        }
        let key = key_of(&request.csr_pem)?;
        let outcome = self.execute(Command::Join {
            wanted: request.nodes.clone(),
            name: request.name.clone(),
            key,
            token: Some(request.token_id),
        })?;
        let Outcome::Joined(nodes) = outcome else {
            return Err(Refused { code: ErrorCode::Internal, reason: "no ids were given".to_owned() });
        };
        self.sign(nodes, &request.csr_pem)
    }

    fn sign(&self, nodes: Vec<NodeId>, csr_pem: &str) -> Result<JoinReply, Refused> {
        let cert_pem = self
            .authority
            .issue_from_csr(csr_pem, &nodes, CERTIFICATE_DAYS)
            .map_err(|e| Refused { code: ErrorCode::Invalid, reason: e.to_string() })?;
        Ok(JoinReply { cluster: self.cluster, nodes, cert_pem, ca_pem: self.authority.cert_pem().to_owned() })
    }

    fn renew(&self, request: &RenewRequest, ctx: &RequestContext) -> Result<Response, ErrorCode> {
        let renew = || {
            let key = key_of(&request.csr_pem)?;
            // Signed first: a request that cannot be signed must not change the key on record.
            let reply = self.sign(ctx.peer.clone(), &request.csr_pem)?;
            self.execute(Command::Renew { nodes: ctx.peer.clone(), key })?;
            Ok(reply)
        };
        let reply = renew().map_err(|r: Refused| log_refusal("renew a certificate", ctx, &r))?;
        tracing::info!("certificate of {} renewed", list(&ctx.peer));
        Ok(Response::ok(&reply))
    }

    fn register(&self, request: RegisterRequest, ctx: &RequestContext) -> Result<Response, ErrorCode> {
        let what = "register";
        speaks_for_itself(&request.nodes, ctx).map_err(|r| log_refusal(what, ctx, &r))?;
        let RegisterRequest { nodes, name, addrs, version, targets } = request;
        let addrs = addrs.into_iter().filter(|a| a.port() != 0).collect();
        let outcome = self
            .execute(Command::Register { nodes, name, addrs, version, targets })
            .map_err(|r| log_refusal(what, ctx, &r))?;
        match outcome {
            Outcome::Registered(targets) => Ok(Response::ok(&RegisterReply { targets, map: self.map_now() })),
            _ => Err(ErrorCode::Internal),
        }
    }

    /// Cancel-safe: the report is taken at once, the rest only waits.
    async fn subscription(
        self: Arc<Self>,
        request: SubscribeRequest,
        ctx: RequestContext,
    ) -> Result<Response, ErrorCode> {
        let what = "report";
        speaks_for_itself(&request.nodes, &ctx).map_err(|r| log_refusal(what, &ctx, &r))?;
        let mut maps = self.watch();
        let stop = self.stop.clone();
        let mgmt = Arc::clone(&self);
        let known = request.known;
        let report = Command::Report { nodes: request.nodes, capacities: request.capacities };
        Arc::clone(&self)
            .blocking(move |m| m.execute(report).map(|_| Response::default()).map_err(|r| log_refusal(what, &ctx, &r)))
            .await?;
        // A caller that knows a newer map than we have is one of before a restored backup: it gets ours.
        let newer = move |version: MapVersion| version != known;
        let map = tokio::select! {
            changed = maps.wait_for(|map| newer(map.version)) => changed.is_ok(),
            () = tokio::time::sleep(SUBSCRIPTION_WAIT) => false,
            () = stop.cancelled() => return Err(ErrorCode::ShuttingDown),
        };
        Ok(Response::ok(&SubscribeReply { map: map.then(|| mgmt.map_now()) }))
    }

    fn token(&self, request: &TokenRequest, ctx: &RequestContext) -> Result<Response, ErrorCode> {
        match self.make_token(request) {
            Ok(token) => {
                let roles: Vec<&str> = request.roles.iter().map(|r| r.as_str()).collect();
                tracing::info!("{} at {} made a join token for {}", list(&ctx.peer), ctx.peer_addr, roles.join(" "));
                Ok(Response::ok(&TokenReply { token }))
            }
            Err(e) => {
                tracing::warn!("{} at {}: {e}", list(&ctx.peer), ctx.peer_addr);
                Err(if self.lock().store.is_fenced() { ErrorCode::DiskFailed } else { ErrorCode::Invalid })
            }
        }
    }
}

/// A certificate speaks for the ids in it.
fn speaks_for_itself(nodes: &[NodeId], ctx: &RequestContext) -> Result<(), Refused> {
    match nodes.iter().find(|id| !ctx.peer.contains(id)) {
        Some(id) => Err(Refused { code: ErrorCode::Forbidden, reason: format!("its certificate does not name {id}") }),
        None => Ok(()),
    }
}

/// SHA-256 of the public key in a signing request. (Its signature is checked when it is signed.)
pub(super) fn key_of(csr_pem: &str) -> Result<MemberKey, Refused> {
    use x509_parser::prelude::FromDer;
    let bad = |why: String| Refused { code: ErrorCode::Invalid, reason: format!("signing request: {why}") };
    if csr_pem.len() > CSR_BYTES_MAX {
        return Err(bad(format!("{} bytes, more than {CSR_BYTES_MAX}", csr_pem.len())));
    }
    let (_, pem) = x509_parser::pem::parse_x509_pem(csr_pem.as_bytes()).map_err(|e| bad(e.to_string()))?;
    let (_, csr) = x509_parser::certification_request::X509CertificationRequest::from_der(&pem.contents)
        .map_err(|e| bad(e.to_string()))?;
    let digest = ring::digest::digest(&ring::digest::SHA256, csr.certification_request_info.subject_pki.raw);
    let mut fingerprint = [0; 32];
    fingerprint.copy_from_slice(digest.as_ref());
    Ok(MemberKey::Fingerprint(fingerprint))
}

fn exporter(ctx: &RequestContext) -> Result<[u8; 32], ErrorCode> {
    ctx.connection.exporter(join::EXPORTER_LABEL).map_err(|e| {
        tracing::warn!("join refused: {} {e}", ctx.peer_addr);
        ErrorCode::BadToken
    })
}

fn parse<T: DeserializeOwned>(body: &[u8], ctx: &RequestContext) -> Result<T, ErrorCode> {
    codec::decode(body).map_err(|e| {
        tracing::warn!("{} at {}: {e}", list(&ctx.peer), ctx.peer_addr);
        ErrorCode::BadMessage
    })
}

fn log_refusal(what: &str, ctx: &RequestContext, refused: &Refused) -> ErrorCode {
    tracing::warn!("{} at {} may not {what}: {refused}", list(&ctx.peer), ctx.peer_addr);
    refused.code
}

fn list(nodes: &[NodeId]) -> String {
    if nodes.is_empty() {
        return "a peer without certificate".to_owned();
    }
    nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ids::{NodeNumber, Role, TargetUuid};
    use crate::net::endpoint::{Connection, Endpoint};
    use crate::net::frame::CallContext;
    use crate::net::identity::{Identity, new_key_and_csr};
    use crate::net::join::JoinToken;
    use crate::net::msg::mgmt::{AnnouncedTarget, WantedNode};

    fn request(token: &JoinToken, exporter: &[u8; 32], role: Role, csr_pem: &str) -> JoinRequest {
        JoinRequest {
            token_id: token.id,
            proof: join::proof(&token.secret, exporter, csr_pem),
            csr_pem: csr_pem.to_owned(),
            nodes: vec![WantedNode { role, number: None }],
            name: "host".to_owned(),
        }
    }

    fn token(mgmt: &Mgmt, uses: Option<u32>) -> JoinToken {
        let request = TokenRequest { roles: vec![Role::Storage], valid_seconds: None, uses };
        mgmt.make_token(&request).unwrap().parse().unwrap()
    }

    #[tokio::test]
    async fn join_with_the_right_proof_gets_a_certificate_and_survives_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let mgmt = Mgmt::open(dir.path(), "m", None).unwrap();
        assert!(mgmt.created());
        let token = token(&mgmt, Some(1));
        assert_eq!(token.ca_fingerprint, mgmt.ca_fingerprint());
        let (key, csr) = new_key_and_csr().unwrap();
        let exporter = [5; 32];
        let reply = mgmt.join(&request(&token, &exporter, Role::Storage, &csr), &exporter).unwrap();
        assert_eq!(reply.nodes, vec![NodeId::new(Role::Storage, 1)]);
        let identity = Identity::new(reply.ca_pem, reply.cert_pem, key).unwrap();
        assert_eq!((identity.cluster, identity.nodes()), (mgmt.cluster(), reply.nodes));
        mgmt.shutdown().await;
        let cluster = mgmt.cluster();
        drop(mgmt);
        let mgmt = reopen(dir.path()).await;
        assert!(!mgmt.created() && mgmt.cluster() == cluster);
        let (_, other) = new_key_and_csr().unwrap();
        let again = mgmt.join(&request(&token, &exporter, Role::Storage, &csr), &exporter).unwrap();
        assert_eq!(again.nodes, vec![NodeId::new(Role::Storage, 1)], "same key, same number");
        let refused = mgmt.join(&request(&token, &exporter, Role::Storage, &other), &exporter);
        assert_eq!(refused.map(|r| r.nodes).map_err(|r| r.code), Err(ErrorCode::BadToken), "used up");
    }

    /// A tick in flight may hold the old one for a moment.
    async fn reopen(dir: &std::path::Path) -> Arc<Mgmt> {
        for _ in 0..100 {
            if let Ok(mgmt) = Mgmt::open(dir, "m", None) {
                return mgmt;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("the directory stays locked");
    }

    #[tokio::test]
    async fn join_with_a_wrong_proof_is_refused_and_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mgmt = Mgmt::open(dir.path(), "m", None).unwrap();
        let token = token(&mgmt, None);
        let (_, csr) = new_key_and_csr().unwrap();
        let good = request(&token, &[5; 32], Role::Storage, &csr);
        let code = |request: &JoinRequest, exporter| mgmt.join(request, &exporter).map(|_| ()).map_err(|r| r.code);
        assert_eq!(code(&good, [6; 32]), Err(ErrorCode::BadToken), "another connection");
        assert_eq!(code(&JoinRequest { token_id: [0; 8], ..good.clone() }, [5; 32]), Err(ErrorCode::BadToken));
        assert_eq!(code(&JoinRequest { proof: [0; 32], ..good.clone() }, [5; 32]), Err(ErrorCode::BadToken));
        let meta = request(&token, &[5; 32], Role::Meta, &csr);
        assert_eq!(code(&meta, [5; 32]), Err(ErrorCode::BadToken), "not admitted by this token");
        let garbage = request(&token, &[5; 32], Role::Storage, "garbage");
        assert_eq!(code(&garbage, [5; 32]), Err(ErrorCode::Invalid));
        assert!(mgmt.lock().state.member(NodeId::new(Role::Storage, 1)).is_none());
        assert_eq!(code(&good, [5; 32]), Ok(()));
    }

    #[tokio::test]
    async fn issue_local_gives_the_same_numbers_again() {
        let dir = tempfile::tempdir().unwrap();
        let mgmt = Mgmt::open(dir.path(), "m", None).unwrap();
        let wanted = [Role::Mgmt, Role::Meta, Role::Storage].map(|role| WantedNode { role, number: None });
        let first = mgmt.issue_local(&wanted, "host").unwrap();
        assert_eq!(first.nodes(), mgmt.issue_local(&wanted, "host").unwrap().nodes());
        let taken = [WantedNode { role: Role::Meta, number: Some(NodeNumber(2)) }];
        assert!(mgmt.issue_local(&taken, "host").is_err_and(|e| e.why.contains("one metadata server")));
        assert_eq!(mgmt.join_hint().len(), 3);
        let map = mgmt.watch().borrow().clone();
        assert_eq!(map.cluster, mgmt.cluster());
    }

    #[tokio::test]
    async fn a_state_that_could_not_be_read_again_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let mgmt = Mgmt::open(dir.path(), "m", None).unwrap();
        let node = mgmt.issue_local(&[WantedNode { role: Role::Storage, number: None }], "s").unwrap().nodes()[0];
        let register = |begin: u32, count: u32| {
            let target = |n: u32| AnnouncedTarget {
                id: None,
                uuid: TargetUuid::random(),
                path: format!("/{n}/{}", "x".repeat(4000)),
                device: 1,
                total_bytes: 100,
                free_bytes: 50,
                total_inodes: 10,
                free_inodes: 5,
                fresh: true,
            };
            let (name, version) = ("s".to_owned(), "1".to_owned());
            let targets = (begin..begin + count).map(target).collect();
            mgmt.execute(Command::Register { nodes: vec![node], name, addrs: Vec::new(), version, targets })
        };
        let mut begin = 0;
        let refused = loop {
            let before = (mgmt.lock().state.clone(), mgmt.watch().borrow().clone());
            match register(begin, 200) {
                Ok(_) => begin += 200,
                Err(refused) => {
                    assert_eq!((mgmt.lock().state.clone(), mgmt.watch().borrow().clone()), before);
                    break refused;
                }
            }
        };
        assert_eq!((refused.code, begin), (ErrorCode::NoSpace, 1000));
        assert!(refused.reason.contains("cannot grow"), "{refused}");
        // It goes on: what fits is kept, and all of it is found again.
        register(begin, 1).unwrap();
        let state = mgmt.lock().state.clone();
        mgmt.shutdown().await;
        drop(mgmt);
        assert_eq!(reopen(dir.path()).await.lock().state.map().targets, state.map().targets);
    }

    async fn call<C: Call>(connection: &Connection, request: &C) -> Result<C::Reply, ErrorCode> {
        let ctx = CallContext { deadline_ms: 5000, ..CallContext::default() };
        connection.call_once(&ctx, request, Bytes::new()).await.map(|(reply, _)| reply)
    }

    #[tokio::test]
    async fn node_joins_registers_and_is_removed_over_quic() {
        let dir = tempfile::tempdir().unwrap();
        let mgmt = Mgmt::open(dir.path(), "m", None).unwrap();
        let own = mgmt.issue_local(&[WantedNode { role: Role::Mgmt, number: None }], "m").unwrap();
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = Endpoint::bind(local, Arc::new(own.clone()), true).unwrap();
        let (addr, cancel) = (server.local_addr().unwrap(), tokio_util::sync::CancellationToken::new());
        let (endpoint, service, stop) = (server.clone(), Arc::clone(&mgmt), cancel.clone());
        let task = tokio::spawn(async move { endpoint.serve(service, stop).await });

        let token = token(&mgmt, None);
        let (key, csr) = new_key_and_csr().unwrap();
        let open = Endpoint::connect_pinned(addr, token.ca_fingerprint).await.unwrap();
        let exporter = open.exporter(join::EXPORTER_LABEL).unwrap();
        let stolen = request(&token, &[0; 32], Role::Storage, &csr);
        assert_eq!(call(&open, &stolen).await.map(|_| ()), Err(ErrorCode::BadToken));
        let reply = call(&open, &request(&token, &exporter, Role::Storage, &csr)).await.unwrap();
        let me = reply.nodes[0];
        let identity = Identity::new(reply.ca_pem, reply.cert_pem, key).unwrap();

        let client = Endpoint::bind(local, Arc::new(identity), false).unwrap();
        let connection = client.connect(addr, NodeId::new(Role::Mgmt, 1)).await.unwrap();
        let register = |node| RegisterRequest {
            nodes: vec![node],
            name: "host".to_owned(),
            addrs: vec![addr],
            version: "0".to_owned(),
            targets: vec![],
        };
        let other = NodeId::new(Role::Storage, 2);
        assert_eq!(call(&connection, &register(other)).await.map(|_| ()), Err(ErrorCode::Forbidden));
        let map = call(&connection, &register(me)).await.unwrap().map;
        assert_eq!(map.node(me).map(|n| n.addrs.clone()), Some(vec![addr]));
        let subscribe = |known| SubscribeRequest { nodes: vec![me], known, capacities: vec![] };
        assert!(call(&connection, &subscribe(MapVersion(0))).await.unwrap().map.is_some(), "at once");
        let nothing_new = subscribe(map.version);
        let (waited, removed) = tokio::join!(call(&connection, &nothing_new), async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            mgmt.execute(Command::RemoveNode(me))
        });
        assert!(removed.is_ok());
        assert_eq!(waited.unwrap().map.map(|m| m.revoked), Some(vec![me]));
        let (_, csr) = new_key_and_csr().unwrap();
        assert_eq!(call(&connection, &RenewRequest { csr_pem: csr }).await.map(|_| ()), Err(ErrorCode::Forbidden));
        mgmt.shutdown().await;
        assert_eq!(call(&connection, &register(me)).await.map(|_| ()), Err(ErrorCode::ShuttingDown));
        cancel.cancel();
        task.await.unwrap();
    }
}
