//! Two endpoints on loopback.

use super::*;
use crate::base::ids::{ClusterId, Csn, Role};
use crate::net::identity::{CertificateAuthority, Identity};
use serde::Deserialize;

const SERVER: NodeId = NodeId::new(Role::Storage, 1);
const CLIENT: NodeId = NodeId::new(Role::Client, 7);

#[derive(Serialize, Deserialize)]
struct Echo(String);
impl Call for Echo {
    type Reply = String;
    const METHOD: u16 = 1;
    const BULK: bool = false;
}
#[derive(Serialize, Deserialize)]
struct Turn(u8);
impl Call for Turn {
    type Reply = u64;
    const METHOD: u16 = 2;
    const BULK: bool = true;
}
#[derive(Serialize, Deserialize)]
struct Sleep(u64);
impl Call for Sleep {
    type Reply = ();
    const METHOD: u16 = 3;
    const BULK: bool = false;
}

struct Tester;
impl Service for Tester {
    fn handle(self: Arc<Self>, ctx: RequestContext, method: u16, body: Bytes, payload: Bytes) -> HandleFuture {
        Box::pin(async move {
            match method {
                1 => {
                    let Echo(text) = codec::decode(&body).map_err(|_| ErrorCode::BadMessage)?;
                    Ok(Response::ok(&format!("{text} {:?} {}", ctx.peer, ctx.call.known_csn.sequence)))
                }
                2 => {
                    let Turn(by) = codec::decode(&body).map_err(|_| ErrorCode::BadMessage)?;
                    let turned: Vec<u8> = payload.iter().map(|b| b.wrapping_add(by)).collect();
                    Ok(Response::ok(&(turned.len() as u64)).with_payload(turned.into()))
                }
                3 => {
                    let Sleep(ms) = codec::decode(&body).map_err(|_| ErrorCode::BadMessage)?;
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                    Ok(Response::ok(&()))
                }
                4 => panic!("on purpose"),
                _ => Err(ErrorCode::UnknownMethod),
            }
        })
    }
}

