//! Errors of fetches.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use larder::hint::Hint;
use larder::reference::Digest;

use super::fetch_notice::short;
use super::hosts::HostsError;
use super::next_step::{FetchContext, OtherFailures, next_step};
use super::tls::TlsProblem;
use crate::manifest::ManifestError;

/// A fetch that failed at every host that could serve it. The text names the repository, the target, the host and the
/// cause, and contains no secret.
#[derive(Debug)]
#[non_exhaustive]
pub struct FetchError {
    /// The repository in full: `docker.io/library/busybox`.
    pub repository: String,
    /// Request that failed.
    pub target: FetchTarget,
    /// The host of the last request; empty if none was sent.
    pub host: String,
    /// The cause.
    pub kind: Box<FetchErrorKind>,
    /// Input of the text and the next step beside the cause.
    pub(crate) context: Box<FetchContext>,
}

impl FetchError {
    /// The next step for the user.
    pub fn hint(&self) -> Option<Hint> {
        next_step(self)
    }
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.repository, self.target)?;
        if !self.host.is_empty() {
            write!(f, " at {}", self.host)?;
        }
        match (&*self.kind, &self.target) {
            (FetchErrorKind::NotFound(answer), FetchTarget::Blob(_)) => {
                write!(f, ": the registry lost this layer: {answer}")?;
            }
            (kind, _) => write!(f, ": {kind}")?,
        }
        let OtherFailures { earlier, later } = &self.context.others;
        earlier.iter().try_for_each(|(host, message)| write!(f, "; before that, {host}: {message}"))?;
        later.iter().try_for_each(|(host, message)| write!(f, "; after that, {host}: {message}"))
    }
}

/// The text of the kind is part of the message, so the source is the source of the kind.
impl Error for FetchError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.kind.source()
    }
}

/// Object of a request to a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FetchTarget {
    /// A manifest or index, by tag or digest.
    Manifest(String),
    /// An image's config.
    Config(Digest),
    /// A blob.
    Blob(Digest),
    /// The content that refers to a manifest or index.
    Referrers(Digest),
    /// A token to read the repository.
    Token,
    /// The host configuration of the registry.
    Hosts,
    /// Validation of a credential.
    Login,
}

impl fmt::Display for FetchTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FetchTarget::Manifest(reference) => write!(f, "manifest {reference}"),
            FetchTarget::Config(digest) => write!(f, "config {digest}"),
            FetchTarget::Blob(digest) => write!(f, "blob {digest}"),
            FetchTarget::Referrers(digest) => write!(f, "referrers of {digest}"),
            FetchTarget::Token => f.write_str("token"),
            FetchTarget::Hosts => f.write_str("hosts"),
            FetchTarget::Login => f.write_str("login"),
        }
    }
}

/// The cause of a failed fetch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchErrorKind {
    /// A request without a credential was rejected, or the credential has no access to this repository.
    #[error("pull access denied, repository does not exist or may require authorization: {0}")]
    Denied(ErrorResponse),
    /// The credential was rejected by itself: a wrong user name or password, or an expired token.
    #[error("authorization failed, the registry rejected the credential: {0}")]
    CredentialRejected(ErrorResponse),
    /// The registry does not have it.
    #[error("not found: {0}")]
    NotFound(ErrorResponse),
    /// The registry requests a wait longer than the limit, or requests waits repeatedly.
    #[error("{answer}{}", wait(.after.as_ref()))]
    RateLimited {
        /// The response.
        answer: ErrorResponse,
        /// The requested wait, if the response has one.
        after: Option<Duration>,
    },
    /// Another rejection; a retry would not help.
    #[error("refused: {0}")]
    Refused(ErrorResponse),
    /// A server error; a later retry may help.
    #[error("registry error: {0}")]
    Failing(ErrorResponse),
    /// No connection, or the connection broke.
    #[error("{0}")]
    Unreachable(String),
    /// The TLS handshake failed.
    #[error("TLS: {0}")]
    Tls(TlsProblem),
    /// No response headers within the time limit.
    #[error("no answer within {}", short(*.0))]
    NoAnswer(Duration),
    /// The body was too slow.
    #[error("stalled: fewer than {min_bytes} bytes within {}", short(*.window))]
    Stalled {
        /// Time spent waiting.
        window: Duration,
        /// Bytes required within that time.
        min_bytes: u64,
    },
    /// The body ended early.
    #[error("truncated: received {got} of {expected} bytes ({cause})")]
    Truncated {
        /// Bytes of the blob received.
        got: u64,
        /// Bytes requested.
        expected: u64,
        /// How it ended.
        cause: String,
    },
    /// The content does not match its digest.
    #[error("digest mismatch: expected {expected}, got {got}")]
    DigestMismatch {
        /// The expected digest.
        expected: Digest,
        /// The digest of the content.
        got: Digest,
    },
    /// More bytes than the limit.
    #[error("too large: the limit is {limit} bytes")]
    TooLarge {
        /// The limit, in bytes.
        limit: u64,
    },
    /// The response violates the protocol.
    #[error("invalid response: {0}")]
    BadReply(String),
    /// The response does not contain the requested range of the blob.
    #[error("invalid response: {0}")]
    BadRange(String),
    /// The manifest or config cannot be used.
    #[error(transparent)]
    Manifest(ManifestError),
    /// The host configuration of the registry is invalid.
    #[error(transparent)]
    Hosts(HostsError),
    /// No configured host has the capability for this request.
    #[error("no configured host has the required capability")]
    NoHost,
}

