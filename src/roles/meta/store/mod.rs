//! The meta store: a transactional key-value engine, a checksummed log in front of redb.
//!
//! Threads: the committer runs transactions one after another and writes one log record each; the syncer fdatasyncs the
//! log for everybody who waits; the flusher moves the overlay into redb in large commits and removes applied segments.
//! Invariants: a change is visible to readers only after its record is written; redb receives only durable records; the
//! first failed write or sync fences the store until it is reopened. A full disk does not: a log record that does not fit
//! leaves no trace, and a flush that does not fit is done later. Lock order: `view`, then `db`, then `progress`.

mod ids;
mod log;
mod overlay;
mod room;
#[cfg(test)]
mod tests;

pub use ids::IdAllocator;

use crate::base::format::DirLock;
use crate::base::ids::{ClientInstance, ClusterId, Csn};
use overlay::{Entry, Overlay};
use redb::{Database, ReadOnlyTable, ReadableDatabase, TableDefinition};
use std::ops::Bound;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{mpsc as queue, oneshot};

/// Transactions waiting for the committer; a full queue pushes back.
const QUEUE_LEN: usize = 1024;
/// Transactions in one write(2).
const BATCH_LEN_MAX: usize = 256;
/// The active overlay may grow to this many times `flush_bytes` while a flush runs.
const OVERLAY_FACTOR: usize = 4;
const KEY_APPLIED: &[u8] = b"\0store/applied";
const KEY_EPOCH: &[u8] = b"\0store/epoch";

macro_rules! tables {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        /// The tables. Keys of `Meta` that start with a zero byte belong to the store.
        #[repr(u8)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum Table { $(#[doc = $text] $name = $number,)* }
        impl Table {
            /// All tables, in order of their numbers.
            pub const ALL: [Table; Table::COUNT] = [$(Table::$name,)*];
            /// How many there are.
            pub const COUNT: usize = [$($number,)*].len();
            const fn number(self) -> u8 { match self { $(Table::$name => $number,)* } }
            fn index(self) -> usize { usize::from(self.number()) - 1 }
            fn from_number(n: u8) -> Option<Table> { match n { $($number => Some(Table::$name),)* _ => None } }
            const fn definition(self) -> TableDefinition<'static, &'static [u8], &'static [u8]> {
                TableDefinition::new(self.name())
            }
            /// Its name in redb.
            pub const fn name(self) -> &'static str { match self { $(Table::$name => $text,)* } }
        }
    };
}
tables! {
    Inodes = 1, "inodes"; Dentries = 2, "dentries"; Xattrs = 3, "xattrs"; Inline = 4, "inline"; Orphans = 5, "orphans";
    Purge = 6, "purge"; Dedupe = 7, "dedupe"; Intents = 8, "intents"; Sessions = 9, "sessions"; Opens = 10, "opens";
    Meta = 11, "meta";
}

/// Why the store cannot do it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// A write or sync failed earlier, or the store is closed: nothing more until it is reopened.
    #[error("the store is fenced until it is reopened: {0}")]
    Fenced(String),
    /// The operating system refused.
    #[error("cannot {0}")]
    Io(String),
    /// No room on the disk; nothing was done, and the store goes on.
    #[error("the disk is full: cannot {0}")]
    Full(String),
    /// The bytes on disk are not what was written.
    #[error("{0}")]
    Damaged(String),
    /// A newer beeswarm wrote it.
    #[error("{0}")]
    Newer(String),
    /// The directory belongs to another cluster or shard.
    #[error("{0}")]
    Foreign(String),
    /// redb failed.
    #[error("redb: {0}")]
    Redb(String),
    /// One transaction changes more than a log record holds.
    #[error("the transaction is too large for a log record")]
    TooLarge,
}

impl StoreError {
    fn io(what: &str, e: &std::io::Error) -> Self {
        let text = format!("{what}: {e}");
        if log::is_full(e) { StoreError::Full(text) } else { StoreError::Io(text) }
    }
    fn redb(e: impl Into<redb::Error>) -> Self {
        match e.into() {
            redb::Error::Io(e) if log::is_full(&e) => StoreError::Full(format!("write to redb: {e}")),
            e => StoreError::Redb(e.to_string()),
        }
    }
    /// Is the disk full, and nothing else wrong?
    pub fn is_full(&self) -> bool {
        matches!(self, StoreError::Full(_))
    }
}