struct Running {
    endpoint: Endpoint,
    addr: SocketAddr,
    cancel: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    async fn stop(self) {
        self.cancel.cancel();
        self.task.await.unwrap();
        self.endpoint.close().await;
    }
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn ca() -> CertificateAuthority {
    CertificateAuthority::generate(ClusterId::random()).unwrap()
}

fn start_at(identity: &Identity, port: u16, open: bool) -> Running {
    let mut tries = 0;
    let endpoint = loop {
        match Endpoint::bind(local(port), Arc::new(identity.clone()), open) {
            Ok(endpoint) => break endpoint,
            Err(e) if tries == 100 => panic!("{e}"),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
        tries += 1;
    };
    let addr = endpoint.local_addr().unwrap();
    let cancel = CancellationToken::new();
    let task = tokio::spawn({
        let (endpoint, cancel) = (endpoint.clone(), cancel.clone());
        async move { endpoint.serve(Arc::new(Tester), cancel).await }
    });
    Running { endpoint, addr, cancel, task }
}

fn start(ca: &CertificateAuthority) -> Running {
    start_at(&ca.issue_self(&[SERVER]).unwrap(), 0, false)
}

fn peer(ca: &CertificateAuthority, addr: SocketAddr) -> Arc<Peer> {
    let endpoint = Endpoint::bind(local(0), Arc::new(ca.issue_self(&[CLIENT]).unwrap()), false).unwrap();
    Peer::new(endpoint, SERVER, vec![addr])
}

async fn echo(peer: &Peer) -> Result<String, ErrorCode> {
    let ctx = CallContext { known_csn: Csn { epoch: 1, sequence: 42 }, ..CallContext::default() };
    peer.call(&ctx, &Echo("hello".into()), Bytes::new()).await.map(|(text, _)| text)
}

#[tokio::test]
async fn a_dead_first_address_does_not_keep_a_peer_away() {
    let ca = ca();
    let server = start(&ca);
    // Takes datagrams and never answers.
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = peer(&ca, silent.local_addr().unwrap());
    peer.set_addrs(vec![silent.local_addr().unwrap(), server.addr]);
    echo(&peer).await.unwrap();
    assert_eq!(peer.remote(), Some(server.addr));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_is_answered_with_context_and_payload() {
    let ca = ca();
    let server = start(&ca);
    let peer = peer(&ca, server.addr);
    let text = echo(&peer).await.unwrap();
    assert!(text.starts_with("hello") && text.contains("Client") && text.ends_with("42"), "{text}");
    assert_eq!(peer.remote(), Some(server.addr));
    assert!(peer.rtt().is_some() && peer.last_error().is_none());
    let payload: Vec<u8> = (0..1u32 << 20).map(|i| (i % 251) as u8).collect();
    let want: Vec<u8> = payload.iter().map(|b| b.wrapping_add(3)).collect();
    for _ in 0..20 {
        let (n, got) = peer.call(&CallContext::default(), &Turn(3), payload.clone().into()).await.unwrap();
        assert_eq!(n, 1 << 20);
        assert!(got == want);
    }
    let too_long = Bytes::from(vec![0; limits::PAYLOAD_BYTES_MAX + 1]);
    assert_eq!(peer.call(&CallContext::default(), &Turn(3), too_long).await.unwrap_err(), ErrorCode::Invalid);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_calls_at_once_are_all_answered() {
    let ca = ca();
    let server = start(&ca);
    let peer = peer(&ca, server.addr);
    let mut tasks = tokio::task::JoinSet::new();
    for i in 0..1500u32 {
        let peer = peer.clone();
        tasks.spawn(async move {
            if i % 10 == 0 {
                let payload = Bytes::from(vec![7; 100_000]);
                let (n, got) = peer.call(&CallContext::default(), &Turn(1), payload).await.unwrap();
                assert!(n == 100_000 && got.iter().all(|b| *b == 8));
            } else {
                peer.call(&CallContext::default(), &Echo(i.to_string()), Bytes::new()).await.unwrap();
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    server.stop().await;
}

#[tokio::test]
async fn another_authority_is_refused_by_client_and_server() {
    let (ours, theirs) = (ca(), ca());
    let server = start(&ours);
    // The client does not trust the server.
    let stranger = peer(&theirs, server.addr);
    assert_eq!(echo(&stranger).await, Err(ErrorCode::Unreachable));
    let why = stranger.last_error().unwrap();
    assert!(why.contains("certificate"), "{why}");
    // The client trusts our authority, but shows a certificate of another: the server refuses, the client learns it.
    let forged = Identity {
        ca_cert_pem: ours.cert_pem().into(),
        cluster: ours.cluster(),
        ..theirs.issue_self(&[CLIENT]).unwrap()
    };
    let endpoint = Endpoint::bind(local(0), Arc::new(forged), false).unwrap();
    let forged = Peer::new(endpoint, SERVER, vec![server.addr]);
    assert_eq!(echo(&forged).await, Err(ErrorCode::Unreachable));
    let why = forged.last_error().unwrap();
    assert!(why.contains("certificate") || why.contains("aborted by peer"), "{why}");
    assert!(!forged.is_connected());
    server.stop().await;
}

#[tokio::test]
async fn another_node_is_refused_by_name() {
    let ca = ca();
    let server = start(&ca);
    let endpoint = Endpoint::bind(local(0), Arc::new(ca.issue_self(&[CLIENT]).unwrap()), false).unwrap();
    let peer = Peer::new(endpoint, NodeId::new(Role::Storage, 2), vec![server.addr]);
    assert_eq!(echo(&peer).await, Err(ErrorCode::Unreachable));
    let why = peer.last_error().unwrap();
    assert!(why.contains("storage:2") && why.contains("storage:1"), "{why}");
    server.stop().await;
}

#[tokio::test]
async fn joining_needs_an_open_server_and_the_right_fingerprint() {
    let ca = ca();
    let closed = start(&ca);
    let why = Endpoint::connect_pinned(closed.addr, ca.fingerprint()).await.unwrap_err().to_string();
    assert!(why.contains("certificate"), "{why}");
    let open = start_at(&ca.issue_self(&[NodeId::new(Role::Mgmt, 1)]).unwrap(), 0, true);
    let connection = Endpoint::connect_pinned(open.addr, ca.fingerprint()).await.unwrap();
    assert_eq!(connection.nodes(), [NodeId::new(Role::Mgmt, 1)]);
    assert_eq!(connection.exporter(b"join").unwrap(), connection.exporter(b"join").unwrap());
    let (text, _) = connection.call_once(&CallContext::default(), &Echo("hi".into()), Bytes::new()).await.unwrap();
    assert!(text.starts_with("hi []"), "{text}");
    let why = Endpoint::connect_pinned(open.addr, [1; 32]).await.unwrap_err().to_string();
    assert!(why.contains("fingerprint"), "{why}");
    closed.stop().await;
    open.stop().await;
}

#[tokio::test]
async fn garbage_closes_the_connection_and_the_server_lives() {
    let ca = ca();
    let server = start(&ca);
    let peer = peer(&ca, server.addr);
    let connection = peer.inner.endpoint.connect(server.addr, SERVER).await.unwrap();
    let (mut send, _recv) = connection.quic.open_bi().await.unwrap();
    send.write_all(&[0x55; 300]).await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(5), connection.quic.closed()).await.unwrap();
    assert!(ended.to_string().contains("bad frame"), "{ended}");
    echo(&peer).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn a_restarted_server_is_found_again() {
    let ca = ca();
    let identity = ca.issue_self(&[SERVER]).unwrap();
    let server = start_at(&identity, 0, false);
    let port = server.addr.port();
    let peer = peer(&ca, server.addr);
    echo(&peer).await.unwrap();
    // A call in flight is answered before the server stops.
    let slow = tokio::spawn({
        let peer = peer.clone();
        async move { peer.call(&CallContext::default(), &Sleep(300), Bytes::new()).await }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    server.stop().await;
    slow.await.unwrap().unwrap();
    assert_eq!(echo(&peer).await, Err(ErrorCode::Unreachable));
    let server = start_at(&identity, port, false);
    tokio::time::sleep(CONNECT_PAUSE).await;
    echo(&peer).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn a_call_without_answer_ends_at_its_deadline_and_the_next_works() {
    let ca = ca();
    let server = start(&ca);
    let peer = peer(&ca, server.addr);
    let ctx = CallContext { deadline_ms: 300, ..CallContext::default() };
    assert_eq!(peer.call(&ctx, &Sleep(2000), Bytes::new()).await.unwrap_err(), ErrorCode::Timeout);
    echo(&peer).await.unwrap();
    let link = peer.inner.live_link().unwrap();
    assert!(lock(&link.control.pending).waiting.is_empty());
    server.cancel.cancel();
}

#[tokio::test]
async fn a_panicking_handler_is_an_internal_error() {
    #[derive(Serialize, Deserialize)]
    struct Panic;
    impl Call for Panic {
        type Reply = ();
        const METHOD: u16 = 4;
        const BULK: bool = false;
    }
    let ca = ca();
    let server = start(&ca);
    let peer = peer(&ca, server.addr);
    assert_eq!(peer.call(&CallContext::default(), &Panic, Bytes::new()).await.unwrap_err(), ErrorCode::Internal);
    server.stop().await;
}

#[tokio::test]
async fn an_absent_server_is_unreachable_at_once_the_second_time() {
    let ca = ca();
    let taken = std::net::UdpSocket::bind(local(0)).unwrap();
    let peer = peer(&ca, taken.local_addr().unwrap());
    assert_eq!(echo(&peer).await, Err(ErrorCode::Unreachable));
    let before = Instant::now();
    assert_eq!(echo(&peer).await, Err(ErrorCode::Unreachable));
    assert!(before.elapsed() < Duration::from_millis(150));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_is_noticed_before_the_idle_timeout() {
    let ca = ca();
    let identity = ca.issue_self(&[SERVER]).unwrap();
    // A runtime that is torn down sends no farewell, like a killed process.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let addr = {
        let identity = identity.clone();
        runtime.spawn(async move { start_at(&identity, 0, false).addr }).await.unwrap()
    };
    let peer = peer(&ca, addr);
    echo(&peer).await.unwrap();
    tokio::task::spawn_blocking(move || runtime.shutdown_timeout(Duration::from_secs(2))).await.unwrap();
    let server = start_at(&identity, addr.port(), false);
    let before = Instant::now();
    let mut last = echo(&peer).await;
    while last.is_err() && before.elapsed() < Duration::from_secs(7) {
        tokio::time::sleep(Duration::from_millis(50)).await;
        last = echo(&peer).await;
    }
    assert!(last.is_ok() && before.elapsed() < Duration::from_secs(5), "{last:?} after {:?}", before.elapsed());
    server.stop().await;
}
