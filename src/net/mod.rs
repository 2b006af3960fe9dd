//! Transport: QUIC with mutual TLS, framing, methods, messages.

pub mod cluster;
pub mod endpoint;
pub mod frame;
pub mod method;
pub mod msg;
pub mod router;
pub mod rpc;
