//! Everything that is wrong with a configuration.

use std::fmt;

use crate::error::Error;
use crate::manifest::LocatedProblem;

/// Why there is no configuration: at least one error. It prints one a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors(pub(super) Vec<LocatedProblem>);

impl ConfigErrors {
    /// Each of them: file, line, key, what is wrong, and what to do.
    pub fn each(&self) -> &[LocatedProblem] {
        &self.0
    }

    /// All of them and what to do, for a log: in one line.
    pub fn line(&self) -> String {
        let text = |error: &LocatedProblem| {
            let hints: Vec<_> = error.hints().iter().map(ToString::to_string).collect();
            if hints.is_empty() { error.to_string() } else { format!("{error} ({})", hints.join("; ")) }
        };
        self.0.iter().map(text).collect::<Vec<_>>().join("; ")
    }
}

/// All errors in one, which prints each as an error of its own.
impl From<&ConfigErrors> for Error {
    fn from(errors: &ConfigErrors) -> Error {
        let Some((last, others)) = errors.each().split_last() else {
            return Error::bad_input("invalid settings");
        };
        let others = others.iter().map(|error| {
            let hints = error.hints().iter().map(|hint| format!("hint: {hint}\n"));
            format!("{error}\n{}error: ", hints.collect::<String>())
        });
        Error::bad_input(format!("{}{last}", others.collect::<String>())).hints(last.hints().iter().cloned())
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}
