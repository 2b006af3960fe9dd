//! The `beeswarm` executable.

use std::process::ExitCode;

fn main() -> ExitCode {
    beeswarm::cli::main()
}
