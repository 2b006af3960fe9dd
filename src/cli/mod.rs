//! The command line: what the words mean, and which part carries them out.
//!
//! Exit codes: 0 yes, 1 the answer is no (`health check` or `health network` found trouble, or a start failed), 2 the
//! command could not be carried out.

mod admin;
mod discover;
mod entry;
mod join;
mod run;
mod start;
mod units;

use crate::base::ids::Role;
use crate::base::start::StartError;
use crate::config::{Config, Layer};
use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const ABOUT: &str = "beeswarm: a parallel file system. Many disks of many machines as one directory tree.";
const EXAMPLES: &str = "\
Examples:
  beeswarm --role all -p /srv/beeswarm --mount /mnt/beeswarm      a whole cluster on this machine
  beeswarm --role mgmt -p /srv/mgmt                               first server of a cluster
  beeswarm cluster token --roles meta,storage,client              lets more machines join
  beeswarm --role storage -m HOST -p /disk1/b -p /disk2/b --join-token-file TOKEN
  beeswarm --role client -m HOST --mount /mnt/beeswarm --join-token-file TOKEN
  beeswarm health check

Each setting may also stand in the environment (BEESWARM_NODE_ID for --node-id) or in the file of -c. Flags win over
the environment, the environment over the file.";

#[derive(Parser, Debug)]
#[command(name = "beeswarm", version, about = ABOUT, after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(flatten)]
    run: RunArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

/// What starts a process. Words are parsed in `config`, with those of the other sources.
#[derive(Args, Debug, Default)]
struct RunArgs {
    /// What this process is: mgmt, meta, storage, client (several with commas), or all
    #[arg(long, value_name = "ROLES")]
    role: Option<String>,
    /// Directory for the state; for storage one per target
    #[arg(short, long, value_name = "DIR")]
    path: Vec<String>,
    /// Number of this node within its role [default: handed out by mgmt]
    #[arg(short = 's', long, value_name = "N")]
    node_id: Option<String>,
    /// Name of this node [default: the host's name]
    #[arg(short = 'S', long, value_name = "NAME")]
    node_name: Option<String>,
    /// Number of a target, in the order of -p [default: handed out by mgmt]
    #[arg(short = 'i', long, value_name = "N")]
    target_id: Vec<String>,
    /// Where mgmt runs
    #[arg(short, long, value_name = "HOST[:PORT]")]
    mgmt: Option<String>,
    /// Configuration file (TOML)
    #[arg(short, long, value_name = "FILE")]
    conf: Option<PathBuf>,
    /// Address and UDP port to listen on [default: all IPv4 addresses (--role all: 127.0.0.1), port of the first role:
    /// mgmt 9008, meta 9005, storage 9003]
    #[arg(long, value_name = "ADDR[:PORT]")]
    listen: Option<String>,
    /// Where the client mounts the file system
    #[arg(long, value_name = "DIR")]
    mount: Option<String>,
    /// Number of targets made below one directory shared by several roles [default: 4 for --role all]
    #[arg(long, value_name = "N")]
    targets: Option<String>,
    /// File with the join token (needed at the first start only)
    #[arg(long, value_name = "FILE")]
    join_token_file: Option<String>,
    /// error, warn, info, debug, trace, or a filter such as info,beeswarm::net=debug [default: info]
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// How long an operation waits for a server that is away before it fails [default: 60]
    #[arg(long, value_name = "SECONDS")]
    call_timeout: Option<String>,
    /// Mount without write access
    #[arg(long)]
    read_only: bool,
}

/// Options of every command that asks mgmt.
#[derive(Args, Debug, Clone, Default)]
struct Common {
    /// Where mgmt runs [default: that of the processes on this host]
    #[arg(short, long, value_name = "HOST[:PORT]", env = "BEESWARM_MGMT")]
    mgmt: Option<String>,
    /// Directory with the certificate to use [default: that of the processes on this host]
    #[arg(long, value_name = "DIR", env = "BEESWARM_IDENTITY")]
    identity: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// The nodes of the cluster
    #[command(subcommand)]
    Node(NodeCommand),
    /// The storage targets
    #[command(subcommand)]
    Target(TargetCommand),
    /// Is everything well?
    #[command(subcommand)]
    Health(HealthCommand),
    /// Room on the targets: short for `health capacity`
    Df {
        #[command(flatten)]
        common: Common,
    },
    /// Which address of each server answers from here, and how fast: short for `health network`
    Net {
        #[command(flatten)]
        common: Common,
    },
    /// How files and directories are striped
    #[command(subcommand)]
    Entry(EntryCommand),
    /// The cluster as a whole
    #[command(subcommand)]
    Cluster(ClusterCommand),
}

#[derive(Subcommand, Debug)]
enum NodeCommand {
    /// Lists the nodes
    List {
        /// Only nodes of this role
        #[arg(long = "type", value_name = "ROLE")]
        role: Option<Role>,
        /// Also addresses, version and when last seen
        #[arg(long)]
        details: bool,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Subcommand, Debug)]
