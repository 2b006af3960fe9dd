//! File data: striped over the targets, all of them at once.

use crate::base::{error::ErrorCode, ids::{ClusterId, InodeId, NodeId, TargetId}};
use crate::fs::chunkfile::{ChunkHeaderRecord, ChunkKey};
use crate::fs::stripe::StripePattern;
use crate::net::cluster::Cluster;
use crate::net::frame::CallContext;
use crate::net::msg::meta::Layout;
use crate::net::msg::storage::{ChangeSpaceRequest, ReadChunkRequest, SeekChunkRequest, SpaceChange, SyncChunkRequest, WriteChunkRequest};
use bytes::Bytes;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// Format of the chunk header that this version writes.
const CHUNK_HEADER_VERSION: u16 = 1;

/// One request of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which stripe.
    pub stripe_index: u16,
    /// Its target.
    pub target: TargetId,
    /// In the chunk file.
    pub local_offset: u64,
    /// In the caller's buffer.
    pub buffer_offset: usize,
    /// Bytes.
    pub len: usize,
}

/// Splits a range of a file into requests; neighbours on one target become one.
pub fn plan(pattern: &StripePattern, offset: u64, len: usize) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for e in pattern.extents(offset, u64::try_from(len).unwrap_or(u64::MAX)) {
        let (Ok(buffer_offset), Ok(len)) = (usize::try_from(e.file_offset.saturating_sub(offset)), usize::try_from(e.len)) else {
            continue;
        };
        if let Some(last) = parts.last_mut() {
            let follows = last.local_offset + u64::try_from(last.len).unwrap_or(0) == e.local_offset;
            if last.stripe_index == e.stripe_index && follows && last.buffer_offset + last.len == buffer_offset {
                last.len += len;
                continue;
            }
        }
        parts.push(Part { stripe_index: e.stripe_index, target: e.target, local_offset: e.local_offset, buffer_offset, len });
    }
    parts
}

/// Has this stripe data?
pub fn has_data(mask: u64, stripe_index: u16) -> bool {
    mask.checked_shr(u32::from(stripe_index)).unwrap_or(0) & 1 == 1
}

/// The mask with only this stripe.
pub fn mask_of(stripe_index: u16) -> u64 {
    1u64.checked_shl(u32::from(stripe_index)).unwrap_or(0)
}

/// Stripe indexes with their targets.
pub fn stripes(pattern: &StripePattern) -> impl Iterator<Item = (u16, TargetId)> + '_ {
    (0u16..).zip(pattern.targets().iter().copied())
}

/// Finds the next data at or after `offset` (below `size`), asking each target with data once. `ask(stripe, local)`
/// answers the next data in that chunk file.
pub async fn next_data<A, F>(pattern: &StripePattern, mask: u64, size: u64, offset: u64, mut ask: A) -> Result<Option<u64>, ErrorCode>
where
    A: FnMut(u16, TargetId, u64) -> F,
    F: Future<Output = Result<Option<u64>, ErrorCode>>,
{
    let mut first: Option<u64> = None;
    for (index, target) in stripes(pattern).filter(|(i, _)| has_data(mask, *i)) {
        // As many bytes as lie before `offset` on this target: where its part from `offset` on begins.
        let from = pattern.local_size(offset, index);
        if let Some(local) = ask(index, target, from).await? {
            let at = pattern.file_offset(index, local.max(from));
            first = Some(first.map_or(at, |f| f.min(at)));
        }
    }
    Ok(first.filter(|at| *at < size))
}

/// Finds the next hole at or after `offset` (below `size`); the end of the file is one.
pub async fn next_hole<A, F>(pattern: &StripePattern, mask: u64, size: u64, offset: u64, mut ask: A) -> Result<u64, ErrorCode>
where
    A: FnMut(u16, TargetId, u64) -> F,
    F: Future<Output = Result<Option<u64>, ErrorCode>>,
{
    let mut known: Vec<Option<u64>> = vec![None; pattern.targets().len()];
    let mut at = offset;
    while at < size {
        let to_chunk_end = u64::from(pattern.chunk_bytes()) - at % u64::from(pattern.chunk_bytes().max(1));
        let Some(e) = pattern.extents(at, to_chunk_end).first().copied() else { return Err(ErrorCode::Internal) };
        if !has_data(mask, e.stripe_index) {
            return Ok(at);
        }
        let Some(cached) = known.get_mut(usize::from(e.stripe_index)) else { return Err(ErrorCode::Internal) };
        let hole = match *cached {
            Some(hole) if hole >= e.local_offset => hole,
            _ => ask(e.stripe_index, e.target, e.local_offset).await?.unwrap_or(e.local_offset).max(e.local_offset),
        };
        *cached = Some(hole);
        if hole < e.local_offset + e.len {
            return Ok((at + (hole - e.local_offset)).min(size));
        }
        at += e.len.max(1);
    }
    Ok(size)
}

