//! Why a command ends early, told once at the edge.

use std::error::Error;

use larder::backend::{BackendError, CallErrorKind};

use crate::exit::Outcome;
use crate::out::Out;

/// An error for people: what went wrong, what could be tried next, and the exit code it leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    outcome: Outcome,
    message: String,
    hints: Vec<String>,
    missing: bool,
}

impl Failure {
    /// Something asked for failed.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Failure { outcome: Outcome::Failed, message: message.into(), hints: Vec::new(), missing: false }
    }

    /// Something asked for is not there.
    pub(crate) fn missing(message: impl Into<String>) -> Self {
        Failure { missing: true, ..Failure::failed(message) }
    }

    /// The input cannot be used.
    pub(crate) fn bad_input(message: impl Into<String>) -> Self {
        Failure { outcome: Outcome::BadInput, ..Failure::failed(message) }
    }

    /// No backend answers.
    pub(crate) fn unreachable(message: impl Into<String>) -> Self {
        Failure { outcome: Outcome::Unreachable, ..Failure::failed(message) }
    }

    /// A signal ended it early.
    pub(crate) fn interrupted() -> Self {
        Failure { outcome: Outcome::Interrupted, ..Failure::failed("interrupted") }
    }

    /// The same, with something to try next.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// The same, with all of these to try next, if any.
    #[must_use]
    pub(crate) fn hints(mut self, hints: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.hints.extend(hints.into_iter().map(Into::into));
        self
    }

    /// The same, with what it is about in front of it.
    #[must_use]
    pub(crate) fn about(mut self, what: impl std::fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// How the run ends with it.
    pub(crate) fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// What went wrong.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// What could be tried next.
    pub(crate) fn next_steps(&self) -> &[String] {
        &self.hints
    }

    /// Whether something asked for is not there.
    pub(crate) fn is_missing(&self) -> bool {
        self.missing
    }

    /// Tells it, and returns how the run ended.
    pub(crate) fn print(&self, out: &Out) -> Outcome {
        out.error(&self.message, &self.hints);
        self.outcome
    }
}

impl From<BackendError> for Failure {
    fn from(error: BackendError) -> Self {
        let failure = match &error {
            BackendError::Unreachable { .. } => Failure::unreachable(chain(&error)),
            BackendError::Call { kind: CallErrorKind::DeadlineExceeded, .. } => {
                Failure::unreachable(format!("the runtime did not answer in time: {}", chain(&error)))
            }
            _ => Failure::failed(chain(&error)),
        };
        let silent =
            is_gone(&error).then_some("the runtime hangs, or --timeout is too short for it; see its log");
        failure.hints(error.hint().or(silent))
    }
}

/// Whether the backend is gone: it does not answer at all, or not in time.
pub(crate) fn is_gone(error: &BackendError) -> bool {
    matches!(
        error,
        BackendError::Unreachable { .. } | BackendError::Call { kind: CallErrorKind::DeadlineExceeded, .. }
    )
}

/// An error and what caused it, outermost first.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_that_is_silent_has_one_hint_and_its_own_comes_first() {
        let silent = |hint| {
            let kind = CallErrorKind::DeadlineExceeded;
            Failure::from(BackendError::Call { message: "no answer within 1s".into(), kind, hint })
        };
        assert_eq!(silent(Some("see its log")).next_steps(), ["see its log"]);
        assert_eq!(silent(None).next_steps().len(), 1);
    }
}
