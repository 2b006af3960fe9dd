//! The join token as text, and the proof of knowing it.
//!
//! Text: `bsw1-<hex of id (8 bytes), secret (16), SHA-256 of the CA certificate (32)>-<CRC-32C of these bytes, 8 hex>`.
//! The secret itself is never sent: the joining node sends an HMAC over the TLS exporter of the connection and its signing
//! request, so that a proof is worthless on any other connection and for any other key.

use ring::hmac;
use std::fmt;
use std::str::FromStr;

/// Label of the TLS exporter that a proof is bound to.
pub const EXPORTER_LABEL: &[u8] = b"beeswarm join";
const PREFIX: &str = "bsw1";
const TOKEN_BYTES: usize = 8 + 16 + 32;

/// A join token: which one, the secret, and the fingerprint by which the joining node knows the right server.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// Which token.
    pub id: [u8; 8],
    /// Known to mgmt and to whoever was given the token.
    pub secret: [u8; 16],
    /// SHA-256 of the certificate (DER) of the cluster's authority.
    pub ca_fingerprint: [u8; 32],
}

/// Shows the id only; the secret stays out of logs.
impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({}, secret not shown)", hex(&self.id))
    }
}

/// What is wrong with a token's text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenTextError {
    /// Nothing there.
    #[error("the join token is empty")]
    Empty,
    /// Another kind of text, or of a newer version.
    #[error("this is not a join token of this version: it must begin with 'bsw1-'")]
    Prefix,
    /// No second dash.
    #[error("the join token is cut short: it must end with '-' and eight hexadecimal digits")]
    NoChecksum,
    /// Length of the middle part.
    #[error("the join token has {found} digits between its dashes instead of {expected}: it was not copied whole")]
    Length {
        /// Digits found.
        found: usize,
        /// Digits expected.
        expected: usize,
    },
    /// A character that does not belong.
    #[error("the join token contains a character which is not a hexadecimal digit")]
    Digit,
    /// Checksum does not match.
    #[error("the join token is mistyped: its checksum does not match")]
    Checksum,
}

impl JoinToken {
    /// The text that goes into a token file. It contains the secret.
    pub fn to_text(&self) -> String {
        let bytes = self.bytes();
        format!("{PREFIX}-{}-{:08x}", hex(&bytes), crc32c::crc32c(&bytes))
    }

    fn bytes(&self) -> [u8; TOKEN_BYTES] {
        let mut bytes = [0; TOKEN_BYTES];
        bytes[..8].copy_from_slice(&self.id);
        bytes[8..24].copy_from_slice(&self.secret);
        bytes[24..].copy_from_slice(&self.ca_fingerprint);
        bytes
    }
}

impl FromStr for JoinToken {
    type Err = TokenTextError;

    /// Space around the text is ignored (files end with a newline).
    fn from_str(text: &str) -> Result<Self, TokenTextError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(TokenTextError::Empty);
        }
        let rest = text.strip_prefix(PREFIX).and_then(|r| r.strip_prefix('-')).ok_or(TokenTextError::Prefix)?;
        let (middle, checksum) = rest.split_once('-').ok_or(TokenTextError::NoChecksum)?;
        let found = middle.chars().count();
        if found != 2 * TOKEN_BYTES {
            return Err(TokenTextError::Length { found, expected: 2 * TOKEN_BYTES });
        }
        let bytes: [u8; TOKEN_BYTES] = unhex(middle).and_then(|v| v.try_into().ok()).ok_or(TokenTextError::Digit)?;
        if checksum.len() < 8 {
            return Err(TokenTextError::NoChecksum);
        }
        let checksum: [u8; 4] = unhex(checksum).and_then(|v| v.try_into().ok()).ok_or(TokenTextError::Digit)?;
        if u32::from_be_bytes(checksum) != crc32c::crc32c(&bytes) {
            return Err(TokenTextError::Checksum);
        }
        let mut token = JoinToken { id: [0; 8], secret: [0; 16], ca_fingerprint: [0; 32] };
        token.id.copy_from_slice(&bytes[..8]);
        token.secret.copy_from_slice(&bytes[8..24]);
        token.ca_fingerprint.copy_from_slice(&bytes[24..]);
        Ok(token)
    }
}