/// Why a commit did not happen.
#[derive(Debug, thiserror::Error)]
pub enum CommitError<E> {
    /// The closure refused; nothing changed.
    #[error("{0}")]
    Refused(E),
    /// The store failed; after a failed log write the outcome is unknown until it is reopened.
    #[error(transparent)]
    Store(StoreError),
}

/// A key and its value.
pub type Row = (Vec<u8>, Vec<u8>);

/// How to open a store.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Its directory; made if missing.
    pub dir: PathBuf,
    /// The cluster it belongs to.
    pub fs_id: ClusterId,
    /// The shard it holds.
    pub shard: u16,
    /// The log is fdatasynced at least this often.
    pub sync_interval: Duration,
    /// Overlay size that starts a flush.
    pub flush_bytes: usize,
    /// A flush happens at least this often.
    pub flush_interval: Duration,
}

impl StoreConfig {
    /// The usual values: sync each second, flush at 32 MiB or every 30 seconds.
    pub fn new(dir: PathBuf, fs_id: ClusterId, shard: u16) -> Self {
        let (second, half_minute) = (Duration::from_secs(1), Duration::from_secs(30));
        Self { dir, fs_id, shard, sync_interval: second, flush_bytes: 32 << 20, flush_interval: half_minute }
    }
}

/// Whose operation a log record is.
#[derive(Clone, Debug, Default)]
pub struct LogContext {
    /// The session that asked.
    pub session: ClientInstance,
    /// Its request slot.
    pub slot: u32,
    /// Number of the request in the slot.
    pub slot_sequence: u64,
    /// Time of the operation.
    pub time_ns: u64,
    /// The encoded logical operation; may be empty.
    pub operation: Vec<u8>,
}

type Snapshot = Vec<ReadOnlyTable<&'static [u8], &'static [u8]>>;

struct View {
    active: Overlay,
    frozen: Option<Arc<Overlay>>,
    snapshot: Snapshot,
}

struct Progress {
    last: u64,
    durable: u64,
    segment: Arc<log::Segment>,
    waiters: Vec<(u64, oneshot::Sender<Result<Csn, StoreError>>)>,
    error: Option<StoreError>,
    stop: bool,
}

type Answer = Box<dyn FnOnce(Result<Csn, StoreError>) + Send>;
type Job = Box<dyn FnOnce(&mut Txn<'_>) -> (bool, Answer) + Send>;

enum Request {
    Commit(LogContext, Job),
    Freeze(mpsc::Sender<Result<Option<Arc<Overlay>>, StoreError>>),
    Stop,
}

enum FlushRequest {
    Flush(Option<oneshot::Sender<Result<(), StoreError>>>),
    Stop,
}

struct Shared {
    config: StoreConfig,
    identity: log::Identity,
    epoch: u64,
    /// None: it could not be reopened after an error; the store is fenced.
    db: Mutex<Option<Database>>,
    room: room::Room,
    /// The last flush did not fit.
    stuck: AtomicBool,
    view: RwLock<View>,
    progress: Mutex<Progress>,
    changed: Condvar,
    durable: AtomicU64,
    fail: Arc<log::Failpoint>,
    _lock: DirLock,
}

fn unpoison<T>(r: Result<T, PoisonError<T>>) -> T {
    r.unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        unpoison(self.progress.lock())
    }
    fn csn(&self, sequence: u64) -> Csn {
        Csn { epoch: self.epoch, sequence }
    }
    fn check(&self) -> Result<(), StoreError> {
        self.progress().error.clone().map_or(Ok(()), Err)
    }
    /// Makes every later call fail.
    fn fence(&self, why: &StoreError) -> StoreError {
        let mut p = self.progress();
        let error = p.error.get_or_insert_with(|| StoreError::Fenced(why.to_string())).clone();
        for (_, w) in p.waiters.drain(..) {
            let _ = w.send(Err(error.clone()));
        }
        drop(p);
        self.changed.notify_all();
        error
    }
    fn set_durable(&self, sequence: u64) {
        let mut p = self.progress();
        p.durable = p.durable.max(sequence);
        let durable = p.durable;
        self.durable.store(durable, Ordering::Release);
        for (_, w) in p.waiters.extract_if(.., |(s, _)| *s <= durable) {
            let _ = w.send(Ok(self.csn(durable)));
        }
    }
}

