//! Stripe policy of directories.

use super::super::db::{self, Env, RowsMut};
use crate::base::error::ErrorCode;
use crate::fs::attr::FileKind;
use crate::fs::perm;
use crate::limits;
use crate::net::msg::meta::SetPolicyRequest;

/// Changes what is given; for new files only.
pub fn set(db: &mut dyn RowsMut, env: &Env, r: &SetPolicyRequest) -> Result<(), ErrorCode> {
    let mut dir = db::inode(db, r.ino)?;
    if dir.kind != FileKind::Directory {
        return Err(ErrorCode::NotDirectory);
    }
    if !perm::owns(&dir.guarded(), &r.cred) {
        return Err(ErrorCode::NotPermitted);
    }
    if let Some(bytes) = r.policy.chunk_bytes {
        let range = limits::CHUNK_BYTES_MIN..=limits::CHUNK_BYTES_MAX;
        if !bytes.is_power_of_two() || !range.contains(&bytes) {
            return Err(ErrorCode::Invalid);
        }
        dir.policy_chunk_bytes = Some(bytes);
    }
    if let Some(n) = r.policy.targets {
        if n == 0 || n > limits::STRIPE_TARGETS_MAX {
            return Err(ErrorCode::Invalid);
        }
        dir.policy_targets = Some(n);
    }
    dir.changed(env.now);
    db::put_inode(db, r.ino, &dir)
}
