//! Finds the program of a helper.

use std::path::{Path, PathBuf};

use crate::credentials::program::{TrustError, check_program};
use crate::go_format::quote;

/// Why a helper is not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HelperNotRunnable {
    /// Its name could mean another program.
    #[error("invalid credential helper name {}: use only letters, digits, '.', '_' and '-'", quote(.0))]
    Name(String),
    /// It is in no directory of `PATH`.
    #[error("docker-credential-{0} not found in PATH: install it, or remove it from the docker config")]
    Absent(String),
    /// It is not trusted.
    #[error("docker-credential-{name} is not trusted: {why}")]
    NotTrusted {
        /// The helper.
        name: String,
        /// Why.
        why: String,
    },
}

/// The first one in these directories that only root and this user can replace.
pub(super) fn find(dirs: &[PathBuf], name: &str) -> Result<PathBuf, HelperNotRunnable> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if name.is_empty() || name.len() > 100 || !name.chars().all(is_plain) {
        return Err(HelperNotRunnable::Name(name.chars().take(100).collect()));
    }
    let mut refused = None;
    for dir in dirs {
        match check_program(&dir.join(Path::new(&format!("docker-credential-{name}")))) {
            Ok(path) => return Ok(path),
            Err(TrustError::Absent { .. }) => {}
            Err(error) => {
                refused.get_or_insert_with(|| format!("{error}; {}", error.hint()));
            }
        }
    }
    let name = name.to_owned();
    Err(match refused {
        Some(why) => HelperNotRunnable::NotTrusted { name, why },
        None => HelperNotRunnable::Absent(name),
    })
}
