//! The UDP socket under quinn: large buffers, and never more segments in one send than the kernel takes.
//!
//! quinn hands up to 10 datagrams to the kernel at once. When they add up to more than a UDP datagram may hold, the kernel
//! refuses all of them, the loss is not seen, and the connection stalls. So the socket remembers the largest datagram
//! that the kernel has taken: no connection's MTU is larger than that, because MTU discovery sent a probe of it first.

use super::{NetError, Result};
use quinn::{AsyncTimer, AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};
use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use socket2::{Domain, Protocol, Socket, Type};
use std::fmt;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tokio::io::Interest;

/// Largest payload of a UDP datagram over IPv4.
pub const UDP_PAYLOAD_BYTES_MAX: u16 = 65_507;
/// Datagrams that quinn gives to the kernel at once, at most.
const SEGMENTS_MAX: usize = 10;
const SOCKET_BUFFER_BYTES: usize = 8 << 20;

/// A socket bound to `addr` with 8 MiB buffers, or as much as the system allows without root.
pub fn bind(addr: SocketAddr) -> Result<std::net::UdpSocket> {
    let socket = open(addr).map_err(NetError::io(format!("bind UDP {addr}")))?;
    if rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, SOCKET_BUFFER_BYTES).is_err() {
        let _ = socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES);
    }
    if rustix::net::sockopt::set_socket_send_buffer_size_force(&socket, SOCKET_BUFFER_BYTES).is_err() {
        let _ = socket.set_send_buffer_size(SOCKET_BUFFER_BYTES);
    }
    if let Ok(got) = socket.recv_buffer_size()
        && got < SOCKET_BUFFER_BYTES
    {
        tracing::warn!(got, wanted = SOCKET_BUFFER_BYTES, "UDP receive buffer is small: raise net.core.rmem_max");
    }
    Ok(socket.into())
}

fn open(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))?;
    if addr.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    Ok(socket)
}

/// tokio as quinn's runtime, with the socket of this module.
#[derive(Debug)]
pub struct SegmentLimitedRuntime;

impl Runtime for SegmentLimitedRuntime {
    fn new_timer(&self, t: Instant) -> Pin<Box<dyn AsyncTimer>> {
        TokioRuntime.new_timer(t)
    }

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        TokioRuntime.spawn(future);
    }

    fn wrap_udp_socket(&self, socket: std::net::UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        Ok(Arc::new(SegmentLimitedSocket {
            state: UdpSocketState::new((&socket).into())?,
            io: tokio::net::UdpSocket::from_std(socket)?,
            largest_sent: AtomicUsize::new(0),
        }))
    }

    fn now(&self) -> Instant {
        TokioRuntime.now()
    }
}

#[derive(Debug)]
struct SegmentLimitedSocket {
    io: tokio::net::UdpSocket,
    state: UdpSocketState,
    largest_sent: AtomicUsize,
}

/// How many datagrams of `mtu` bytes fit one send.
fn segments_for(mtu: usize) -> usize {
    (usize::from(UDP_PAYLOAD_BYTES_MAX) / mtu.max(1)).clamp(1, SEGMENTS_MAX)
}

impl AsyncUdpSocket for SegmentLimitedSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(WritablePoller { socket: self, waiting: None })
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        match self.io.try_io(Interest::WRITABLE, || self.state.try_send((&self.io).into(), transmit)) {
            Ok(()) => {
                let datagram = transmit.segment_size.unwrap_or(transmit.contents.len());
                self.largest_sent.fetch_max(datagram, Ordering::SeqCst);
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(e),
            Err(e) => {
                // A probe larger than the interface takes is how MTU discovery finds its bound. Anything else is a loss
                // like any other on the way: QUIC repeats, and gives up after its idle timeout.
                if e.raw_os_error() == Some(rustix::io::Errno::MSGSIZE.raw_os_error()) {
                    tracing::trace!(to = %transmit.destination, bytes = transmit.contents.len(), "datagram too large");
                } else {
                    tracing::debug!(to = %transmit.destination, bytes = transmit.contents.len(), "UDP send failed: {e}");
                }
                Ok(())
            }
        }
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.io.poll_recv_ready(cx))?;
            match self.io.try_io(Interest::READABLE, || self.state.recv((&self.io).into(), bufs, meta)) {
                Ok(n) => return Poll::Ready(Ok(n)),
                // An ICMP error of an earlier send, or nothing there: neither ends the endpoint.
                Err(_) => continue,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.io.local_addr()
    }

    fn may_fragment(&self) -> bool {
        self.state.may_fragment()
    }

    fn max_transmit_segments(&self) -> usize {
        segments_for(self.largest_sent.load(Ordering::SeqCst)).min(self.state.max_gso_segments())
    }

    // The buffer of each receive holds a whole 64 KiB, which no coalesced batch exceeds.
    fn max_receive_segments(&self) -> usize {
        1
    }
}

type Waiting = Pin<Box<dyn Future<Output = io::Result<()>> + Send + Sync>>;

struct WritablePoller {
    socket: Arc<SegmentLimitedSocket>,
    waiting: Option<Waiting>,
}

impl fmt::Debug for WritablePoller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WritablePoller").finish_non_exhaustive()
    }
}

impl UdpPoller for WritablePoller {
    fn poll_writable(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let socket = self.socket.clone();
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(async move { socket.io.writable().await }));
        let result = ready!(waiting.as_mut().poll(cx));
        self.waiting = None;
        Poll::Ready(result)
    }
}

#[cfg(test)]
mod tests {
    use super::segments_for;

    #[test]
    fn segments_never_exceed_a_datagram() {
        assert_eq!(segments_for(0), 10);
        assert_eq!(segments_for(1452), 10);
        assert_eq!(segments_for(8952), 7);
        assert_eq!(segments_for(65_000), 1);
        assert!((1..=65_507).all(|mtu| segments_for(mtu) * mtu <= 65_507));
    }
}
