//! The kill -9 matrix: each role, killed when idle, under streaming writes and under a metadata storm, 20 rounds in one
//! cluster. A record of all that was answered is compared with the volume after each restart. The rounds follow from one
//! seed: `BEESWARM_KILL_SEED` repeats the choices of a run (not its interleaving).

mod common;

use common::{CLIENT, META, MGMT, STORAGE1, STORAGE2, Separate, random_bytes, wait_mounted};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const ROUNDS: usize = 20;
const STREAMS: u64 = 2;
const STORMS: u64 = 3;
/// A stream overwrites what it has once its file is this long.
const FILE_BYTES: u64 = 6 << 20;
/// A storm removes rather than makes above this many names.
const NAMES: usize = 120;
/// No worker takes more steps than this in a round.
const STEPS_MAX: u64 = 200_000;
/// Longer than calls wait for a server (60 s).
const STUCK: Duration = Duration::from_secs(90);

/// `ErrorKind` has no name for it.
const EIO: i32 = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Stream,
    Storm,
}

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    fn index(&mut self, n: usize) -> usize {
        usize::try_from(self.below(n as u64)).expect("below a usize")
    }
}

/// What the main thread and the workers of a round tell each other.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// The victim is about to be killed: from here on calls may fail, if the victim is the client.
    killed: AtomicBool,
}

/// One worker's answered steps.
type Steps = Arc<AtomicU64>;

/// A call that failed.
struct Failed {
    what: String,
    error: io::Error,
    before_kill: bool,
}

impl Failed {
    fn new(what: String, error: io::Error, shared: &Shared) -> Failed {
        Failed { what, error, before_kill: !shared.killed.load(Ordering::SeqCst) }
    }
}

/// A range that was written as one.
#[derive(Default)]
struct Block {
    len: usize,
    /// The pattern whose fsync was answered.
    synced: Option<u64>,
    /// Patterns written since: each byte may be of any of them.
    maybe: Vec<u64>,
}

/// The record of a streamed file.
struct FileRecord {
    path: PathBuf,
    /// Its create was answered.
    created: bool,
    blocks: BTreeMap<u64, Block>,
    fsyncs: u64,
    /// fsyncs that said EIO: a storage server restarted in between.
    refused: u64,
    failed: Option<Failed>,
}

/// Writes, overwrites and fsyncs one file until told to stop or until a call fails.
fn stream(path: PathBuf, seed: u64, shared: &Shared, steps: &AtomicU64) -> FileRecord {
    let mut rng = Rng(seed);
    let mut rec = FileRecord { path, created: false, blocks: BTreeMap::new(), fsyncs: 0, refused: 0, failed: None };
    let file = match File::create_new(&rec.path) {
        Ok(file) => file,
        Err(e) => {
            rec.failed = Some(Failed::new("create".into(), e, shared));
            return rec;
        }
    };
    rec.created = true;
    let mut end = 0;
    let mut since: Vec<u64> = Vec::new();
    for _ in 0..STEPS_MAX {
        if shared.stop.load(Ordering::SeqCst) {
            break;
        }
        let offset = if end < FILE_BYTES {
            let most = if rng.below(4) == 0 { 700_000 } else { 60_000 };
            let len = 1 + rng.below(most);
            let at = end;
            rec.blocks.insert(at, Block { len: usize::try_from(len).expect("len"), ..Block::default() });
            end += len;
            at
        } else {
            *rec.blocks.keys().nth(rng.index(rec.blocks.len())).expect("a block")
        };
        let pattern = rng.next();
        let block = rec.blocks.get_mut(&offset).expect("there");
        block.maybe.push(pattern);
        since.push(offset);
        if let Err(e) = file.write_all_at(&random_bytes(pattern, block.len), offset) {
            rec.failed = Some(Failed::new(format!("write at {offset}"), e, shared));
            return rec;
        }
        if rng.below(3) == 0 {
            match file.sync_all() {
                Ok(()) => {
                    rec.fsyncs += 1;
                    for at in since.drain(..) {
                        let block = rec.blocks.get_mut(&at).expect("there");
                        if let Some(last) = block.maybe.last().copied() {
                            block.synced = Some(last);
                            block.maybe.clear();
                        }
                    }
                }
                // SEMANTICS.md, Durability: what was written before the restart may be lost, and it says so.
                Err(e) if e.raw_os_error() == Some(EIO) && shared.killed.load(Ordering::SeqCst) => {
                    rec.refused += 1;
                    since.clear();
                }
                Err(e) => {
                    rec.failed = Some(Failed::new("fsync".into(), e, shared));
                    return rec;
                }
            }
        }
        steps.fetch_add(1, Ordering::SeqCst);
    }
    rec
}

