//! The log: segment files `log/<first sequence>.log`.
//!
//! Segment header (56 bytes): magic 8, version u32, shard u16, zero u16, fs id 16, epoch u64, first sequence u64, checksum
//! of the record before u32, crc32c of the header so far u32. Record: body length u32, crc32c u32 (of length and body),
//! body: sequence u64, durable sequence when written u64, checksum of the record before u32, session 16, slot u32, slot
//! sequence u64, time u64, operation (u32 length, bytes), number of changes u32, changes: table u8, kind u8 (1 put,
//! 0 delete), key (u32, bytes), for a put the value (u32, bytes). Little-endian.
//!
//! A broken record with nothing after it that proves it had been durable is a torn tail and is cut. When a valid later
//! record says the broken one was durable, or the segment is not the last one, the disk has damaged the log: refused.
//! (Unsynced pages reach the disk in any order, so valid bytes after a torn record alone are no proof.)

use super::overlay::{Entry, Overlay};
use super::{LogContext, StoreError, Table};
use crate::base::ids::{ClientInstance, ClusterId};
use crate::base::version::{self, Unreadable};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const MAGIC: &[u8; 8] = b"BSWMLOG\n";
const VERSION: u32 = 1;
const HEADER: usize = 56;
/// Reserved for a segment when it is started: some thousand opens and removals, should another program fill the disk.
const AHEAD_BYTES: u64 = 4 << 20;
/// Largest body of a record.
const RECORD_BYTES_MAX: usize = 256 << 20;

/// Makes writes or syncs of the log fail, for tests.
#[derive(Default, Debug)]
pub(super) struct Failpoint {
    pub write: AtomicBool,
    pub sync: AtomicBool,
}

/// An open segment.
#[derive(Debug)]
pub(super) struct Segment {
    file: File,
    /// Bytes of whole records, and the header.
    len: AtomicU64,
    fail: Arc<Failpoint>,
}

impl Segment {
    /// Appends whole records. An error for which `is_full` holds has left no trace.
    pub fn append(&self, bytes: &[u8]) -> io::Result<()> {
        if self.fail.write.load(Ordering::Relaxed) {
            return Err(io::Error::other("injected write failure"));
        }
        let before = self.len.load(Ordering::Relaxed);
        match (&self.file).write_all(bytes) {
            Ok(()) => {
                self.len.store(before.saturating_add(bytes.len() as u64), Ordering::Relaxed);
                Ok(())
            }
            Err(e) if is_full(&e) => match self.file.set_len(before) {
                Ok(()) => Err(e),
                Err(cut) => Err(io::Error::other(format!("{e}; and the part that was written stays: {cut}"))),
            },
            Err(e) => Err(e),
        }
    }

    pub fn sync(&self) -> io::Result<()> {
        if self.fail.sync.load(Ordering::Relaxed) {
            return Err(io::Error::other("injected fdatasync failure"));
        }
        self.file.sync_data()
    }
}

/// What every segment of a store carries.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub dir: PathBuf,
    pub fs_id: ClusterId,
    pub shard: u16,
}

/// The disk or its quota has no room.
pub(super) fn is_full(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn path_of(dir: &Path, first: u64) -> PathBuf {
    dir.join(format!("{first:020}.log"))
}

/// Starts a segment; its name is durable on return.
pub(super) fn create(
    id: &Identity,
    epoch: u64,
    first: u64,
    previous: u32,
    fail: Arc<Failpoint>,
) -> io::Result<Segment> {
    let mut h = Vec::with_capacity(HEADER);
    h.extend_from_slice(MAGIC);
    h.extend_from_slice(&VERSION.to_le_bytes());
    h.extend_from_slice(&id.shard.to_le_bytes());
    h.extend_from_slice(&[0, 0]);
    h.extend_from_slice(id.fs_id.0.as_bytes());
    h.extend_from_slice(&epoch.to_le_bytes());
    h.extend_from_slice(&first.to_le_bytes());
    h.extend_from_slice(&previous.to_le_bytes());
    let crc = crc32c::crc32c(&h);
    h.extend_from_slice(&crc.to_le_bytes());
    let path = path_of(&id.dir, first);
    let file = OpenOptions::new().append(true).create_new(true).open(&path)?;
    // Only a help: what matters is whether the records fit.
    let _ = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::KEEP_SIZE, 0, AHEAD_BYTES);
    let segment = Segment { file, len: AtomicU64::new(0), fail };
    let made = segment.append(&h).and_then(|()| segment.sync()).and_then(|()| crate::base::durable::sync_dir(&id.dir));
    if let Err(e) = made {
        // The segment before goes on: one that came back after a crash would contradict it.
        let gone = std::fs::remove_file(&path).and_then(|()| crate::base::durable::sync_dir(&id.dir));
        return Err(match gone {
            Ok(()) => e,
            Err(stays) => io::Error::other(format!("{e}; and it stays: {stays}")),
        });
    }
    Ok(segment)
}

