//! Where an address is: what a server on the internet names must not lead a node into its own network.

use std::error::Error;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// The network that an address belongs to, as seen from this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum AddressClass {
    /// Reachable from everywhere.
    #[default]
    Global,
    /// A site's own: RFC 1918, RFC 6598, unique local addresses.
    Private,
    /// One link, where clouds serve the node's identity.
    LinkLocal,
    /// This machine.
    Loopback,
}

/// Metadata services of clouds outside of the link-local range.
const METADATA: [Ipv4Addr; 2] = [Ipv4Addr::new(168, 63, 129, 16), Ipv4Addr::new(100, 100, 100, 200)];

impl AddressClass {
    pub(crate) fn of(address: IpAddr) -> AddressClass {
        match address.to_canonical() {
            IpAddr::V4(address) => AddressClass::of_v4(address),
            IpAddr::V6(address) => AddressClass::of_v6(address),
        }
    }

    fn of_v4(address: Ipv4Addr) -> AddressClass {
        let [first, second, ..] = address.octets();
        match first {
            // The kernel connects 0.0.0.0 to this machine.
            _ if address.is_loopback() || first == 0 => AddressClass::Loopback,
            _ if address.is_link_local() || METADATA.contains(&address) => AddressClass::LinkLocal,
            // Of one link, of benchmarks, or nobody's.
            192 if address.octets()[1..3] == [0, 0] => AddressClass::LinkLocal,
            198 if second & 0xfe == 18 => AddressClass::LinkLocal,
            224.. => AddressClass::LinkLocal,
            _ if address.is_private() => AddressClass::Private,
            100 if second & 0xc0 == 64 => AddressClass::Private,
            _ => AddressClass::Global,
        }
    }

    fn of_v6(address: Ipv6Addr) -> AddressClass {
        let segments = address.segments();
        let embedded = |high: u16, low: u16| {
            let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
            AddressClass::of_v4(Ipv4Addr::new(a, b, c, d))
        };
        match segments {
            [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => return embedded(high, low),
            [0xfd00, 0x0ec2, ..] => return AddressClass::LinkLocal,
            _ => {}
        }
        if address.is_loopback() || address.is_unspecified() {
            AddressClass::Loopback
        } else if segments[0] & 0xffc0 == 0xfec0 || address.is_unicast_link_local() || address.is_multicast()
        {
            AddressClass::LinkLocal
        } else if address.is_unique_local() {
            AddressClass::Private
        } else {
            AddressClass::Global
        }
    }

    /// Returns true when a server of this class may name a server of the other one, by a redirect or as its token
    /// server.
    fn may_name(self, other: AddressClass) -> bool {
        match other {
            AddressClass::Global => true,
            AddressClass::Private => matches!(self, AddressClass::Private | AddressClass::Loopback),
            AddressClass::LinkLocal | AddressClass::Loopback => self == other,
        }
    }

    /// Fails if the URL has an address that a server of this class may not name. Names are checked when the
    /// [`GuardedResolver`] resolves them.
    pub(crate) fn check(self, url: &Url) -> Result<(), InternalAddress> {
        let host = url.host_str().unwrap_or_default();
        match host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>() {
            Ok(address) if !self.may_name(AddressClass::of(address)) => Err(InternalAddress),
            _ => Ok(()),
        }
    }
}

/// A server was named whose address is in the node's own network, which the naming server is not part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InternalAddress;

impl fmt::Display for InternalAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the registry leads to an address of the node's own network")
    }
}

impl Error for InternalAddress {}

/// Resolves the names of servers that a server of this class has named.
#[derive(Debug)]
pub(crate) struct GuardedResolver(pub(crate) AddressClass);

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let from = self.0;
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let allowed: Vec<SocketAddr> =
                found.into_iter().filter(|found| from.may_name(AddressClass::of(found.ip()))).collect();
            if allowed.is_empty() {
                return Err(InternalAddress.into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::AddressClass::{self, Global, LinkLocal, Loopback, Private};

    #[test]
    fn a_server_names_servers_of_its_own_network_and_of_the_internet() {
        for (address, class) in [
            ("192.0.32.1", Global),
            ("2606:4700::1", Global),
            ("10.1.2.3", Private),
            ("172.31.0.1", Private),
            ("172.32.0.1", Global),
            ("192.168.0.1", Private),
            ("100.64.0.1", Private),
            ("100.128.0.1", Global),
            ("fd00::1", Private),
            ("169.254.169.254", LinkLocal),
            ("fe80::1", LinkLocal),
            ("224.0.0.251", LinkLocal),
            ("168.63.129.16", LinkLocal),
            ("100.100.100.200", LinkLocal),
            ("192.0.0.192", LinkLocal),
            ("198.19.0.1", LinkLocal),
            ("240.0.0.1", LinkLocal),
            ("fec0::1", LinkLocal),
            ("fd00:ec2::254", LinkLocal),
            ("64:ff9b::a9fe:a9fe", LinkLocal),
            ("64:ff9b::8.8.8.8", Global),
            ("2002:7f00:1::", Loopback),
            ("127.0.0.1", Loopback),
            ("0.0.0.0", Loopback),
            ("::1", Loopback),
            ("::", Loopback),
            ("::ffff:127.0.0.1", Loopback),
            ("::ffff:169.254.169.254", LinkLocal),
        ] {
            assert_eq!(AddressClass::of(address.parse().unwrap()), class, "{address}");
            let literal = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
            let url = reqwest::Url::parse(&format!("http://{literal}/x")).unwrap();
            for from in [Global, Private, LinkLocal, Loopback] {
                let allowed = class == Global || class == from || (from == Loopback && class == Private);
                assert_eq!(from.check(&url).is_ok(), allowed, "{from:?} names {address}");
            }
        }
    }
}