fn wait(after: Option<&Duration>) -> String {
    after.map_or_else(String::new, |after| format!("; retry after {}", short(*after)))
}

impl FetchErrorKind {
    /// The response of the registry, if there was one.
    pub fn answer(&self) -> Option<&ErrorResponse> {
        match self {
            FetchErrorKind::Denied(answer)
            | FetchErrorKind::CredentialRejected(answer)
            | FetchErrorKind::NotFound(answer)
            | FetchErrorKind::RateLimited { answer, .. }
            | FetchErrorKind::Refused(answer)
            | FetchErrorKind::Failing(answer) => Some(answer),
            _ => None,
        }
    }

    /// The HTTP status of the response.
    pub fn status(&self) -> Option<u16> {
        self.answer().map(|answer| answer.status)
    }

    /// Copies the error for another request that waited for this one.
    pub(crate) fn for_waiter(&self) -> FetchErrorKind {
        match self {
            FetchErrorKind::Denied(answer) => FetchErrorKind::Denied(answer.clone()),
            FetchErrorKind::CredentialRejected(answer) => FetchErrorKind::CredentialRejected(answer.clone()),
            FetchErrorKind::Failing(answer) => FetchErrorKind::Failing(answer.clone()),
            FetchErrorKind::RateLimited { answer, after } => {
                FetchErrorKind::RateLimited { answer: answer.clone(), after: *after }
            }
            FetchErrorKind::Unreachable(text) => FetchErrorKind::Unreachable(text.clone()),
            FetchErrorKind::Tls(problem) => FetchErrorKind::Tls(problem.clone()),
            FetchErrorKind::NoAnswer(limit) => FetchErrorKind::NoAnswer(*limit),
            other => FetchErrorKind::BadReply(other.to_string()),
        }
    }

    /// Whether a retry at the same host may succeed soon.
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

    /// Whether no server has this name or listens on this port, which does not change within seconds.
    pub(crate) fn is_wrong_address(&self) -> bool {
        matches!(self, FetchErrorKind::Unreachable(text) if is_refused(text) || is_unknown_host(text))
    }

    /// Whether there was no connection to the host, so that nothing is known of what it speaks.
    pub(crate) fn is_unconnected(&self) -> bool {
        let is_of_connect = |text: &str| {
            text.starts_with(NO_CONNECTION)
                || text.contains("tcp connect error")
                || text.contains("dns error")
        };
        matches!(self, FetchErrorKind::Unreachable(text) if is_of_connect(text))
    }

    /// Whether the host seems to be down, so that other requests to it would only wait as well.
    pub(crate) fn is_host_gone(&self) -> bool {
        matches!(self, FetchErrorKind::Unreachable(_) | FetchErrorKind::NoAnswer(_) | FetchErrorKind::Tls(_))
    }
}

/// Text of a failure that some servers without TLS cause.
pub(crate) const HANDSHAKE_CLOSED: &str = "the server closed the connection during the TLS handshake";

/// Beginning of the text of a failure to connect in time.
pub(crate) const NO_CONNECTION: &str = "no connection within";

pub(crate) fn is_refused(text: &str) -> bool {
    text.contains("Connection refused")
}

/// The resolver's texts for a name that does not exist; it has another one for a name server that does not answer.
fn is_unknown_host(text: &str) -> bool {
    ["Name or service not known", "Name does not resolve", "No address associated with hostname"]
        .iter()
        .any(|unknown| text.contains(unknown))
}

impl From<ManifestError> for FetchErrorKind {
    fn from(error: ManifestError) -> Self {
        FetchErrorKind::Manifest(error)
    }
}

/// An error response: `404 Not Found (MANIFEST_UNKNOWN: manifest unknown)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorResponse {
    /// The HTTP status.
    pub status: u16,
    /// The message of the body, shortened; empty if it has none.
    pub message: String,
}

/// Longest message of a registry that is printed, in bytes.
const MAX_MESSAGE: usize = 300;

impl ErrorResponse {
    pub(crate) fn new(status: u16, message: &str) -> ErrorResponse {
        ErrorResponse { status, message: printable(message) }
    }

    /// Reads the message of a body: the `errors` of the distribution protocol, or the fields of token servers. Other
    /// bodies (a proxy's web page) have none, but for plain text. A server that was sent a secret can repeat it in any
    /// encoding: of its text only known error codes are kept.
    pub(crate) fn read(status: u16, body: &[u8], was_sent_secret: bool) -> ErrorResponse {
        let message =
            if was_sent_secret { codes_of(body) } else { errors_of(body).or_else(|| plain_text(body)) };
        ErrorResponse::new(status, &message.unwrap_or_default())
    }
}

