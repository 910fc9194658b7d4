//! Which images a location of a docker config covers: host labels with wildcards, port, path prefix.
//!
//! Locations are read as Go reads URLs, since that decides which of them are ignored.

use std::net::Ipv6Addr;

/// A text that cannot be read as a URL. It matches nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a URL")]
pub(crate) struct InvalidUrl;

/// Whether a pattern covers a target, both without scheme.
///
/// The ports must be equal (443 is not implied), the number of host labels too; each label of the pattern matches
/// as a glob (`*` stands for any characters of one label); the pattern's path is a prefix of the target's, whether
/// or not it ends at a slash. Case matters. An error says that the pattern is no URL; it then covers nothing.
pub(crate) fn url_match(pattern: &str, target: &str) -> Result<bool, InvalidUrl> {
    let pattern = RegistryLocation::parse(pattern)?;
    Ok(RegistryLocation::parse(target).is_ok_and(|target| pattern.covers(&target)))
}

/// Whether an image belongs to the hub, whose credentials many files keep under `index.docker.io`.
pub(crate) fn is_default_registry(image: &str) -> bool {
    match image.split_once('/') {
        None => !image.is_empty(),
        Some(("docker.io" | "index.docker.io", _)) => true,
        Some((first, _)) => !first.is_empty() && !first.contains(['.', ':']),
    }
}

/// The key under which a location of a docker config is kept: `host[:port][path]`.
///
/// The scheme, a leading `/v1/` or `/v2/` but for its last slash, user, query and fragment are dropped, and so is a
/// path that is only a slash.
pub(super) fn key_of(location: &str) -> Result<String, InvalidUrl> {
    let bare =
        location.strip_prefix("https://").or_else(|| location.strip_prefix("http://")).unwrap_or(location);
    let (host, path) = split_url(bare)?;
    let path = match path.strip_prefix("/v1").or_else(|| path.strip_prefix("/v2")) {
        Some(rest) if rest.starts_with('/') => rest,
        _ => &path,
    };
    Ok(if path == "/" { host } else { host + path })
}

/// A host, port and path, cut for matching.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RegistryLocation {
    labels: Vec<String>,
    port: String,
    path: String,
}

impl RegistryLocation {
    /// Reads `host[:port][/path]`.
    pub(super) fn parse(text: &str) -> Result<Self, InvalidUrl> {
        let (host, path) = split_url(text)?;
        let (host, port) = split_port(&host);
        Ok(RegistryLocation {
            labels: host.split('.').map(str::to_owned).collect(),
            port: port.to_owned(),
            path,
        })
    }

    /// Whether this, as a pattern, covers a target.
    pub(super) fn covers(&self, target: &RegistryLocation) -> bool {
        self.port == target.port
            && self.labels.len() == target.labels.len()
            && target.path.starts_with(&self.path)
            && self.labels.iter().zip(&target.labels).all(|(glob, label)| glob_match(glob, label))
    }
}

/// Whether a label fits a glob. A bracket can only come from an IPv6 address without a port; kubelet takes it for
/// the start of a character class, and so it fits no address.
fn glob_match(glob: &str, label: &str) -> bool {
    if glob.contains('[') {
        return false;
    }
    let mut pieces = glob.split('*');
    let Some(mut rest) = label.strip_prefix(pieces.next().unwrap_or_default()) else { return false };
    let Some(last) = pieces.next_back() else { return rest.is_empty() };
    for piece in pieces {
        match rest.find(piece) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Host with port, and path, of a URL without its scheme; percent escapes decoded.
fn split_url(url: &str) -> Result<(String, String), InvalidUrl> {
    let (url, fragment) = url.split_once('#').unwrap_or((url, ""));
    if url.bytes().any(|b| b.is_ascii_control()) {
        return Err(InvalidUrl);
    }
    unescape(fragment)?;
    let url = url.split_once('?').map_or(url, |(url, _)| url);
    let path_at = url.find('/').unwrap_or(url.len());
    let host = match url[..path_at].rsplit_once('@') {
        Some((user, host)) if user.bytes().all(is_user_byte) => unescape(user).map(|_| host)?,
        Some(_) => return Err(InvalidUrl),
        None => &url[..path_at],
    };
    Ok((host_of(host)?, unescape(&url[path_at..])?))
}

fn host_of(host: &str) -> Result<String, InvalidUrl> {
    if let Some(open) = host.rfind('[') {
        let (address, port) = host[open + 1..].rsplit_once(']').ok_or(InvalidUrl)?;
        let zoneless = match address.split_once("%25") {
            Some((address, zone)) if !zone.is_empty() => address,
            _ => address,
        };
        let fits = open == 0 && zoneless.parse::<Ipv6Addr>().is_ok() && is_port(port);
        return if fits { Ok(format!("[{address}]{port}")) } else { Err(InvalidUrl) };
    }
    let port_at = host.find(':').unwrap_or(host.len());
    if !is_port(&host[port_at..]) || !host.bytes().all(is_host_byte) {
        return Err(InvalidUrl);
    }
    // Only what lies outside of ASCII may be escaped in a host; the percent sign itself is the one exception.
    let mut escapes = host.split('%').skip(1);
    if escapes.any(|after| !after.starts_with("25") && after.starts_with(|c: char| c < '8')) {
        return Err(InvalidUrl);
    }
    unescape(host)
}

/// Nothing, or a colon and any number of digits.
fn is_port(text: &str) -> bool {
    text.strip_prefix(':').map_or(text.is_empty(), |digits| digits.bytes().all(|b| b.is_ascii_digit()))
}

fn is_host_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || !b.is_ascii() || b"-_.~!$&'()*+,;=:]<>\"%".contains(&b)
}

fn is_user_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:%@".contains(&b)
}

