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
/// Of any length: a frame refuses a body that is too long to be read. What is kept on disk goes through `encode_bounded`.
///
/// # Panics
/// Never for our types: they hold nothing that bincode refuses.
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    match bincode::serde::encode_to_vec(value, config()) {
        Ok(bytes) => bytes,
        Err(e) => panic!("internal: cannot encode {}: {e}", std::any::type_name::<T>()),
    }
}

/// A value too large to be decoded again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("it would take {bytes} bytes, at most {} can be read again", limits::MESSAGE_BODY_BYTES_MAX)]
pub struct TooLong {
    /// Its length.
    pub bytes: usize,
}

/// Encodes a value that is to be kept: what `decode` would refuse for its length is refused here, before it is written.
pub fn encode_bounded<T: Serialize>(value: &T) -> Result<Vec<u8>, TooLong> {
    let bytes = encode(value);
    // The decoder's own bound counts the same bytes, all lengths being fixed.
    if bytes.len() > limits::MESSAGE_BODY_BYTES_MAX { Err(TooLong { bytes: bytes.len() }) } else { Ok(bytes) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_encode_bounded_takes_can_be_decoded() {
        let longest = limits::MESSAGE_BODY_BYTES_MAX - 8;
        let bytes = encode_bounded(&"x".repeat(longest)).unwrap();
        assert_eq!(decode::<String>(&bytes).unwrap().len(), longest);
        let over = "x".repeat(longest + 1);
        assert_eq!(encode_bounded(&over), Err(TooLong { bytes: longest + 9 }));
        assert!(decode::<String>(&encode(&over)).is_err());
        let many: Vec<(u64, Option<String>)> = (0..190_000).map(|n| (n, Some("abcde".into()))).collect();
        let bytes = encode_bounded(&many).unwrap();
        assert_eq!(decode::<Vec<(u64, Option<String>)>>(&bytes).unwrap(), many);
    }
}
