//! The meaning of a gRPC status, and kubelet's texts for it.

use std::error::Error as _;
use std::time::Duration;

use larder::backend::{BackendError, CallErrorKind};
use larder::go_format;
use larder::hint::Hint;
use tonic::{Code, Status};

use crate::channel::EndpointUnavailable;
use crate::endpoint::Endpoint;
use crate::pull_text;

/// The error of a call: `rpc error: code = CODE desc = MESSAGE`. Its [cause](BackendError::cause) is the status.
pub fn call_error(endpoint: &Endpoint, status: &Status) -> BackendError {
    unreachable(endpoint, status).unwrap_or_else(|| {
        let message = format!("rpc error: code = {} desc = {}", code_name(status.code()), status.message());
        BackendError::call(kind(status.code()), message).with_cause(status.clone())
    })
}

/// The error of a pull: like [`call_error`], but `Unknown` leaves the bare message, so that a name like
/// `RegistryUnavailable` stands at its start. Kind and hint are read from the message, since CRI has no codes for them.
pub(crate) fn pull_error(endpoint: &Endpoint, status: &Status) -> BackendError {
    let error = if status.code() == Code::Unknown {
        BackendError::call(CallErrorKind::Other, status.message()).with_cause(status.clone())
    } else {
        call_error(endpoint, status)
    };
    pull_text::classify(error, status.message())
}

/// The status of a call after its time limit, in the words of kubelet's client.
pub fn deadline() -> Status {
    Status::new(Code::DeadlineExceeded, "context deadline exceeded")
}

/// The error of calls that did not end within larder's own time limit. The text is kubelet's, so the hint has the
/// socket.
pub(crate) fn timed_out(endpoint: &Endpoint, limit: Duration) -> BackendError {
    let waited = go_format::duration(limit);
    let hint = Hint::from(format!("{endpoint} did not answer within {waited}: the runtime hangs, or "))
        .setting("timeout", "")
        .text(" is too short; see the runtime's log");
    call_error(endpoint, &deadline()).with_hint(hint)
}

/// The endpoint's failure, if the status is one.
fn unreachable(endpoint: &Endpoint, status: &Status) -> Option<BackendError> {
    let EndpointUnavailable(problem) = status.source()?.downcast_ref()?;
    Some(BackendError::Unreachable { endpoint: endpoint.to_string(), problem: problem.clone() })
}

fn kind(code: Code) -> CallErrorKind {
    match code {
        Code::NotFound => CallErrorKind::NotFound,
        Code::DeadlineExceeded => CallErrorKind::DeadlineExceeded,
        Code::Cancelled => CallErrorKind::Canceled,
        Code::Unavailable => CallErrorKind::Unavailable,
        Code::Unimplemented => CallErrorKind::Unimplemented,
        Code::FailedPrecondition => CallErrorKind::FailedPrecondition,
        _ => CallErrorKind::Other,
    }
}

/// The names of codes that Go's gRPC prints.
pub fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pull_loses_the_code_and_only_if_it_is_unknown() {
        let endpoint = Endpoint::at("/run/a.sock");
        let unknown = Status::unknown("RegistryUnavailable: x");
        let missing = Status::not_found("no such image");
        assert_eq!(pull_error(&endpoint, &unknown).to_string(), "RegistryUnavailable: x");
        assert_eq!(
            pull_error(&endpoint, &missing).to_string(),
            "rpc error: code = NotFound desc = no such image"
        );
        let text = call_error(&endpoint, &unknown).to_string();
        assert_eq!(text, "rpc error: code = Unknown desc = RegistryUnavailable: x");
    }

    #[test]
    fn a_failed_call_has_its_status_as_the_cause() {
        let endpoint = Endpoint::at("/run/a.sock");
        for code in (1..=16).map(Code::from) {
            let error = call_error(&endpoint, &Status::new(code, "a desc = b"));
            let status: &Status = error.cause().expect("an answer");
            assert_eq!((status.code(), status.message()), (code, "a desc = b"));
        }
    }
}
