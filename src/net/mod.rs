//! Transport: QUIC with mutual TLS, framing, methods, messages.
//!
//! `identity` makes and reads certificates, `udp` is the socket under quinn, `endpoint` opens connections, `frame` is the
//! layout on a stream, `rpc` turns frames into calls. Nothing here knows what a method does.

pub mod cluster;
pub mod endpoint;
pub mod frame;
pub mod identity;
pub mod join;
pub mod method;
pub mod msg;
pub mod router;
pub mod rpc;
pub mod udp;

/// Why something of the transport could not be set up. Calls fail with an `ErrorCode` instead.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// A certificate, key or signing request that is not what it should be.
    #[error("{0}")]
    Identity(String),
    /// The operating system refused.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// TLS or QUIC would not be configured.
    #[error("cannot set up TLS: {0}")]
    Tls(String),
    /// No connection came about; the text names the address and the reason.
    #[error("{0}")]
    Connect(String),
    /// The two do not trust each other, or it is another node: the same again unless somebody changes something.
    #[error("{0}")]
    Untrusted(String),
}

/// Result of setting up something of the transport.
pub type Result<T> = std::result::Result<T, NetError>;

impl NetError {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> NetError {
        let what = what.into();
        move |source| NetError::Io { what, source }
    }
}
