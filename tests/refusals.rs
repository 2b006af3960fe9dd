//! What must be refused is refused: with a reason and what to do, and with nothing changed on disk.

mod common;

use beeswarm::base::error::ErrorCode;
use beeswarm::net::endpoint::ALPN;
use beeswarm::net::frame::{self, CallContext, FrameReader, Header, Kind};
use beeswarm::net::identity::{Identity, server_name};
use beeswarm::net::msg::{mgmt::TokenRequest, storage::ReadChunkRequest};
use beeswarm::net::rpc::Call;
use bytes::Bytes;
use common::{CLIENT, META, MGMT, STORAGE1, STORAGE2, Separate, free_port, is_mounted, random_bytes};
use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Everything below a directory: sizes and contents. (The lock file of a directory in use holds the last process's id.)
fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).expect("read directory").map(|e| e.expect("entry")) {
        let path = entry.path();
        if entry.file_type().expect("type").is_dir() {
            found.insert(path.clone(), Vec::new());
            found.extend(tree(&path));
        } else {
            let lock = path.file_name().is_some_and(|n| n == "lock");
            let bytes = if lock { Vec::new() } else { fs::read(&path).expect("read") };
            found.insert(path, bytes);
        }
    }
    found
}

fn text(path: &Path) -> &str {
    path.to_str().expect("utf-8")
}

/// Exit code 1, these words on stderr, a second line with what to do, and the directory as it was.
fn refused(cluster: &Separate, what: &str, args: &[&str], words: &[&str], unchanged: &Path) -> String {
    let before = tree(unchanged);
    let (code, err) = cluster.run(args);
    assert_eq!(code, Some(1), "{what}: {err}");
    for word in words {
        assert!(err.contains(word), "{what}: no '{word}' in: {err}");
    }
    let mut told = err.lines().skip_while(|l| !l.starts_with("beeswarm: ")).skip(1);
    assert!(told.any(|l| l.len() > 10), "{what}: does not say what to do: {err}");
    let after = tree(unchanged);
    let names = |t: &BTreeMap<PathBuf, Vec<u8>>| t.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&before), names(&after), "{what}: {err}");
    assert!(before == after, "{what}: a file has other bytes: {err}");
    err
}

/// The cluster still works.
fn works(cluster: &Separate, name: &str) {
    let path = cluster.mnt().join(name);
    let bytes = random_bytes(7, 3 << 20);
    fs::write(&path, &bytes).expect("write");
    assert!(fs::read(&path).expect("read") == bytes);
    fs::remove_file(&path).expect("remove");
}

fn new_dir(cluster: &Separate, name: &str) -> PathBuf {
    let dir = cluster.path(name);
    fs::create_dir(&dir).expect("mkdir");
    dir
}