/// A file's identity for the targets.
#[derive(Clone, Debug)]
pub struct DataFile {
    /// Inode.
    pub ino: InodeId,
    /// Where.
    pub layout: Layout,
    /// Owner, for the header of new chunk files.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl DataFile {
    fn key(&self) -> ChunkKey {
        ChunkKey { ino: self.ino, data_id: self.layout.data_id }
    }
}

/// Access to all targets.
#[derive(Debug)]
pub struct Data {
    cluster: Arc<Cluster>,
    wait: Duration,
    fs_id: ClusterId,
}

impl Data {
    /// Waits at most `wait` for a target that is away.
    pub fn new(cluster: Arc<Cluster>, wait: Duration) -> Self {
        let fs_id = cluster.id();
        Self { cluster, wait, fs_id }
    }

    fn node_of(&self, target: TargetId) -> Result<NodeId, ErrorCode> {
        self.cluster.map().target(target).map(|t| t.node).ok_or(ErrorCode::Unreachable)
    }

    fn header(&self, file: &DataFile, stripe_index: u16) -> ChunkHeaderRecord {
        ChunkHeaderRecord {
            version: CHUNK_HEADER_VERSION,
            fs_id: self.fs_id,
            ino: file.ino,
            data_id: file.layout.data_id,
            stripe_index,
            chunk_bytes: file.layout.pattern.chunk_bytes(),
            targets: file.layout.pattern.targets().to_vec(),
            kind: file.layout.pattern.kind(),
            uid: file.uid,
            gid: file.gid,
            project: 0,
            mirror_sequence: 0,
        }
    }

    /// Writes; answers the verifier of each part. On an error some parts may have been written.
    pub async fn write(self: &Arc<Self>, ctx: &CallContext, file: &Arc<DataFile>, offset: u64, data: &Bytes) -> Result<Vec<(u16, TargetId, u64)>, ErrorCode> {
        let parts = plan(&file.layout.pattern, offset, data.len());
        join(parts.into_iter().map(|part| {
            let (this, file, ctx) = (self.clone(), file.clone(), *ctx);
            let payload = data.slice(part.buffer_offset..part.buffer_offset + part.len);
            async move {
                let request = WriteChunkRequest {
                    target: part.target,
                    data_epoch: file.layout.data_epoch,
                    key: file.key(),
                    header: this.header(&file, part.stripe_index),
                    offset: part.local_offset,
                };
                let (reply, _) = this.cluster.call(this.node_of(part.target)?, &ctx, &request, payload, this.wait).await?;
                Ok((part.stripe_index, part.target, reply.verifier))
            }
        })).await
    }

    /// Reads exactly `len` bytes; what no target has is zeros.
    pub async fn read(self: &Arc<Self>, ctx: &CallContext, file: &Arc<DataFile>, offset: u64, len: usize) -> Result<Bytes, ErrorCode> {
        let parts: Vec<Part> = plan(&file.layout.pattern, offset, len)
            .into_iter()
            .filter(|p| has_data(file.layout.targets_with_data, p.stripe_index))
            .collect();
        let answers = join(parts.into_iter().map(|part| {
            let (this, file, ctx) = (self.clone(), file.clone(), *ctx);
            async move {
                let request = ReadChunkRequest {
                    target: part.target,
                    key: file.key(),
                    offset: part.local_offset,
                    length: u32::try_from(part.len).map_err(|_| ErrorCode::Invalid)?,
                    must_exist: true,
                };
                let ((), payload) = this.cluster.call(this.node_of(part.target)?, &ctx, &request, Bytes::new(), this.wait).await?;
                Ok((part, payload))
            }
        })).await?;
        if let [(part, payload)] = answers.as_slice()
            && part.buffer_offset == 0
            && payload.len() == len
        {
            return Ok(payload.clone());
        }
        let mut buffer = vec![0u8; len];
        for (part, payload) in answers {
            let n = payload.len().min(part.len);
            if let (Some(to), Some(from)) = (buffer.get_mut(part.buffer_offset..part.buffer_offset + n), payload.get(..n)) {
                to.copy_from_slice(from);
            }
        }
        Ok(Bytes::from(buffer))
    }

    /// Makes the chunk files of these stripes durable; answers their verifiers. Stripes may be of older data ids.
    pub async fn sync(self: &Arc<Self>, ctx: &CallContext, which: Vec<(ChunkKey, u16, TargetId)>) -> Result<Vec<(ChunkKey, u16, u64)>, ErrorCode> {
        join(which.into_iter().map(|(key, index, target)| {
            let (this, ctx) = (self.clone(), *ctx);
            async move {
                let request = SyncChunkRequest { target, key };
                let (reply, _) = this.cluster.call(this.node_of(target)?, &ctx, &request, Bytes::new(), this.wait).await?;
                Ok((key, index, reply.verifier))
            }
        })).await
    }

