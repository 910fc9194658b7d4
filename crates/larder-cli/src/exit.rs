//! Exit codes of `larder`. This table is what `--help` and `docs/output.md` print.
//!
//! When several apply, the highest in this order wins: interrupted, unreachable, bad input, failed, done.

use std::process::ExitCode;

/// How a run ended. Ordered: the exit code is that of the largest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) enum CommandOutcome {
    /// Success.
    #[default]
    Done,
    /// A pull or a removal failed, or an image does not exist.
    Failed,
    /// A flag, a file, a document or a name is invalid. The valid rest was done.
    BadInput,
    /// The backend is unreachable.
    Unreachable,
    /// A signal ended the run early.
    Interrupted,
}

impl CommandOutcome {
    /// The exit code.
    pub(crate) fn code(self) -> u8 {
        match self {
            CommandOutcome::Done => 0,
            CommandOutcome::Failed => 1,
            CommandOutcome::BadInput => 2,
            CommandOutcome::Unreachable => 3,
            CommandOutcome::Interrupted => 130,
        }
    }
}

impl From<CommandOutcome> for ExitCode {
    fn from(outcome: CommandOutcome) -> ExitCode {
        ExitCode::from(outcome.code())
    }
}

/// The table in the help text.
pub(crate) const HELP: &str = "\
Exit codes:
  0    success: every image is present
  1    failure: a pull, a removal, an image not found
  2    invalid input: a flag, a file, a document or an image name; the valid rest was done
  3    backend unreachable: no socket, no answer, not a container runtime, or no image store
  130  interrupted
If several apply: 130 before 3, 3 before 2, 2 before 1.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreachable_backend_outranks_bad_input_and_bad_input_outranks_failure() {
        assert_eq!(CommandOutcome::Failed.max(CommandOutcome::BadInput), CommandOutcome::BadInput);
        assert_eq!(CommandOutcome::BadInput.max(CommandOutcome::Unreachable), CommandOutcome::Unreachable);
        assert_eq!(CommandOutcome::Unreachable.max(CommandOutcome::Interrupted), CommandOutcome::Interrupted);
    }

    #[test]
    fn help_names_every_code() {
        for outcome in [
            CommandOutcome::Done,
            CommandOutcome::Failed,
            CommandOutcome::BadInput,
            CommandOutcome::Unreachable,
            CommandOutcome::Interrupted,
        ] {
            assert!(HELP.contains(&format!("\n  {} ", outcome.code())), "{outcome:?}");
        }
    }
}