#[test]
fn directories_that_are_not_the_right_ones() {
    let mut cluster = Separate::start();
    let (mgmt, token) = (cluster.mgmt(), cluster.token());
    let token = text(&token);
    let listen = format!("127.0.0.1:{}", free_port());
    let join: Vec<&str> = vec!["-m", &mgmt, "--join-token-file", token, "--listen", &listen];
    let start = |role: &'static str, dirs: &[&Path]| {
        let mut args = vec!["--role".to_owned(), role.to_owned()];
        args.extend(dirs.iter().flat_map(|d| ["-p".to_owned(), text(d).to_owned()]));
        args.extend(join.iter().map(|s| (*s).to_owned()));
        args
    };
    let check = |cluster: &Separate, what: &str, args: Vec<String>, words: &[&str], unchanged: &Path| {
        refused(cluster, what, &args.iter().map(String::as_str).collect::<Vec<_>>(), words, unchanged)
    };

    // In use.
    let (s1a, s2a) = (cluster.path("s1a"), cluster.path("s2a"));
    let pid = fs::read_to_string(s1a.join("lock")).expect("lock");
    check(&cluster, "storage in use", start("storage", &[&s1a]), &["in use", pid.trim()], &s1a);
    check(&cluster, "meta in use", start("meta", &[&cluster.path("meta")]), &["in use"], &cluster.path("meta"));
    let args = ["--role", "mgmt", "-p", text(&cluster.path("mgmt")), "--listen", &listen].map(str::to_owned).to_vec();
    check(&cluster, "mgmt in use", args, &["in use by process"], &cluster.path("mgmt/ca"));

    // Somebody else's files.
    let foreign = new_dir(&cluster, "thesis");
    fs::write(foreign.join("thesis.tex"), "x").expect("write");
    check(&cluster, "foreign storage", start("storage", &[&foreign]), &["thesis.tex", "not empty"], &foreign);
    check(&cluster, "foreign meta", start("meta", &[&foreign]), &["thesis.tex"], &foreign);
    let missing = cluster.path("missing");
    check(&cluster, "missing", start("storage", &[&missing]), &["no such directory", "mkdir -p"], &foreign);
    assert!(!missing.exists());

    // A role's directory for another role; a second meta server.
    cluster.stop_one(STORAGE2);
    check(&cluster, "role", start("meta", &[&s2a]), &["storage"], &s2a);
    let empty = new_dir(&cluster, "empty");
    check(&cluster, "second meta", start("meta", &[&empty]), &["one meta node only"], &empty);

    // A newer format.
    let record = s2a.join("beeswarm.toml");
    let was = fs::read_to_string(&record).expect("read");
    assert!(was.contains("format = 1\n"), "{was}");
    fs::write(&record, was.replace("format = 1\n", "format = 99\n")).expect("write");
    check(&cluster, "format", start("storage", &[&s2a]), &["version 99", "upgrade"], &s2a);
    fs::write(&record, "format = \"rubbish").expect("write");
    check(&cluster, "damaged", start("storage", &[&s2a]), &["beeswarm.toml", "backup"], &s2a);
    fs::write(&record, was).expect("write");

    // Two targets of which one is another node's.
    check(&cluster, "another node's", start("storage", &[&empty, &s2a]), &["mgmt's log"], &s2a);
    assert_eq!(tree(&empty).len(), 0, "{:?}", tree(&empty));
    cluster.wait_log(MGMT, "may not register");

    cluster.start_one(STORAGE2);
    cluster.wait_up(STORAGE2);
    works(&cluster, "f");
}

