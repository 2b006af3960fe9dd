//! beeswarm: a parallel file system. Many disks of many machines as one directory tree.
//!
//! Imports point one way: `cli, roles -> net -> fs -> base`. ARCHITECTURE.md walks a write and a create through the tree.

pub mod base;
pub mod cli;
pub mod config;
pub mod fs;
pub mod limits;
pub mod net;
pub mod roles;
