//! A frame on a stream: fixed header, encoded body, raw payload.
//!
//! Little-endian, 104 bytes, in this order:
//!
//! | at | bytes | field |
//! | --- | --- | --- |
//! | 0 | 1 | magic 0xB5 |
//! | 1 | 1 | version 1 |
//! | 2 | 1 | kind: 1 request, 2 reply |
//! | 3 | 1 | flags, 0 |
//! | 4 | 2 | method |
//! | 6 | 2 | status: 0, or the number of an `ErrorCode` |
//! | 8 | 8 | request id |
//! | 16 | 4 | body length |
//! | 20 | 4 | payload length |
//! | 24 | 16 | client instance |
//! | 40 | 8 | session epoch |
//! | 48 | 4 | slot |
//! | 52 | 4 | deadline in milliseconds |
//! | 56 | 8 | slot sequence |
//! | 64 | 8 | group or target epoch |
//! | 72 | 8 | map version |
//! | 80 | 16 | known CSN: epoch, sequence |
//! | 96 | 8 | trace id |

use crate::base::ids::{ClientInstance, Csn};
use crate::limits;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use uuid::Uuid;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 104;
const MAGIC: u8 = 0xB5;
const VERSION: u8 = 1;

/// What a call says besides its message; travels in the header of every frame.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct CallContext {
    /// The mount that calls.
    pub client_instance: ClientInstance,
    /// Epoch of its session at the shard; an evicted client's is old.
    pub session_epoch: u64,
    /// Slot of the session that the request uses.
    pub slot: u32,
    /// Number of the request within its slot.
    pub slot_sequence: u64,
    /// Epoch of the group or target that the caller believes in.
    pub group_epoch: u64,
    /// Version of the caller's cluster map.
    pub map_version: u64,
    /// Newest CSN of this shard that the caller knows.
    pub known_csn: Csn,
    /// Joins the log lines of one operation over several servers.
    pub trace_id: u64,
    /// How long the caller waits; 0: the default of 60 s.
    pub deadline_ms: u32,
}

/// Request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// From the caller.
    Request,
    /// From the server.
    Reply,
}

/// The fixed part of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Request or reply.
    pub kind: Kind,
    /// Method number.
    pub method: u16,
    /// 0, or the number of an `ErrorCode`.
    pub status: u16,
    /// Chosen by the caller, unique on its connection.
    pub request_id: u64,
    /// Bytes of the encoded message.
    pub body_len: u32,
    /// Bytes after it.
    pub payload_len: u32,
    /// The rest.
    pub call: CallContext,
}

/// Why a stream cannot be read further.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer sent something that is no frame of ours.
    #[error("bad frame: {0}")]
    Bad(String),
    /// The connection or stream ended.
    #[error("connection lost: {0}")]
    Lost(#[from] quinn::ReadError),
    /// The stream ended within a frame.
    #[error("stream ended within a frame")]
    Cut,
}

impl Header {
    /// The bytes on the wire.
    pub fn encode(&self, out: &mut impl BufMut) {
        out.put_u8(MAGIC);
        out.put_u8(VERSION);
        out.put_u8(match self.kind {
            Kind::Request => 1,
            Kind::Reply => 2,
        });
        out.put_u8(0);
        out.put_u16_le(self.method);
        out.put_u16_le(self.status);
        out.put_u64_le(self.request_id);
        out.put_u32_le(self.body_len);
        out.put_u32_le(self.payload_len);
        out.put_slice(self.call.client_instance.0.as_bytes());
        out.put_u64_le(self.call.session_epoch);
        out.put_u32_le(self.call.slot);
        out.put_u32_le(self.call.deadline_ms);
        out.put_u64_le(self.call.slot_sequence);
        out.put_u64_le(self.call.group_epoch);
        out.put_u64_le(self.call.map_version);
        out.put_u64_le(self.call.known_csn.epoch);
        out.put_u64_le(self.call.known_csn.sequence);
        out.put_u64_le(self.call.trace_id);
    }

    /// Reads a header and checks its lengths, before anything is allocated for them.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, FrameError> {
        let mut b = &bytes[..];
        let (magic, version, kind, flags) = (b.get_u8(), b.get_u8(), b.get_u8(), b.get_u8());
        if magic != MAGIC {
            return Err(FrameError::Bad(format!("starts with {magic:#04x}, not {MAGIC:#04x}")));
        }
        if version != VERSION {
            return Err(FrameError::Bad(format!("frame version {version}, this program speaks {VERSION}")));
        }
        let kind = match kind {
            1 => Kind::Request,
            2 => Kind::Reply,
            other => return Err(FrameError::Bad(format!("kind {other}"))),
        };
        if flags != 0 {
            return Err(FrameError::Bad(format!("flags {flags:#04x}")));
        }
        let (method, status, request_id) = (b.get_u16_le(), b.get_u16_le(), b.get_u64_le());
        let (body_len, payload_len) = (b.get_u32_le(), b.get_u32_le());
        check_length("body", body_len, limits::MESSAGE_BODY_BYTES_MAX)?;
        check_length("payload", payload_len, limits::PAYLOAD_BYTES_MAX)?;
        let mut instance = [0; 16];
        b.copy_to_slice(&mut instance);
        let (session_epoch, slot, deadline_ms) = (b.get_u64_le(), b.get_u32_le(), b.get_u32_le());
        let call = CallContext {
            client_instance: ClientInstance(Uuid::from_bytes(instance)),
            session_epoch,
            slot,
            deadline_ms,
            slot_sequence: b.get_u64_le(),
            group_epoch: b.get_u64_le(),
            map_version: b.get_u64_le(),
            known_csn: Csn { epoch: b.get_u64_le(), sequence: b.get_u64_le() },
            trace_id: b.get_u64_le(),
        };
        Ok(Header { kind, method, status, request_id, body_len, payload_len, call })
    }
}