#[test]
fn disks_that_are_not_mounted() {
    let mut cluster = Separate::start_on(&[("s1a", 64), ("s2b", 64)]);
    works(&cluster, "f");
    let (mgmt, token) = (cluster.mgmt(), cluster.token());
    let nodes = cluster.run(&["node", "list", "--json"]).1;
    for (which, disk, with, without_identity) in [(STORAGE1, 0, "s1b", true), (STORAGE2, 1, "s2a", false)] {
        cluster.stop_one(which);
        cluster.disks[disk].unmount();
        let (gone, there) = (cluster.disks[disk].at.clone(), cluster.path(with));
        let listen = format!("127.0.0.1:{}", cluster.port(which));
        let dirs = if without_identity { [text(&gone), text(&there)] } else { [text(&there), text(&gone)] };
        let args = ["--role", "storage", "-p", dirs[0], "-p", dirs[1], "-m", &mgmt, "--listen", &listen];
        let word = if without_identity { "mount its disk" } else { "mounted" };
        refused(&cluster, "without a token", &args, &[word], &gone);
        let args = [&args[..], &["--join-token-file", text(&token)]].concat();
        refused(&cluster, "with a token", &args, &["mounted"], &gone);
        // The empty directory alone, as a node with one target.
        let alone = ["--role", "storage", "-p", text(&gone), "-m", &mgmt, "--join-token-file", text(&token)];
        let alone = [&alone[..], &["--listen", &listen]].concat();
        refused(&cluster, "alone", &alone, &["mounted"], &gone);
        assert_eq!(tree(&gone).len(), 0);
        cluster.wait_log(MGMT, "its disk is probably not mounted");
        cluster.disks[disk].mount();
        cluster.start_one(which);
        cluster.wait_up(which);
        works(&cluster, "g");
    }
    // Another disk in its place.
    cluster.stop_one(STORAGE1);
    cluster.disks[0].unmount();
    let at = cluster.path("s1a");
    let other = cluster.path("copy");
    fs::create_dir(&other).expect("mkdir");
    {
        cluster.disks[0].mount();
        common::system("cp", &["-a", &format!("{}/.", text(&at)), text(&other)]);
        cluster.disks[0].unmount();
        common::system("mount", &["--bind", text(&other), text(&at)]);
        struct Bound<'a>(&'a Path);
        impl Drop for Bound<'_> {
            fn drop(&mut self) {
                let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
            }
        }
        let _bound = Bound(&at);
        let listen = format!("127.0.0.1:{}", cluster.port(STORAGE1));
        let s1b = cluster.path("s1b");
        let args = ["--role", "storage", "-p", text(&at), "-p", text(&s1b), "-m", &mgmt, "--listen", &listen];
        refused(&cluster, "a copy", &args, &["file system", "findmnt"], &other);
    }
    cluster.disks[0].mount();
    cluster.start_one(STORAGE1);
    cluster.wait_up(STORAGE1);
    works(&cluster, "h");
    let after = cluster.run(&["node", "list", "--json"]).1;
    assert_eq!(nodes.matches("storage").count(), after.matches("storage").count(), "{after}");
}