struct Handle {
    shared: Arc<Shared>,
    requests: queue::Sender<Request>,
    flushes: mpsc::Sender<FlushRequest>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Handle {
    fn stop(&self) {
        self.shared.progress().stop = true;
        self.shared.fence(&StoreError::Io("use it: it is closed".into()));
        let _ = self.flushes.send(FlushRequest::Stop);
        let _ = self.requests.try_send(Request::Stop);
    }
    fn stop_and_join(&self) {
        self.stop();
        for t in unpoison(self.threads.lock()).drain(..) {
            let _ = t.join();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.stop();
    }
}

/// An open store. Clones share it.
#[derive(Clone)]
pub struct Store(Arc<Handle>);

impl Store {
    /// Opens or creates it: replays the log, raises the epoch durably. Blocks. Keeps the directory's lock as long as any
    /// part of it lives.
    pub fn open(config: StoreConfig, lock: DirLock) -> Result<Store, StoreError> {
        let dir = config.dir.join("log");
        std::fs::create_dir_all(&dir).map_err(|e| StoreError::io("make the store's directory", &e))?;
        let identity = log::Identity { dir, fs_id: config.fs_id, shard: config.shard };
        let db = Database::create(config.dir.join("meta.redb")).map_err(StoreError::redb)?;
        write_redb(&db, &[], &[])?;
        crate::base::durable::sync_dir(&config.dir).map_err(|e| StoreError::io("sync the directory", &e))?;
        let snapshot = open_snapshot(&db)?;
        let mut replayed = Overlay::default();
        let applied = stored_number(&snapshot, KEY_APPLIED)?;
        let end = log::replay(&identity, applied, &mut replayed)?;
        let epoch = stored_number(&snapshot, KEY_EPOCH)?.max(end.epoch) + 1;
        drop(snapshot);
        write_redb(&db, &replayed.rows(), &[(KEY_APPLIED, end.sequence), (KEY_EPOCH, epoch)])?;
        remove_segments(&identity, u64::MAX)?;
        let fail = Arc::new(log::Failpoint::default());
        let segment = log::create(&identity, epoch, end.sequence + 1, end.checksum, fail.clone())
            .map_err(|e| StoreError::io("start a log segment", &e))?;
        let segment = Arc::new(segment);
        let view = View { active: Overlay::default(), frozen: None, snapshot: open_snapshot(&db)? };
        let (last, durable) = (end.sequence, end.sequence);
        let progress =
            Progress { last, durable, segment: segment.clone(), waiters: Vec::new(), error: None, stop: false };
        let shared = Arc::new(Shared {
            config,
            identity,
            epoch,
            db: Mutex::new(Some(db)),
            room: room::Room::default(),
            stuck: AtomicBool::new(false),
            view: RwLock::new(view),
            progress: Mutex::new(progress),
            changed: Condvar::new(),
            durable: AtomicU64::new(durable),
            fail,
            _lock: lock,
        });
        let (requests, request_rx) = queue::channel(QUEUE_LEN);
        let (flushes, flush_rx) = mpsc::channel();
        let handle =
            Handle { shared: shared.clone(), requests, flushes: flushes.clone(), threads: Mutex::new(Vec::new()) };
        let spawn = |name: &str, f: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.into()).spawn(f).map_err(|e| StoreError::io("start a thread", &e))
        };
        let weak = handle.requests.downgrade();
        let (a, b, c) = (shared.clone(), shared.clone(), shared);
        let committer = Committer { shared: a, flushes, segment, last, checksum: end.checksum, asked: false };
        let threads = vec![
            spawn("meta-committer", Box::new(move || committer.run(request_rx)))?,
            spawn("meta-syncer", Box::new(move || sync_loop(&b)))?,
            spawn("meta-flusher", Box::new(move || flush_loop(&c, &flush_rx, &weak)))?,
        ];
        *unpoison(handle.threads.lock()) = threads;
        Ok(Store(Arc::new(handle)))
    }