/// Decodes `%XX`.
fn unescape(text: &str) -> Result<String, InvalidUrl> {
    let mut pieces = text.split('%');
    let mut bytes = pieces.next().unwrap_or_default().as_bytes().to_vec();
    for piece in pieces {
        let digits = piece
            .get(..2)
            .filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))
            .ok_or(InvalidUrl)?;
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| InvalidUrl)?);
        bytes.extend_from_slice(&piece.as_bytes()[2..]);
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Host and port. A bracketed address loses its brackets only where a port follows, as in Go.
fn split_port(host: &str) -> (&str, &str) {
    match host.rsplit_once(':') {
        Some((address, port)) if address.starts_with('[') && address.ends_with(']') => {
            (&address[1..address.len() - 1], port)
        }
        Some((name, port)) if !host.starts_with('[') => (name, port),
        _ => (host, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_glob_fits_what_it_spans() {
        for (glob, label) in
            [("*", ""), ("*", "a"), ("a*", "a"), ("*a*b*", "xaxbx"), ("a*a", "aa"), ("a**b", "ab")]
        {
            assert!(glob_match(glob, label), "{glob} {label}");
        }
        for (glob, label) in [("", "a"), ("a", ""), ("a*a", "a"), ("*ab*b", "ab"), ("a*", "ba"), ("[a]", "a")]
        {
            assert!(!glob_match(glob, label), "{glob} {label}");
        }
    }

    #[test]
    fn urls_that_go_rejects_are_rejected() {
        for text in [
            "%zz",
            "host:*",
            "reg[ab].example",
            "[::1",
            "[1.2.3.4]",
            "a:1:2",
            "a b",
            "a\n",
            "h/%z",
            "h%41",
            "u ser@h",
            "h#%",
        ] {
            assert_eq!(key_of(text), Err(InvalidUrl), "{text}");
        }
    }

    #[test]
    fn user_query_and_fragment_are_dropped() {
        assert_eq!(key_of("https://bob:pw@reg.example:5000/team?x=1#y"), Ok("reg.example:5000/team".into()));
        // Only a lower-case scheme is one; anything else reads as a host with an empty port.
        assert_eq!(key_of("HTTPS://reg.example"), Ok("HTTPS://reg.example".into()));
    }

    #[test]
    fn only_a_whole_version_part_is_dropped() {
        for (location, key) in [
            ("https://index.docker.io/v1", "index.docker.io/v1"),
            ("r.example/v1/", "r.example"),
            ("r.example/v2/x/", "r.example/x/"),
            ("r.example/v10/x", "r.example/v10/x"),
            ("r.example/v1/v2/", "r.example/v2/"),
        ] {
            assert_eq!(key_of(location), Ok(key.into()));
        }
    }

    #[test]
    fn a_bracketed_address_matches_only_with_a_port() {
        assert_eq!(url_match("[::1]:5000", "[::1]:5000/app"), Ok(true));
        assert_eq!(url_match("[::1]", "[::1]/app"), Ok(false));
    }
}
