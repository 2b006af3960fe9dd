//! What surrounds a start: the log, the panic hook, signals, addresses.

use crate::base::start::StartError;
use crate::config::{Config, with_port};
use crate::limits;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use tracing_subscriber::EnvFilter;

/// A panic ends the process: a role whose invariants are broken must not go on serving.
pub fn abort_on_panic() {
    std::panic::set_hook(Box::new(|info| {
        let trace = std::backtrace::Backtrace::force_capture();
        let thread = std::thread::current();
        eprintln!(
            "beeswarm: internal error in thread '{}': {info}\n{trace}\n\
             This is a fault in beeswarm {}. The process stops now so that no data is harmed; it may be started again.\n\
             Please report the lines above.",
            thread.name().unwrap_or("unnamed"),
            env!("CARGO_PKG_VERSION"),
        );
        std::process::abort();
    }));
}

/// The log goes to stderr; the journal adds the time itself.
pub fn init_log(level: &str) -> Result<(), StartError> {
    // fuser warns of each second unmount; what matters of it the client role says itself.
    let quiet = if level.contains('=') { level.to_owned() } else { format!("{level},fuser=error") };
    let filter = EnvFilter::try_new(quiet).map_err(|e| {
        StartError::new(format!("use log level '{level}'"), e, "Use error, warn, info, debug or trace.")
    })?;
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr()) && std::env::var_os("NO_COLOR").is_none();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(ansi);
    // Fails only if a log is there already.
    let _ = if std::env::var_os("JOURNAL_STREAM").is_some() { log.without_time().try_init() } else { log.try_init() };
    Ok(())
}

/// Addresses of `host[:port]`.
pub fn lookup(host: &str) -> Result<Vec<SocketAddr>, StartError> {
    let full = with_port(host, limits::PORT_MGMT);
    let what = format!("find mgmt at '{host}'");
    let todo = "Check the name given with -m, /etc/hosts and DNS; an address such as 10.0.0.1 works as well.";
    let addrs: Vec<SocketAddr> = full.to_socket_addrs().map_err(|e| StartError::new(&what, e, todo))?.collect();
    if addrs.is_empty() {
        return Err(StartError::new(what, "the name has no address", todo));
    }
    Ok(addrs)
}

/// The address of this host that packets to `to` would leave from. Nothing is sent.
fn source_towards(to: SocketAddr) -> Option<std::net::IpAddr> {
    let any: SocketAddr = if to.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { "[::]:0".parse().ok()? };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(to).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
}

/// Addresses to announce: the one listened on if it is a particular one; else the address of the default route, and the
/// one that faces mgmt; loopback last, and only when mgmt is reached over it.
pub fn announced(config: &Config, bound: SocketAddr, mgmt: &[SocketAddr]) -> Vec<SocketAddr> {
    if !bound.ip().is_unspecified() {
        return vec![bound];
    }
    let mut ips = Vec::new();
    // TEST-NET-1: stands for "somewhere out there".
    ips.extend(source_towards((Ipv4Addr::new(192, 0, 2, 1), 9).into()));
    for addr in mgmt {
        ips.extend(source_towards(*addr));
    }
    if ips.is_empty() || config.has(crate::base::ids::Role::Mgmt) {
        ips.push(Ipv4Addr::LOCALHOST.into());
    }
    ips.sort_by_key(std::net::IpAddr::is_loopback);
    let mut addrs: Vec<SocketAddr> = Vec::new();
    for ip in ips {
        let addr = SocketAddr::new(ip, bound.port());
        if !addrs.contains(&addr) {
            addrs.push(addr);
        }
    }
    addrs
}

/// The host's name, for nodes without one of their own.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Layer;

    #[test]
    fn announced_is_the_particular_address_or_ends_with_loopback() {
        let mut layer = Layer::new("test");
        layer.set("role", vec!["mgmt".into()]);
        layer.set("path", vec!["/x".into()]);
        let config = Config::resolve(&[layer]).expect("valid");
        let one: SocketAddr = "10.1.2.3:7".parse().expect("address");
        assert_eq!(announced(&config, one, &[]), [one]);
        let any =
            announced(&config, "0.0.0.0:7".parse().expect("address"), &["127.0.0.1:9008".parse().expect("address")]);
        assert_eq!(any.last(), Some(&"127.0.0.1:7".parse().expect("address")));
    }
}