fn check_length(what: &str, len: u32, max: usize) -> Result<(), FrameError> {
    if usize::try_from(len).is_ok_and(|len| len <= max) {
        return Ok(());
    }
    Err(FrameError::Bad(format!("{what} of {len} bytes, at most {max} are allowed")))
}

/// A whole frame.
#[derive(Debug)]
pub struct Frame {
    /// Fixed part.
    pub header: Header,
    /// Encoded message.
    pub body: Bytes,
    /// Raw bytes.
    pub payload: Bytes,
}

/// Header and body as one piece, ready to be written before the payload. The header's lengths are set here; `None` if one
/// is over its limit.
pub fn head(mut header: Header, body: &[u8], payload: &Bytes) -> Option<Bytes> {
    if body.len() > limits::MESSAGE_BODY_BYTES_MAX || payload.len() > limits::PAYLOAD_BYTES_MAX {
        return None;
    }
    header.body_len = u32::try_from(body.len()).ok()?;
    header.payload_len = u32::try_from(payload.len()).ok()?;
    let mut out = BytesMut::with_capacity(HEADER_BYTES + body.len());
    header.encode(&mut out);
    out.put_slice(body);
    Some(out.freeze())
}

/// Cuts a stream into frames. What lies in one chunk as received is sliced, what spans several is copied once.
pub struct FrameReader {
    stream: quinn::RecvStream,
    current: Bytes,
}

impl FrameReader {
    /// Reads from `stream`.
    pub fn new(stream: quinn::RecvStream) -> Self {
        Self { stream, current: Bytes::new() }
    }

    /// The next frame; `None` when the peer finished the stream between two frames. Not cancel-safe: a dropped call
    /// leaves the stream within a frame.
    pub async fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        if self.current.is_empty() && !self.refill().await? {
            return Ok(None);
        }
        let mut bytes = [0; HEADER_BYTES];
        let mut filled = 0;
        while filled < HEADER_BYTES {
            if self.current.is_empty() && !self.refill().await? {
                return Err(FrameError::Cut);
            }
            let n = self.current.len().min(HEADER_BYTES - filled);
            self.current.copy_to_slice(&mut bytes[filled..filled + n]);
            filled += n;
        }
        let header = Header::decode(&bytes)?;
        let body = self.take(header.body_len).await?;
        let payload = self.take(header.payload_len).await?;
        Ok(Some(Frame { header, body, payload }))
    }

    async fn refill(&mut self) -> Result<bool, FrameError> {
        while self.current.is_empty() {
            match self.stream.read_chunk(usize::MAX, true).await? {
                Some(chunk) => self.current = chunk.bytes,
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    async fn take(&mut self, len: u32) -> Result<Bytes, FrameError> {
        // Bounded by Header::decode.
        let len = usize::try_from(len).map_err(|_| FrameError::Bad("length".into()))?;
        if len == 0 {
            return Ok(Bytes::new());
        }
        if self.current.is_empty() && !self.refill().await? {
            return Err(FrameError::Cut);
        }
        if self.current.len() >= len {
            return Ok(self.current.split_to(len));
        }
        let mut out = BytesMut::with_capacity(len);
        while out.len() < len {
            if self.current.is_empty() && !self.refill().await? {
                return Err(FrameError::Cut);
            }
            let n = self.current.len().min(len - out.len());
            out.put(self.current.split_to(n));
        }
        Ok(out.freeze())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Header {
        Header {
            kind: Kind::Request,
            method: 0x0201,
            status: 0x0403,
            request_id: 0x1817_1615_1413_1211,
            body_len: 0x0002_2221,
            payload_len: 0x0012_3231,
            call: CallContext {
                client_instance: ClientInstance(Uuid::from_u128(0x000102030405060708090a0b0c0d0e0f)),
                session_epoch: 1,
                slot: 2,
                slot_sequence: 3,
                group_epoch: 4,
                map_version: 5,
                known_csn: Csn { epoch: 6, sequence: 7 },
                trace_id: 8,
                deadline_ms: 9,
            },
        }
    }

    fn bytes_of(header: &Header) -> [u8; HEADER_BYTES] {
        let mut out = Vec::new();
        header.encode(&mut out);
        out.try_into().unwrap()
    }

    #[test]
    fn header_bytes_never_change() {
        let golden = concat!(
            "b5010100",
            "0102",
            "0304",
            "1112131415161718",
            "21220200",
            "31321200",
            "000102030405060708090a0b0c0d0e0f",
            "0100000000000000",
            "02000000",
            "09000000",
            "0300000000000000",
            "0400000000000000",
            "0500000000000000",
            "06000000000000000700000000000000",
            "0800000000000000",
        );
        assert_eq!(crate::net::identity::hex(&bytes_of(&sample())), golden);
        assert_eq!(Header::decode(&bytes_of(&sample())).unwrap(), sample());
    }

    #[test]
    fn decode_refuses_what_is_no_frame() {
        for (at, value, text) in [
            (0, 0, "starts with"),
            (1, 9, "version 9"),
            (2, 7, "kind 7"),
            (3, 1, "flags"),
            (19, 255, "body of"),
            (23, 255, "payload of"),
        ] {
            let mut bytes = bytes_of(&sample());
            bytes[at] = value;
            let error = Header::decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}