    /// Runs `f` on a consistent view, on this thread. `f` must be short and must not call the store: new commits become
    /// visible only after it returns.
    pub fn read<R>(&self, f: impl FnOnce(&ReadView<'_>) -> R) -> R {
        let view = unpoison(self.0.shared.view.read());
        f(&ReadView { view: &view, pending: None, shared: &self.0.shared })
    }

    /// Runs `f` on the committer thread: checks first, then mutations. Ok: one log record, written before the answer (not
    /// yet durable). Err: nothing happens. Not cancel-safe: a dropped call may still commit.
    pub async fn commit<R: Send + 'static, E: Send + 'static>(
        &self,
        what: LogContext,
        f: impl FnOnce(&mut Txn<'_>) -> Result<R, E> + Send + 'static,
    ) -> Result<(R, Csn), CommitError<E>> {
        let (tx, rx) = oneshot::channel();
        let job: Job = Box::new(move |txn| match f(txn) {
            Ok(r) => (true, Box::new(move |csn| drop(tx.send(csn.map(|c| (r, c)).map_err(CommitError::Store))))),
            Err(e) => (
                false,
                Box::new(move |csn| {
                    drop(tx.send(Err(csn.map_or_else(CommitError::Store, |_| CommitError::Refused(e)))))
                }),
            ),
        });
        let gone = || CommitError::Store(StoreError::Fenced("it is closed".into()));
        self.0.requests.send(Request::Commit(what, job)).await.map_err(|_| gone())?;
        rx.await.map_err(|_| gone())?
    }

    /// Returns when everything committed before the call is fdatasynced. Cancel-safe.
    pub async fn sync(&self) -> Result<Csn, StoreError> {
        let rx = {
            let mut p = self.0.shared.progress();
            if let Some(e) = &p.error {
                return Err(e.clone());
            }
            if p.last <= p.durable {
                return Ok(self.0.shared.csn(p.durable));
            }
            let (tx, rx) = oneshot::channel();
            let last = p.last;
            p.waiters.push((last, tx));
            rx
        };
        self.0.shared.changed.notify_all();
        rx.await.unwrap_or_else(|_| Err(StoreError::Fenced("it is closed".into())))
    }

    /// Everything up to here survives a power loss.
    pub fn durable(&self) -> Csn {
        self.0.shared.csn(self.0.shared.durable.load(Ordering::Acquire))
    }

    /// The newest commit.
    pub fn last(&self) -> Csn {
        self.0.shared.csn(self.0.shared.progress().last)
    }

    /// Moves everything committed so far into redb and cuts the log.
    pub async fn flush(&self) -> Result<(), StoreError> {
        let (tx, rx) = oneshot::channel();
        let gone = || StoreError::Fenced("it is closed".into());
        self.0.flushes.send(FlushRequest::Flush(Some(tx))).map_err(|_| gone())?;
        rx.await.map_err(|_| gone())?
    }

    /// Flushes everything and stops. Other clones fail from then on.
    pub async fn close(self) {
        if let Err(e) = self.flush().await {
            tracing::error!("the last flush of the store failed, its log is kept: {e}");
        }
        let _ = tokio::task::spawn_blocking(move || self.0.stop_and_join()).await;
    }

    /// Stops the threads without a flush, as kill -9 would.
    #[cfg(test)]
    fn abandon(self) {
        self.0.stop_and_join();
    }
}

/// A consistent view of the store.
pub struct ReadView<'a> {
    view: &'a View,
    pending: Option<(&'a Overlay, &'a Overlay)>,
    shared: &'a Shared,
}

impl<'a> ReadView<'a> {
    fn layers(&self) -> impl Iterator<Item = &'a Overlay> + use<'a> {
        let own = self.pending.into_iter().flat_map(|(a, b)| [a, b]);
        own.chain([&self.view.active]).chain(self.view.frozen.as_deref())
    }

