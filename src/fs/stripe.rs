//! Where each byte of a file lies: chunk i on target i mod n, dense on each target.

use crate::{base::{error::ErrorCode, ids::TargetId}, limits};
use serde::{Deserialize, Serialize};

/// How the targets of a pattern keep the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum StripeKind {
    /// One copy.
    Raid0,
    /// Two copies, each target with its buddy.
    BuddyMirror,
}

#[derive(Deserialize)]
struct Unchecked {
    chunk_bytes: u32,
    targets: Vec<TargetId>,
    kind: StripeKind,
}

/// The layout of one file. Always valid: built and decoded only through the checks of `new`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct StripePattern {
    chunk_bytes: u32,
    targets: Vec<TargetId>,
    kind: StripeKind,
}

impl TryFrom<Unchecked> for StripePattern {
    type Error = ErrorCode;
    fn try_from(u: Unchecked) -> Result<Self, ErrorCode> {
        StripePattern::new(u.chunk_bytes, u.targets, u.kind)
    }
}

/// One contiguous piece of one chunk file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Position of the target in the pattern.
    pub stripe_index: u16,
    /// The target.
    pub target: TargetId,
    /// Offset in the chunk file.
    pub local_offset: u64,
    /// Offset in the file.
    pub file_offset: u64,
    /// Length in bytes; never 0.
    pub len: u64,
}

impl StripePattern {
    /// Checks chunk size (power of two within the limits) and number of targets.
    pub fn new(chunk_bytes: u32, targets: Vec<TargetId>, kind: StripeKind) -> Result<Self, ErrorCode> {
        let size_ok = chunk_bytes.is_power_of_two()
            && (limits::CHUNK_BYTES_MIN..=limits::CHUNK_BYTES_MAX).contains(&chunk_bytes);
        if !size_ok || targets.is_empty() || targets.len() > usize::from(limits::STRIPE_TARGETS_MAX) {
            return Err(ErrorCode::Invalid);
        }
        Ok(Self { chunk_bytes, targets, kind })
    }

    /// Bytes of one chunk.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// The targets, in order of stripe index.
    pub fn targets(&self) -> &[TargetId] {
        &self.targets
    }

    /// How the data is kept.
    pub fn kind(&self) -> StripeKind {
        self.kind
    }

    fn chunk(&self) -> u64 {
        u64::from(self.chunk_bytes)
    }

    fn count(&self) -> u64 {
        self.targets.len() as u64
    }

    /// The pieces that hold `len` bytes from `offset`, in file order. A range past u64::MAX is cut there.
    pub fn extents(&self, offset: u64, len: u64) -> Vec<Extent> {
        let (chunk, n) = (self.chunk(), self.count());
        let end = offset.saturating_add(len);
        let mut out = Vec::new();
        let mut at = offset;
        while at < end {
            let (i, within) = (at / chunk, at % chunk);
            let piece = if n == 1 { end - at } else { (chunk - within).min(end - at) };
            let index = u16::try_from(i % n).unwrap_or(0); // n <= 64
            out.push(Extent {
                stripe_index: index,
                target: self.targets[usize::from(index)],
                local_offset: (i / n) * chunk + within,
                file_offset: at,
                len: piece,
            });
            at += piece;
        }
        out
    }

    /// Bytes of that chunk file if the file had this size without holes.
    pub fn local_size(&self, file_size: u64, stripe_index: u16) -> u64 {
        let (chunk, n, s) = (self.chunk(), self.count(), u64::from(stripe_index));
        let (full, rest) = (file_size / chunk, file_size % chunk);
        let last = full % n;
        let extra = match s.cmp(&last) {
            std::cmp::Ordering::Less => chunk,
            std::cmp::Ordering::Equal => rest,
            std::cmp::Ordering::Greater => 0,
        };
        (full / n) * chunk + extra
    }

    /// Smallest file size that implies this size of the chunk file.
    pub fn file_size_from_local(&self, stripe_index: u16, local_size: u64) -> u64 {
        local_size.checked_sub(1).map_or(0, |last| self.file_offset(stripe_index, last).saturating_add(1))
    }

    /// The file offset of a byte of a chunk file; saturates.
    pub fn file_offset(&self, stripe_index: u16, local_offset: u64) -> u64 {
        let chunk = self.chunk();
        (local_offset / chunk)
            .saturating_mul(self.count())
            .saturating_add(u64::from(stripe_index))
            .saturating_mul(chunk)
            .saturating_add(local_offset % chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pattern(n: u32) -> StripePattern {
        StripePattern::new(65536, (1..=n).map(TargetId).collect(), StripeKind::Raid0).unwrap()
    }

    #[test]
    fn limits_hold() {
        assert!(StripePattern::new(65537, vec![TargetId(1)], StripeKind::Raid0).is_err());
        assert!(StripePattern::new(65536, vec![], StripeKind::Raid0).is_err());
        assert!(StripePattern::new(32768, vec![TargetId(1)], StripeKind::Raid0).is_err());
        assert!(StripePattern::new(65536, vec![TargetId(1); 65], StripeKind::Raid0).is_err());
    }

    proptest! {
        #[test]
        fn extents_cover_and_invert(n in 1u32..9, offset in 0u64..5_000_000, len in 0u64..3_000_000) {
            let p = pattern(n);
            let mut at = offset;
            for e in p.extents(offset, len) {
                prop_assert_eq!(e.file_offset, at);
                prop_assert!(e.len > 0);
                prop_assert_eq!(p.file_offset(e.stripe_index, e.local_offset), at);
                prop_assert_eq!(p.file_offset(e.stripe_index, e.local_offset + e.len - 1), at + e.len - 1);
                at += e.len;
            }
            prop_assert_eq!(at, offset + len);
        }

        #[test]
        fn sizes_agree(n in 1u16..9, size in 0u64..5_000_000) {
            let p = pattern(u32::from(n));
            let sizes: Vec<u64> = (0..n).map(|s| p.local_size(size, s)).collect();
            prop_assert_eq!(sizes.iter().sum::<u64>(), size);
            let back = (0..n).map(|s| p.file_size_from_local(s, sizes[usize::from(s)])).max().unwrap();
            prop_assert_eq!(back, size);
        }
    }
}
