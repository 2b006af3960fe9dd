//! Transport: QUIC with mutual TLS, framing, methods, messages.

pub mod cluster;
pub mod frame;
pub mod method;
pub mod msg;
pub mod rpc;
