//! Errors of commands: how they are printed, and their exit codes.

pub(crate) use larder::error_chain;
pub(crate) use larder_agent::{Error as Failure, ErrorKind};

use crate::exit::CommandOutcome;
use crate::printer::Printer;

/// A command of a part that was not built in.
#[cfg(not(all(feature = "kube", feature = "top")))]
pub(crate) fn missing_feature(command: &str, feature: &str) -> Failure {
    Failure::failed(format!("{command} is not in this build: it lacks the feature \"{feature}\"")).hint(format!(
        "install a package of larder, or build it with: cargo build --release -p larder-cli --features {feature}"
    ))
}

/// Prints errors and maps them to exit codes.
pub(crate) trait ExitReport {
    /// The outcome of a command that fails with it.
    fn outcome(&self) -> CommandOutcome;

    /// Prints it, and returns the outcome.
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
