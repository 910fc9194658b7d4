//! Errors on their way from the daemon to the command line: a code, a sentence, and what could be tried next.

use std::fmt::Write as _;

use larder_control::HINT_KEY;
use larder_control::v1alpha1::Refused;
use tonic::{Code, Status};

use crate::exit::Outcome;
use crate::failure::Failure;

/// The longest that all hints together may be, in bytes as they travel: what fits into a header everywhere.
const MAX_HINTS: usize = 4096;

impl From<Failure> for Status {
    fn from(failure: Failure) -> Status {
        let mut status = Status::new(code(&failure), failure.message());
        let hints = encode(&failure.next_steps().join("\n"));
        if !hints.is_empty()
            && hints.len() <= MAX_HINTS
            && let Ok(hints) = hints.parse()
        {
            status.metadata_mut().insert(HINT_KEY, hints);
        }
        status
    }
}

impl From<&Failure> for Refused {
    fn from(failure: &Failure) -> Refused {
        Refused {
            code: code(failure).into(),
            message: failure.message().to_owned(),
            hints: failure.next_steps().to_vec(),
        }
    }
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Failure {
        let failure = of_code(refused.code.into(), refused.message);
        refused.hints.into_iter().fold(failure, Failure::hint)
    }
}

/// What the daemon answered instead of what it was asked for.
pub(super) fn answered(status: &Status) -> Failure {
    let failure = of_code(status.code(), status.message().to_owned());
    let hints = status.metadata().get(HINT_KEY).and_then(|hints| hints.to_str().ok()).unwrap_or_default();
    decode(hints).lines().map(str::to_owned).fold(failure, Failure::hint)
}

fn code(failure: &Failure) -> Code {
    match failure.outcome() {
        Outcome::BadInput => Code::InvalidArgument,
        Outcome::Unreachable => Code::Unavailable,
        Outcome::Interrupted => Code::Cancelled,
        Outcome::Done | Outcome::Failed if failure.is_missing() => Code::NotFound,
        Outcome::Done | Outcome::Failed => Code::FailedPrecondition,
    }
}

fn of_code(code: Code, message: String) -> Failure {
    match code {
        Code::InvalidArgument => Failure::bad_input(message),
        Code::Unavailable | Code::DeadlineExceeded => Failure::unreachable(message),
        Code::NotFound => Failure::missing(message),
        _ => Failure::failed(message),
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
    fn a_failure_comes_out_as_it_went_in() {
        let failures = [
            Failure::failed("it is mounted at /mnt"),
            Failure::bad_input("\"Busybox\": bad").hint("did you mean busybox?").hint("100% sure, caf\u{e9}"),
            Failure::unreachable("nobody there").hint("start it"),
            Failure::missing("a:1: no such image").hint("larder images"),
        ];
        for failure in failures {
            assert_eq!(Failure::from(Refused::from(&failure)), failure);
            assert_eq!(answered(&Status::from(failure.clone())), failure);
        }
    }

    #[test]
    fn hints_of_others_are_read_as_far_as_they_can_be() {
        assert_eq!(decode("50%"), "50%");
        assert_eq!(decode("%zz%41"), "%zzA");
        assert_eq!(decode("%ff"), "\u{fffd}");
    }
}