    /// The value of a key.
    pub fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        if let Some(e) = self.layers().find_map(|l| l.get(table, key)) {
            return Ok(e.value.clone());
        }
        let t = self.view.snapshot.get(table.index()).ok_or_else(without_redb)?;
        Ok(t.get(key).map_err(StoreError::redb)?.map(|v| v.value().to_vec()))
    }

    /// At most `limit` pairs with `from <= key < to_exclusive`, in key order. An empty `to_exclusive`: to the end.
    pub fn scan(&self, table: Table, from: &[u8], to_exclusive: &[u8], limit: usize) -> Result<Vec<Row>, StoreError> {
        let mut out = Vec::new();
        if limit == 0 || (!to_exclusive.is_empty() && from >= to_exclusive) {
            return Ok(out);
        }
        let end = if to_exclusive.is_empty() { Bound::Unbounded } else { Bound::Excluded(to_exclusive) };
        let range = (Bound::Included(from), end);
        let mut layers: Vec<_> = self.layers().map(|l| l.table(table).range::<[u8], _>(range).peekable()).collect();
        let t = self.view.snapshot.get(table.index()).ok_or_else(without_redb)?;
        let mut stored = t.range::<&[u8]>(range).map_err(StoreError::redb)?;
        let mut next_stored = || match stored.next() {
            Some(Ok((k, v))) => Ok(Some((k.value().to_vec(), v.value().to_vec()))),
            Some(Err(e)) => Err(StoreError::redb(e)),
            None => Ok(None),
        };
        let mut base: Option<(Vec<u8>, Vec<u8>)> = next_stored()?;
        while out.len() < limit {
            let least = layers.iter_mut().filter_map(|l| l.peek().map(|(k, _)| *k)).min();
            match (least, &base) {
                (Some(k), b) if b.as_ref().is_none_or(|(bk, _)| k <= bk) => {
                    if b.as_ref().is_some_and(|(bk, _)| bk == k) {
                        base = next_stored()?;
                    }
                    let mut newest: Option<&Entry> = None;
                    for l in &mut layers {
                        if let Some((_, e)) = l.next_if(|(lk, _)| *lk == k) {
                            newest = newest.or(Some(e));
                        }
                    }
                    if let Some(v) = newest.and_then(|e| e.value.clone()) {
                        out.push((k.clone(), v));
                    }
                }
                (_, Some(_)) => {
                    out.extend(base.take());
                    base = next_stored()?;
                }
                (_, None) => break,
            }
        }
        Ok(out)
    }

    /// Who changed the key last, if that change is not durable yet.
    pub fn changed_by(&self, table: Table, key: &[u8]) -> Option<(ClientInstance, Csn)> {
        let e = self.layers().find_map(|l| l.get(table, key))?;
        (e.sequence > self.shared.durable.load(Ordering::Acquire))
            .then_some((e.session, Csn { epoch: e.epoch, sequence: e.sequence }))
    }
}

/// A transaction; sees its own writes.
pub struct Txn<'a> {
    view: &'a View,
    batch: &'a Overlay,
    own: Overlay,
    shared: &'a Shared,
    session: ClientInstance,
    sequence: u64,
}

impl Txn<'_> {
    fn reads(&self) -> ReadView<'_> {
        ReadView { view: self.view, pending: Some((&self.own, self.batch)), shared: self.shared }
    }
    /// The transaction's reads as a view, for code shared with readers.
    pub fn view(&self) -> ReadView<'_> {
        self.reads()
    }
    /// See [`ReadView::get`].
    pub fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.reads().get(table, key)
    }
    /// See [`ReadView::scan`].
    pub fn scan(&self, table: Table, from: &[u8], to_exclusive: &[u8], limit: usize) -> Result<Vec<Row>, StoreError> {
        self.reads().scan(table, from, to_exclusive, limit)
    }
    /// See [`ReadView::changed_by`].
    pub fn changed_by(&self, table: Table, key: &[u8]) -> Option<(ClientInstance, Csn)> {
        self.reads().changed_by(table, key)
    }
    /// The CSN this transaction gets if it changes anything.
    pub fn csn(&self) -> Csn {
        self.shared.csn(self.sequence)
    }
    fn set(&mut self, table: Table, key: &[u8], value: Option<Vec<u8>>) {
        let entry = Entry { value, session: self.session, epoch: self.shared.epoch, sequence: self.sequence };
        self.own.set(table, key.to_vec(), entry);
    }
    /// Sets a key.
    pub fn put(&mut self, table: Table, key: &[u8], value: &[u8]) {
        self.set(table, key, Some(value.to_vec()));
    }
    /// Removes a key; fine if it is not there.
    pub fn delete(&mut self, table: Table, key: &[u8]) {
        self.set(table, key, None);
    }
}

