//! Why a call failed: a kind, a message, and next steps. The same value on both sides of the control API.
//!
//! On the wire an [`Error`] is a gRPC status whose details are a [`Refused`] message, or that message alone where one
//! call reports several errors.

use std::fmt;

use larder::backend::{BackendError, CallErrorKind};
use larder::error_chain;
use larder::hint::Hint;
use prost::Message as _;
use tonic::{Code, Status};

use crate::convert;
use crate::v1::Refused;

/// The most details of one status, in encoded bytes: what fits into a header everywhere.
const MAX_DETAILS: usize = 4096;

/// Kind of a failure. Callers derive exit codes and retries from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request was understood and could not be carried out.
    Failed,
    /// The object named in the request does not exist.
    NotFound,
    /// The request, a name, a file or a setting is not valid.
    InvalidInput,
    /// The agent, its backend or its store cannot be reached or opened.
    Unavailable,
    /// The caller was interrupted.
    Interrupted,
}

/// An error for operators: kind, message, and what to try next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    hints: Vec<Hint>,
}

impl Error {
    fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), hints: Vec::new() }
    }

    /// A request that could not be carried out.
    pub fn failed(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Failed, message)
    }

    /// An object that does not exist.
    pub fn missing(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::NotFound, message)
    }

    /// Input that is not valid.
    pub fn bad_input(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidInput, message)
    }

    /// An agent, backend or store that cannot be reached.
    pub fn unreachable(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Unavailable, message)
    }

    /// A caller that was interrupted.
    pub fn interrupted() -> Error {
        Error::new(ErrorKind::Interrupted, "interrupted")
    }

    /// Adds a next step.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<Hint>) -> Error {
        self.hints.push(hint.into());
        self
    }

    /// Adds next steps, if there are any.
    #[must_use]
    pub fn hints(mut self, hints: impl IntoIterator<Item = impl Into<Hint>>) -> Error {
        self.hints.extend(hints.into_iter().map(Into::into));
        self
    }

    /// Puts the subject in front of the message.
    #[must_use]
    pub fn about(mut self, subject: impl fmt::Display) -> Error {
        self.message = format!("{subject}: {}", self.message);
        self
    }

    /// Kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Description of the failure, without next steps.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Next steps, in the order to try them.
    pub fn next_steps(&self) -> &[Hint] {
        &self.hints
    }

    /// The error in a gRPC status, with its hints.
    pub fn from_status(status: &Status) -> Error {
        let details = Refused::decode(status.details()).unwrap_or_default(); // of others than larder
        Error::new(kind_of(status.code()), status.message())
            .hints(details.hints.into_iter().map(convert::hint_from))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<BackendError> for Error {
    fn from(error: BackendError) -> Error {
        let failure = match &error {
            BackendError::Unreachable { .. } => Error::unreachable(error_chain(&error)),
            BackendError::Call { kind: CallErrorKind::DeadlineExceeded, .. } => {
                Error::unreachable(format!("the runtime did not answer in time: {}", error_chain(&error)))
            }
            _ => Error::failed(error_chain(&error)),
        };
        let silent = is_gone(&error).then(|| {
            Hint::from("the runtime hangs, or ")
                .setting("timeout", "")
                .text(" is too short for it; see its log")
        });
        failure.hints(error.hint().or(silent))
    }
}

/// Whether the backend is unreachable: it does not answer at all, or not in time.
pub fn is_gone(error: &BackendError) -> bool {
    matches!(
        error,
        BackendError::Unreachable { .. } | BackendError::Call { kind: CallErrorKind::DeadlineExceeded, .. }
    )
}

impl From<Error> for Status {
    fn from(error: Error) -> Status {
        let code = code_of(error.kind);
        let mut refused = Refused::from(error);
        while refused.encoded_len() > MAX_DETAILS && refused.hints.pop().is_some() {}
        let details = if refused.hints.is_empty() { Vec::new() } else { refused.encode_to_vec() };
        Status::with_details(code, refused.message, details.into())
    }
}

impl From<Error> for Refused {
    fn from(error: Error) -> Refused {
        Refused {
            code: code_of(error.kind).into(),
            message: error.message,
            hints: error.hints.iter().map(convert::hint).collect(),
        }
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Error {
        Error::new(kind_of(refused.code.into()), refused.message)
            .hints(refused.hints.into_iter().map(convert::hint_from))
    }
}

fn code_of(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::InvalidInput => Code::InvalidArgument,
        ErrorKind::Unavailable => Code::Unavailable,
        ErrorKind::Interrupted => Code::Cancelled,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::Failed => Code::FailedPrecondition,
    }
}

fn kind_of(code: Code) -> ErrorKind {
    match code {
        Code::InvalidArgument => ErrorKind::InvalidInput,
        Code::Unavailable | Code::DeadlineExceeded => ErrorKind::Unavailable,
        Code::NotFound => ErrorKind::NotFound,
        _ => ErrorKind::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_survives_the_conversion() {
        let failures = [
            Error::failed("it is mounted at /mnt"),
            Error::bad_input("\"Busybox\": bad").hint("did you mean busybox?").hint("100% sure, caf\u{e9}"),
            Error::unreachable("no listener").hint("start it"),
            Error::missing("a:1: image not found")
                .hint(Hint::new().command(["images"]).text(" or ").setting("backend", "docker")),
        ];
        for failure in failures {
            assert_eq!(Error::from(Refused::from(failure.clone())), failure);
            assert_eq!(Error::from_status(&Status::from(failure.clone())), failure);
        }
    }

    #[test]
    fn a_silent_runtime_has_one_hint_after_that_of_the_error() {
        let silent = |hint: Option<Hint>| {
            let late = BackendError::call(CallErrorKind::DeadlineExceeded, "no answer within 1s");
            Error::from(late.with_hint(hint))
        };
        assert_eq!(silent(Some("see its log".into())).next_steps(), ["see its log".into()]);
        assert_eq!(silent(None).next_steps().len(), 1);
    }

    #[test]
    fn a_status_without_details_is_an_error_without_hints() {
        let status = Status::with_details(Code::NotFound, "no", vec![0xff; 3].into());
        assert_eq!(Error::from_status(&status), Error::missing("no"));
    }

    #[test]
    fn a_header_is_truncated_at_its_end() {
        let error = Error::failed("no").hint("first").hint("x".repeat(MAX_DETAILS));
        assert_eq!(Error::from_status(&error.into()), Error::failed("no").hint("first"));
    }
}
