//! One UDP socket that serves and calls, with mutual TLS 1.3 inside QUIC.

use super::identity::{self, Identity, fingerprint_of, hex, parse_peer, server_name};
use super::udp::{self, SegmentLimitedRuntime};
use super::{NetError, Result};
use crate::base::ids::{ClusterId, NodeId};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    ConnectionError, ConnectionId, ConnectionIdGenerator, EndpointConfig, IdleTimeout, MtuDiscoveryConfig,
    TransportConfig, VarInt,
};
use ring::rand::SecureRandom;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::server::WebPkiClientVerifier;
use rustls::{DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// Names the protocol and its version in the handshake.
pub const ALPN: &[u8] = b"beeswarm/1";
/// What a server says first on every connection that it admits. In TLS 1.3 a client's handshake ends before the server has
/// looked at the client's certificate; without this a refusal would only show at the first call.
const HELLO: &[u8] = b"beeswarm admits\x01";
/// Close code of an orderly end: everything that was taken up has been answered.
pub(super) const CLOSE_SHUTDOWN: u32 = 1;
/// Close code after something that is no frame.
pub(super) const CLOSE_BAD_FRAME: u32 = 2;
/// Close code for a peer that may not connect.
pub(super) const CLOSE_REFUSED: u32 = 3;
/// Close code of an end that left calls unanswered.
pub(super) const CLOSE_ABORTED: u32 = 4;

const CONNECT_WAIT: Duration = Duration::from_secs(2);
const JOIN_WAIT: Duration = Duration::from_secs(5);
const KEEP_ALIVE: Duration = Duration::from_secs(2);
const IDLE_TIMEOUT_MS: u32 = 8_000;
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
const STREAMS_MAX: u32 = 4096;
/// quinn's default of 14 KB is less than one datagram of a large MTU: then nothing, not even a close, goes out while an MTU
/// probe is in flight.
const CONGESTION_WINDOW_INITIAL_BYTES: u64 = 1 << 20;
const MTU_INITIAL: u16 = 1200;
const MTU_MAX: u16 = 65_000;

fn tls(e: impl std::fmt::Display) -> NetError {
    NetError::Tls(e.to_string())
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn transport() -> Arc<TransportConfig> {
    let mut mtu = MtuDiscoveryConfig::default();
    mtu.upper_bound(MTU_MAX);
    let mut congestion = quinn::congestion::CubicConfig::default();
    congestion.initial_window(CONGESTION_WINDOW_INITIAL_BYTES);
    let mut config = TransportConfig::default();
    config
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW_BYTES))
        .receive_window(VarInt::from_u32(CONNECTION_WINDOW_BYTES))
        .send_window(u64::from(CONNECTION_WINDOW_BYTES))
        .congestion_controller_factory(Arc::new(congestion))
        .initial_mtu(MTU_INITIAL)
        .mtu_discovery_config(Some(mtu))
        .keep_alive_interval(Some(KEEP_ALIVE))
        .max_idle_timeout(Some(IdleTimeout::from(VarInt::from_u32(IDLE_TIMEOUT_MS))))
        .max_concurrent_bidi_streams(VarInt::from_u32(STREAMS_MAX));
    Arc::new(config)
}

/// Random connection ids without a secret in them: a restarted server must recognise those of its former life as possible,
/// to tell their owners at once that the connection is gone.
struct RandomIds;

impl ConnectionIdGenerator for RandomIds {
    fn generate_cid(&mut self) -> ConnectionId {
        let mut bytes = [0; 8];
        if ring::rand::SystemRandom::new().fill(&mut bytes).is_err() {
            bytes.copy_from_slice(&uuid::Uuid::new_v4().as_bytes()[..8]);
        }
        ConnectionId::new(&bytes)
    }
    fn cid_len(&self) -> usize {
        8
    }
    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

/// `secret` makes the reset tokens: the same after a restart, so that peers notice it at once, not by timeout.
fn endpoint_config(secret: &[u8]) -> Result<EndpointConfig> {
    let reset = ring::digest::digest(&ring::digest::SHA256, &[b"beeswarm stateless reset", secret].concat());
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, reset.as_ref());
    let mut config = EndpointConfig::new(Arc::new(key));
    config.cid_generator(|| Box::new(RandomIds));
    config.max_udp_payload_size(udp::UDP_PAYLOAD_BYTES_MAX).map_err(tls)?;
    Ok(config)
}

