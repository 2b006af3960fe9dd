//! mgmt's calls. The router has checked the caller's role; that a caller speaks for itself only is checked here.

use super::Mgmt;
use super::state::{Command, MemberKey, Outcome, Refused};
use crate::base::codec;
use crate::base::error::ErrorCode;
use crate::base::ids::{MapVersion, NodeId};
use crate::net::join;
use crate::net::msg::mgmt::{
    JoinReply, JoinRequest, RegisterReply, RegisterRequest, RemoveNodeRequest, RenewRequest, SubscribeReply,
    SubscribeRequest, TokenReply, TokenRequest,
};
use crate::net::rpc::{Call, RequestContext, Response, Service, ServiceFuture};
use bytes::Bytes;
use serde::de::DeserializeOwned;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// How long a subscription waits for a newer map. A fifth of the silence that makes a node probably offline.
const SUBSCRIPTION_WAIT: Duration = Duration::from_secs(2);
/// Certificates live so long and are renewed at a third.
const CERTIFICATE_DAYS: u32 = 90;
/// Largest signing request; ours have about 400 bytes.
const CSR_BYTES_MAX: usize = 16 << 10;

impl Service for Mgmt {
    fn handle(self: Arc<Self>, ctx: RequestContext, method: u16, body: Bytes, _payload: Bytes) -> ServiceFuture {
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
    async fn subscription(self: Arc<Self>, request: SubscribeRequest, ctx: RequestContext) -> Result<Response, ErrorCode> {
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

fn exporter(_ctx: &RequestContext) -> Result<[u8; 32], ErrorCode> {
    Err(ErrorCode::NotReady)
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