/// Error codes of the distribution protocol, of older registries, and of OAuth 2.0.
const ERROR_CODES: [&str; 24] = [
    "BLOB_UNKNOWN",
    "BLOB_UPLOAD_INVALID",
    "BLOB_UPLOAD_UNKNOWN",
    "DENIED",
    "DIGEST_INVALID",
    "MANIFEST_BLOB_UNKNOWN",
    "MANIFEST_INVALID",
    "MANIFEST_UNKNOWN",
    "MANIFEST_UNVERIFIED",
    "NAME_INVALID",
    "NAME_UNKNOWN",
    "RANGE_INVALID",
    "SIZE_INVALID",
    "TAG_INVALID",
    "TOOMANYREQUESTS",
    "UNAUTHORIZED",
    "UNAVAILABLE",
    "UNKNOWN",
    "UNSUPPORTED",
    "access_denied",
    "invalid_client",
    "invalid_grant",
    "invalid_request",
    "unauthorized_client",
];

/// The known error codes of a body.
fn codes_of(body: &[u8]) -> Option<String> {
    let value: serde_json::Value = serde_json::from_slice(body).ok()?;
    let errors = value.get("errors").and_then(|errors| errors.as_array()).map_or(&[][..], Vec::as_slice);
    let codes = errors.iter().take(3).map(|error| error.get("code")).chain([value.get("error")]);
    let known = codes.flatten().filter_map(|code| ERROR_CODES.iter().find(|known| code == **known));
    Some(known.copied().collect::<Vec<_>>().join(", "))
}

/// A body that is a plain text: registries behind a firewall say why they refuse. Not a web page.
fn plain_text(body: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?.trim();
    (!text.starts_with(['<', '{', '['])).then(|| text.to_owned())
}

fn errors_of(body: &[u8]) -> Option<String> {
    let value: serde_json::Value = serde_json::from_slice(body).ok()?;
    let text = |value: &serde_json::Value, key: &str| value.get(key)?.as_str().map(str::to_owned);
    if let Some(errors) = value.get("errors").and_then(|errors| errors.as_array()) {
        let messages: Vec<String> = errors
            .iter()
            .take(3)
            .filter_map(|error| match (text(error, "code"), text(error, "message")) {
                (Some(code), Some(message)) => Some(format!("{code}: {message}")),
                (code, message) => code.or(message),
            })
            .collect();
        return Some(messages.join(", "));
    }
    ["details", "error_description", "message", "error"].iter().find_map(|key| text(&value, key))
}

/// One line without control characters, of bounded length.
pub(crate) fn printable(text: &str) -> String {
    let mut line: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_MESSAGE + 1).collect();
    if line.chars().count() > MAX_MESSAGE {
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
        if !self.message.is_empty() {
            write!(f, " ({})", self.message)?;
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
            kind: Box::new(FetchErrorKind::NotFound(ErrorResponse::read(404, body, false))),
            context: Box::new(FetchContext {
                others: OtherFailures {
                    earlier: vec![("mirror.example".into(), "connection refused".into())],
                    ..OtherFailures::default()
                },
                ..FetchContext::default()
            }),
        };
        assert_eq!(
            error.to_string(),
            "docker.io/library/nope: manifest 1 at registry-1.docker.io: not found: 404 Not Found \
             (MANIFEST_UNKNOWN: manifest unknown [2J); before that, mirror.example: connection refused"
        );
        assert!(error.hint().is_some());
    }

    #[test]
    fn of_a_server_that_was_sent_a_secret_only_known_codes_are_repeated() {
        for (body, text) in [
            (r#"{"message":"bad token s3cret!"}"#, "403 Forbidden"),
            (r#"{"errors":[{"code":"DENIED","message":"czNjcmV0IQ=="}]}"#, "403 Forbidden (DENIED)"),
            (r#"{"errors":[{"code":"s3cret!"},{"code":"UNKNOWN"}]}"#, "403 Forbidden (UNKNOWN)"),
            (r#"{"error":"invalid_grant","error_description":"s3cret!"}"#, "403 Forbidden (invalid_grant)"),
            (r#"{"error":"s3cret!"}"#, "403 Forbidden"),
        ] {
            assert_eq!(ErrorResponse::read(403, body.as_bytes(), true).to_string(), text, "{body}");
        }
    }

    #[test]
    fn web_pages_are_not_repeated_and_long_texts_are_cut() {
        assert_eq!(ErrorResponse::read(502, b"<html>nginx</html>", false).to_string(), "502 Bad Gateway");
        let plain = b"your address\x1b[2J is not allowed\n";
        let expected = "403 Forbidden (your address [2J is not allowed)";
        assert_eq!(ErrorResponse::read(403, plain, false).to_string(), expected);
        assert_eq!(ErrorResponse::read(403, plain, true).to_string(), "403 Forbidden");
        let long = format!(r#"{{"message":"{}"}}"#, "x".repeat(10_000));
        assert!(ErrorResponse::read(500, long.as_bytes(), false).message.len() < 400);
    }
}