struct Committer {
    shared: Arc<Shared>,
    flushes: mpsc::Sender<FlushRequest>,
    segment: Arc<log::Segment>,
    last: u64,
    checksum: u32,
    asked: bool,
}

impl Committer {
    fn run(mut self, mut requests: queue::Receiver<Request>) {
        while let Some(first) = requests.blocking_recv() {
            let (mut next, mut jobs, mut freeze, mut stop) = (Some(first), Vec::new(), None, false);
            while let Some(r) = next.take() {
                match r {
                    Request::Commit(what, job) => jobs.push((what, job)),
                    Request::Freeze(reply) => freeze = Some(reply),
                    Request::Stop => stop = true,
                }
                if jobs.len() < BATCH_LEN_MAX && freeze.is_none() && !stop {
                    next = requests.try_recv().ok();
                }
            }
            self.batch(jobs);
            if let Some(reply) = freeze {
                let _ = reply.send(self.freeze());
            }
            if stop || self.shared.progress().stop {
                return;
            }
            self.bound();
        }
    }

    fn batch(&mut self, jobs: Vec<(LogContext, Job)>) {
        if jobs.is_empty() {
            return;
        }
        let shared = self.shared.clone();
        let mut fenced = shared.check().and_then(|()| self.check_size());
        let (mut last, mut checksum) = (self.last, self.checksum);
        let (mut pending, mut bytes, mut answers) = (Overlay::default(), Vec::new(), Vec::new());
        {
            let view = unpoison(shared.view.read());
            for (what, job) in jobs {
                let (session, sequence) = (what.session, last + 1);
                let mut txn =
                    Txn { view: &view, batch: &pending, own: Overlay::default(), shared: &shared, session, sequence };
                if fenced.is_err() {
                    // Runs only to learn where the answer goes; its changes are dropped.
                    answers.push((job(&mut txn).1, None));
                    continue;
                }
                let (ok, answer) = job(&mut txn);
                let own = txn.own;
                if !ok || own.is_empty() {
                    answers.push((answer, Some(last)));
                    continue;
                }
                let (start, durable) = (bytes.len(), shared.durable.load(Ordering::Acquire));
                match log::encode(&mut bytes, sequence, durable, checksum, &what, &own) {
                    Some(crc) => {
                        (last, checksum) = (sequence, crc);
                        pending.absorb(own);
                        answers.push((answer, Some(last)));
                    }
                    None => {
                        bytes.truncate(start);
                        answer(Err(StoreError::TooLarge));
                    }
                }
            }
        }
        if fenced.is_ok() && !bytes.is_empty() {
            match self.segment.append(&bytes) {
                Ok(()) => {
                    unpoison(shared.view.write()).active.absorb(pending);
                    (self.last, self.checksum) = (last, checksum);
                    shared.progress().last = last;
                }
                Err(e) => {
                    let e = StoreError::io("write the log", &e);
                    fenced = Err(if e.is_full() { e } else { shared.fence(&e) });
                }
            }
        }
        for (answer, sequence) in answers {
            answer(fenced.clone().map(|()| shared.csn(sequence.unwrap_or(last))));
        }
    }