fn roots(ca: CertificateDer<'static>) -> Result<Arc<RootCertStore>> {
    let mut roots = RootCertStore::empty();
    roots.add(ca).map_err(tls)?;
    Ok(Arc::new(roots))
}

fn server_config(identity: &Identity, allow_unauthenticated: bool) -> Result<quinn::ServerConfig> {
    let mut verifier = WebPkiClientVerifier::builder_with_provider(roots(identity.ca_cert()?)?, provider());
    if allow_unauthenticated {
        verifier = verifier.allow_unauthenticated();
    }
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls)?
        .with_client_cert_verifier(verifier.build().map_err(tls)?)
        .with_single_cert(identity.chain()?, identity.key()?)
        .map_err(tls)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    // A resumed session would not look at the client's certificate again.
    config.send_tls13_tickets = 0;
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(config).map_err(tls)?));
    config.transport_config(transport());
    Ok(config)
}

fn quic_client(mut config: rustls::ClientConfig) -> Result<quinn::ClientConfig> {
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    let mut config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).map_err(tls)?));
    config.transport_config(transport());
    Ok(config)
}

fn client_config(identity: &Identity) -> Result<quinn::ClientConfig> {
    let config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls)?
        .with_root_certificates(roots(identity.ca_cert()?)?)
        .with_client_auth_cert(identity.chain()?, identity.key()?)
        .map_err(tls)?;
    quic_client(config)
}

/// Accepts a server whose chain holds the authority with the fingerprint of the join token, and whose certificate that
/// authority signed. The server's name is read from its certificate: a joining node does not know its cluster yet.
#[derive(Debug)]
struct PinnedVerifier {
    ca_fingerprint: [u8; 32],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let general = |e: String| rustls::Error::General(e);
        let Some(ca) = intermediates.iter().find(|cert| fingerprint_of(cert) == self.ca_fingerprint) else {
            let shown: Vec<String> = intermediates.iter().map(|cert| hex(&fingerprint_of(cert))).collect();
            return Err(general(format!(
                "the join token names a cluster authority with fingerprint {}, the server shows {}",
                hex(&self.ca_fingerprint),
                if shown.is_empty() { "none".to_owned() } else { shown.join(", ") }
            )));
        };
        let (cluster, _) = parse_peer(end_entity).map_err(|e| general(e.to_string()))?;
        let name = ServerName::try_from(server_name(cluster)).map_err(|e| general(e.to_string()))?;
        let roots = roots(ca.clone().into_owned()).map_err(|e| general(e.to_string()))?;
        let inner = WebPkiServerVerifier::builder_with_provider(roots, self.provider.clone());
        let inner = inner.build().map_err(|e| general(e.to_string()))?;
        inner.verify_server_cert(end_entity, intermediates, &name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.3 only".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// A connection whose peer has been admitted. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Connection {
    pub(super) quic: quinn::Connection,
    cluster: Option<ClusterId>,
    nodes: Arc<[NodeId]>,
}

impl Connection {
    fn new(quic: quinn::Connection) -> Result<Connection> {
        let certs = quic.peer_identity().and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
        let (cluster, nodes) = match certs.as_deref().and_then(|certs| certs.first()) {
            Some(cert) => {
                let (cluster, nodes) = parse_peer(cert)?;
                (Some(cluster), nodes)
            }
            None => (None, Vec::new()),
        };
        Ok(Connection { quic, cluster, nodes: nodes.into() })
    }

    /// The nodes of the peer's certificate; empty when it has none (a node that joins).
    pub fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    /// The cluster of the peer's certificate.
    pub fn cluster(&self) -> Option<ClusterId> {
        self.cluster
    }

    /// Where the peer is.
    pub fn remote_address(&self) -> SocketAddr {
        self.quic.remote_address()
    }

    /// For messages: the peer's nodes and address.
    pub fn describe(&self) -> String {
        let names: Vec<String> = self.nodes.iter().map(ToString::to_string).collect();
        let names = if names.is_empty() { "a peer without certificate".to_owned() } else { names.join(",") };
        format!("{names} at {}", self.remote_address())
    }

