//! Operations through the dispatcher, over a real store in a temporary directory and recorded targets.

use super::target::{Sent, TargetAccess};
use super::{MetaServer, purge};
use crate::base::codec;
use crate::base::error::ErrorCode;
use crate::base::format::lock;
use crate::base::ids::*;
use crate::fs::attr::{Attributes, Credential, FileKind, Timestamp};
use crate::fs::map::{ClusterMap, Consistency, Reachability, TargetEntry};
use crate::fs::name::FileName;
use crate::fs::placement::CapacityPool;
use crate::net::frame::CallContext;
use crate::net::msg::meta::*;
use crate::net::msg::storage::{ChangeSpaceRequest, FenceRequest, PurgeRequest, SpaceChange};
use crate::net::rpc::Call;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[derive(Default)]
struct Fake {
    away: AtomicBool,
    cuts: Mutex<Vec<(TargetId, u64)>>,
    purged: Mutex<Vec<(TargetId, usize)>>,
    fenced: Mutex<Vec<TargetId>>,
}

impl Fake {
    fn answer(&self) -> Sent {
        let away = self.away.load(Ordering::Relaxed);
        Box::pin(async move { if away { Err(ErrorCode::Unreachable) } else { Ok(()) } })
    }
}

impl TargetAccess for Fake {
    fn map(&self) -> Arc<ClusterMap> {
        let target = |n| TargetEntry {
            id: TargetId(n),
            uuid: TargetUuid::random(),
            node: NodeId::new(Role::Storage, n),
            path: String::new(),
            reachability: if n == 9 { Reachability::Offline } else { Reachability::Online },
            consistency: Consistency::Good,
            device: u64::from(n),
            total_bytes: 1 << 40,
            free_bytes: 1 << 39,
            total_inodes: 1 << 20,
            free_inodes: 1 << 20,
            pool: CapacityPool::Normal,
        };
        Arc::new(ClusterMap { targets: [1, 2, 9].map(target).to_vec(), ..ClusterMap::default() })
    }
    fn change_space(&self, r: ChangeSpaceRequest) -> Sent {
        if let SpaceChange::Truncate(size) = r.change {
            self.cuts.lock().unwrap().push((r.target, size));
        }
        self.answer()
    }
    fn purge(&self, r: PurgeRequest) -> Sent {
        self.purged.lock().unwrap().push((r.target, r.keys.len()));
        self.answer()
    }
    fn fence(&self, r: FenceRequest) -> Sent {
        self.fenced.lock().unwrap().push(r.target);
        self.answer()
    }
}

struct Rig {
    dir: tempfile::TempDir,
    fs_id: ClusterId,
    fake: Arc<Fake>,
    server: Arc<MetaServer>,
    client: ClientInstance,
    sequence: AtomicU64,
}

const ROOT: InodeId = InodeId::ROOT;
const READ: OpenMode = OpenMode { read: true, write: false, truncate: false, execute: false };
const WRITE: OpenMode = OpenMode { read: true, write: true, truncate: false, execute: false };

fn root() -> Credential {
    Credential::default()
}
fn user(uid: u32) -> Credential {
    Credential { uid, gid: uid, groups: vec![] }
}
fn name(s: &str) -> FileName {
    FileName::new(s.as_bytes().to_vec()).unwrap()
}