    /// Starts a new segment and freezes the active overlay. The old segment is synced first, so that only the last segment
    /// can have a torn tail; the flusher has just synced most of it.
    fn freeze(&mut self) -> Result<Option<Arc<Overlay>>, StoreError> {
        self.asked = false;
        self.shared.check()?;
        if unpoison(self.shared.view.read()).active.is_empty() {
            return Ok(None);
        }
        let fence = |e: std::io::Error| match StoreError::io("change the log segment", &e) {
            full @ StoreError::Full(_) => full,
            e => self.shared.fence(&e),
        };
        self.segment.sync().map_err(fence)?;
        self.shared.set_durable(self.last);
        let id = &self.shared.identity;
        let next = log::create(id, self.shared.epoch, self.last + 1, self.checksum, self.shared.fail.clone());
        self.segment = Arc::new(next.map_err(fence)?);
        let mut view = unpoison(self.shared.view.write());
        let frozen = Arc::new(std::mem::take(&mut view.active));
        view.frozen = Some(frozen.clone());
        self.shared.progress().segment = self.segment.clone();
        Ok(Some(frozen))
    }

    /// While flushes do not fit, the overlay must not grow for ever.
    fn check_size(&self) -> Result<(), StoreError> {
        let too_large = || self.is_far_too_large(unpoison(self.shared.view.read()).active.bytes);
        if self.shared.stuck.load(Ordering::Relaxed) && too_large() {
            return Err(StoreError::Full("flush to redb".into()));
        }
        Ok(())
    }

    fn is_far_too_large(&self, bytes: usize) -> bool {
        bytes > self.shared.config.flush_bytes.saturating_mul(OVERLAY_FACTOR)
    }

    /// Asks for a flush when the overlay is large; waits when it is far too large and one is running.
    fn bound(&mut self) {
        let size = |s: &Shared| {
            let v = unpoison(s.view.read());
            (v.active.bytes, v.frozen.is_some())
        };
        let (bytes, _) = size(&self.shared);
        if bytes > self.shared.config.flush_bytes && !self.asked {
            self.asked = self.flushes.send(FlushRequest::Flush(None)).is_ok();
        }
        while self.is_far_too_large(bytes) && size(&self.shared).1 {
            let p = self.shared.progress();
            if p.stop || p.error.is_some() || self.shared.stuck.load(Ordering::Relaxed) {
                return;
            }
            drop(unpoison(self.shared.changed.wait_timeout(p, Duration::from_millis(10))));
        }
    }
}

fn sync_loop(shared: &Shared) {
    loop {
        let (target, segment) = {
            let p = shared.progress();
            let idle = |p: &mut Progress| p.waiters.is_empty() && !p.stop;
            let (p, _) = unpoison(shared.changed.wait_timeout_while(p, shared.config.sync_interval, idle));
            if p.stop {
                return;
            }
            if p.error.is_some() || p.last <= p.durable {
                continue;
            }
            (p.last, p.segment.clone())
        };
        match segment.sync() {
            Ok(()) => shared.set_durable(target),
            Err(e) => drop(shared.fence(&StoreError::io("sync the log", &e))),
        }
    }
}

