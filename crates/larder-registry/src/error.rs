//! Why something could not be fetched.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use larder::reference::Digest;

use super::fetch_notice::short;
use super::hosts::HostsError;
use crate::manifest::ManifestError;

/// A fetch that failed at every host that could serve it. The text names the repository, what was wanted, the host and
/// the cause; no secret is ever in it.
#[derive(Debug)]
#[non_exhaustive]
pub struct FetchError {
    /// The repository in full: `docker.io/library/busybox`.
    pub repository: String,
    /// What was wanted.
    pub target: FetchTarget,
    /// The host that was asked last; empty when none was asked.
    pub host: String,
    /// The cause.
    pub kind: Box<FetchErrorKind>,
    /// Hosts that were asked before it, with what they said.
    pub earlier: Vec<(String, String)>,
}

impl FetchError {
    /// What the reader could try next.
    pub fn hint(&self) -> Option<&'static str> {
        self.kind.hint()
    }
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.repository, self.target)?;
        if !self.host.is_empty() {
            write!(f, " at {}", self.host)?;
        }
        write!(f, ": {}", self.kind)?;
        self.earlier.iter().try_for_each(|(host, said)| write!(f, "; before that, {host}: {said}"))
    }
}

/// The kind is part of the text, so the source is what is behind the kind.
impl Error for FetchError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.kind.source()
    }
}

/// What was wanted from a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FetchTarget {
    /// A manifest or index, by tag or digest.
    Manifest(String),
    /// An image's config.
    Config(Digest),
    /// A blob.
    Blob(Digest),
    /// A token to read the repository.
    Token,
    /// How to reach the registry.
    Hosts,
    /// Whether a credential is good.
    Login,
}

impl fmt::Display for FetchTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FetchTarget::Manifest(reference) => write!(f, "manifest {reference}"),
            FetchTarget::Config(digest) => write!(f, "config {digest}"),
            FetchTarget::Blob(digest) => write!(f, "blob {digest}"),
            FetchTarget::Token => f.write_str("token"),
            FetchTarget::Hosts => f.write_str("hosts"),
            FetchTarget::Login => f.write_str("login"),
        }
    }
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchErrorKind {
    /// The credential, or its absence, was refused.
    #[error("pull access denied, repository does not exist or may require authorization: {0}")]
    Denied(ErrorResponse),
    /// The registry does not have it.
    #[error("not found: {0}")]
    NotFound(ErrorResponse),
    /// The registry asks to be left alone, for longer than larder waits or again and again.
    #[error("{answer}{}", wait(.after.as_ref()))]
    RateLimited {
        /// What it said.
        answer: ErrorResponse,
        /// How long it asked to wait, if it said so.
        after: Option<Duration>,
    },
    /// Another refusal; asking again would not help.
    #[error("refused: {0}")]
    Refused(ErrorResponse),
    /// The registry failed; asking later may help.
    #[error("registry error: {0}")]
    Failing(ErrorResponse),
    /// No connection came about, or it broke.
    #[error("{0}")]
    Unreachable(String),
    /// No trusted connection came about.
    #[error("TLS: {0}")]
    Tls(String),
    /// The request was sent, and no reply began in time.
    #[error("no answer within {}", short(*.0))]
    NoAnswer(Duration),
    /// The reply's body came too slowly.
    #[error("stalled: fewer than {min_bytes} bytes within {}", short(*.window))]
    Stalled {
        /// Time spent waiting.
        window: Duration,
        /// Bytes that should have come in it.
        min_bytes: u64,
    },
    /// The reply's body ended too early.
    #[error("truncated: received {got} of {want} bytes ({cause})")]
    Truncated {
        /// Bytes of the blob up to which it came.
        got: u64,
        /// Bytes that were wanted.
        want: u64,
        /// How it ended.
        cause: String,
    },
    /// The content is not what its digest says.
    #[error("digest mismatch: expected {expected}, got {got}")]
    DigestMismatch {
        /// What was asked for.
        expected: Digest,
        /// What the content has.
        got: String,
    },
    /// More came than may.
    #[error("too large: the limit is {limit} bytes")]
    TooLarge {
        /// The bound, in bytes.
        limit: u64,
    },
    /// The reply breaks the protocol.
    #[error("invalid response: {0}")]
    BadReply(String),
    /// The manifest or config is none that larder can use.
    #[error(transparent)]
    Manifest(ManifestError),
    /// The configuration of the registry's hosts is wrong.
    #[error(transparent)]
    Hosts(HostsError),
    /// No host is configured to serve this.
    #[error("no configured host has the required capability")]
    NoHost,
}

