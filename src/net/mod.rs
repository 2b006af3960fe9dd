//! Transport: QUIC with mutual TLS, framing, methods, messages.
