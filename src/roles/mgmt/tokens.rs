//! Join tokens: who may join with one, until when, how often.

use crate::base::{ids::Role, start::StartError};
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};

/// Most tokens kept. Bounds what `beeswarm cluster token` in a loop can do.
pub const TOKENS_MAX: usize = 1024;

/// A token as it is kept.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// The secret; proofs are made with it.
    pub secret: [u8; 16],
    /// Roles that may join.
    pub roles: Vec<Role>,
    /// First second at which it is no longer valid; none: never.
    pub expires_unix_seconds: Option<u64>,
    /// Joins left; none: any number.
    pub uses_left: Option<u32>,
}

/// Without the secret.
impl std::fmt::Debug for TokenRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenRecord({:?}, expires {:?}, left {:?})", self.roles, self.expires_unix_seconds, self.uses_left)
    }
}

impl TokenRecord {
    /// Whether it admits all of these roles now; otherwise why not.
    pub fn admits(&self, now: u64, roles: impl Iterator<Item = Role>) -> Result<(), String> {
        if self.is_expired(now) {
            return Err("the token has expired".to_owned());
        }
        if self.uses_left == Some(0) {
            return Err("the token has been used as often as it may be".to_owned());
        }
        for role in roles {
            if !self.roles.contains(&role) {
                return Err(format!("the token does not admit the role {role}"));
            }
        }
        Ok(())
    }

    /// Whether its time is over.
    pub fn is_expired(&self, now: u64) -> bool {
        self.expires_unix_seconds.is_some_and(|end| now >= end)
    }
}

/// A random id and secret.
pub fn random_token() -> Result<([u8; 8], [u8; 16]), StartError> {
    let (mut id, mut secret) = ([0; 8], [0; 16]);
    let random = SystemRandom::new();
    random.fill(&mut id).and_then(|()| random.fill(&mut secret)).map_err(|_| {
        StartError::new("cannot make a join token", "the kernel gave no random bytes", "look into the kernel's log")
    })?;
    Ok((id, secret))
}