#[test]
fn nodes_of_another_cluster_and_wrong_tokens() {
    let mut ours = Separate::start();
    let theirs = Separate::start();
    let listen = format!("127.0.0.1:{}", free_port());
    let (mgmt, their_token) = (ours.mgmt(), theirs.token());
    let new = new_dir(&ours, "new");
    let join = |dir: &Path, token: &Path| -> Vec<String> {
        let words = ["--role", "storage", "-p", text(dir), "-m", &mgmt, "--listen", &listen, "--join-token-file"];
        words.iter().map(|s| (*s).to_owned()).chain([text(token).to_owned()]).collect()
    };
    let refuse = |what: &str, args: Vec<String>, words: &[&str], dir: &Path| {
        refused(&ours, what, &args.iter().map(String::as_str).collect::<Vec<_>>(), words, dir)
    };
    let count = |log: &str, word: &str| log.matches(word).count();

    // A token of another cluster: told apart by the authority's fingerprint; mgmt logs the handshake that failed.
    let before = count(&ours.log(MGMT), "refused");
    refuse("token of another cluster", join(&new, &their_token), &["fingerprint", "token is of this cluster"], &new);
    assert!(count(&ours.log(MGMT), "refused") > before, "{}", ours.log(MGMT));
    // None, a mistyped one, one for another role, one that is used up.
    let mut args = join(&new, &their_token);
    args.truncate(args.len() - 2);
    refuse("no token", args, &["no join token", "beeswarm cluster token"], &new);
    let file = ours.path("other-token");
    refuse("missing token file", join(&new, &file), &["other-token", "No such file"], &new);
    let good = fs::read_to_string(ours.token()).expect("token");
    let mut typo = good.clone().into_bytes();
    typo[10] = if typo[10] == b'a' { b'b' } else { b'a' };
    fs::write(&file, typo).expect("write");
    refuse("mistyped", join(&new, &file), &["mistyped", "whole line"], &new);
    let (code, made) = ours.run(&["cluster", "token", "--roles", "client"]);
    assert_eq!(code, Some(0), "{made}");
    fs::write(&file, made).expect("write");
    refuse("for clients", join(&new, &file), &["token", "not for this role"], &new);
    ours.wait_log(MGMT, "the token does not admit the role storage");
    let (_, made) = ours.run(&["cluster", "token", "--valid", "1s"]);
    fs::write(&file, made).expect("write");
    std::thread::sleep(Duration::from_millis(2100));
    refuse("expired", join(&new, &file), &["expired"], &new);
    ours.wait_log(MGMT, "has expired");
    // A number that is taken.
    let mut args = join(&new, &ours.token());
    args.extend(["-s".to_owned(), "1".to_owned()]);
    refuse("number taken", args, &["taken", "-s"], &new);

    // A node, and so a certificate and a directory, of another cluster; the other side logs it as well.
    let mut theirs = theirs;
    theirs.stop_one(STORAGE1);
    theirs.stop_one(STORAGE2);
    let (foreign, token) = (theirs.path("s1a"), ours.token());
    let before = count(&ours.log(MGMT), "refused");
    let other_listen = format!("127.0.0.1:{}", free_port());
    let args = ["--role", "storage", "-p", text(&foreign), "-m", &mgmt, "--listen", &other_listen];
    refused(&ours, "node of another cluster", &args, &["certificate", "same cluster"], &foreign);
    assert!(count(&ours.log(MGMT), "refused") > before, "{}", ours.log(MGMT));
    // Its second disk in a node of ours.
    ours.stop_one(STORAGE1);
    let (s1a, second) = (ours.path("s1a"), theirs.path("s1b"));
    let args = ["--role", "storage", "-p", text(&s1a), "-p", text(&second), "-m", &mgmt, "--listen", &other_listen];
    refused(&ours, "disk of another cluster", &args, &["cluster"], &second);
    // And as a new node of ours, with a good token.
    let args = [
        &["--role", "storage", "-p", text(&second), "-m", &mgmt, "--listen", &other_listen][..],
        &["--join-token-file", text(&token)],
    ]
    .concat();
    refused(&ours, "disk of another cluster, new node", &args, &["cluster"], &second);
    ours.start_one(STORAGE1);
    ours.wait_up(STORAGE1);
    // A certificate for another role.
    let client = ours.path("client");
    let args = ["--role", "meta", "-p", text(&client), "-m", &mgmt, "--listen", &other_listen];
    refused(&ours, "certificate of another role", &args, &["client", "another directory"], &client);
    // mgmt's address is another server's.
    let args = format!("127.0.0.1:{}", ours.port(META));
    let args = ["--role", "client", "-p", text(&client), "-m", &args, "--mount", text(&new)];
    refused(&ours, "-m names meta", &args, &["meta:1"], &new);
    works(&ours, "f");
}

#[test]
fn wrong_settings_and_ports() {
    let cluster = Separate::start();
    let new = new_dir(&cluster, "new");
    let (dir, mgmt) = (text(&new), cluster.mgmt());
    let fails = |args: &[&str], words: &[&str]| {
        let (code, err) = cluster.run(args);
        assert!(code.is_some_and(|c| c == 1 || c == 2), "{args:?}: {code:?} {err}");
        for word in words {
            assert!(err.contains(word), "{args:?}: no '{word}' in {err}");
        }
        assert!(err.lines().count() >= 2, "{args:?}: does not say what to do: {err}");
        assert_eq!(tree(&new).len(), 0, "{args:?}");
    };
    fails(&["--rolle", "storage", "-p", dir], &["--rolle", "--role"]);
    fails(&["--role", "stroage", "-p", dir, "-m", &mgmt], &["stroage", "storage"]);
    fails(&["--role", "storage", "-m", &mgmt], &["-p DIR"]);
    fails(&["--role", "mgmt"], &["-p DIR"]);
    fails(&["--role", "storage", "-p", dir], &["-m HOST"]);
    fails(&["--role", "client", "-m", &mgmt], &["--mount DIR"]);
    fails(&["-p", dir], &["no role", "--role"]);
    fails(&["--role", "storage", "-p", dir, "-m", &mgmt, "-i", "nought"], &["nought"]);
    fails(&["--role", "storage", "-p", dir, "-m", "no-such-host.invalid"], &["no-such-host.invalid", "-m"]);
    fails(&["--role", "storage", "-p", dir, "-m", &mgmt, "--listen", "here"], &["here"]);
    let conf = cluster.path("b.toml");
    fs::write(&conf, format!("role = \"storage\"\npaht = \"{dir}\"\nmgmt = \"{mgmt}\"\n")).expect("write");
    fails(&["--conf", text(&conf)], &["paht", "path", "b.toml"]);
    fs::write(&conf, "role = \"storage\n").expect("write");
    fails(&["--conf", text(&conf)], &["b.toml"]);
    fails(&["--conf", "/no/such/b.toml"], &["/no/such/b.toml"]);

    // A port in use, by another program or by one of ours: before a join, and before a cluster is made.
    let other = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
    let ports = [other.local_addr().expect("address").port(), cluster.port(META)];
    let token = cluster.token();
    for port in ports {
        let listen = format!("127.0.0.1:{port}");
        let args =
            ["--role", "storage", "-p", dir, "-m", &mgmt, "--join-token-file", text(&token), "--listen", &listen];
        refused(&cluster, "port", &args, &[&listen, "in use", "--listen"], &new);
        refused(&cluster, "port", &["--role", "mgmt", "-p", dir, "--listen", &listen], &[&listen, "in use"], &new);
    }
}

