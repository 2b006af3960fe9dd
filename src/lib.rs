//! beeswarm: a parallel file system. Many disks of many machines as one directory tree.
//!
//! Imports point one way: `cli, roles -> net -> fs -> base`. ARCHITECTURE.md walks a write and a create through the tree.

// Tests index small models with casts that production code may not use.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_possible_wrap))]

pub mod base;
pub mod cli;
pub mod config;
pub mod fs;
pub mod limits;
pub mod net;
pub mod roles;