impl FileRecord {
    /// What the file holds now is what was answered; what was in flight is old, new or a hole.
    fn check(&self) -> Result<(), String> {
        let name = self.path.display();
        let file = match File::open(&self.path) {
            Ok(f) => f,
            Err(e) if !self.created && e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(format!("{name}: open: {e}")),
        };
        // Bytes of the server, not of the kernel's cache.
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        let size = file.metadata().map_err(|e| format!("{name}: stat: {e}"))?.len();
        let ends = |(at, b): (&u64, &Block)| at + b.len as u64;
        let least = self.blocks.iter().filter(|(_, b)| b.synced.is_some()).map(ends).max().unwrap_or(0);
        let most = self.blocks.iter().map(ends).max().unwrap_or(0);
        if size < least || size > most {
            return Err(format!("{name}: {size} bytes, but {least} were fsynced and {most} were written"));
        }
        for (at, block) in &self.blocks {
            let there = usize::try_from(size.saturating_sub(*at)).unwrap_or(usize::MAX).min(block.len);
            let mut got = vec![0; there];
            file.read_exact_at(&mut got, *at).map_err(|e| format!("{name}: read at {at}: {e}"))?;
            let old = block.synced.map_or_else(|| vec![0; block.len], |p| random_bytes(p, block.len));
            if got == old.get(..there).unwrap_or_default() {
                continue;
            }
            let maybe: Vec<Vec<u8>> = block.maybe.iter().map(|p| random_bytes(*p, block.len)).collect();
            let wrong = got
                .iter()
                .enumerate()
                .find(|(i, byte)| old.get(*i) != Some(byte) && maybe.iter().all(|bytes| bytes.get(*i) != Some(byte)));
            if let Some((i, byte)) = wrong {
                return Err(format!(
                    "{name}: byte {i} of the block of {} at {at} is {byte:#04x}; fsynced: {}, written since: {} times",
                    block.len,
                    block.synced.is_some(),
                    block.maybe.len()
                ));
            }
        }
        Ok(())
    }
}

/// A name that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Name {
    is_dir: bool,
    /// When it could be asked for.
    ino: Option<u64>,
}

/// An operation on names.
#[derive(Clone, Debug)]
enum Op {
    Create(String),
    Mkdir(String),
    Rename(String, String),
    Unlink(String),
    Rmdir(String),
}

/// The record of a storm's directory.
struct DirRecord {
    path: PathBuf,
    /// Its mkdir was answered.
    created: bool,
    names: BTreeMap<String, Name>,
    answered: u64,
    /// The call that failed, and its operation.
    in_flight: Option<Op>,
    failed: Option<Failed>,
}

impl DirRecord {
    fn run(&self, op: &Op) -> io::Result<()> {
        let at = |n: &String| self.path.join(n);
        match op {
            Op::Create(n) => File::create_new(at(n)).map(|_| ()),
            Op::Mkdir(n) => fs::create_dir(at(n)),
            Op::Rename(from, to) => fs::rename(at(from), at(to)),
            Op::Unlink(n) => fs::remove_file(at(n)),
            Op::Rmdir(n) => fs::remove_dir(at(n)),
        }
    }

    fn answered(&mut self, op: &Op) {
        self.answered += 1;
        match op {
            Op::Create(n) | Op::Mkdir(n) => {
                let ino = fs::symlink_metadata(self.path.join(n)).ok().map(|m| m.ino());
                self.names.insert(n.clone(), Name { is_dir: matches!(op, Op::Mkdir(_)), ino });
            }
            Op::Rename(from, to) => {
                let name = self.names.remove(from).expect("recorded");
                self.names.insert(to.clone(), name);
            }
            Op::Unlink(n) | Op::Rmdir(n) => {
                self.names.remove(n);
            }
        }
    }

