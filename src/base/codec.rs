//! The one place that knows bincode. Wire messages and records on disk are encoded here, so that it can be replaced.

use crate::limits;
use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use serde::{Serialize, de::DeserializeOwned};

/// Bytes that are not what they should be: cut short, too long, or of another type.
#[derive(Debug, thiserror::Error)]
#[error("cannot decode {what}: {why}")]
pub struct DecodeError {
    /// The type that was expected.
    pub what: &'static str,
    /// What the decoder said.
    pub why: String,
}

type Config = Configuration<LittleEndian, Fixint, Limit<{ limits::MESSAGE_BODY_BYTES_MAX }>>;

fn config() -> Config {
    bincode::config::standard().with_fixed_int_encoding().with_limit::<{ limits::MESSAGE_BODY_BYTES_MAX }>()
}

/// Encodes a value. Fixed-width little-endian integers; lengths as u64.
///
/// # Panics
/// Never for our types: they hold nothing that bincode refuses, and a body over the limit is a bug that must not travel.
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    match bincode::serde::encode_to_vec(value, config()) {
        Ok(bytes) => bytes,
        Err(e) => panic!("internal: cannot encode {}: {e}", std::any::type_name::<T>()),
    }
}

/// Decodes a value; all of `bytes` must be used. Bounded before allocation by `MESSAGE_BODY_BYTES_MAX`.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    let what = std::any::type_name::<T>();
    match bincode::serde::decode_from_slice(bytes, config()) {
        Ok((value, used)) if used == bytes.len() => Ok(value),
        Ok((_, used)) => Err(DecodeError { what, why: format!("{} bytes left over", bytes.len() - used) }),
        Err(e) => Err(DecodeError { what, why: e.to_string() }),
    }
}