#[test]
fn mount_points_that_cannot_be_used() {
    let cluster = Separate::start();
    let (mgmt, token) = (cluster.mgmt(), cluster.token());
    let state = new_dir(&cluster, "client2");
    let (file, missing) = (cluster.path("file"), cluster.path("missing"));
    fs::write(&file, "x").expect("write");
    let mnt = cluster.mnt();
    let cases = [
        ("missing", &missing, ["no such directory", "mkdir -p"]),
        ("a file", &file, ["Not a directory", "existing directory"]),
        ("mounted", &mnt, ["mounted there already", "umount"]),
    ];
    for (what, at, words) in cases {
        let args = ["--role", "client", "-p", text(&state), "-m", &mgmt, "--join-token-file", text(&token)];
        let args = [&args[..], &["--mount", text(at)]].concat();
        refused(&cluster, what, &args, &words, &state);
    }
    assert!(!missing.exists() && fs::read(&file).expect("read") == b"x" && is_mounted(&mnt));
    works(&cluster, "f");
    let (code, err) = cluster.run(&["node", "list"]);
    assert!(code == Some(0) && err.matches("client").count() == 1, "{err}");
}

// ---- what comes over the network ----

/// A QUIC client that shows this certificate, or none; it sends what it likes.
struct Raw {
    _endpoint: quinn::Endpoint,
    connection: quinn::Connection,
}

impl Raw {
    async fn connect(
        to: SocketAddr,
        identity: &Identity,
        with_certificate: bool,
    ) -> Result<Raw, quinn::ConnectionError> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(identity.ca_cert().expect("authority")).expect("root");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .with_root_certificates(roots);
        let mut tls = match with_certificate {
            true => builder
                .with_client_auth_cert(identity.chain().expect("chain"), identity.key().expect("key"))
                .expect("certificate"),
            false => builder.with_no_client_auth(),
        };
        tls.alpn_protocols = vec![ALPN.to_vec()];
        let tls = quinn::crypto::rustls::QuicClientConfig::try_from(tls).expect("QUIC");
        let mut endpoint = quinn::Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).expect("endpoint");
        endpoint.set_default_client_config(quinn::ClientConfig::new(Arc::new(tls)));
        let connection = endpoint.connect(to, &server_name(identity.cluster)).expect("connect").await?;
        Ok(Raw { _endpoint: endpoint, connection })
    }

    /// Sends bytes on a stream of their own; the reason for which the server then closes the connection.
    async fn closed_after(&self, bytes: &[u8], finish: bool) -> String {
        let (mut send, _recv) = self.connection.open_bi().await.expect("stream");
        send.write_all(bytes).await.expect("write");
        if finish {
            send.finish().expect("finish");
        }
        let closed = tokio::time::timeout(Duration::from_secs(5), self.connection.closed()).await;
        closed.expect("the server does not close").to_string()
    }

    /// One request; the status of its answer.
    async fn ask(&self, method: u16, body: &[u8], payload: &[u8]) -> u16 {
        let payload = Bytes::copy_from_slice(payload);
        let head = frame::head(header(method), body, &payload).expect("frame");
        let (mut send, recv) = self.connection.open_bi().await.expect("stream");
        send.write_all(&head).await.expect("write");
        send.write_all(&payload).await.expect("write");
        let mut reader = FrameReader::new(recv);
        let answer = tokio::time::timeout(Duration::from_secs(5), reader.next()).await.expect("no answer");
        answer.expect("frame").expect("answer").header.status
    }
}