    fn choose(&self, rng: &mut Rng, step: u64) -> Op {
        let fresh = format!("n{step}");
        let make = self.names.is_empty() || (self.names.len() < NAMES && rng.below(2) == 0);
        if make {
            return if rng.below(4) == 0 { Op::Mkdir(fresh) } else { Op::Create(fresh) };
        }
        let pick = |rng: &mut Rng| self.names.iter().nth(rng.index(self.names.len())).expect("a name");
        let (name, what) = pick(rng);
        let (other, its) = pick(rng);
        match rng.below(4) {
            0 => Op::Rename(name.clone(), fresh),
            // Over another one of its kind; directories here are empty.
            1 if other != name && its.is_dir == what.is_dir => Op::Rename(name.clone(), other.clone()),
            _ if what.is_dir => Op::Rmdir(name.clone()),
            _ => Op::Unlink(name.clone()),
        }
    }

    /// What is there now; the name must answer to stat.
    fn look(&self, name: &str) -> Result<Option<Name>, String> {
        match fs::symlink_metadata(self.path.join(name)) {
            Ok(m) => Ok(Some(Name { is_dir: m.is_dir(), ino: Some(m.ino()) })),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(format!("{}: stat: {e}", self.path.join(name).display())),
        }
    }

    /// Which way did the operation in flight go? It must be one of two. Its names are removed after that.
    fn settle(&mut self) -> Result<(), String> {
        let Some(op) = self.in_flight.take() else { return Ok(()) };
        let wrong = |why: &str| Err(format!("{}: {op:?} in flight: {why}", self.path.display()));
        let mut touched = Vec::new();
        match &op {
            Op::Create(n) | Op::Mkdir(n) => {
                if let Some(found) = self.look(n)? {
                    if found.is_dir != matches!(op, Op::Mkdir(_)) {
                        return wrong("another kind");
                    }
                    touched.push((n.clone(), found));
                }
            }
            Op::Unlink(n) | Op::Rmdir(n) => {
                let before = self.names.get(n).copied().expect("recorded");
                if let Some(found) = self.look(n)? {
                    if !same(before, found) {
                        return wrong("another inode");
                    }
                    touched.push((n.clone(), found));
                }
                self.names.remove(n);
            }
            Op::Rename(from, to) => {
                let moved = self.names.get(from).copied().expect("recorded");
                let replaced = self.names.get(to).copied();
                match (self.look(from)?, self.look(to)?) {
                    (None, Some(t)) if same(moved, t) => touched.push((to.clone(), t)),
                    (Some(f), None) if same(moved, f) && replaced.is_none() => touched.push((from.clone(), f)),
                    (Some(f), Some(t)) if same(moved, f) && replaced.is_some_and(|r| same(r, t)) => {
                        touched.extend([(from.clone(), f), (to.clone(), t)]);
                    }
                    other => return wrong(&format!("half done: {moved:?} over {replaced:?} became {other:?}")),
                }
                self.names.remove(from);
                self.names.remove(to);
            }
        }
        for (name, found) in touched {
            let path = self.path.join(&name);
            let gone = if found.is_dir {
                fs::read_dir(&path).map(|d| d.count()).and_then(|_| fs::remove_dir(&path))
            } else {
                File::open(&path).and_then(|_| fs::remove_file(&path))
            };
            if let Err(e) = gone {
                return wrong(&format!("{name} cannot be opened and removed: {e}"));
            }
            if self.look(&name)?.is_some() {
                return wrong(&format!("{name} is removed and still there"));
            }
        }
        Ok(())
    }

    /// Exactly the recorded names are there, each as the inode that it was.
    fn check(&mut self) -> Result<(), String> {
        let dir = self.path.display().to_string();
        match fs::symlink_metadata(&self.path) {
            Ok(_) => {}
            Err(e) if !self.created && e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(format!("{dir}: stat: {e}")),
        }
        self.settle()?;
        let mut listed = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(|e| format!("{dir}: readdir: {e}"))? {
            listed.push(entry.map_err(|e| format!("{dir}: readdir: {e}"))?.file_name().into_string().expect("ours"));
        }
        listed.sort_unstable();
        if !listed.iter().eq(self.names.keys()) {
            let back: Vec<_> = listed.iter().filter(|n| !self.names.contains_key(*n)).collect();
            let gone: Vec<_> = self.names.keys().filter(|n| !listed.contains(n)).collect();
            return Err(format!("{dir}: listed but removed: {back:?}; answered but not listed: {gone:?}"));
        }
        for (name, was) in &self.names {
            match self.look(name)? {
                Some(is) if same(*was, is) => {}
                is => return Err(format!("{dir}/{name}: was {was:?}, is {is:?}")),
            }
        }
        Ok(())
    }
}

fn same(was: Name, is: Name) -> bool {
    was.is_dir == is.is_dir && was.ino.is_none_or(|ino| is.ino == Some(ino))
}

