//! Which requests are answered. Pure functions of the request.
//!
//! A page of another site can make a browser send requests to this daemon, and with DNS rebinding even read the
//! responses under a name of its own. So only reads are answered, only under names that are this daemon's, and not to
//! pages of others. Browsers name the requesting site to loopback addresses and over HTTPS only: at another address
//! such a page can cause reads, whose responses the browser keeps from it.

use std::net::IpAddr;

use tonic::body::Body;
use tonic::codegen::http::uri::Authority;
use tonic::codegen::http::{HeaderMap, Method, Response, StatusCode, Uri, header};

use crate::serve::responses::text;

/// Properties that a request is checked against.
pub(super) struct RequestTarget<'a> {
    /// Whether the page itself is requested, to which other sites may link.
    pub(super) is_page: bool,
    /// The address that the connection was made to.
    pub(super) local: IpAddr,
    /// Names that are this daemon's.
    pub(super) hosts: &'a [String],
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RefusalReason {
    Method,
    Host,
    Origin,
}

impl RefusalReason {
    pub(super) fn response(self) -> Response<Body> {
        match self {
            RefusalReason::Method => {
                let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "only GET is supported\n");
                super::set(response.headers_mut(), header::ALLOW, "GET, HEAD");
                response
            }
            RefusalReason::Host => text(
                StatusCode::MISDIRECTED_REQUEST,
                "unknown host name; use localhost or the address, or add the name to dashboard.hosts\n",
            ),
            RefusalReason::Origin => text(StatusCode::FORBIDDEN, "requests of other sites are refused\n"),
        }
    }
}

/// Checks method, host and origin.
pub(super) fn check(
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
    target: &RequestTarget<'_>,
) -> Result<(), RefusalReason> {
    if method != Method::GET && method != Method::HEAD {
        return Err(RefusalReason::Method);
    }
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(RefusalReason::Host) };
    let host = host.to_str().map_err(|_| RefusalReason::Host)?;
    if !is_own(host, target) || uri.authority().is_some_and(|authority| authority.as_str() != host) {
        return Err(RefusalReason::Host);
    }
    if !is_same_site(headers, host, target.is_page) {
        return Err(RefusalReason::Origin);
    }
    Ok(())
}

/// Whether the value of a `Host` header names this daemon. Its port is that of a tunnel, perhaps.
fn is_own(host: &str, target: &RequestTarget<'_>) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host();
    // User information has no place here.
    if host.contains('@') {
        return false;
    }
    let literal = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    if let Ok(address) = literal.parse::<IpAddr>() {
        let address = address.to_canonical();
        return address.is_loopback() || address == target.local.to_canonical();
    }
    name.eq_ignore_ascii_case("localhost") || target.hosts.iter().any(|own| own.eq_ignore_ascii_case(name))
}

/// Whether the request is one of this page, of an address bar, or of a program that is no browser.
fn is_same_site(headers: &HeaderMap, host: &str, is_page: bool) -> bool {
    let own = |origin: &str| {
        let origin = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        origin.is_some_and(|origin| origin.eq_ignore_ascii_case(host))
    };
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let from = text("sec-fetch-site").is_none_or(|site| matches!(site, "same-origin" | "none"));
    let follows_link = is_page && text("sec-fetch-mode") == Some("navigate");
    text("origin").is_none_or(own) && (from || follows_link)
}

#[cfg(test)]
mod tests {
    use tonic::codegen::http::HeaderValue;

    use super::*;

    const LOCAL: [u8; 4] = [10, 0, 0, 7];

    fn checked(
        method: &str,
        uri: &str,
        headers: &[(&'static str, &str)],
        is_page: bool,
    ) -> Result<(), RefusalReason> {
        let hosts = ["node-1.example".to_owned()];
        let target = RequestTarget { is_page, local: LOCAL.into(), hosts: &hosts };
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_str(value).unwrap());
        }
        check(&method.parse().unwrap(), &uri.parse().unwrap(), &map, &target)
    }

    #[test]
    fn only_names_of_the_daemon_are_answered() {
        let own = [
            "localhost",
            "LOCALHOST:9464",
            "127.0.0.1:9464",
            "127.1.2.3",
            "[::1]:9464",
            "[::1]",
            "10.0.0.7:1",
            "[::ffff:10.0.0.7]",
            "node-1.example:80",
            "NODE-1.example",
        ];
        for host in own {
            assert_eq!(checked("GET", "/dashboard/", &[("host", host)], true), Ok(()), "{host}");
        }
        let others = [
            "evil.example",
            "evil.example:9464",
            "localhost.evil.example",
            "localhost.",
            "10.0.0.8",
            "0.0.0.0",
            "a@localhost",
            "localhost@evil.example",
            "",
            ":9464",
            "localhost:9464:1",
            "127.0.0.1.evil.example",
            "2130706433",
            "0x7f000001",
            "localhost evil",
            "[::1",
            "[fe80::1]",
            "node-1.example.evil",
            "x.localhost",
        ];
        for host in others {
            assert_eq!(
                checked("GET", "/dashboard/", &[("host", host)], true),
                Err(RefusalReason::Host),
                "{host}"
            );
        }
    }

    #[test]
    fn a_request_has_one_host_in_header_and_line() {
        assert_eq!(checked("GET", "/", &[], true), Err(RefusalReason::Host));
        let twice = [("host", "localhost"), ("host", "evil.example")];
        assert_eq!(checked("GET", "/", &twice, true), Err(RefusalReason::Host));
        let host = [("host", "localhost")];
        assert_eq!(checked("GET", "http://evil.example/dashboard/", &host, true), Err(RefusalReason::Host));
        assert_eq!(checked("GET", "http://localhost/dashboard/", &host, true), Ok(()));
    }

    #[test]
    fn only_reads_are_answered() {
        for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "EXTRA"] {
            let refused = checked(method, "/dashboard/api/status", &[("host", "localhost")], false);
            assert_eq!(refused, Err(RefusalReason::Method), "{method}");
        }
        assert_eq!(checked("HEAD", "/dashboard/", &[("host", "localhost")], true), Ok(()));
    }

    #[test]
    fn pages_of_other_sites_get_nothing() {
        let with = |more: &[(&'static str, &'static str)], is_page| {
            let headers = [&[("host", "localhost:9464")], more].concat();
            checked("GET", "/dashboard/api/status", &headers, is_page)
        };
        for own in ["http://localhost:9464", "https://localhost:9464"] {
            assert_eq!(with(&[("origin", own)], false), Ok(()), "{own}");
        }
        let others = [
            "null",
            "http://evil.example",
            "http://localhost:80",
            "http://localhost",
            "file://localhost:9464",
            "",
        ];
        for other in others {
            assert_eq!(with(&[("origin", other)], false), Err(RefusalReason::Origin), "{other}");
        }
        for site in ["cross-site", "same-site", "?"] {
            assert_eq!(with(&[("sec-fetch-site", site)], false), Err(RefusalReason::Origin), "{site}");
            let link = [("sec-fetch-site", site), ("sec-fetch-mode", "navigate")];
            assert_eq!(with(&link, true), Ok(()), "a link from {site} to the page");
            assert_eq!(with(&link, false), Err(RefusalReason::Origin), "a link from {site} to data");
        }
        for site in ["same-origin", "none"] {
            assert_eq!(with(&[("sec-fetch-site", site)], false), Ok(()), "{site}");
        }
    }
}
