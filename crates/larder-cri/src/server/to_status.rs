//! The status of a failed call, as containerd returns and kubelet parses it.

use larder::backend::{BackendError, CallErrorKind};
use tonic::{Code, Status};

/// The status for an error.
///
/// An error of a runtime passes unchanged. Otherwise the kind of the error is the code, where CRI has one. It has none
/// for a registry that denies or cannot be reached, a signature that is not acceptable, and a full disk: these are
/// `Unknown`, as from containerd, so that kubelet shows the bare text. `ResourceExhausted` is not used for a full disk:
/// gRPC itself returns it for messages that are too large, and callers take it for that.
pub(super) fn of(error: &BackendError) -> Status {
    if let Some(status) = error.cause::<Status>() {
        return Status::new(status.code(), status.message());
    }
    match error {
        BackendError::Unreachable { .. } => Status::unavailable(error.to_string()),
        // Clients print the message only, and the next step is on this node.
        BackendError::Call { message, kind: CallErrorKind::FailedPrecondition, hint: Some(hint), .. } => {
            Status::failed_precondition(format!("{message}; {hint}"))
        }
        BackendError::Call { message, kind, .. } => Status::new(code(*kind), message),
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
    use larder::hint::Hint;

    use super::*;
    use crate::{Endpoint, call_error};

    fn call(kind: CallErrorKind, message: &str) -> BackendError {
        BackendError::call(kind, message).with_hint(Hint::from("try again"))
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
            (
                call(CallErrorKind::InsufficientSpace { reclaim_bytes: None }, "the disk is full"),
                Code::Unknown,
                "the disk is full",
            ),
            (call(CallErrorKind::DeadlineExceeded, "late"), Code::DeadlineExceeded, "late"),
            (call(CallErrorKind::Canceled, "left"), Code::Cancelled, "left"),
            (call(CallErrorKind::Unavailable, "restarting"), Code::Unavailable, "restarting"),
            (call(CallErrorKind::Unimplemented, "what?"), Code::Unimplemented, "what?"),
            (call(CallErrorKind::Other, "boom"), Code::Unknown, "boom"),
            (call(CallErrorKind::FailedPrecondition, "kept"), Code::FailedPrecondition, "kept; try again"),
            (
                call(CallErrorKind::RegistryUnavailable, "RegistryUnavailable: no route"),
                Code::Unknown,
                "RegistryUnavailable: no route",
            ),
            (
                call(CallErrorKind::SignatureInvalid, "SignatureValidationFailed: no key"),
                Code::Unknown,
                "SignatureValidationFailed: no key",
            ),
            (
                call_error(&Endpoint::at("/run/a.sock"), &Status::resource_exhausted("too large")),
                Code::ResourceExhausted,
                "too large",
            ),
            (call_error(&Endpoint::at("/run/a.sock"), &Status::not_found("gone")), Code::NotFound, "gone"),
            (BackendError::Incomplete("no id".into()), Code::Unknown, "no id"),
            (gone, Code::Unavailable, gone_text),
        ];
        for (error, code, message) in cases {
            let status = of(&error);
            assert_eq!((status.code(), status.message()), (code, message), "{error:?}");
        }
    }
}
