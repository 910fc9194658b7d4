//! Docker's credential helpers: programs named `docker-credential-NAME` that store the passwords of a docker config.
//!
//! ```text
//! credHelpers (by registry), else credsStore -> choose -> find (PATH) -> run `get` -> answer -> one credential, or none
//! ```
//!
//! Promises: an answer is used for one lookup and not cached; concurrent lookups share a run; a program that other
//! users can replace is not run; a helper's output is never shown. An error is logged and counts as no credentials.

mod change;
mod find;
mod helper_output;
mod helper_selection;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use parking_lot::Mutex;
use zeroize::Zeroizing;

pub use find::HelperNotRunnable;
pub use helper_selection::{HelperNames, HelperRequest};

use super::credential::{Credential, CredentialLocation};
use super::docker_config::DockerConfigEntry;
use super::program::{self, ProgramCommand};
use super::program_results::{ProgramResult, ProgramResultLog};
use crate::threads::blocking;

/// Why a helper returned no credential. Never quotes its output.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HelperError {
    /// It was not found, or is not trusted.
    #[error(transparent)]
    Find(#[from] HelperNotRunnable),
    /// It could not be run to its end.
    #[error("docker-credential-{name} {problem}")]
    Run {
        /// The helper.
        name: String,
        /// The problem.
        problem: String,
    },
    /// It failed, and not because it has no credentials.
    #[error(
        "docker-credential-{name} failed ({status}); output is not shown because it may contain a password; to see it, run 'echo {server} | docker-credential-{name} get'"
    )]
    Failed {
        /// The helper.
        name: String,
        /// Such as `exit status: 1`.
        status: String,
        /// The requested server.
        server: String,
    },
    /// It failed to store or erase a credential.
    #[error(
        "docker-credential-{name} {verb} failed for {server} ({status}); output is not shown because it may contain the password"
    )]
    Change {
        /// The helper.
        name: String,
        /// `store` or `erase`.
        verb: &'static str,
        /// The server of the credential.
        server: String,
        /// Such as `exit status: 1`.
        status: String,
    },
    /// Its answer is not a valid credential.
    #[error("docker-credential-{0} returned no valid credential")]
    Answer(String),
}

type HelperLookup = BoxFuture<'static, Result<Option<Arc<DockerConfigEntry>>, HelperError>>;

/// Runs the helpers in some directories.
pub struct CredentialHelpers {
    dirs: Vec<PathBuf>,
    answers: Option<ProgramResultLog>,
    runs: Mutex<HashMap<HelperRequest, WeakShared<HelperLookup>>>,
}

impl fmt::Debug for CredentialHelpers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Helpers").field("dirs", &self.dirs).finish_non_exhaustive()
    }
}

impl CredentialHelpers {
    /// The helpers in the directories of a `PATH`. Relative paths are ignored.
    pub fn on_path(path: &OsStr) -> CredentialHelpers {
        let dirs = std::env::split_paths(path).filter(|dir| dir.is_absolute()).collect();
        CredentialHelpers { dirs, answers: None, runs: Mutex::default() }
    }

    /// Records the results of lookups.
    #[must_use]
    pub fn with_result_log(self, answers: ProgramResultLog) -> CredentialHelpers {
        CredentialHelpers { answers: Some(answers), ..self }
    }

    /// A helper's credential for a normalised repository; none if the helper has none, or if no helper is configured.
    pub(crate) async fn get(
        &self,
        names: &HelperNames,
        repository: &str,
    ) -> Result<Option<Credential>, HelperError> {
        let Some(asked) = names.request_for(repository) else { return Ok(None) };
        let origin = CredentialLocation::Helper(asked.helper.clone());
        let entry = self.run(asked).await?;
        Ok(entry.map(|entry| Credential::of(&entry, None, &origin)))
    }

    /// Like `get`, but logs errors.
    pub(super) async fn lookup(&self, names: &HelperNames, repository: &str) -> Option<Credential> {
        let asked = names.request_for(repository)?;
        let got = self.get(names, repository).await;
        if let Some(answers) = &self.answers {
            let answer = match &got {
                Ok(Some(_)) => ProgramResult::Found,
                Ok(None) => ProgramResult::None,
                Err(error) => ProgramResult::Failed(error.to_string()),
            };
            answers.record(repository, CredentialLocation::Helper(asked.helper), answer);
        }
        got.unwrap_or_else(|error| {
            tracing::warn!(image = repository, "no credentials: {error}");
            None
        })
    }

    fn run(&self, asked: HelperRequest) -> Shared<HelperLookup> {
        let mut runs = self.runs.lock();
        // An answer is dropped with its last waiter.
        runs.retain(|_, run| run.upgrade().is_some_and(|run| run.peek().is_none()));
        if let Some(run) = runs.get(&asked).and_then(WeakShared::upgrade) {
            return run;
        }
        let run = ask(self.dirs.clone(), asked.clone()).boxed().shared();
        runs.extend(run.downgrade().map(|weak| (asked, weak)));
        run
    }
}

/// The program of a helper, searched on a blocking thread.
async fn found(dirs: Vec<PathBuf>, name: &str) -> Result<PathBuf, HelperNotRunnable> {
    let name = name.to_owned();
    blocking(move || find::find(&dirs, &name)).await
}

async fn ask(
    dirs: Vec<PathBuf>,
    asked: HelperRequest,
) -> Result<Option<Arc<DockerConfigEntry>>, HelperError> {
    let HelperRequest { helper: name, server } = asked;
    let path = found(dirs, &name).await?;
    let args = ["get".to_owned()];
    let input = Zeroizing::new(server.as_bytes().to_vec());
    let run = ProgramCommand { path: &path, args: &args, env: Vec::new(), input };
    let failed = |problem: String| HelperError::Run { name: name.clone(), problem };
    let ended = program::run(run).await.map_err(|error| failed(error.to_string()))?;
    if !ended.status.success() {
        if helper_output::is_not_found(&ended.stdout) {
            return Ok(None);
        }
        return Err(HelperError::Failed { name, status: ended.status.to_string(), server });
    }
    let entry = helper_output::decode(&ended.stdout).ok_or(HelperError::Answer(name))?;
    Ok(Some(Arc::new(entry)))
}

#[cfg(test)]
mod tests;