fn wait(after: Option<&Duration>) -> String {
    after.map_or_else(String::new, |after| format!("; retry after {}", short(*after)))
}

impl FetchErrorKind {
    /// What the registry said, where it said something.
    pub fn answer(&self) -> Option<&ErrorResponse> {
        match self {
            FetchErrorKind::Denied(answer)
            | FetchErrorKind::NotFound(answer)
            | FetchErrorKind::RateLimited { answer, .. }
            | FetchErrorKind::Refused(answer)
            | FetchErrorKind::Failing(answer) => Some(answer),
            _ => None,
        }
    }

    /// The HTTP status of what it said.
    pub fn status(&self) -> Option<u16> {
        self.answer().map(|answer| answer.status)
    }

    fn hint(&self) -> Option<&'static str> {
        match self {
            FetchErrorKind::Denied(_) => {
                Some("check the image name, and that the credential has read access to this repository")
            }
            FetchErrorKind::NotFound(_) => Some(
                "check the name and the tag, and that it was pushed: skopeo list-tags docker://REPOSITORY lists its tags",
            ),
            FetchErrorKind::RateLimited { .. } => {
                Some("wait, log in (many registries have a higher limit for users), or configure a mirror")
            }
            FetchErrorKind::Unreachable(text) if text.contains("Connection refused") => Some(
                "nothing listens on this port: check the host and the port, and that the registry runs; mirrors are configured in hosts.toml",
            ),
            FetchErrorKind::Unreachable(text) if text.contains("dns error") => Some(
                "host name not found: check the registry's name, and DNS on this machine (/etc/resolv.conf); \
                 to use a proxy, set HTTPS_PROXY",
            ),
            FetchErrorKind::Unreachable(_) | FetchErrorKind::NoAnswer(_) => Some(
                "check the registry's name and the network; proxies are configured with HTTPS_PROXY, mirrors in hosts.toml",
            ),
            FetchErrorKind::Tls(_) => Some(
                "set `ca` in certs.d/REGISTRY/hosts.toml to the registry's CA certificate; for plain HTTP, set server = \"http://REGISTRY\" there",
            ),
            FetchErrorKind::Manifest(error) => error.hint(),
            FetchErrorKind::Hosts(error) => error.hint(),
            FetchErrorKind::NoHost => {
                Some("give a host in hosts.toml capabilities = [\"pull\", \"resolve\"]")
            }
            FetchErrorKind::DigestMismatch { .. } => {
                Some("the registry or a proxy returned corrupt content; pull from another mirror")
            }
            FetchErrorKind::Failing(_)
            | FetchErrorKind::Stalled { .. }
            | FetchErrorKind::Truncated { .. } => {
                Some("retry: the pull resumes with the content already fetched")
            }
            FetchErrorKind::Refused(_) | FetchErrorKind::TooLarge { .. } | FetchErrorKind::BadReply(_) => {
                None
            }
        }
    }

    /// Whether the same request at the same host may succeed a moment later.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(
            self,
            FetchErrorKind::RateLimited { .. }
                | FetchErrorKind::Failing(_)
                | FetchErrorKind::Unreachable(_)
                | FetchErrorKind::NoAnswer(_)
                | FetchErrorKind::Stalled { .. }
                | FetchErrorKind::Truncated { .. }
        )
    }

    /// Whether the host itself seems to be gone, so that other requests to it would only wait as well.
    pub(crate) fn is_host_gone(&self) -> bool {
        matches!(self, FetchErrorKind::Unreachable(_) | FetchErrorKind::NoAnswer(_) | FetchErrorKind::Tls(_))
    }
}

