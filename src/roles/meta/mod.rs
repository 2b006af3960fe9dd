//! The meta role: keeps the namespace.

pub mod store;