/// The proof of knowing `secret` on this connection: HMAC-SHA256 over the exporter (32 bytes), then the signing request.
pub fn proof(secret: &[u8; 16], exporter: &[u8; 32], csr_pem: &str) -> [u8; 32] {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), &proof_input(exporter, csr_pem));
    let mut out = [0; 32];
    out.copy_from_slice(tag.as_ref());
    out
}

/// Whether the proof is right; in constant time.
pub fn verify(secret: &[u8; 16], exporter: &[u8; 32], csr_pem: &str, proof: &[u8; 32]) -> bool {
    hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, secret), &proof_input(exporter, csr_pem), proof).is_ok()
}

fn proof_input(exporter: &[u8; 32], csr_pem: &str) -> Vec<u8> {
    [exporter.as_slice(), csr_pem.as_bytes()].concat()
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) {
        return None;
    }
    let digit = |b: &u8| char::from(*b).to_digit(16).and_then(|d| u8::try_from(d).ok());
    text.as_bytes()
        .chunks(2)
        .map(|pair| match pair {
            [high, low] => Some(digit(high)? << 4 | digit(low)?),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> JoinToken {
        JoinToken { id: [1, 2, 3, 4, 5, 6, 7, 255], secret: [0xab; 16], ca_fingerprint: [0x5c; 32] }
    }

    #[test]
    fn parse_own_text_gives_the_same_token() {
        let text = token().to_text();
        assert_eq!(text.parse(), Ok(token()));
        assert_eq!(format!(" {text}\n").parse(), Ok(token()));
    }

    #[test]
    fn parse_damaged_text_is_refused_whatever_the_place() {
        let text = token().to_text();
        for cut in 0..text.len() {
            assert!(text[..cut].parse::<JoinToken>().is_err(), "cut at {cut}");
        }
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = if bytes[at] == b'7' { b'8' } else { b'7' };
            assert!(String::from_utf8(bytes).unwrap().parse::<JoinToken>().is_err(), "changed at {at}");
        }
    }

    #[test]
    fn parse_error_says_what_is_wrong() {
        let text = token().to_text();
        assert_eq!("".parse::<JoinToken>(), Err(TokenTextError::Empty));
        assert_eq!("hello".parse::<JoinToken>(), Err(TokenTextError::Prefix));
        assert_eq!("bsw1-00".parse::<JoinToken>(), Err(TokenTextError::NoChecksum));
        assert_eq!("bsw1-00-00".parse::<JoinToken>(), Err(TokenTextError::Length { found: 2, expected: 112 }));
        assert_eq!(text.replacen("ab", "xy", 1).parse::<JoinToken>(), Err(TokenTextError::Digit));
        assert_eq!(text.replacen("ab", "ac", 1).parse::<JoinToken>(), Err(TokenTextError::Checksum));
        assert!("bsw1-ää-ö".parse::<JoinToken>().is_err());
    }

    #[test]
    fn debug_does_not_show_the_secret() {
        assert!(!format!("{:?}", token()).contains("abab"));
    }

    #[test]
    fn verify_accepts_only_the_same_secret_connection_and_request() {
        let (secret, exporter) = ([7; 16], [9; 32]);
        let good = proof(&secret, &exporter, "request");
        assert!(verify(&secret, &exporter, "request", &good));
        assert!(!verify(&[8; 16], &exporter, "request", &good));
        assert!(!verify(&secret, &[1; 32], "request", &good));
        assert!(!verify(&secret, &exporter, "another", &good));
        assert!(!verify(&secret, &exporter, "request", &[0; 32]));
    }
}
