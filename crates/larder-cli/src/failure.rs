//! Errors of a command, as they are printed and as the exit code reports them.

pub(crate) use larder::chain;
pub(crate) use larder_agent::{Error as Failure, ErrorKind};

use crate::exit::Outcome;
use crate::out::Out;

/// What the command line makes of an error.
pub(crate) trait Report {
    /// How the command ends with it.
    fn outcome(&self) -> Outcome;

    /// Prints it, and returns how the command ends.
    fn print(&self, out: &Out) -> Outcome;
}

impl Report for Failure {
    fn outcome(&self) -> Outcome {
        match self.kind() {
            ErrorKind::Failed | ErrorKind::NotFound => Outcome::Failed,
            ErrorKind::InvalidInput => Outcome::BadInput,
            ErrorKind::Unavailable => Outcome::Unreachable,
            ErrorKind::Interrupted => Outcome::Interrupted,
        }
    }

    fn print(&self, out: &Out) -> Outcome {
        out.error(self.message(), self.next_steps());
        self.outcome()
    }
}
