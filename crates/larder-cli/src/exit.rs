//! Exit codes of `larder`. This table is what `--help` and `docs/output.md` print.
//!
//! When several apply, the highest in this order wins: interrupted, unreachable, bad input, failed, done.

use std::process::ExitCode;

/// How a run ended. Ordered: [`CommandOutcome::max`] of two is the one that the exit code tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) enum CommandOutcome {
    /// Everything asked for is so.
    #[default]
    Done,
    /// Something asked for failed: a pull, a removal, an image that does not exist.
    Failed,
    /// A flag, a file, a document or a name could not be used. What could be used was still done.
    BadInput,
    /// Nothing that serves images answered.
    Unreachable,
    /// A signal ended the run early.
    Interrupted,
}

impl CommandOutcome {
    /// The number that the shell sees.
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

/// The table, as help shows it.
pub(crate) const HELP: &str = "\
Exit codes:
  0    all is as asked: every image is present
  1    some of it failed: a pull, a removal, an image that is not there
  2    bad input: a flag, a file, a document or an image name; the good ones were still done
  3    the backend is unreachable: no socket, no answer, not a container runtime, or no image store there
  130  interrupted
When several apply: 130 before 3, 3 before 2, 2 before 1.";

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