enum TargetCommand {
    /// Lists the targets with their states
    List {
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Subcommand, Debug)]
enum HealthCommand {
    /// Checks nodes and targets; exit code 1 if something is wrong
    Check {
        #[command(flatten)]
        common: Common,
    },
    /// Room on the targets
    #[command(alias = "df")]
    Capacity {
        #[command(flatten)]
        common: Common,
    },
    /// Which address of each server answers from here, and how fast
    #[command(alias = "net")]
    Network {
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Subcommand, Debug)]
enum EntryCommand {
    /// Shows how a file lies on the targets, or what new files in a directory will get
    Info {
        /// A path on a mounted beeswarm
        path: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Sets how new files below a directory are striped
    Set {
        /// A directory on a mounted beeswarm
        path: PathBuf,
        /// Bytes that lie together on one target, e.g. 1m; a power of two from 64k to 64m
        #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
        chunk_size: Option<u64>,
        /// Number of targets of a file
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
        num_targets: Option<u16>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Subcommand, Debug)]
enum ClusterCommand {
    /// Makes a join token and prints it
    Token {
        /// Roles that may join with it
        #[arg(long, value_delimiter = ',', default_value = "meta,storage,client")]
        roles: Vec<Role>,
        /// How long it is valid, e.g. 12h or 7d [default: for ever]
        #[arg(long, value_name = "TIME", value_parser = units::parse_seconds)]
        valid: Option<u64>,
        /// How many processes may join with it [default: any number]
        #[arg(long, value_name = "N")]
        uses: Option<u32>,
        #[command(flatten)]
        common: Common,
    },
}

/// A command's answer.
enum Answer {
    Yes,
    No,
}

/// The whole program.
pub fn main() -> ExitCode {
    start::abort_on_panic();
    let cli = Cli::parse();
    let Some(command) = cli.command else {
        return match configure(cli.run).and_then(run::run) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                complain(&e);
                ExitCode::from(1)
            }
        };
    };
    match carry_out(command) {
        Ok(Answer::Yes) => ExitCode::SUCCESS,
        Ok(Answer::No) => ExitCode::from(1),
        Err(e) => {
            complain(&e);
            ExitCode::from(2)
        }
    }
}

fn complain(error: &StartError) {
    eprintln!("beeswarm: {error}");
}

fn configure(args: RunArgs) -> Result<Config, StartError> {
    let flags = flags(&args);
    let env = Layer::from_env(|name| std::env::var(name).ok());
    let mut layers = vec![flags, env];
    let conf = args.conf.or_else(|| std::env::var_os("BEESWARM_CONF").map(PathBuf::from));
    if let Some(file) = conf {
        layers.push(read_conf(&file)?);
    } else if layers.iter().all(|layer| layer.values.is_empty()) {
        let _ = Cli::command().print_help();
        return Err(StartError::new(
            "start",
            "nothing was asked for",
            "Begin with --role, -c FILE or a command from above.",
        ));
    }
    Config::resolve(&layers)
}

fn read_conf(file: &Path) -> Result<Layer, StartError> {
    let text = std::fs::read_to_string(file).map_err(|e| {
        StartError::new(
            format!("read configuration {}", file.display()),
            e,
            "Check the path given with -c and its permissions.",
        )
    })?;
    Layer::from_toml(file, &text)
}

fn flags(args: &RunArgs) -> Layer {
    let mut layer = Layer::new("the command line");
    let one = |value: &Option<String>| value.iter().cloned().collect::<Vec<_>>();
    layer.set("role", one(&args.role));
    layer.set("path", args.path.clone());
    layer.set("node-id", one(&args.node_id));
    layer.set("node-name", one(&args.node_name));
    layer.set("target-id", args.target_id.clone());
    layer.set("mgmt", one(&args.mgmt));
    layer.set("listen", one(&args.listen));
    layer.set("mount", one(&args.mount));
    layer.set("targets", one(&args.targets));
    layer.set("join-token-file", one(&args.join_token_file));
    layer.set("log-level", one(&args.log_level));
    layer.set("call-timeout", one(&args.call_timeout));
    if args.read_only {
        layer.set("read-only", vec!["true".into()]);
    }
    layer
}

fn carry_out(command: Command) -> Result<Answer, StartError> {
    match command {
        Command::Entry(EntryCommand::Info { path, json }) => entry::info(&path, json),
        Command::Entry(EntryCommand::Set { path, chunk_size, num_targets, json }) => {
            entry::set(&path, chunk_size, num_targets, json)
        }
        asks_mgmt => {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .context("cannot start the runtime")
                .map_err(|e| {
                    StartError::new("start", format!("{e:#}"), "Check the limits of open files and memory (ulimit -a).")
                })?;
            runtime.block_on(admin::carry_out(asks_mgmt))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_become_a_layer() {
        let cli = Cli::try_parse_from([
            "beeswarm", "--role", "storage", "-p", "/a", "-p", "/b", "-i", "1,2", "-s", "7", "-m", "h",
        ])
        .expect("parses");
        let config = Config::resolve(&[flags(&cli.run)]).expect("valid");
        assert_eq!(config.paths.len(), 2);
        assert_eq!(config.target_ids.len(), 2);
        assert_eq!(config.node_id.map(|n| n.0), Some(7));
    }

    #[test]
    fn aliases_parse() {
        for line in [["beeswarm", "health", "df"], ["beeswarm", "health", "net"], ["beeswarm", "node", "list"]]
            .map(Vec::from)
            .into_iter()
            .chain([vec!["beeswarm", "df"], vec!["beeswarm", "net"]])
        {
            assert!(Cli::try_parse_from(&line).is_ok_and(|cli| cli.command.is_some()), "{line:?}");
        }
    }
}