fn put_bytes(out: &mut Vec<u8>, b: &[u8]) -> Option<()> {
    out.extend_from_slice(&u32::try_from(b.len()).ok()?.to_le_bytes());
    out.extend_from_slice(b);
    Some(())
}

/// Appends an encoded record to `out` and returns its checksum; None when it is too large.
pub(super) fn encode(
    out: &mut Vec<u8>,
    sequence: u64,
    durable: u64,
    previous: u32,
    what: &LogContext,
    changes: &Overlay,
) -> Option<u32> {
    let start = out.len();
    out.extend_from_slice(&[0; 8]);
    out.extend_from_slice(&sequence.to_le_bytes());
    out.extend_from_slice(&durable.to_le_bytes());
    out.extend_from_slice(&previous.to_le_bytes());
    out.extend_from_slice(what.session.0.as_bytes());
    out.extend_from_slice(&what.slot.to_le_bytes());
    out.extend_from_slice(&what.slot_sequence.to_le_bytes());
    out.extend_from_slice(&what.time_ns.to_le_bytes());
    put_bytes(out, &what.operation)?;
    let count: usize = Table::ALL.iter().map(|t| changes.table(*t).len()).sum();
    out.extend_from_slice(&u32::try_from(count).ok()?.to_le_bytes());
    for table in Table::ALL {
        for (key, entry) in changes.table(table) {
            out.push(table.number());
            out.push(u8::from(entry.value.is_some()));
            put_bytes(out, key)?;
            if let Some(v) = &entry.value {
                put_bytes(out, v)?;
            }
        }
    }
    let body = out.len() - start - 8;
    if body > RECORD_BYTES_MAX {
        return None;
    }
    let len = u32::try_from(body).ok()?.to_le_bytes();
    let crc = crc32c::crc32c_append(crc32c::crc32c(&len), &out[start + 8..]);
    out[start..start + 4].copy_from_slice(&len);
    out[start + 4..start + 8].copy_from_slice(&crc.to_le_bytes());
    Some(crc)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (a, b) = self.0.split_at_checked(n)?;
        self.0 = b;
        Some(a)
    }
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }
    fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|a| a[0])
    }
    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    fn bytes(&mut self) -> Option<&'a [u8]> {
        let n = usize::try_from(self.u32()?).ok()?;
        self.take(n)
    }
}

struct Frame<'a> {
    crc: u32,
    size: usize,
    sequence: u64,
    durable: u64,
    previous: u32,
    rest: Reader<'a>,
}

/// A record at the start of `b`, when length and checksum are right. `accept` looks at the sequence before the checksum
/// is computed.
fn frame(b: &[u8], accept: impl Fn(u64) -> bool) -> Option<Frame<'_>> {
    let mut r = Reader(b);
    let len = r.u32()?;
    let crc = r.u32()?;
    let size = usize::try_from(len).ok()?;
    let mut body = Reader(r.take(size)?);
    let whole = body.0;
    let (sequence, durable, previous) = (body.u64()?, body.u64()?, body.u32()?);
    if !accept(sequence) || crc32c::crc32c_append(crc32c::crc32c(&len.to_le_bytes()), whole) != crc {
        return None;
    }
    Some(Frame { crc, size: size + 8, sequence, durable, previous, rest: body })
}

fn apply(mut r: Reader<'_>, epoch: u64, sequence: u64, into: &mut Overlay) -> Option<()> {
    let session = ClientInstance(uuid::Uuid::from_bytes(r.array()?));
    r.take(4 + 8 + 8)?;
    r.bytes()?;
    for _ in 0..r.u32()? {
        let table = Table::from_number(r.u8()?)?;
        let put = r.u8()? == 1;
        let key = r.bytes()?.to_vec();
        let value = if put { Some(r.bytes()?.to_vec()) } else { None };
        into.set(table, key, Entry { value, session, epoch, sequence });
    }
    r.0.is_empty().then_some(())
}

/// Names of the segments, in order of their first sequence.
pub(super) fn list(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut all = Vec::new();
    for item in std::fs::read_dir(dir)? {
        let path = item?.path();
        if path.extension().is_some_and(|e| e == "log")
            && let Some(first) = path.file_stem().and_then(|s| s.to_str()).and_then(|s| s.parse().ok())
        {
            all.push((first, path));
        }
    }
    all.sort();
    Ok(all)
}