/// Makes, renames and removes names until told to stop or until a call fails.
fn storm(path: PathBuf, seed: u64, shared: &Shared, steps: &AtomicU64) -> DirRecord {
    let mut rng = Rng(seed);
    let mut rec =
        DirRecord { path, created: false, names: BTreeMap::new(), answered: 0, in_flight: None, failed: None };
    if let Err(e) = fs::create_dir(&rec.path) {
        rec.failed = Some(Failed::new("mkdir".into(), e, shared));
        return rec;
    }
    rec.created = true;
    for step in 0..STEPS_MAX {
        if shared.stop.load(Ordering::SeqCst) {
            break;
        }
        let op = rec.choose(&mut rng, step);
        if let Err(e) = rec.run(&op) {
            rec.failed = Some(Failed::new(format!("{op:?}"), e, shared));
            rec.in_flight = Some(op);
            break;
        }
        rec.answered(&op);
        steps.fetch_add(1, Ordering::SeqCst);
    }
    rec
}

/// The workers of a round. Told to stop when dropped.
struct Workers {
    shared: Arc<Shared>,
    steps: Vec<Steps>,
    streams: Vec<JoinHandle<FileRecord>>,
    storms: Vec<JoinHandle<DirRecord>>,
}

impl Workers {
    fn start(mnt: &Path, round: usize, state: State, rng: &mut Rng) -> Workers {
        let mut w = Workers { shared: Arc::default(), steps: Vec::new(), streams: Vec::new(), storms: Vec::new() };
        let count = match state {
            State::Idle => 0,
            State::Stream => STREAMS,
            State::Storm => STORMS,
        };
        for i in 0..count {
            let (shared, steps, seed) = (w.shared.clone(), Steps::default(), rng.next());
            w.steps.push(steps.clone());
            if state == State::Stream {
                let path = mnt.join(format!("stream-{round}-{i}"));
                w.streams.push(std::thread::spawn(move || stream(path, seed, &shared, &steps)));
            } else {
                let path = mnt.join(format!("storm-{round}-{i}"));
                w.storms.push(std::thread::spawn(move || storm(path, seed, &shared, &steps)));
            }
        }
        w
    }