fn header(method: u16) -> Header {
    let call = CallContext::default();
    Header { kind: Kind::Request, method, status: 0, request_id: 1, body_len: 0, payload_len: 0, call }
}

/// A header as bytes, changed by `f`.
fn wrong(f: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = frame::head(header(ReadChunkRequest::METHOD), b"", &Bytes::new()).expect("frame").to_vec();
    f(&mut bytes);
    bytes
}

fn identity_of(cluster: &Separate, dir: &str) -> Identity {
    Identity::load(&cluster.path(dir).join("identity")).expect("identity")
}

#[test]
fn bad_frames_close_the_connection_and_the_server_lives() {
    let cluster = Separate::start();
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let (client, mut random) = (identity_of(&cluster, "client"), 0);
    let cases: Vec<(&str, Vec<u8>, bool, &str)> = vec![
        ("zeros", vec![0; 300], false, "starts with 0x00"),
        ("another protocol", b"GET / HTTP/1.1\r\n\r\n".repeat(20), false, "starts with 0x47"),
        ("version", wrong(|b| b[1] = 9), false, "version 9"),
        ("kind", wrong(|b| b[2] = 7), false, "kind 7"),
        ("flags", wrong(|b| b[3] = 1), false, "flags"),
        ("body too long", wrong(|b| b[16..20].copy_from_slice(&u32::MAX.to_le_bytes())), false, "body of 4294967295"),
        (
            "payload too long",
            wrong(|b| b[20..24].copy_from_slice(&u32::MAX.to_le_bytes())),
            false,
            "payload of 4294967295",
        ),
        ("cut within the header", wrong(|b| b.truncate(50)), true, "within a frame"),
        ("cut within the body", wrong(|b| b[16..20].copy_from_slice(&100u32.to_le_bytes())), true, "within a frame"),
        ("a reply", wrong(|b| b[2] = 2), false, "a reply where a request was due"),
    ];
    for which in [MGMT, META, STORAGE1] {
        let to = SocketAddr::from(([127, 0, 0, 1], cluster.port(which)));
        for (what, bytes, finish, reason) in &cases {
            let closed = runtime.block_on(async {
                let raw = Raw::connect(to, &client, true).await.expect("connect");
                raw.closed_after(bytes, *finish).await
            });
            assert!(closed.contains(reason), "{what}: {closed}");
            assert!(cluster.log(which).contains(reason), "{what}: not logged:\n{}", cluster.log(which));
        }
        // Random bytes behind a right beginning.
        for _ in 0..50 {
            random += 1;
            let mut bytes = wrong(|b| b.extend(random_bytes(random, 2000)));
            bytes[4..24].copy_from_slice(&random_bytes(random + 1000, 20));
            runtime.block_on(async {
                let raw = Raw::connect(to, &client, true).await.expect("connect");
                let (mut send, _recv) = raw.connection.open_bi().await.expect("stream");
                let _ = send.write_all(&bytes).await;
                let _ = send.finish();
                raw.connection.close(0u32.into(), b"");
            });
        }
        // Right frames with wrong contents: answered with an error, and the connection goes on.
        runtime.block_on(async {
            let raw = Raw::connect(to, &client, true).await.expect("connect");
            assert_eq!(raw.ask(9999, b"", b"").await, ErrorCode::UnknownMethod.number());
            let (method, own) = match which {
                MGMT => (4, 4), // SubscribeRequest
                META => (105, 105),
                _ => (ReadChunkRequest::METHOD, 200),
            };
            assert_eq!(raw.ask(method, b"\x01\x02\x03", b"").await, ErrorCode::BadMessage.number());
            assert_eq!(raw.ask(own, &[0xff; 4096], &[1; 4096]).await, ErrorCode::BadMessage.number());
            // A call of another role.
            assert_ne!(raw.ask(TokenRequest::METHOD, b"", b"").await, 0);
            assert_ne!(raw.ask(206, b"", b"").await, 0);
        });
        cluster.wait_log(which, "this version has no such method");
    }
    // mgmt: a client's certificate makes no tokens. storage: a client purges nothing.
    cluster.wait_log(MGMT, "TokenRequest");
    cluster.wait_log(STORAGE1, "PurgeRequest");
    works(&cluster, "f");
    assert!(cluster.daemons.iter().flatten().count() == 5 && cluster.log(META).contains("is up"));
}