/// Where the log ends.
#[derive(Debug, Default)]
pub(super) struct End {
    pub sequence: u64,
    pub checksum: u32,
    pub epoch: u64,
}

/// Reads all segments; records after `applied` go into the overlay. Cuts a torn tail.
pub(super) fn replay(id: &Identity, applied: u64, into: &mut Overlay) -> Result<End, StoreError> {
    let segments = list(&id.dir).map_err(|e| StoreError::io("list the log", &e))?;
    let mut end = End { sequence: applied, ..End::default() };
    let mut chain: Option<(u64, u32)> = None;
    for (i, (first, path)) in segments.iter().enumerate() {
        let last_segment = i + 1 == segments.len();
        let damaged =
            |at: usize, why: &str| StoreError::Damaged(format!("{} is damaged at byte {at}: {why}", path.display()));
        let data = std::fs::read(path).map_err(|e| StoreError::io("read the log", &e))?;
        // The version first: a newer header may have another length, and must not be taken for a torn one.
        if data.starts_with(MAGIC)
            && let Some(found) = data.get(8..12).and_then(|b| <[u8; 4]>::try_from(b).ok()).map(u32::from_le_bytes)
            && let Err(Unreadable::Newer(e)) = version::check(found, VERSION)
        {
            return Err(StoreError::Newer(format!("{}: {e}", path.display())));
        }
        let Some(header) = data
            .get(..HEADER)
            .filter(|h| crc32c::crc32c(&h[..HEADER - 4]).to_le_bytes() == h[HEADER - 4..] && h.starts_with(MAGIC))
        else {
            // A segment takes records only after its header is durable.
            if last_segment && data.len() <= HEADER {
                tracing::warn!("{}: cut short before its first record, removed", path.display());
                std::fs::remove_file(path).map_err(|e| StoreError::io("remove a torn segment", &e))?;
                break;
            }
            return Err(damaged(0, "the header is broken"));
        };
        let mut r = Reader(&header[8..]);
        let bad = || damaged(8, "the header is too short");
        let own_version = r.u32().ok_or_else(bad)?;
        let shard = u16::from_le_bytes(r.array().ok_or_else(bad)?);
        r.take(2).ok_or_else(bad)?;
        let fs_id = ClusterId(uuid::Uuid::from_bytes(r.array().ok_or_else(bad)?));
        let epoch = r.u64().ok_or_else(bad)?;
        let header_first = r.u64().ok_or_else(bad)?;
        let previous = r.u32().ok_or_else(bad)?;
        if own_version != VERSION {
            return Err(damaged(8, &format!("{own_version} is no version of it")));
        }
        if fs_id != id.fs_id || shard != id.shard {
            return Err(StoreError::Foreign(format!("{} is of cluster {fs_id}, shard {shard}", path.display())));
        }
        if header_first != *first {
            return Err(damaged(0, "the name is not that of the header"));
        }
        let (mut sequence, mut checksum) = match chain {
            Some((s, c)) if s + 1 == *first && c == previous => (s, c),
            Some(_) => return Err(damaged(0, "it does not continue the segment before")),
            None if *first > applied + 1 => {
                return Err(damaged(0, &format!("records {} to {} are missing", applied + 1, first - 1)));
            }
            None => (first.saturating_sub(1), previous),
        };
        let mut at = HEADER;
        while at < data.len() {
            let next = sequence + 1;
            let Some(f) = frame(&data[at..], |s| s == next).filter(|f| f.previous == checksum) else {
                let was_durable = (at + 1..data.len())
                    .any(|p| frame(&data[p..], |s| s > next && s - next < 1 << 32).is_some_and(|f| f.durable >= next));
                if !last_segment || was_durable {
                    return Err(damaged(at, &format!("record {next} is broken and was durable")));
                }
                tracing::warn!("{}: torn tail cut from byte {at} of {} on", path.display(), data.len());
                let file = OpenOptions::new().write(true).open(path);
                file.and_then(|f| f.set_len(u64::try_from(at).unwrap_or(u64::MAX)).and_then(|()| f.sync_all()))
                    .map_err(|e| StoreError::io("cut the torn tail", &e))?;
                break;
            };
            if f.sequence > applied {
                apply(f.rest, epoch, f.sequence, into).ok_or_else(|| damaged(at, "a record does not decode"))?;
            }
            (sequence, checksum) = (f.sequence, f.crc);
            at += f.size;
        }
        chain = Some((sequence, checksum));
        end = End { sequence: sequence.max(end.sequence), checksum, epoch: epoch.max(end.epoch) };
    }
    Ok(end)
}