    /// Waits until each has taken this many more steps, or has ended.
    fn wait_steps(&self, more: u64) {
        let before: Vec<u64> = self.steps.iter().map(|s| s.load(Ordering::SeqCst)).collect();
        let end = Instant::now() + STUCK;
        let busy = || {
            let ended =
                self.streams.iter().any(JoinHandle::is_finished) || self.storms.iter().any(JoinHandle::is_finished);
            !ended && self.steps.iter().zip(&before).any(|(now, then)| now.load(Ordering::SeqCst) < then + more)
        };
        while busy() {
            assert!(Instant::now() < end, "a worker is stuck");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Their records.
    fn join(&mut self) -> (Vec<FileRecord>, Vec<DirRecord>) {
        let end = Instant::now() + STUCK;
        while !(self.streams.iter().all(JoinHandle::is_finished) && self.storms.iter().all(JoinHandle::is_finished)) {
            assert!(Instant::now() < end, "a worker does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let files = self.streams.drain(..).map(|t| t.join().expect("stream")).collect();
        let dirs = self.storms.drain(..).map(|t| t.join().expect("storm")).collect();
        (files, dirs)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
    }
}

/// Starts a killed server again, with the same command; returns when it says that it is up.
fn restart_server(cluster: &mut Separate, which: usize) {
    let ups = |c: &Separate| c.daemons[which].as_ref().map_or(0, |d| d.output().matches("is up").count());
    let before = ups(cluster);
    if let Some(mut d) = cluster.daemons[which].take() {
        d.kill();
    }
    cluster.start_one(which);
    let end = Instant::now() + STUCK;
    while ups(cluster) <= before {
        let d = cluster.daemons[which].as_mut().expect("started");
        assert!(d.ended().is_none() && Instant::now() < end, "does not come up again:\n{}", d.output());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The cluster takes new work.
fn probe(mnt: &Path) -> io::Result<()> {
    let path = mnt.join("probe");
    let bytes = random_bytes(7, 200_000);
    let file = File::create_new(&path)?;
    file.write_all_at(&bytes, 0)?;
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    if fs::read(&path)? != bytes {
        return Err(io::Error::other("other bytes"));
    }
    fs::remove_file(&path)
}

/// Every role in every state at least once, in an order of the seed.
fn plan(rng: &mut Rng) -> Vec<(usize, State)> {
    let mut rounds = Vec::new();
    for state in [State::Idle, State::Stream, State::Storm] {
        for role in [MGMT, META, STORAGE1, CLIENT] {
            rounds.push((role, state));
        }
    }
    while rounds.len() < ROUNDS {
        let busy = [State::Stream, State::Storm][rng.index(2)];
        rounds.push(([MGMT, META, STORAGE1, CLIENT][rng.index(4)], busy));
    }
    for i in (1..rounds.len()).rev() {
        rounds.swap(i, rng.index(i + 1));
    }
    for (victim, _) in &mut rounds {
        if *victim == STORAGE1 {
            *victim = [STORAGE1, STORAGE2][rng.index(2)];
        }
    }
    rounds
}

#[test]
fn kill_of_any_role_in_any_state_loses_nothing_answered() {
    let seed = match std::env::var("BEESWARM_KILL_SEED") {
        Ok(s) => s.parse().expect("BEESWARM_KILL_SEED is a number"),
        Err(_) => u64::from(std::time::SystemTime::UNIX_EPOCH.elapsed().expect("clock").subsec_nanos()),
    };
    eprintln!("BEESWARM_KILL_SEED={seed}");
    let mut rng = Rng(seed);
    let mut cluster = Separate::start();
    let mnt = cluster.mnt();
    let (mut files, mut dirs): (Vec<FileRecord>, Vec<DirRecord>) = (Vec::new(), Vec::new());
    let mut refused = 0;
    for (round, (victim, state)) in plan(&mut rng).into_iter().enumerate() {
        let role = ["mgmt", "meta", "storage 1", "storage 2", "client"][victim];
        let here = format!("seed {seed}, round {round}, {role} killed in {state:?}");
        eprintln!("{here}");
        let mut workers = Workers::start(&mnt, round, state, &mut rng);
        workers.wait_steps(5);
        std::thread::sleep(Duration::from_millis(20 + rng.below(600)));
        workers.shared.killed.store(true, Ordering::SeqCst);
        let (new_files, new_dirs) = if victim == CLIENT {
            if let Some(mut d) = cluster.daemons[CLIENT].take() {
                d.kill();
            }
            // Each ends at its first error: nobody is there to write into the directory below the mount.
            let records = workers.join();
            rustix::mount::unmount(&mnt, rustix::mount::UnmountFlags::DETACH).expect("umount of the dead mount");
            cluster.start_one(CLIENT);
            wait_mounted(&mnt, cluster.daemons[CLIENT].as_mut().expect("started"));
            records
        } else {
            restart_server(&mut cluster, victim);
            workers.wait_steps(10);
            workers.shared.stop.store(true, Ordering::SeqCst);
            workers.join()
        };
        let failures =
            new_files.iter().map(|f| (&f.path, &f.failed)).chain(new_dirs.iter().map(|d| (&d.path, &d.failed)));
        for (path, failed) in failures {
            match failed {
                Some(f) if victim != CLIENT || f.before_kill => {
                    panic!("{here}: {}: {} failed: {}", path.display(), f.what, f.error)
                }
                None if victim == CLIENT => panic!("{here}: {} went on without a client", path.display()),
                _ => {}
            }
        }
        for f in &new_files {
            // Only what was written before a storage server's restart may be refused, and that once.
            let most = u64::from(victim == STORAGE1 || victim == STORAGE2);
            let is_ok = victim == CLIENT || f.refused <= most;
            assert!(is_ok, "{here}: {}: {} fsyncs said EIO", f.path.display(), f.refused);
            refused += f.refused;
        }
        files.extend(new_files);
        dirs.extend(new_dirs);
        for f in &files {
            f.check().unwrap_or_else(|e| panic!("{here}: {e}"));
        }
        for d in &mut dirs {
            d.check().unwrap_or_else(|e| panic!("{here}: {e}"));
        }
        probe(&mnt).unwrap_or_else(|e| panic!("{here}: afterwards: {e}"));
    }
    let (fsyncs, names) = (files.iter().map(|f| f.fsyncs).sum::<u64>(), dirs.iter().map(|d| d.answered).sum::<u64>());
    eprintln!("{fsyncs} fsyncs and {names} operations on names were answered; {refused} fsyncs said EIO");
    assert!(fsyncs > 0 && names > 0, "nothing was answered at all");
}
