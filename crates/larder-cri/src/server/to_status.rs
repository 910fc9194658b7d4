//! The status of a failed call, as containerd returns and kubelet parses it.

use larder::backend::{BackendError, CallErrorKind};
use tonic::{Code, Status};

use crate::status;

/// Names that kubelet expects at the start of the text of a failed pull. It sees the bare text only of `Unknown`.
const REASONS: [&str; 2] = ["RegistryUnavailable", "SignatureValidationFailed"];

/// The status for an error.
///
/// An error of a runtime passes unchanged. Otherwise the kind of the error is the code, where CRI has one. It has none
/// for a registry that denies and for a full disk: both are `Unknown`, as from containerd, so that kubelet shows the
/// bare text. `ResourceExhausted` is not used for a full disk: gRPC itself returns it for messages that are too large,
/// and callers take it for that.
pub(super) fn of(error: &BackendError) -> Status {
    match error {
        BackendError::Unreachable { .. } => Status::unavailable(error.to_string()),
        BackendError::Call { message, .. } if REASONS.iter().any(|reason| message.starts_with(reason)) => {
            Status::unknown(message)
        }
        // Clients print the message only, and the next step is on this node.
        BackendError::Call { message, kind: CallErrorKind::FailedPrecondition, hint: Some(hint) } => {
            Status::failed_precondition(format!("{message}; {hint}"))
        }
        BackendError::Call { message, kind, .. } => {
            let (code, message) = status::behind(message, *kind).unwrap_or((code(*kind), message));
            Status::new(code, message)
        }
        other => Status::unknown(other.to_string()),
    }
}

fn code(kind: CallErrorKind) -> Code {
    match kind {
        CallErrorKind::NotFound => Code::NotFound,
        CallErrorKind::DeadlineExceeded => Code::DeadlineExceeded,
        CallErrorKind::Canceled => Code::Cancelled,
        CallErrorKind::Unavailable => Code::Unavailable,
        CallErrorKind::Unimplemented => Code::Unimplemented,
        CallErrorKind::FailedPrecondition => Code::FailedPrecondition,
        _ => Code::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use larder::backend::EndpointFailure;

    use super::*;

    fn call(kind: CallErrorKind, message: &str) -> BackendError {
        BackendError::Call { message: message.into(), kind, hint: Some("try again".into()) }
    }

    #[test]
    fn each_error_has_the_code_that_kubelet_expects() {
        let gone = BackendError::Unreachable {
            endpoint: "unix:///a.sock".into(),
            problem: EndpointFailure::Refused,
        };
        let gone_text = "unix:///a.sock: connection refused: no process listens on this socket";
        let cases = [
            (call(CallErrorKind::NotFound, "no such tag"), Code::NotFound, "no such tag"),
            (call(CallErrorKind::Denied, "not for you"), Code::Unknown, "not for you"),
            (call(CallErrorKind::InsufficientSpace, "the disk is full"), Code::Unknown, "the disk is full"),
            (call(CallErrorKind::DeadlineExceeded, "late"), Code::DeadlineExceeded, "late"),
            (call(CallErrorKind::Canceled, "left"), Code::Cancelled, "left"),
            (call(CallErrorKind::Unavailable, "restarting"), Code::Unavailable, "restarting"),
            (call(CallErrorKind::Unimplemented, "what?"), Code::Unimplemented, "what?"),
            (call(CallErrorKind::Other, "boom"), Code::Unknown, "boom"),
            (call(CallErrorKind::FailedPrecondition, "kept"), Code::FailedPrecondition, "kept; try again"),
            (
                call(CallErrorKind::Unavailable, "RegistryUnavailable: no route"),
                Code::Unknown,
                "RegistryUnavailable: no route",
            ),
            (
                call(CallErrorKind::Other, "SignatureValidationFailed: no key"),
                Code::Unknown,
                "SignatureValidationFailed: no key",
            ),
            (
                call(CallErrorKind::Other, "rpc error: code = ResourceExhausted desc = too large"),
                Code::ResourceExhausted,
                "too large",
            ),
            (call(CallErrorKind::NotFound, "rpc error: code = NotFound desc = gone"), Code::NotFound, "gone"),
            (BackendError::Incomplete("no id".into()), Code::Unknown, "no id"),
            (gone, Code::Unavailable, gone_text),
        ];
        for (error, code, message) in cases {
            let status = of(&error);
            assert_eq!((status.code(), status.message()), (code, message), "{error:?}");
        }
    }
}
