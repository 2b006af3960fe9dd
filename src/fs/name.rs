//! File names: bytes, checked once on entry, and their keyed hash for directory cookies.

use crate::{base::error::ErrorCode, limits};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use siphasher::sip::SipHasher13;
use std::{fmt, hash::Hasher};

/// A name of one directory entry: 1 to 255 bytes, no `/` or NUL, not `.` or `..`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileName(Vec<u8>);

impl FileName {
    /// Checks the bytes; `NameTooLong` or `Invalid` if they are no name.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, ErrorCode> {
        let bytes = bytes.into();
        if bytes.len() > limits::FILE_NAME_BYTES_MAX {
            return Err(ErrorCode::NameTooLong);
        }
        let special = bytes.is_empty() || bytes == b"." || bytes == b"..";
        if special || bytes.iter().any(|b| matches!(b, 0 | b'/')) {
            return Err(ErrorCode::Invalid);
        }
        Ok(Self(bytes))
    }

    /// The bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

impl Serialize for FileName {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        serde_bytes::serialize(&self.0, s)
    }
}

impl<'de> Deserialize<'de> for FileName {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let bytes: Vec<u8> = serde_bytes::deserialize(d)?;
        FileName::new(bytes).map_err(|code| D::Error::custom(format!("not a file name: {code}")))
    }
}

/// 48 bits of keyed SipHash-1-3 of a name: the upper part of a readdir cookie.
pub fn name_hash(key: &[u8; 16], name: &FileName) -> u64 {
    let mut hasher = SipHasher13::new_with_key(key);
    hasher.write(name.as_bytes());
    hasher.finish() >> 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::codec;

    #[test]
    fn bad_names_are_refused_also_when_decoded() {
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0"] {
            assert_eq!(FileName::new(bad), Err(ErrorCode::Invalid));
            assert!(codec::decode::<FileName>(&codec::encode(&FileName(bad.to_vec()))).is_err());
        }
        assert_eq!(FileName::new(vec![b'x'; 256]), Err(ErrorCode::NameTooLong));
        let good = FileName::new(vec![0xff; 255]).unwrap();
        assert_eq!(codec::decode::<FileName>(&codec::encode(&good)).unwrap(), good);
    }

    #[test]
    fn hash_has_48_bits_and_depends_on_the_key() {
        let name = FileName::new("a").unwrap();
        assert!(name_hash(&[1; 16], &name) < 1 << 48);
        assert_ne!(name_hash(&[1; 16], &name), name_hash(&[2; 16], &name));
    }
}