#[test]
fn strangers_are_refused_and_the_server_lives() {
    let mut cluster = Separate::start();
    let other = Separate::start();
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let (ours, theirs) = (identity_of(&cluster, "client"), identity_of(&other, "client"));
    // Their certificate with our authority: what a stranger with a copied ca.crt can show.
    let forged = Identity { ca_cert_pem: ours.ca_cert_pem.clone(), cluster: ours.cluster, ..theirs.clone() };
    for which in [MGMT, META, STORAGE1] {
        let to = SocketAddr::from(([127, 0, 0, 1], cluster.port(which)));
        for (what, identity, certificate) in [("no certificate", &ours, false), ("another authority's", &forged, true)]
        {
            let lines = cluster.log(which).lines().count();
            let got = runtime.block_on(async {
                match Raw::connect(to, identity, certificate).await {
                    // In TLS 1.3 the refusal comes after the client's end of the handshake.
                    Ok(raw) => match tokio::time::timeout(Duration::from_secs(3), raw.connection.closed()).await {
                        Ok(closed) => Err(closed.to_string()),
                        // mgmt lets one in that has no certificate: it may join, and nothing else.
                        Err(_) => Ok(raw.ask(TokenRequest::METHOD, b"", b"").await),
                    },
                    Err(e) => Err(e.to_string()),
                }
            });
            match got {
                Ok(status) => {
                    assert!(which == MGMT && !certificate, "{what}: let in by {which}");
                    assert_eq!(status, ErrorCode::Forbidden.number());
                }
                Err(why) => assert!(!why.is_empty()),
            }
            let end = Instant::now() + Duration::from_secs(5);
            while cluster.log(which).lines().count() == lines && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(20));
            }
            let log = cluster.log(which);
            let new: Vec<&str> = log.lines().skip(lines).collect();
            assert!(
                new.iter().any(|l| l.contains("refused") && l.contains("certificate")),
                "{what} at {which}: {new:?}"
            );
        }
        // No QUIC at all.
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        for i in 0..500u64 {
            let len = usize::try_from(i % 1400 + 1).expect("small");
            let mut bytes = random_bytes(i + 1, len);
            if i % 2 == 0 {
                bytes[0] = 0xc0; // the form of a QUIC handshake
            }
            let _ = socket.send_to(&bytes, to);
        }
    }
    works(&cluster, "f");
    for which in [MGMT, META, STORAGE1, STORAGE2, CLIENT] {
        assert!(cluster.daemons[which].as_mut().is_some_and(|d| d.ended().is_none()), "{which} has ended");
    }
}
