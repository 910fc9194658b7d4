//! Engine errors in larder's terms: unreachable, or an error response.

use std::error::Error;
use std::io;

use larder::backend::{BackendError, CallErrorKind, EndpointFailure};
use larder::hint::Hint;

use crate::host::{EngineHost, SOCKET};
use crate::names;

/// Next step for a user without access to the socket.
const DENIED: &str = "run as root, or add the user to the group that owns the socket: \
     sudo usermod -aG docker $USER, then log in again; members of that group have root access";

/// Connection failure.
fn no_connection(host: &EngineHost, error: &reqwest::Error) -> BackendError {
    let kind = cause_of::<io::Error>(error).map(io::Error::kind);
    // Podman serves the API of Docker on a socket of this name.
    let is_podman = host.socket().is_some_and(|path| path.ends_with("podman.sock"));
    let unit = if is_podman { "podman.socket" } else { "docker" };
    let problem = match (kind, host.socket()) {
        (Some(io::ErrorKind::NotFound | io::ErrorKind::NotADirectory), Some(_)) => reported(
            "socket not found",
            Hint::from(format!("start the engine (systemctl start {unit}), or name its socket with "))
                .setting("backend", SOCKET),
        ),
        (Some(io::ErrorKind::PermissionDenied), Some(_)) => reported("permission denied", DENIED),
        (Some(io::ErrorKind::ConnectionRefused), _) => reported(
            "connection refused: no process listens on this address",
            format!("the engine is stopped or starting; see systemctl status {unit}"),
        ),
        _ => reported(&text(error), format!("check systemctl status {unit} and DOCKER_HOST")),
    };
    BackendError::Unreachable { endpoint: host.to_string(), problem }
}

/// No response: unreachable, a TLS failure, or a lost connection.
pub(crate) fn no_answer(host: &EngineHost, error: &reqwest::Error) -> BackendError {
    if let Some(problem) = tls_problem(error) {
        let hint = "set DOCKER_CERT_PATH to a directory with the engine's CA certificate (ca.pem), and a client certificate \
             (cert.pem, key.pem) if the engine requires one";
        return unusable(host, &format!("TLS: {problem}"), hint);
    }
    if error.is_connect() { no_connection(host, error) } else { broken(error) }
}

/// The TLS error among the sources, if any.
fn tls_problem(error: &(dyn Error + 'static)) -> Option<String> {
    if let Some(problem) = error.downcast_ref::<rustls::Error>() {
        return Some(problem.to_string());
    }
    // It is wrapped in an I/O error, possibly several times, and is not its source.
    let carried = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    carried.and_then(|inner| tls_problem(inner)).or_else(|| tls_problem(error.source()?))
}

/// The server cannot be used at all, beyond one call.
pub(crate) fn unusable(host: &EngineHost, problem: &str, hint: impl Into<Hint>) -> BackendError {
    BackendError::Unreachable { endpoint: host.to_string(), problem: reported(problem, hint) }
}

fn reported(problem: &str, hint: impl Into<Hint>) -> EndpointFailure {
    EndpointFailure::Reported { problem: problem.to_owned(), hint: hint.into() }
}

/// The connection broke during a response.
pub(crate) fn broken(error: &reqwest::Error) -> BackendError {
    let message = format!("the engine closed the connection during a response: {}", text(error));
    BackendError::call(CallErrorKind::Unavailable, message)
        .with_hint(Hint::from("the engine restarted or crashed; see its log and retry"))
}

/// An error response.
pub(crate) fn refused(code: u16, message: &str) -> BackendError {
    let kind = match code {
        404 => CallErrorKind::NotFound,
        409 => CallErrorKind::FailedPrecondition,
        503 => CallErrorKind::Unavailable,
        501 => CallErrorKind::Unimplemented,
        _ => CallErrorKind::Other,
    };
    BackendError::call(kind, message)
}

/// Classifies the error of a pull, which the engine reports as text only, and not always with a name.
pub(crate) fn of_pull(image: &str, message: &str) -> BackendError {
    let text = message.to_ascii_lowercase();
    // Refers to files on the engine's own disk.
    let text = text.replace("permission denied", "");
    let has = |parts: &[&str]| parts.iter().any(|part| text.contains(part));
    let (kind, hint) = if has(&["unauthorized", "authentication required", "no basic auth", "denied"]) {
        (
            CallErrorKind::Denied,
            Some("check the credentials for this registry (docker login writes them)".into()),
        )
    } else if has(&["no space left"]) {
        let hint = Hint::from("free space with ").command(["gc"]).text(", or see ").command(["df"]);
        (CallErrorKind::InsufficientSpace { reclaim_bytes: None }, Some(hint))
    } else if has(&["manifest unknown", "not found", "no such image"]) {
        (CallErrorKind::NotFound, None)
    } else {
        (CallErrorKind::Other, None)
    };
    let named = message.contains(names::repository(image));
    let message = if named { message.to_owned() } else { format!("{image}: {message}") };
    BackendError::call(kind, message).with_hint(hint)
}

/// The time limit of a call expired.
pub(crate) fn too_late(after: std::time::Duration) -> BackendError {
    let message = format!("no answer from the engine within {}", larder::go_format::duration(after));
    let hint =
        Hint::from("increase the limit with ").setting("timeout", "").text(", or see the engine's log");
    BackendError::call(CallErrorKind::DeadlineExceeded, message).with_hint(hint)
}

/// A malformed response.
pub(crate) fn unreadable(what: &str, why: impl std::fmt::Display) -> BackendError {
    BackendError::Incomplete(format!("invalid engine response to {what}: {why}"))
}

/// The text of the innermost error: the outer ones only say that something inside failed.
fn text(error: &reqwest::Error) -> String {
    let mut innermost: &dyn Error = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    innermost.to_string()
}

fn cause_of<T: Error + 'static>(error: &reqwest::Error) -> Option<&T> {
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pull_errors_are_classified_by_their_text() {
        for (text, kind) in [
            ("Head \"https://r/v2/x/manifests/1\": no basic auth credentials", CallErrorKind::Denied),
            (
                "pull access denied for x, repository does not exist or may require 'docker login'",
                CallErrorKind::Denied,
            ),
            ("manifest for r/x:9 not found: manifest unknown: manifest unknown", CallErrorKind::NotFound),
            (
                "write /var/lib/docker/tmp/G: no space left on device",
                CallErrorKind::InsufficientSpace { reclaim_bytes: None },
            ),
            ("unauthorized: authentication required", CallErrorKind::Denied),
            ("failed to register layer: mkdir /a: permission denied", CallErrorKind::Other),
            ("unexpected EOF", CallErrorKind::Other),
        ] {
            let BackendError::Call { kind: found, message, .. } = of_pull("h:5000/x:1", text) else {
                panic!("{text}")
            };
            assert_eq!(found, kind, "{text}");
            assert!(message.ends_with(text) && message.contains('x'), "{message}");
        }
    }
}