    /// Bytes that only the two ends of this connection know: proofs over them cannot be passed on to another.
    pub fn exporter(&self, label: &[u8]) -> Result<[u8; 32]> {
        let mut out = [0; 32];
        self.quic
            .export_keying_material(&mut out, label, b"")
            .map_err(|_| tls("no keying material of this connection"))?;
        Ok(out)
    }

    /// Smoothed round trip time.
    pub fn rtt(&self) -> Duration {
        self.quic.rtt()
    }

    /// Closes at once; calls in flight are lost.
    pub fn close(&self, reason: &str) {
        self.quic.close(VarInt::from_u32(CLOSE_ABORTED), reason.as_bytes());
    }

    pub(super) fn is_closed(&self) -> bool {
        self.quic.close_reason().is_some()
    }
}

struct Active {
    identity: Arc<Identity>,
    client: quinn::ClientConfig,
}

struct Inner {
    quic: quinn::Endpoint,
    allow_unauthenticated: bool,
    active: RwLock<Active>,
}

/// One UDP socket for serving and calling. Cheap to clone.
#[derive(Clone)]
pub struct Endpoint {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("addr", &self.inner.quic.local_addr().ok()).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Binds. With `allow_unauthenticated` (mgmt) a peer without certificate is let in, with no nodes to its name.
    /// Must be called within a tokio runtime.
    pub fn bind(addr: SocketAddr, identity: Arc<Identity>, allow_unauthenticated: bool) -> Result<Endpoint> {
        let server = server_config(&identity, allow_unauthenticated)?;
        let client = client_config(&identity)?;
        let config = endpoint_config(identity.key_pem.as_bytes())?;
        let socket = udp::bind(addr)?;
        let quic = quinn::Endpoint::new(config, Some(server), socket, Arc::new(SegmentLimitedRuntime))
            .map_err(NetError::io(format!("start QUIC on {addr}")))?;
        let active = RwLock::new(Active { identity, client });
        Ok(Endpoint { inner: Arc::new(Inner { quic, allow_unauthenticated, active }) })
    }

    /// Uses a renewed identity for connections from now on.
    pub fn set_identity(&self, identity: Arc<Identity>) -> Result<()> {
        let server = server_config(&identity, self.inner.allow_unauthenticated)?;
        let client = client_config(&identity)?;
        self.inner.quic.set_server_config(Some(server));
        *self.inner.active.write().unwrap_or_else(PoisonError::into_inner) = Active { identity, client };
        Ok(())
    }

    /// The identity in use.
    pub fn identity(&self) -> Arc<Identity> {
        self.inner.active.read().unwrap_or_else(PoisonError::into_inner).identity.clone()
    }

    /// Where it is bound.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        self.inner.quic.local_addr().map_err(NetError::io("read the socket's address"))
    }

    /// Closes every connection, lets go of the port once all handles are dropped.
    pub async fn close(&self) {
        self.inner.quic.close(VarInt::from_u32(CLOSE_ABORTED), b"endpoint closed");
        let _ = tokio::time::timeout(Duration::from_secs(2), self.inner.quic.wait_idle()).await;
    }

    /// Connects to `node` at `addr`: 2 s at most, and only if the peer's certificate names that node of our cluster.
    pub async fn connect(&self, addr: SocketAddr, node: NodeId) -> Result<Connection> {
        let (identity, client) = {
            let active = self.inner.active.read().unwrap_or_else(PoisonError::into_inner);
            (active.identity.clone(), active.client.clone())
        };
        let name = server_name(identity.cluster);
        let connection = establish(&self.inner.quic, client, addr, &name, CONNECT_WAIT).await?;
        if connection.cluster != Some(identity.cluster) || !connection.nodes.contains(&node) {
            let found = connection.cluster.map(|c| c.to_string()).unwrap_or_default();
            let reason = format!(
                "wanted {node} of cluster {} at {addr}, found {} of cluster {found}",
                identity.cluster,
                connection.describe()
            );
            connection.quic.close(VarInt::from_u32(CLOSE_REFUSED), b"not the node that was wanted");
            return Err(NetError::Untrusted(reason));
        }
        Ok(connection)
    }

