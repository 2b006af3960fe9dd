//! Evicted client instances of one target. The list is durable before a fence is acknowledged, and no request of a
//! fenced client is still at work by then: the meta server grants new leases on that answer.

use crate::base::durable;
use crate::base::ids::ClientInstance;
use std::collections::{HashSet, VecDeque};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, TryLockError};

/// Remembered clients; beyond, the oldest are forgotten (an instance is one mount, its session is long gone).
pub const FENCED_CLIENTS_MAX: usize = 16_384;
const FILE: &str = "fenced-clients";

#[derive(Debug, Default)]
struct List {
    known: HashSet<ClientInstance>,
    order: VecDeque<ClientInstance>,
}

impl List {
    fn add(&mut self, client: ClientInstance) -> bool {
        let new = self.known.insert(client);
        if new {
            self.order.push_back(client);
            while self.order.len() > FENCED_CLIENTS_MAX {
                if let Some(oldest) = self.order.pop_front() {
                    self.known.remove(&oldest);
                }
            }
        }
        new
    }
}

/// The fence of one target.
#[derive(Debug)]
pub struct Fence {
    dir: PathBuf,
    list: RwLock<List>,
    /// Held while the list is written; true: what is on disk is behind.
    behind: Mutex<bool>,
}

/// While held, no fence is acknowledged.
pub struct Passage<'a>(#[allow(dead_code, reason = "held for its lifetime")] RwLockReadGuard<'a, List>);

impl Fence {
    /// Reads the list of a target directory.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let text = match fs::read_to_string(dir.join(FILE)) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e),
        };
        let mut list = List::default();
        for line in text.lines() {
            let client = line
                .parse()
                .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("{FILE}: '{line}': {e}")))?;
            list.add(client);
        }
        Ok(Self { dir: dir.to_owned(), list: RwLock::new(list), behind: Mutex::new(false) })
    }

    /// Lets a client's request through, unless it is fenced. Hold the result while the request works.
    pub fn pass(&self, client: ClientInstance) -> Option<Passage<'_>> {
        let list = self.list.read().unwrap_or_else(PoisonError::into_inner);
        (!list.known.contains(&client)).then_some(Passage(list))
    }

    /// Like `pass`, without waiting: None also while a fence is being set.
    pub fn try_pass(&self, client: ClientInstance) -> Option<Passage<'_>> {
        let list = match self.list.try_read() {
            Ok(list) => list,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        (!list.known.contains(&client)).then_some(Passage(list))
    }

    /// Fences clients: waits for their requests at work, durable when it returns. May be repeated.
    pub fn add(&self, clients: &[ClientInstance]) -> io::Result<()> {
        let mut behind = self.behind.lock().unwrap_or_else(PoisonError::into_inner);
        let text = {
            let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
            let mut new = false;
            for &client in clients {
                new |= list.add(client);
            }
            if !new && !*behind {
                return Ok(());
            }
            list.order.iter().fold(String::new(), |text, c| text + &c.to_string() + "\n")
        };
        *behind = true;
        durable::write_file(&self.dir.join(FILE), text.as_bytes(), durable::PUBLIC)?;
        *behind = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_over_a_restart_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (ClientInstance::random(), ClientInstance::random());
        let fence = Fence::open(dir.path()).unwrap();
        fence.add(&[a]).unwrap();
        assert!(fence.pass(a).is_none() && fence.pass(b).is_some());
        let fence = Fence::open(dir.path()).unwrap();
        assert!(fence.pass(a).is_none() && fence.pass(b).is_some());
        let many: Vec<_> = (0..FENCED_CLIENTS_MAX).map(|_| ClientInstance::random()).collect();
        fence.add(&many).unwrap();
        assert!(fence.pass(a).is_some());
        assert_eq!(Fence::open(dir.path()).unwrap().list.into_inner().unwrap().order.len(), FENCED_CLIENTS_MAX);
    }

    #[test]
    fn a_fence_waits_for_requests_at_work() {
        let dir = tempfile::tempdir().unwrap();
        let fence = Fence::open(dir.path()).unwrap();
        let client = ClientInstance::random();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let at_work = fence.pass(client).unwrap();
            let setting = scope.spawn(|| {
                fence.add(&[client]).unwrap();
                assert!(done.load(std::sync::atomic::Ordering::SeqCst));
            });
            std::thread::sleep(std::time::Duration::from_millis(30));
            done.store(true, std::sync::atomic::Ordering::SeqCst);
            drop(at_work);
            setting.join().unwrap();
        });
        assert!(fence.try_pass(client).is_none());
    }

    #[test]
    fn a_damaged_list_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), "rubbish\n").unwrap();
        assert!(Fence::open(dir.path()).is_err());
    }
}
