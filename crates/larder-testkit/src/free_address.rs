//! Addresses for programs that choose none themselves.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// An address of this machine on which nothing listens, for a program that is started later. Its port is not of the
/// range from which the kernel takes ports of connections, and other tests, which have a process of their own, begin
/// elsewhere: nothing takes it in between.
///
/// # Panics
/// Never: the number of a port is small enough.
pub fn free_address() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(16);
    loop {
        let offset = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        let port = u16::try_from(10_000 + offset).expect("below 30,000");
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}
