//! The registry of errors that travel: number, class and errno of each, chosen here and nowhere else.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// What a caller may make of an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorClass {
    /// An answer such as ENOENT: the operation was understood and refused.
    Expected,
    /// Nothing was done; the same call may succeed later or elsewhere.
    Retryable,
    /// The effect is not known (the connection broke before the answer).
    OutcomeUnknown,
    /// The caller gave up.
    Cancelled,
    /// Will not get better without a person.
    Fatal,
    /// A fault of ours.
    Bug,
}

macro_rules! registry {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $class:ident, $errno:ident, $text:literal;)*) => {
        /// An error that may travel in a reply. Numbers are never used again.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize, thiserror::Error)]
        #[repr(u16)]
        pub enum ErrorCode {
            $($(#[$doc])* #[doc = $text] #[error($text)] $name = $number,)*
        }
        impl ErrorCode {
            /// Every code, in order of number.
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$name,)*];
            /// The number on the wire.
            pub const fn number(self) -> u16 { match self { $(ErrorCode::$name => $number,)* } }
            /// The code of a number; unknown numbers (from a newer peer) are `Internal`.
            pub const fn from_number(n: u16) -> ErrorCode { match n { $($number => ErrorCode::$name,)* _ => ErrorCode::Internal } }
            /// What a caller may make of it.
            pub const fn class(self) -> ErrorClass { match self { $(ErrorCode::$name => ErrorClass::$class,)* } }
            /// What a program sees.
            pub const fn errno(self) -> Errno { match self { $(ErrorCode::$name => Errno::$errno,)* } }
        }
    };
}

registry! {
    NotFound = 1, Expected, NOENT, "no such file or directory";
    Exists = 2, Expected, EXIST, "file exists";
    NotDirectory = 3, Expected, NOTDIR, "not a directory";
    IsDirectory = 4, Expected, ISDIR, "is a directory";
    NotEmpty = 5, Expected, NOTEMPTY, "directory not empty";
    AccessDenied = 6, Expected, ACCESS, "permission denied";
    NotPermitted = 7, Expected, PERM, "operation not permitted";
    NameTooLong = 8, Expected, NAMETOOLONG, "name too long";
    Invalid = 9, Expected, INVAL, "invalid argument";
    TooManyLinks = 10, Expected, MLINK, "too many links";
    FileTooBig = 11, Expected, FBIG, "file too large";
    NoSpace = 12, Expected, NOSPC, "no space left";
    QuotaExceeded = 13, Expected, DQUOT, "quota exceeded";
    NoXattr = 14, Expected, NODATA, "no such extended attribute";
    RangeTooSmall = 15, Expected, RANGE, "result too large for the buffer";
    NotSupported = 16, Expected, OPNOTSUPP, "operation not supported";
    CrossesShards = 17, Expected, XDEV, "crosses file systems";
    NoSuchDevice = 18, Expected, NXIO, "no such device or address";
    ReadOnly = 19, Expected, ROFS, "read-only file system";
    Stale = 20, Expected, STALE, "stale handle";
    Busy = 21, Expected, BUSY, "busy";
    XattrTooBig = 22, Expected, TOOBIG, "attribute too big";
    NoXattrSpace = 23, Expected, NOSPC, "no space for attributes";
    Loop = 24, Expected, LOOP, "too many symbolic links";
    Unreachable = 40, Retryable, IO, "server cannot be reached";
    Overloaded = 41, Retryable, AGAIN, "server is busy, queue full";
    StaleMap = 42, Retryable, IO, "caller's cluster map is out of date";
    NotReady = 43, Retryable, IO, "server is starting";
    SessionUnknown = 44, Retryable, IO, "session is not known to the server";
    WrongNode = 45, Retryable, IO, "not served by this node";
    ConnectionLost = 60, OutcomeUnknown, IO, "connection lost before the answer";
    Timeout = 61, OutcomeUnknown, IO, "no answer in time";
    Interrupted = 70, Cancelled, INTR, "interrupted";
    ShuttingDown = 71, Retryable, IO, "server is stopping";
    Fenced = 80, Fatal, IO, "client session has been evicted";
    DiskFailed = 81, Fatal, IO, "a disk failed; see the server's log";
    Corrupt = 82, Fatal, IO, "stored data is damaged; see the server's log";
    ChunkMissing = 83, Fatal, IO, "a chunk file that should exist is missing";
    Forbidden = 84, Fatal, ACCESS, "peer's certificate does not allow this call";
    BadToken = 85, Fatal, ACCESS, "join token refused";
    Conflict = 86, Fatal, EXIST, "id or name is taken by another node";
    TooNew = 87, Fatal, IO, "stored data is of a newer version of beeswarm; see the server's log";
    BadMessage = 90, Bug, PROTO, "message cannot be decoded";
    UnknownMethod = 91, Bug, NOSYS, "method is not known to this version";
    Internal = 92, Bug, IO, "internal error; see the server's log";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_round_trip() {
        let mut seen = std::collections::BTreeSet::new();
        for &code in ErrorCode::ALL {
            assert!(seen.insert(code.number()), "{code:?} re-uses a number");
            assert_eq!(ErrorCode::from_number(code.number()), code);
        }
        assert_eq!(ErrorCode::from_number(65000), ErrorCode::Internal);
    }
}