impl Rig {
    async fn new() -> Rig {
        let (dir, fake, fs_id) = (tempfile::tempdir().unwrap(), Arc::new(Fake::default()), ClusterId::random());
        let server = MetaServer::open_with(dir.path(), lock(dir.path()).unwrap(), fs_id, fake.clone()).await.unwrap();
        let rig = Rig { dir, fs_id, fake, server, client: ClientInstance::random(), sequence: AtomicU64::new(1) };
        rig.call(OpenSessionRequest { host: "h".into(), reclaim: vec![] }).await.unwrap();
        rig
    }
    fn ctx(&self, sequence: u64) -> CallContext {
        CallContext { client_instance: self.client, slot_sequence: sequence, ..CallContext::default() }
    }
    async fn call<C: Call>(&self, r: C) -> Result<C::Reply, ErrorCode> {
        self.call_as(self.sequence.fetch_add(1, Ordering::Relaxed), r).await
    }
    async fn call_as<C: Call>(&self, sequence: u64, r: C) -> Result<C::Reply, ErrorCode> {
        let body = self.server.call(&self.ctx(sequence), C::METHOD, &codec::encode(&r)).await?;
        Ok(codec::decode(&body).unwrap())
    }
    /// Drops the server as a crash would, and opens the store again.
    async fn crash(self) -> Rig {
        let Rig { dir, fs_id, fake, server, client, sequence } = self;
        drop(server);
        for _ in 0..100 {
            if let Ok(lock) = lock(dir.path()) {
                let server = MetaServer::open_with(dir.path(), lock, fs_id, fake.clone()).await.unwrap();
                return Rig { dir, fs_id, fake, server, client, sequence };
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("cannot reopen");
    }
    async fn mkdir(&self, parent: InodeId, n: &str, mode: u32, cred: Credential) -> Result<InodeId, ErrorCode> {
        let r = MakeRequest { parent, name: name(n), cred, mode, node: NewNode::Directory };
        self.call(r).await.map(|r| r.attr.ino)
    }
    async fn create(&self, parent: InodeId, n: &str, cred: Credential) -> Result<InodeId, ErrorCode> {
        let r = CreateRequest { parent, name: name(n), cred, mode: 0o644, open: WRITE, exclusive: true };
        let ino = self.call(r).await?.attr.ino;
        self.call(CloseRequest { ino, write: true, tail_unsure: false }).await?;
        Ok(ino)
    }
    async fn stat(&self, ino: InodeId) -> Result<Attributes, ErrorCode> {
        self.call(GetAttrRequest { ino }).await.map(|r| r.attr)
    }
    async fn find(&self, parent: InodeId, n: &str) -> Result<InodeId, ErrorCode> {
        self.call(LookupRequest { parent, name: name(n), cred: root() }).await.map(|r| r.attr.ino)
    }
    async fn unlink(&self, parent: InodeId, n: &str, cred: Credential) -> Result<(), ErrorCode> {
        self.call(UnlinkRequest { parent, name: name(n), cred }).await
    }
    async fn rmdir(&self, parent: InodeId, n: &str) -> Result<(), ErrorCode> {
        self.call(RemoveDirRequest { parent, name: name(n), cred: root() }).await
    }
    async fn mv(
        &self,
        from: (InodeId, &str),
        to: (InodeId, &str),
        flag: &str,
        cred: Credential,
    ) -> Result<(), ErrorCode> {
        self.call(RenameRequest {
            parent: from.0,
            name: name(from.1),
            new_parent: to.0,
            new_name: name(to.1),
            no_replace: flag == "noreplace",
            exchange: flag == "exchange",
            cred,
        })
        .await
    }
    async fn write(&self, ino: InodeId, end: u64) {
        let layout = self.call(LayoutRequest { ino }).await.unwrap().layout;
        let r = WrittenRequest {
            ino,
            data_id: layout.data_id,
            data_epoch: layout.data_epoch,
            end,
            targets_with_data: 3,
            clear_suid: false,
        };
        self.call(r).await.unwrap();
    }
    async fn chmod(&self, ino: InodeId, mode: u32, cred: Credential) -> Result<u32, ErrorCode> {
        let r = SetAttrRequest { ino, cred, mode: Some(mode), ..SetAttrRequest::default() };
        self.call(r).await.map(|r| r.attr.mode)
    }
    async fn truncate(&self, ino: InodeId, size: u64, cred: Credential) -> Result<Attributes, ErrorCode> {
        let r = SetAttrRequest { ino, cred, size: Some(size), ..SetAttrRequest::default() };
        self.call(r).await.map(|r| r.attr)
    }
    async fn queue(&self) -> u64 {
        self.call(MetaStatusRequest {}).await.unwrap().purge_queue
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_come_and_go() {
    let t = Rig::new().await;
    let d = t.mkdir(ROOT, "d", 0o755, root()).await.unwrap();
    assert_eq!(t.mkdir(ROOT, "d", 0o755, root()).await, Err(ErrorCode::Exists));
    assert_eq!(t.stat(ROOT).await.unwrap().nlink, 3);
    let f = t.create(d, "f", root()).await.unwrap();
    assert_eq!(t.find(d, "f").await, Ok(f));
    assert_eq!(t.find(f, "x").await, Err(ErrorCode::NotDirectory));
    assert_eq!(t.rmdir(ROOT, "d").await, Err(ErrorCode::NotEmpty));
    assert_eq!(t.rmdir(d, "f").await, Err(ErrorCode::NotDirectory));
    assert_eq!(t.unlink(ROOT, "d", root()).await, Err(ErrorCode::IsDirectory));
    assert_eq!(t.create(d, "g", user(5)).await, Err(ErrorCode::AccessDenied));
    let link = |ino, n: &str| LinkRequest { ino, parent: ROOT, name: name(n), cred: root() };
    assert_eq!(t.call(link(f, "l")).await.unwrap().attr.nlink, 2);
    assert_eq!(t.call(link(d, "m")).await.err(), Some(ErrorCode::NotPermitted));
    t.unlink(d, "f", root()).await.unwrap();
    assert_eq!(t.stat(f).await.unwrap().nlink, 1);
    assert_eq!(t.call(LookupParentRequest { ino: d }).await.unwrap().attr.ino, ROOT);
    t.rmdir(ROOT, "d").await.unwrap();
    assert_eq!(t.stat(d).await, Err(ErrorCode::NotFound));
    assert_eq!(t.stat(ROOT).await.unwrap().nlink, 2);
    let node = NewNode::Symlink { target: b"a/b".to_vec() };
    let s = t.call(MakeRequest { parent: ROOT, name: name("s"), cred: root(), mode: 0, node }).await.unwrap().attr;
    assert_eq!((s.kind, s.size), (FileKind::Symlink, 3));
    assert_eq!(t.call(ReadLinkRequest { ino: s.ino }).await.unwrap().target, b"a/b");
    assert_eq!(t.call(MetaStatusRequest {}).await.unwrap().inodes, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn rename_matrix() {
    let t = Rig::new().await;
    let a = t.mkdir(ROOT, "a", 0o755, root()).await.unwrap();
    let b = t.mkdir(a, "b", 0o755, root()).await.unwrap();
    let f = t.create(ROOT, "f", root()).await.unwrap();
    let g = t.create(ROOT, "g", root()).await.unwrap();
    let mv = |from, to, flag| t.mv(from, to, flag, root());
    assert_eq!(mv((ROOT, "a"), (b, "x"), "").await, Err(ErrorCode::Invalid));
    assert_eq!(mv((ROOT, "a"), (a, "x"), "").await, Err(ErrorCode::Invalid));
    assert_eq!(mv((a, "b"), (ROOT, "a"), "").await, Err(ErrorCode::NotEmpty));
    assert_eq!(mv((ROOT, "f"), (ROOT, "a"), "").await, Err(ErrorCode::IsDirectory));
    assert_eq!(mv((ROOT, "a"), (ROOT, "f"), "").await, Err(ErrorCode::NotDirectory));
    assert_eq!(mv((ROOT, "f"), (ROOT, "g"), "noreplace").await, Err(ErrorCode::Exists));
    assert_eq!(mv((ROOT, "f"), (ROOT, "none"), "exchange").await, Err(ErrorCode::NotFound));
    assert_eq!(mv((ROOT, "none"), (ROOT, "x"), "").await, Err(ErrorCode::NotFound));
    mv((ROOT, "f"), (ROOT, "f"), "").await.unwrap();
    mv((ROOT, "f"), (a, "b"), "exchange").await.unwrap();
    assert_eq!((t.find(ROOT, "f").await, t.find(a, "b").await), (Ok(b), Ok(f)));
    assert_eq!((t.stat(ROOT).await.unwrap().nlink, t.stat(a).await.unwrap().nlink), (4, 2));
    assert_eq!(t.call(LookupParentRequest { ino: b }).await.unwrap().attr.ino, ROOT);
    mv((ROOT, "g"), (a, "b"), "").await.unwrap();
    assert_eq!((t.find(a, "b").await, t.stat(f).await), (Ok(g), Err(ErrorCode::NotFound)));
    let c = t.mkdir(a, "c", 0o755, root()).await.unwrap();
    mv((a, "c"), (ROOT, "f"), "").await.unwrap();
    assert_eq!((t.find(ROOT, "f").await, t.stat(b).await), (Ok(c), Err(ErrorCode::NotFound)));
    assert_eq!((t.stat(ROOT).await.unwrap().nlink, t.stat(a).await.unwrap().nlink), (4, 2));
    // Two names of one file: nothing happens.
    t.call(LinkRequest { ino: g, parent: ROOT, name: name("g2"), cred: root() }).await.unwrap();
    mv((ROOT, "g2"), (a, "b"), "").await.unwrap();
    assert_eq!(t.find(ROOT, "g2").await, Ok(g));
    // A moved directory's ".." changes: write permission on it.
    let w = t.mkdir(ROOT, "w", 0o777, root()).await.unwrap();
    t.chmod(w, 0o777, root()).await.unwrap();
    let v = t.mkdir(ROOT, "v", 0o777, root()).await.unwrap();
    t.mkdir(w, "ro", 0o555, user(7)).await.unwrap();
    assert_eq!(t.mv((w, "ro"), (v, "ro"), "", user(7)).await, Err(ErrorCode::AccessDenied));
    t.mv((w, "ro"), (w, "ro2"), "", user(7)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn sticky_directories_and_owners() {
    let t = Rig::new().await;
    let tmp = t.mkdir(ROOT, "tmp", 0o1777, root()).await.unwrap();
    let f = t.create(tmp, "f", user(5)).await.unwrap();
    assert_eq!(t.unlink(tmp, "f", user(6)).await, Err(ErrorCode::NotPermitted));
    assert_eq!(t.mv((tmp, "f"), (tmp, "g"), "", user(6)).await, Err(ErrorCode::NotPermitted));
    t.create(tmp, "mine", user(6)).await.unwrap();
    assert_eq!(t.mv((tmp, "mine"), (tmp, "f"), "", user(6)).await, Err(ErrorCode::NotPermitted));
    assert_eq!(t.chmod(f, 0o600, user(6)).await, Err(ErrorCode::NotPermitted));
    assert_eq!(t.truncate(f, 5, user(6)).await.err(), Some(ErrorCode::AccessDenied));
    assert_eq!(t.chmod(f, 0o6755, user(5)).await, Ok(0o6755));
    let chown = |uid, gid, cred| SetAttrRequest { ino: f, cred, uid, gid, ..SetAttrRequest::default() };
    assert_eq!(t.call(chown(Some(6), None, user(5))).await.err(), Some(ErrorCode::NotPermitted));
    assert_eq!(t.call(chown(None, Some(99), user(5))).await.err(), Some(ErrorCode::NotPermitted));
    assert_eq!(t.call(chown(None, Some(99), root())).await.unwrap().attr.mode, 0o755);
    assert_eq!(t.chmod(f, 0o2755, user(5)).await, Ok(0o755));
    let time = |m, cred| SetAttrRequest { ino: f, cred, mtime: Some(m), ..SetAttrRequest::default() };
    let then = SetTime::To(Timestamp { seconds: 1, nanos: 2 });
    assert_eq!(t.call(time(then, user(6))).await.err(), Some(ErrorCode::NotPermitted));
    assert_eq!(t.call(time(SetTime::Now, user(6))).await.err(), Some(ErrorCode::AccessDenied));
    assert_eq!(t.call(time(then, user(5))).await.unwrap().attr.mtime.seconds, 1);
    t.unlink(tmp, "f", user(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlinked_file_lives_until_its_last_close() {
    let t = Rig::new().await;
    let f = t.create(ROOT, "f", root()).await.unwrap();
    t.call(OpenRequest { ino: f, cred: root(), open: READ }).await.unwrap();
    t.write(f, 10).await;
    t.unlink(ROOT, "f", root()).await.unwrap();
    assert_eq!(t.stat(f).await.unwrap().nlink, 0);
    assert_eq!(t.queue().await, 0);
    let t = t.crash().await;
    assert_eq!(t.stat(f).await.unwrap().nlink, 0);
    t.call(CloseRequest { ino: f, write: false, tail_unsure: false }).await.unwrap();
    assert_eq!(t.stat(f).await, Err(ErrorCode::NotFound));
    assert_eq!(t.queue().await, 1);
    t.fake.away.store(true, Ordering::Relaxed);
    purge::pass(&t.server, &mut purge::Backoff::default()).await.unwrap();
    assert_eq!(t.call(MetaStatusRequest {}).await.unwrap().purge_blocked_by, [TargetId(1), TargetId(2)]);
    t.fake.away.store(false, Ordering::Relaxed);
    purge::pass(&t.server, &mut purge::Backoff::default()).await.unwrap();
    assert_eq!(t.queue().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn truncation_cuts_the_targets_and_is_redone() {
    let t = Rig::new().await;
    let f = t.create(ROOT, "f", root()).await.unwrap();
    t.write(f, 2 << 20).await;
    assert_eq!(t.truncate(f, 100, root()).await.unwrap().size, 100);
    assert_eq!(t.fake.cuts.lock().unwrap().len(), 2);
    assert_eq!(t.truncate(f, 1000, root()).await.unwrap().size, 1000);
    assert_eq!(t.fake.cuts.lock().unwrap().len(), 2);
    t.fake.away.store(true, Ordering::Relaxed);
    assert_eq!(t.truncate(f, 10, root()).await.err(), Some(ErrorCode::Unreachable));
    let t = t.crash().await;
    t.fake.away.store(false, Ordering::Relaxed);
    t.server.repair_all().await.unwrap();
    assert_eq!(t.fake.cuts.lock().unwrap().len(), 6);
    t.server.repair_all().await.unwrap();
    assert_eq!(t.fake.cuts.lock().unwrap().len(), 6);
    // To nothing: new data, the old goes to the queue, and writers of the old are told.
    let old = t.call(LayoutRequest { ino: f }).await.unwrap().layout.data_id;
    assert_eq!(t.truncate(f, 0, root()).await.unwrap().size, 0);
    assert_eq!(t.queue().await, 1);
    let r = WrittenRequest { ino: f, data_id: old, data_epoch: 0, end: 5, targets_with_data: 1, clear_suid: false };
    assert_eq!(t.call(r).await.err(), Some(ErrorCode::Stale));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_gets_the_first_answer_even_after_a_crash() {
    let t = Rig::new().await;
    let make = || MakeRequest { parent: ROOT, name: name("d"), cred: root(), mode: 0o755, node: NewNode::Directory };
    let first = t.call_as(1000, make()).await.unwrap().attr;
    assert_eq!(t.call_as(1000, make()).await.unwrap().attr, first);
    assert_eq!(t.call_as(999, make()).await.err(), Some(ErrorCode::BadMessage));
    let t = t.crash().await;
    assert_eq!(t.call_as(1000, make()).await.unwrap().attr, first);
    assert_eq!(t.call_as(1001, make()).await.err(), Some(ErrorCode::Exists));
    let mut stranger = t.ctx(1);
    stranger.client_instance = ClientInstance::random();
    let reply = t.server.call(&stranger, MakeRequest::METHOD, &codec::encode(&make())).await;
    assert_eq!(reply.err(), Some(ErrorCode::SessionUnknown));
}

#[tokio::test(flavor = "multi_thread")]
async fn listing_while_deleting_meets_each_name_once() {
    let t = Rig::new().await;
    for i in 0..50 {
        t.create(ROOT, &format!("f{i}"), root()).await.unwrap();
    }
    let (mut after, mut seen) = (0, Vec::new());
    loop {
        let r = ReadDirRequest { ino: ROOT, after, count_max: 7, with_attributes: true };
        let batch = t.call(r).await.unwrap();
        for e in batch.entries {
            assert!(e.cookie > after && e.attr.is_some());
            after = e.cookie;
            t.call(UnlinkRequest { parent: ROOT, name: e.name.clone(), cred: root() }).await.unwrap();
            seen.push(e.name);
        }
        if batch.end {
            break;
        }
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 50);
    assert_eq!(t.stat(ROOT).await.unwrap().size, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn mtime_never_repeats_and_appends_never_overlap() {
    let t = Rig::new().await;
    let f = t.create(ROOT, "f", root()).await.unwrap();
    let future = Timestamp { seconds: 1 << 40, nanos: 0 };
    let r = SetAttrRequest { ino: f, mtime: Some(SetTime::To(future)), ..SetAttrRequest::default() };
    let mut last = t.call(r).await.unwrap().attr.mtime;
    for i in 0..5 {
        let a = t.call(AppendRequest { ino: f, length: 10, clear_suid: false }).await.unwrap();
        assert_eq!(a.offset, i * 10);
        assert!(a.attr.mtime > last);
        last = a.attr.mtime;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_writer_is_fenced_and_its_tail_trimmed() {
    let t = Rig::new().await;
    let r = CreateRequest { parent: ROOT, name: name("f"), cred: root(), mode: 0o644, open: WRITE, exclusive: false };
    let f = t.call(r).await.unwrap().attr.ino;
    t.write(f, 100).await;
    t.fake.away.store(true, Ordering::Relaxed);
    t.server.expire_sessions(Instant::now() + Duration::from_secs(61)).await;
    assert_eq!(t.call(RenewSessionRequest {}).await.err(), Some(ErrorCode::SessionUnknown));
    t.call(OpenSessionRequest { host: "h".into(), reclaim: vec![] }).await.unwrap();
    let open = || OpenRequest { ino: f, cred: root(), open: WRITE };
    assert_eq!(t.call(open()).await.err(), Some(ErrorCode::NotReady));
    t.fake.away.store(false, Ordering::Relaxed);
    t.server.repair_all().await.unwrap();
    assert!(!t.fake.fenced.lock().unwrap().is_empty());
    assert!(!t.fake.cuts.lock().unwrap().is_empty());
    t.call(open()).await.unwrap();
    assert_eq!(t.call(EntryInfoRequest { ino: f }).await.unwrap().open, (0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn extended_attributes_and_policies() {
    let t = Rig::new().await;
    let f = t.create(ROOT, "f", user(0)).await.unwrap();
    let set = |n: &str, create, replace, cred| SetXattrRequest {
        ino: f,
        name: n.as_bytes().to_vec(),
        value: b"v".to_vec(),
        create,
        replace,
        cred,
    };
    assert_eq!(t.call(set("user.a", false, true, root())).await, Err(ErrorCode::NoXattr));
    t.call(set("user.a", true, false, root())).await.unwrap();
    assert_eq!(t.call(set("user.a", true, false, root())).await, Err(ErrorCode::Exists));
    assert_eq!(t.call(set("user.b", false, false, user(5))).await, Err(ErrorCode::AccessDenied));
    assert_eq!(t.call(set("trusted.a", false, false, user(5))).await, Err(ErrorCode::NotPermitted));
    assert_eq!(t.call(set("system.x", false, false, root())).await, Err(ErrorCode::NotSupported));
    t.call(set("trusted.a", false, false, root())).await.unwrap();
    let list = |cred| ListXattrRequest { ino: f, cred };
    assert_eq!(t.call(list(user(5))).await.unwrap().value, b"user.a\0");
    assert_eq!(t.call(list(root())).await.unwrap().value, b"trusted.a\0user.a\0");
    let get = GetXattrRequest { ino: f, name: b"user.a".to_vec(), cred: user(5) };
    assert_eq!(t.call(get).await.unwrap().value, b"v");
    let remove = || RemoveXattrRequest { ino: f, name: b"user.a".to_vec(), cred: root() };
    t.call(remove()).await.unwrap();
    assert_eq!(t.call(remove()).await, Err(ErrorCode::NoXattr));
    let policy = StripePolicy { chunk_bytes: Some(1 << 20), targets: Some(1) };
    t.call(SetPolicyRequest { ino: ROOT, policy, cred: root() }).await.unwrap();
    let d = t.mkdir(ROOT, "d", 0o755, root()).await.unwrap();
    assert_eq!(t.call(EntryInfoRequest { ino: d }).await.unwrap().policy, policy);
    let g = t.create(d, "g", root()).await.unwrap();
    let layout = t.call(LayoutRequest { ino: g }).await.unwrap().layout;
    assert_eq!((layout.pattern.chunk_bytes(), layout.pattern.targets().len()), (1 << 20, 1));
}
