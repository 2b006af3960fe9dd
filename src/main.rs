//! The `beeswarm` executable.

fn main() {}
