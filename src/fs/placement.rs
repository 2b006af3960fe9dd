//! Which targets a new file gets. Pure: the same arguments give the same choice.

use crate::base::ids::{NodeNumber, TargetId};
use serde::{Deserialize, Serialize};
use siphasher::sip::SipHasher13;
use std::{collections::BTreeMap, hash::Hasher};

/// How full a target is; better pools are used first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum CapacityPool {
    /// Enough space.
    Normal,
    /// Used when no normal target is left.
    Low,
    /// Used when nothing else is left.
    Emergency,
}

/// A target that may be chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// The target.
    pub target: TargetId,
    /// Its node.
    pub node: NodeNumber,
    /// Free bytes.
    pub free_bytes: u64,
    /// Size in bytes.
    pub total_bytes: u64,
    /// Its pool.
    pub pool: CapacityPool,
    /// Online and not being drained.
    pub usable: bool,
}

/// The pool of a target: emergency under min(3 %, 20 GiB) free, low under min(10 %, 100 GiB).
pub fn classify(free_bytes: u64, total_bytes: u64) -> CapacityPool {
    if free_bytes < (total_bytes / 100 * 3).min(20 << 30) {
        CapacityPool::Emergency
    } else if free_bytes < (total_bytes / 10).min(100 << 30) {
        CapacityPool::Low
    } else {
        CapacityPool::Normal
    }
}

fn draw(seed: u64, number: u64) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(seed, 0x6265_6573_7761_726d);
    hasher.write_u64(number);
    hasher.finish()
}

/// Chooses `count` targets: best pool first, then nodes used least, then at random weighted by free space.
/// Fewer only if fewer are usable. The result is rotated at random, so that first chunks spread.
pub fn choose(candidates: &[Candidate], count: usize, seed: u64) -> Vec<TargetId> {
    let mut left: Vec<&Candidate> = candidates.iter().filter(|c| c.usable).collect();
    let mut used: BTreeMap<NodeNumber, u32> = BTreeMap::new();
    let mut out = Vec::new();
    let mut number = 0;
    while out.len() < count {
        let rank = |c: &Candidate| (c.pool, used.get(&c.node).copied().unwrap_or(0));
        let Some(best) = left.iter().map(|c| rank(c)).min() else { break };
        let pool: Vec<usize> = (0..left.len()).filter(|&i| rank(left[i]) == best).collect();
        let total: u128 = pool.iter().map(|&i| u128::from(left[i].free_bytes) + 1).sum();
        let mut mark = (u128::from(draw(seed, number)) * total) >> 64;
        number += 1;
        let mut pick = pool[0];
        for &i in &pool {
            let weight = u128::from(left[i].free_bytes) + 1;
            pick = i;
            if mark < weight {
                break;
            }
            mark -= weight;
        }
        let c = left.swap_remove(pick);
        *used.entry(c.node).or_default() += 1;
        out.push(c.target);
    }
    if !out.is_empty() {
        let by = draw(seed, u64::MAX) % out.len() as u64;
        out.rotate_left(usize::try_from(by).unwrap_or(0));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uneven_targets_fill_evenly() {
        let sizes = [12u64, 12, 7, 7].map(|t| t << 40);
        let mut free = sizes;
        for seed in 0..3000 {
            let cs: Vec<Candidate> = (0..4u32)
                .map(|i| {
                    let (f, t) = (free[i as usize], sizes[i as usize]);
                    let pool = classify(f, t);
                    Candidate { target: TargetId(i), node: NodeNumber(i), free_bytes: f, total_bytes: t, pool, usable: true }
                })
                .collect();
            free[choose(&cs, 1, seed)[0].0 as usize] -= 10 << 30;
        }
        let parts: Vec<u64> = (0..4).map(|i| free[i] * 100 / sizes[i]).collect();
        assert!(parts.iter().max().unwrap() - parts.iter().min().unwrap() <= 6, "{parts:?}");
    }

    #[test]
    fn spreads_over_nodes_and_never_fails_with_one_usable() {
        let c = |t, n, pool, usable| Candidate {
            target: TargetId(t), node: NodeNumber(n), free_bytes: 0, total_bytes: 100, pool, usable,
        };
        use CapacityPool::{Emergency, Normal};
        let cs = [c(1, 1, Normal, true), c(2, 1, Normal, true), c(3, 2, Normal, true), c(4, 3, Emergency, true)];
        for seed in 0..100 {
            let got = choose(&cs, 2, seed);
            assert!(got.contains(&TargetId(3)) && got.len() == 2);
            assert_eq!(choose(&cs, 9, seed).len(), 4);
        }
        assert_eq!(choose(&[c(1, 1, Normal, false), c(4, 3, Emergency, true)], 4, 1), vec![TargetId(4)]);
        assert!(choose(&[c(1, 1, Normal, false)], 4, 1).is_empty());
    }
}
