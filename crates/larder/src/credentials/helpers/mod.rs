//! Docker's credential helpers: programs named `docker-credential-NAME` that keep the passwords which a docker config
//! only points to.
//!
//! ```text
//! credHelpers (by registry), else credsStore -> choose -> find (PATH) -> run `get` -> answer -> one credential, or none
//! ```
//!
//! Promises: an answer is used for the one lookup that asked and is kept nowhere; lookups of one moment share a run; a
//! program that others can replace is not run; nothing that a helper wrote is shown. Trouble is logged and means none.

mod change;
mod find;
mod helper_output;
mod helper_selection;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use zeroize::Zeroizing;

pub use find::HelperNotRunnable;
pub use helper_selection::{HelperNames, HelperRequest};

use super::credential::{Credential, CredentialLocation};
use super::docker_config::DockerConfigEntry;
use super::program::{self, ProgramCommand};
use super::program_results::{ProgramResult, ProgramResultLog};
use crate::threads::blocking;

/// Why a helper gave nothing, in words without anything that it wrote.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HelperError {
    /// It is not there, or is not run.
    #[error(transparent)]
    Find(#[from] HelperNotRunnable),
    /// It could not be run to its end.
    #[error("docker-credential-{name} {problem}")]
    Run {
        /// The helper.
        name: String,
        /// What went wrong.
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
        /// What it was asked for.
        server: String,
    },
    /// It did not keep a credential, or did not forget one.
    #[error(
        "docker-credential-{name} {verb} failed for {server} ({status}); output is not shown because it may contain the password"
    )]
    Change {
        /// The helper.
        name: String,
        /// `store` or `erase`.
        verb: &'static str,
        /// Whose credential it is.
        server: String,
        /// Such as `exit status: 1`.
        status: String,
    },
    /// Its answer is no credential.
    #[error("docker-credential-{0} returned no valid credential")]
    Answer(String),
}

type HelperLookup = BoxFuture<'static, Result<Option<Arc<DockerConfigEntry>>, HelperError>>;

/// Runs the helpers that are found in some folders.
pub struct CredentialHelpers {
    folders: Vec<PathBuf>,
    answers: Option<ProgramResultLog>,
    runs: Mutex<HashMap<HelperRequest, WeakShared<HelperLookup>>>,
}

impl fmt::Debug for CredentialHelpers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Helpers").field("folders", &self.folders).finish_non_exhaustive()
    }
}

impl CredentialHelpers {
    /// Those in the folders of a `PATH`. What is not an absolute path in it is left out.
    pub fn on_path(path: &OsStr) -> CredentialHelpers {
        let folders = std::env::split_paths(path).filter(|folder| folder.is_absolute()).collect();
        CredentialHelpers { folders, answers: None, runs: Mutex::default() }
    }

    /// The same, with what they answer to lookups noted.
    #[must_use]
    pub fn with_result_log(self, answers: ProgramResultLog) -> CredentialHelpers {
        CredentialHelpers { answers: Some(answers), ..self }
    }

    /// What a helper has for a normalised repository: a credential of the node, none if the helper has none, or if none
    /// is asked.
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

    /// The same, with trouble in the log.
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
        let mut runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        // Answers go with the last who waits for them.
        runs.retain(|_, run| run.upgrade().is_some_and(|run| run.peek().is_none()));
        if let Some(run) = runs.get(&asked).and_then(WeakShared::upgrade) {
            return run;
        }
        let run = ask(self.folders.clone(), asked.clone()).boxed().shared();
        runs.extend(run.downgrade().map(|weak| (asked, weak)));
        run
    }
}

/// The program of a helper, looked for on a thread that may block.
async fn found(folders: Vec<PathBuf>, name: &str) -> Result<PathBuf, HelperNotRunnable> {
    let name = name.to_owned();
    blocking(move || find::find(&folders, &name)).await
}

async fn ask(
    folders: Vec<PathBuf>,
    asked: HelperRequest,
) -> Result<Option<Arc<DockerConfigEntry>>, HelperError> {
    let HelperRequest { helper: name, server } = asked;
    let path = found(folders, &name).await?;
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
