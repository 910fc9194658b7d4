//! Everything that is wrong with a configuration.

use std::fmt;

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
        let each = self.0.iter().map(|error| {
            let hints: Vec<_> = error.hints().iter().map(ToString::to_string).collect();
            if hints.is_empty() { error.to_string() } else { format!("{error} ({})", hints.join("; ")) }
        });
        each.collect::<Vec<_>>().join("; ")
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
