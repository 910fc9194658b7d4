//! Errors of a command, as they are printed and as the exit code reports them.

pub(crate) use larder::error_chain;
pub(crate) use larder_agent::{Error as Failure, ErrorKind};

use crate::exit::CommandOutcome;
use crate::printer::Printer;

/// What the command line makes of an error.
pub(crate) trait ExitReport {
    /// How the command ends with it.
    fn outcome(&self) -> CommandOutcome;

    /// Prints it, and returns how the command ends.
    fn print(&self, out: &Printer) -> CommandOutcome;
}

impl ExitReport for Failure {
    fn outcome(&self) -> CommandOutcome {
        match self.kind() {
            ErrorKind::Failed | ErrorKind::NotFound => CommandOutcome::Failed,
            ErrorKind::InvalidInput => CommandOutcome::BadInput,
            ErrorKind::Unavailable => CommandOutcome::Unreachable,
            ErrorKind::Interrupted => CommandOutcome::Interrupted,
        }
    }

    fn print(&self, out: &Printer) -> CommandOutcome {
        out.error(self.message(), self.next_steps());
        self.outcome()
    }
}
