//! What surrounds a start: the log, the panic hook, signals, addresses.

use crate::base::start::StartError;
use crate::config::with_port;
use crate::limits;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
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

/// Whether the port is free; looked at before anything is made on disk. Taken for good once there is a certificate.
pub fn check_port(bind: SocketAddr) -> Result<(), StartError> {
    UdpSocket::bind(bind).map(drop).map_err(|e| cannot_listen(bind, e))
}

/// The refusal of a port that cannot be had.
pub fn cannot_listen(bind: SocketAddr, why: impl std::fmt::Display) -> StartError {
    StartError::new(
        format!("listen on UDP {bind}"),
        why,
        "Another process may use that port (ss -ulnp); --listen ADDR:PORT chooses another.",
    )
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
fn source_towards(to: SocketAddr) -> Option<IpAddr> {
    let any = if to.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
}

/// Addresses to announce to the other nodes: the one listened on if it is a particular one; else every address of this
/// machine that another one may reach, the preferred first: that of the default route, then the one that faces mgmt.
pub fn announced(bound: SocketAddr, mgmt: &[SocketAddr]) -> Vec<SocketAddr> {
    if !bound.ip().is_unspecified() {
        return vec![bound];
    }
    // TEST-NET-1: stands for "somewhere out there".
    let out_there = SocketAddr::from(([192, 0, 2, 1], 9));
    let preferred = std::iter::once(out_there).chain(mgmt.iter().copied()).filter_map(source_towards);
    let interfaces = if_addrs::get_if_addrs().unwrap_or_else(|e| {
        tracing::warn!("cannot list this machine's addresses: {e}; name the one to announce with --listen");
        Vec::new()
    });
    let rest = interfaces.iter().filter(|i| !i.is_link_local()).map(if_addrs::Interface::ip);
    choose(bound, preferred.chain(rest))
}

/// The addresses in this order, each once, as far as a socket bound to `bound` hears them. Loopback is another place on
/// each machine: announced only by a machine that has nothing else.
fn choose(bound: SocketAddr, ips: impl Iterator<Item = IpAddr>) -> Vec<SocketAddr> {
    let mut addrs: Vec<SocketAddr> = Vec::new();
    for ip in ips.filter(|ip| !ip.is_loopback() && (ip.is_ipv4() || bound.is_ipv6())) {
        let addr = SocketAddr::new(ip, bound.port());
        if !addrs.contains(&addr) && addrs.len() < limits::ADDRS_PER_NODE_MAX {
            addrs.push(addr);
        }
    }
    if addrs.is_empty() {
        addrs.push(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), bound.port()));
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

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("address")
    }

    fn chosen(bound: &str, ips: &[&str]) -> Vec<String> {
        choose(bound.parse().expect("address"), ips.iter().map(|i| ip(i))).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn particular_address_is_announced_alone() {
        let one: SocketAddr = "10.1.2.3:7".parse().expect("address");
        assert_eq!(announced(one, &["10.9.9.9:9008".parse().expect("address")]), [one]);
    }

    #[test]
    fn every_address_once_in_order_and_loopback_only_alone() {
        assert_eq!(
            chosen("0.0.0.0:7", &["10.0.0.1", "127.0.0.1", "10.0.0.1", "10.2.0.1"]),
            ["10.0.0.1:7", "10.2.0.1:7"]
        );
        assert_eq!(chosen("0.0.0.0:7", &["127.0.0.1", "::1", "2001:db8::1"]), ["127.0.0.1:7"]);
        assert_eq!(chosen("[::]:7", &["2001:db8::1", "10.0.0.1"]), ["[2001:db8::1]:7", "10.0.0.1:7"]);
    }
}