fn flush_loop(shared: &Shared, flushes: &mpsc::Receiver<FlushRequest>, requests: &queue::WeakSender<Request>) {
    loop {
        let reply = match flushes.recv_timeout(shared.config.flush_interval) {
            Ok(FlushRequest::Flush(reply)) => reply,
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Ok(FlushRequest::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
        };
        let result = flush(shared, requests);
        let stuck = result.as_ref().is_err_and(StoreError::is_full);
        if shared.stuck.swap(stuck, Ordering::Relaxed) != stuck {
            match &result {
                Err(e) => tracing::warn!("metadata stays in the log for now: {e}"),
                Ok(()) => tracing::info!("the disk of the metadata has room again"),
            }
        }
        if let Err(e) = &result
            && !stuck
            && shared.check().is_ok()
        {
            shared.fence(e);
        }
        if let Some(r) = reply {
            let _ = r.send(result);
        }
    }
}

fn flush(shared: &Shared, requests: &queue::WeakSender<Request>) -> Result<(), StoreError> {
    shared.check()?;
    // What did not fit the last time comes first.
    let waiting = unpoison(shared.view.read()).frozen.clone();
    if let Some(frozen) = waiting {
        apply(shared, &frozen)?;
    }
    let (target, segment) = {
        let p = shared.progress();
        (p.last, p.segment.clone())
    };
    segment.sync().map_err(|e| shared.fence(&StoreError::io("sync the log", &e)))?;
    shared.set_durable(target);
    let gone = || StoreError::Fenced("it is closed".into());
    let (tx, rx) = mpsc::channel();
    requests.upgrade().ok_or_else(gone)?.blocking_send(Request::Freeze(tx)).map_err(|_| gone())?;
    if let Some(frozen) = rx.recv().map_err(|_| gone())?? {
        apply(shared, &frozen)?;
    }
    shared.recount()
}

fn without_redb() -> StoreError {
    StoreError::Fenced("redb could not be reopened".into())
}

/// Moves the frozen overlay into redb: at once, or in parts when the disk is nearly full, so that the pages that one part
/// gives up serve the next. When that does not fit, the overlay stays and covers what has been written of it.
fn apply(shared: &Shared, frozen: &Overlay) -> Result<(), StoreError> {
    let rows = frozen.rows();
    let mut left = rows.as_slice();
    while !left.is_empty() {
        let (part, rest) = left.split_at(shared.fit(frozen, left)?);
        let applied = [(KEY_APPLIED, frozen.last)];
        let numbers = if rest.is_empty() { &applied[..] } else { &[] };
        let snapshot = {
            let guard = unpoison(shared.db.lock());
            let db = guard.as_ref().ok_or_else(without_redb)?;
            write_redb(db, part, numbers).and_then(|()| open_snapshot(db))
        };
        match snapshot {
            Ok(snapshot) => unpoison(shared.view.write()).snapshot = snapshot,
            Err(e) => {
                // It was filled from outside meanwhile; and after an error redb wants to be opened afresh.
                if e.is_full() {
                    shared.reopen()?;
                }
                return Err(e);
            }
        }
        if !rest.is_empty() {
            shared.recount()?;
        }
        left = rest;
    }
    unpoison(shared.view.write()).frozen = None;
    shared.changed.notify_all();
    remove_segments(&shared.identity, frozen.last)
}

/// Removes segments whose first record is applied. Called when the segment after `applied` has been started (or at
/// start-up, when all are).
fn remove_segments(identity: &log::Identity, applied: u64) -> Result<(), StoreError> {
    let io = |e: std::io::Error| StoreError::io("remove applied log segments", &e);
    for (first, path) in log::list(&identity.dir).map_err(io)? {
        if first <= applied {
            std::fs::remove_file(path).map_err(io)?;
        }
    }
    crate::base::durable::sync_dir(&identity.dir).map_err(io)
}

fn write_redb(db: &Database, rows: &[overlay::Row<'_>], numbers: &[(&[u8], u64)]) -> Result<(), StoreError> {
    let mut txn = db.begin_write().map_err(StoreError::redb)?;
    txn.set_durability(redb::Durability::Immediate).map_err(StoreError::redb)?;
    txn.set_quick_repair(true);
    for table in Table::ALL {
        let mut t = txn.open_table(table.definition()).map_err(StoreError::redb)?;
        for (_, key, entry) in rows.iter().filter(|(of, ..)| *of == table) {
            match &entry.value {
                Some(v) => drop(t.insert(key.as_slice(), v.as_slice()).map_err(StoreError::redb)?),
                None => drop(t.remove(key.as_slice()).map_err(StoreError::redb)?),
            }
        }
        if table == Table::Meta {
            for (key, n) in numbers {
                t.insert(*key, n.to_le_bytes().as_slice()).map_err(StoreError::redb)?;
            }
        }
    }
    txn.commit().map_err(StoreError::redb)
}

fn open_snapshot(db: &Database) -> Result<Snapshot, StoreError> {
    let txn = db.begin_read().map_err(StoreError::redb)?;
    Table::ALL.iter().map(|t| txn.open_table(t.definition()).map_err(StoreError::redb)).collect()
}

fn stored_number(snapshot: &Snapshot, key: &[u8]) -> Result<u64, StoreError> {
    let Some(t) = snapshot.get(Table::Meta.index()) else { return Ok(0) };
    let Some(v) = t.get(key).map_err(StoreError::redb)? else { return Ok(0) };
    let bytes =
        v.value().try_into().map_err(|_| StoreError::Damaged("a number of the store has a wrong size".into()))?;
    Ok(u64::from_le_bytes(bytes))
}