    /// Orders a change of space on each of these stripes.
    pub async fn change_space(self: &Arc<Self>, ctx: &CallContext, file: &Arc<DataFile>, changes: Vec<(u16, TargetId, SpaceChange)>) -> Result<Vec<(u16, TargetId, u64)>, ErrorCode> {
        join(changes.into_iter().map(|(index, target, change)| {
            let (this, file, ctx) = (self.clone(), file.clone(), *ctx);
            async move {
                let request = ChangeSpaceRequest {
                    target,
                    data_epoch: file.layout.data_epoch,
                    key: file.key(),
                    header: this.header(&file, index),
                    change,
                };
                let (reply, _) = this.cluster.call(this.node_of(target)?, &ctx, &request, Bytes::new(), this.wait).await?;
                Ok((index, target, reply.verifier))
            }
        })).await
    }

    /// SEEK_DATA or SEEK_HOLE in one chunk file.
    pub async fn seek(&self, ctx: &CallContext, file: &DataFile, target: TargetId, offset: u64, hole: bool) -> Result<Option<u64>, ErrorCode> {
        let request = SeekChunkRequest { target, key: file.key(), offset, hole };
        let (reply, _) = self.cluster.call(self.node_of(target)?, ctx, &request, Bytes::new(), self.wait).await?;
        Ok(reply.offset)
    }
}

/// Runs all at once (a single one without a task of its own) and waits for all; the first error counts.
async fn join<T, F>(work: impl Iterator<Item = F>) -> Result<Vec<T>, ErrorCode>
where
    T: Send + 'static,
    F: Future<Output = Result<T, ErrorCode>> + Send + 'static,
{
    let mut work: Vec<F> = work.collect();
    if work.len() == 1
        && let Some(only) = work.pop()
    {
        return Ok(vec![only.await?]);
    }
    let mut set = JoinSet::new();
    for f in work {
        set.spawn(f);
    }
    let mut done = Vec::with_capacity(set.len());
    let mut failed = None;
    while let Some(result) = set.join_next().await {
        match result {
            Ok(Ok(value)) => done.push(value),
            // Stale wins: it tells the caller to ask for the layout again.
            Ok(Err(e)) if failed.is_none() || e == ErrorCode::Stale => failed = Some(e),
            Ok(Err(_)) => {}
            Err(_) => failed = failed.or(Some(ErrorCode::Internal)),
        }
    }
    failed.map_or(Ok(done), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::stripe::StripeKind;
    use std::future::ready;

    const CHUNK: u32 = 65_536;
    const C: u64 = 65_536;

    fn pattern(targets: u32) -> StripePattern {
        StripePattern::new(CHUNK, (1..=targets).map(TargetId).collect(), StripeKind::Raid0).unwrap()
    }

    #[test]
    fn a_range_becomes_one_request_per_extent() {
        let parts = plan(&pattern(2), C - 10, 20 + 65_536);
        let short: Vec<_> = parts.iter().map(|p| (p.stripe_index, p.local_offset, p.buffer_offset, p.len)).collect();
        assert_eq!(short, [(0, C - 10, 0, 10), (1, 0, 10, 65_536), (0, C, 65_546, 10)]);
    }

    #[test]
    fn neighbours_on_one_target_become_one_request() {
        let parts = plan(&pattern(1), 5, 3 * 65_536);
        assert_eq!(parts.len(), 1);
        assert_eq!((parts[0].local_offset, parts[0].buffer_offset, parts[0].len), (5, 0, 3 * 65_536));
    }

    #[test]
    fn masks_never_overflow() {
        assert!(has_data(1 << 63, 63) && !has_data(u64::MAX, 64));
        assert_eq!((mask_of(0), mask_of(63), mask_of(64)), (1, 1 << 63, 0));
    }

    /// Chunk files with data in the given local ranges.
    struct Fake(Vec<Vec<(u64, u64)>>);

    impl Fake {
        fn data(&self, i: u16, from: u64) -> Option<u64> {
            self.0[usize::from(i)].iter().filter(|(_, end)| *end > from).map(|(start, _)| (*start).max(from)).min()
        }
        fn hole(&self, i: u16, mut from: u64) -> Option<u64> {
            while let Some((_, end)) = self.0[usize::from(i)].iter().find(|(s, e)| *s <= from && from < *e) {
                from = *end;
            }
            Some(from)
        }
    }

    #[tokio::test]
    async fn seeks_agree_with_a_byte_map() {
        let p = pattern(3);
        let fake = Fake(vec![vec![(0, C), (C + 4096, 2 * C)], vec![(4096, 8192)], vec![]]);
        let size = 6 * C;
        let mask = 0b011;
        let is_data = |at: u64| {
            let e = p.extents(at, 1)[0];
            has_data(mask, e.stripe_index) && fake.data(e.stripe_index, e.local_offset) == Some(e.local_offset)
        };
        for step in 0..size / 4096 {
            let at = step * 4096;
            let data = (at..size).step_by(4096).find(|a| is_data(*a));
            let hole = (at..size).step_by(4096).find(|a| !is_data(*a)).unwrap_or(size);
            assert_eq!(next_data(&p, mask, size, at, |i, _, l| ready(Ok(fake.data(i, l)))).await, Ok(data), "data from {at}");
            assert_eq!(next_hole(&p, mask, size, at, |i, _, l| ready(Ok(fake.hole(i, l)))).await, Ok(hole), "hole from {at}");
        }
    }
}
