//! Why a call failed: a kind, a message, and next steps. The same value on both sides of the control API.
//!
//! On the wire an [`Error`] is a gRPC status whose metadata [`HINT_KEY`] holds the hints, percent-encoded, or a
//! [`Refused`] message where one call reports several errors.

use std::fmt::{self, Write as _};

use larder::backend::{BackendError, CallErrorKind};
use larder::chain;
use larder::hint::Hint;
use tonic::{Code, Status};

use crate::HINT_KEY;
use crate::v1alpha1::Refused;

/// Upper bound for all hints of one status together, in encoded bytes: what fits into a header everywhere.
const MAX_HINTS: usize = 4096;

/// What kind of failure it is. Callers derive exit codes and retries from it.
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

    /// What kind of failure it is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What failed, without next steps.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Next steps, in the order to try them.
    pub fn next_steps(&self) -> &[Hint] {
        &self.hints
    }

    /// The error in a gRPC status, with its hints.
    pub fn from_status(status: &Status) -> Error {
        let hints = status.metadata().get(HINT_KEY).and_then(|hints| hints.to_str().ok()).unwrap_or_default();
        Error::new(kind_of(status.code()), status.message()).hints(decode(hints).lines().map(str::to_owned))
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
            BackendError::Unreachable { .. } => Error::unreachable(chain(&error)),
            BackendError::Call { kind: CallErrorKind::DeadlineExceeded, .. } => {
                Error::unreachable(format!("the runtime did not answer in time: {}", chain(&error)))
            }
            _ => Error::failed(chain(&error)),
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
        let mut status = Status::new(code_of(error.kind), error.message);
        let hints: Vec<String> = error.hints.iter().map(ToString::to_string).collect();
        let hints = encode(&hints.join("\n"));
        if !hints.is_empty()
            && hints.len() <= MAX_HINTS
            && let Ok(hints) = hints.parse()
        {
            status.metadata_mut().insert(HINT_KEY, hints);
        }
        status
    }
}

impl From<Error> for Refused {
    fn from(error: Error) -> Refused {
        Refused {
            code: code_of(error.kind).into(),
            message: error.message,
            hints: error.hints.iter().map(ToString::to_string).collect(),
        }
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Error {
        Error::new(kind_of(refused.code.into()), refused.message).hints(refused.hints)
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

/// Everything but letters, digits and a few signs as `%` and two digits.
fn encode(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b" -_.:/,;=*()'".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}"); // writing to a text does not fail
        }
    }
    encoded
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        let hex = after.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        let decoded = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()).filter(|_| *byte == b'%');
        bytes.push(decoded.unwrap_or(*byte));
        rest = if decoded.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_comes_out_as_it_went_in() {
        let failures = [
            Error::failed("it is mounted at /mnt"),
            Error::bad_input("\"Busybox\": bad").hint("did you mean busybox?").hint("100% sure, caf\u{e9}"),
            Error::unreachable("nobody there").hint("start it"),
            Error::missing("a:1: no such image").hint("larder images"),
        ];
        for failure in failures {
            assert_eq!(Error::from(Refused::from(failure.clone())), failure);
            assert_eq!(Error::from_status(&Status::from(failure.clone())), failure);
        }
    }

    #[test]
    fn a_runtime_that_is_silent_has_one_hint_and_its_own_comes_first() {
        let silent = |hint| {
            let kind = CallErrorKind::DeadlineExceeded;
            Error::from(BackendError::Call { message: "no answer within 1s".into(), kind, hint })
        };
        assert_eq!(silent(Some("see its log")).next_steps(), ["see its log"]);
        assert_eq!(silent(None).next_steps().len(), 1);
    }

    #[test]
    fn hints_of_others_are_read_as_far_as_they_can_be() {
        assert_eq!(decode("50%"), "50%");
        assert_eq!(decode("%zz%41"), "%zzA");
        assert_eq!(decode("%ff"), "\u{fffd}");
    }
}