    /// For joining: connects without a certificate to a server whose cluster authority has this fingerprint. The caller
    /// checks in `Connection::nodes` that it is a mgmt node.
    pub async fn connect_pinned(addr: SocketAddr, ca_fingerprint: [u8; 32]) -> Result<Connection> {
        let verifier = PinnedVerifier { ca_fingerprint, provider: provider() };
        let config = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(tls)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        let client = quic_client(config)?;
        let any = if addr.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = udp::bind(SocketAddr::new(any, 0))?;
        let config = endpoint_config(ClusterId::random().0.as_bytes())?;
        let quic = quinn::Endpoint::new(config, None, socket, Arc::new(SegmentLimitedRuntime))
            .map_err(NetError::io("start QUIC"))?;
        establish(&quic, client, addr, "join.beeswarm.internal", JOIN_WAIT).await
    }

    /// The next connection attempt; `None` once the endpoint is closed.
    pub(super) async fn incoming(&self) -> Option<quinn::Incoming> {
        self.inner.quic.accept().await
    }

    /// Handshake of the serving side, with the reason of a refusal.
    pub(super) async fn admit(&self, incoming: quinn::Incoming) -> Result<Connection> {
        let from = incoming.remote_address();
        let refused = |e: &dyn std::fmt::Display| NetError::Connect(format!("connection from {from} refused: {e}"));
        let handshake = async { incoming.accept().map_err(|e| refused(&e))?.await.map_err(|e| refused(&e)) };
        let quic = match tokio::time::timeout(JOIN_WAIT, handshake).await {
            Ok(quic) => quic?,
            Err(_) => return Err(refused(&"handshake took too long")),
        };
        let close = VarInt::from_u32(CLOSE_REFUSED);
        let connection = match Connection::new(quic.clone()) {
            Ok(connection) => connection,
            Err(e) => {
                quic.close(close, e.to_string().as_bytes());
                return Err(refused(&e));
            }
        };
        let ours = self.identity().cluster;
        if connection.cluster.is_some_and(|theirs| theirs != ours) {
            quic.close(close, b"certificate of another cluster");
            return Err(refused(&format!("{} is of another cluster", connection.describe())));
        }
        if connection.cluster.is_none() && !self.inner.allow_unauthenticated {
            quic.close(close, b"a certificate is needed");
            return Err(refused(&"no certificate"));
        }
        let mut hello = quic.open_uni().await.map_err(|e| refused(&e))?;
        hello.write_all(HELLO).await.map_err(|e| refused(&e))?;
        let _ = hello.finish();
        Ok(connection)
    }
}

async fn establish(
    endpoint: &quinn::Endpoint,
    config: quinn::ClientConfig,
    addr: SocketAddr,
    name: &str,
    wait: Duration,
) -> Result<Connection> {
    let failed = |e: &dyn std::fmt::Display| NetError::Connect(format!("cannot connect to {addr}: {e}"));
    let connecting = endpoint.connect_with(config, addr, name).map_err(|e| failed(&e))?;
    let ended = |e: ConnectionError| match is_refusal(&e) {
        true => NetError::Untrusted(format!("cannot connect to {addr}: {e}")),
        false => failed(&e),
    };
    let attempt = async {
        let quic = connecting.await.map_err(ended)?;
        let mut hello = quic.accept_uni().await.map_err(ended)?;
        let said = hello.read_to_end(64).await.map_err(|e| failed(&e))?;
        if said != HELLO {
            return Err(failed(&"the server does not greet as a beeswarm server"));
        }
        Connection::new(quic)
    };
    match tokio::time::timeout(wait, attempt).await {
        Ok(result) => result,
        Err(_) => Err(failed(&format!("no answer within {} s (is the UDP port open?)", wait.as_secs()))),
    }
}

/// Did a certificate end the connection, on whichever side?
fn is_refusal(e: &ConnectionError) -> bool {
    // QUIC's numbers for alerts of TLS.
    let is_alert = |code: quinn::TransportErrorCode| (0x100..0x200).contains(&u64::from(code));
    match e {
        ConnectionError::TransportError(e) => is_alert(e.code),
        ConnectionError::ConnectionClosed(close) => is_alert(close.error_code),
        ConnectionError::ApplicationClosed(close) => close.error_code == VarInt::from_u32(CLOSE_REFUSED),
        _ => false,
    }
}

/// The fingerprint in a join token as text, and back.
pub fn parse_fingerprint(text: &str) -> Option<[u8; 32]> {
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    let mut out = [0; 32];
    for (byte, at) in out.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(text.get(at..at + 2)?, 16).ok()?;
    }
    (identity::hex(&out) == text.to_ascii_lowercase()).then_some(out)
}
