//! Ids from ranges whose high mark is durable before use: never issued twice, not even after a power loss.

use super::{CommitError, LogContext, Store, StoreError, Table, unpoison};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};

impl Store {
    /// Takes `count` ids of the named sequence (from 0 up). Durable on return; a range nobody uses is lost.
    pub async fn reserve_ids(&self, name: &str, count: u64) -> Result<Range<u64>, StoreError> {
        let key = [b"\0ids/", name.as_bytes()].concat();
        let reserve = self.commit(LogContext::default(), move |txn| {
            let start = match txn.get(Table::Meta, &key)? {
                None => 0,
                Some(v) => u64::from_le_bytes(
                    v.try_into().map_err(|_| StoreError::Damaged("an id high mark has a wrong size".into()))?,
                ),
            };
            let end = start.checked_add(count).ok_or_else(|| StoreError::Io("reserve ids: none left".into()))?;
            txn.put(Table::Meta, &key, &end.to_le_bytes());
            Ok::<_, StoreError>(start..end)
        });
        let (range, _) = reserve.await.map_err(|e| match e {
            CommitError::Refused(e) | CommitError::Store(e) => e,
        })?;
        self.sync().await?;
        Ok(range)
    }

    /// An allocator that keeps between half a `batch` and one and a half reserved. Must run inside a tokio runtime.
    pub async fn id_allocator(&self, name: &str, batch: u64) -> Result<IdAllocator, StoreError> {
        let first = self.reserve_ids(name, batch).await?;
        let state = State { ranges: VecDeque::from([first]), refilling: false };
        let runtime = tokio::runtime::Handle::current();
        let inner = Inner { store: self.clone(), name: name.to_owned(), batch, runtime, state: Mutex::new(state) };
        Ok(IdAllocator(Arc::new(inner)))
    }
}

struct State {
    ranges: VecDeque<Range<u64>>,
    refilling: bool,
}

struct Inner {
    store: Store,
    name: String,
    batch: u64,
    runtime: tokio::runtime::Handle,
    state: Mutex<State>,
}

/// Hands out reserved ids and refills itself in the background. Clones share it.
#[derive(Clone)]
pub struct IdAllocator(Arc<Inner>);

impl IdAllocator {
    /// The next id; None when the refill is late: the caller answers that it is overloaded. Usable inside a commit.
    pub fn next(&self) -> Option<u64> {
        let mut s = unpoison(self.0.state.lock());
        while s.ranges.front().is_some_and(Range::is_empty) {
            s.ranges.pop_front();
        }
        let id = s.ranges.front_mut().and_then(Iterator::next);
        let left: u64 = s.ranges.iter().map(|r| r.end - r.start).sum();
        if left <= self.0.batch / 2 && !s.refilling {
            s.refilling = true;
            let inner = self.0.clone();
            self.0.runtime.spawn(async move {
                let got = inner.store.reserve_ids(&inner.name, inner.batch).await;
                let mut s = unpoison(inner.state.lock());
                s.refilling = false;
                match got {
                    Ok(range) => s.ranges.push_back(range),
                    Err(e) => tracing::warn!("cannot reserve ids of {}: {e}", inner.name),
                }
            });
        }
        id
    }
}