impl From<ManifestError> for FetchErrorKind {
    fn from(error: ManifestError) -> Self {
        FetchErrorKind::Manifest(error)
    }
}

/// A refusal in the registry's words: `404 Not Found (MANIFEST_UNKNOWN: manifest unknown)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorResponse {
    /// The HTTP status.
    pub status: u16,
    /// What the body said, shortened; empty if nothing that can be printed.
    pub said: String,
}

/// Longest text of a registry that is repeated.
const MAX_SAID: usize = 300;

impl ErrorResponse {
    pub(crate) fn new(status: u16, said: &str) -> ErrorResponse {
        ErrorResponse { status, said: printable(said) }
    }

    /// What a refusal's body says: the `errors` of the distribution protocol, or what token servers write. Anything
    /// else (a proxy's web page) is not worth repeating. `secrets` are struck out, should the server echo them.
    pub(crate) fn read(status: u16, body: &[u8], secrets: &[&str]) -> ErrorResponse {
        let said = errors_of(body).unwrap_or_default();
        let struck = secrets
            .iter()
            .filter(|secret| secret.len() > 2)
            .fold(said, |said, secret| said.replace(secret, "****"));
        ErrorResponse::new(status, &struck)
    }
}

fn errors_of(body: &[u8]) -> Option<String> {
    let value: serde_json::Value = serde_json::from_slice(body).ok()?;
    let text = |value: &serde_json::Value, key: &str| value.get(key)?.as_str().map(str::to_owned);
    if let Some(errors) = value.get("errors").and_then(|errors| errors.as_array()) {
        let said: Vec<String> = errors
            .iter()
            .take(3)
            .filter_map(|error| match (text(error, "code"), text(error, "message")) {
                (Some(code), Some(message)) => Some(format!("{code}: {message}")),
                (code, message) => code.or(message),
            })
            .collect();
        return Some(said.join(", "));
    }
    ["details", "error_description", "message", "error"].iter().find_map(|key| text(&value, key))
}

/// One line without control characters, of bounded length.
pub(crate) fn printable(text: &str) -> String {
    let mut line: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_SAID + 1).collect();
    if line.chars().count() > MAX_SAID {
        line.pop();
        line.push('…');
    }
    line.trim().to_owned()
}

impl fmt::Display for ErrorResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.status)?;
        let status = reqwest::StatusCode::from_u16(self.status).ok();
        if let Some(reason) = status.and_then(|status| status.canonical_reason()) {
            write!(f, " {reason}")?;
        }
        if !self.said.is_empty() {
            write!(f, " ({})", self.said)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_names_repository_object_host_and_cause() {
        let body = br#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown\u001b[2J"}]}"#;
        let error = FetchError {
            repository: "docker.io/library/nope".into(),
            target: FetchTarget::Manifest("1".into()),
            host: "registry-1.docker.io".into(),
            kind: Box::new(FetchErrorKind::NotFound(ErrorResponse::read(404, body, &[]))),
            earlier: vec![("mirror.example".into(), "connection refused".into())],
        };
        assert_eq!(
            error.to_string(),
            "docker.io/library/nope: manifest 1 at registry-1.docker.io: not found: 404 Not Found \
             (MANIFEST_UNKNOWN: manifest unknown [2J); before that, mirror.example: connection refused"
        );
        assert!(error.hint().is_some());
    }

    #[test]
    fn a_secret_that_the_server_echoes_is_struck_out() {
        let answer = ErrorResponse::read(403, br#"{"message":"bad token s3cret!"}"#, &["s3cret!"]);
        assert_eq!(answer.to_string(), "403 Forbidden (bad token ****)");
    }

    #[test]
    fn web_pages_are_not_repeated_and_long_texts_are_cut() {
        assert_eq!(ErrorResponse::read(502, b"<html>nginx</html>", &[]).to_string(), "502 Bad Gateway");
        let long = format!(r#"{{"message":"{}"}}"#, "x".repeat(10_000));
        assert!(ErrorResponse::read(500, long.as_bytes(), &[]).said.len() < 400);
    }
}
