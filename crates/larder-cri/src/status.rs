//! What a gRPC status means, and how kubelet words it.

use std::error::Error as _;

use larder::backend::{BackendError, CallErrorKind};
use tonic::{Code, Status};

use crate::channel::NothingThere;
use crate::endpoint::Endpoint;

/// The error of a call: `rpc error: code = CODE desc = MESSAGE`.
pub(crate) fn call_error(endpoint: &Endpoint, status: &Status) -> BackendError {
    unreachable(endpoint, status).unwrap_or_else(|| BackendError::Call {
        message: format!("rpc error: code = {} desc = {}", code_name(status.code()), status.message()),
        kind: kind(status.code()),
        hint: None,
    })
}

/// The error of a pull: like [`call_error`], but `Unknown` leaves the bare message, so that a name like
/// `RegistryUnavailable` stands at its start.
pub(crate) fn pull_error(endpoint: &Endpoint, status: &Status) -> BackendError {
    if status.code() == Code::Unknown {
        return BackendError::Call {
            message: status.message().to_owned(),
            kind: CallErrorKind::Other,
            hint: None,
        };
    }
    call_error(endpoint, status)
}

/// The status of a call whose time is over, worded as by the client of kubelet.
pub(crate) fn deadline() -> Status {
    Status::new(Code::DeadlineExceeded, "context deadline exceeded")
}

/// Nothing answered at the endpoint, if that is what the status says.
fn unreachable(endpoint: &Endpoint, status: &Status) -> Option<BackendError> {
    let NothingThere(problem) = status.source()?.downcast_ref()?;
    Some(BackendError::Unreachable { endpoint: endpoint.to_string(), problem: problem.clone() })
}

fn kind(code: Code) -> CallErrorKind {
    match code {
        Code::NotFound => CallErrorKind::NotFound,
        Code::DeadlineExceeded => CallErrorKind::DeadlineExceeded,
        Code::Cancelled => CallErrorKind::Canceled,
        Code::Unavailable => CallErrorKind::Unavailable,
        Code::Unimplemented => CallErrorKind::Unimplemented,
        _ => CallErrorKind::Other,
    }
}

/// The names that Go's gRPC prints.
fn code_name(code: Code) -> &'static str {
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
}
