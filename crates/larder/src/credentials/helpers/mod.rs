//! Docker's credential helpers: programs named `docker-credential-NAME` that keep the passwords which a docker config
//! only points to.
//!
//! ```text
//! credHelpers (by registry), else credsStore -> choose -> find (PATH) -> run `get` -> answer -> one credential, or none
//! ```
//!
//! Promises: an answer is used for the one lookup that asked and is kept nowhere; lookups of one moment share a run; a
//! program that others can replace is not run; nothing that a helper wrote is shown. Trouble is logged and means none.

mod answer;
mod change;
mod choose;
mod find;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use zeroize::Zeroizing;

pub use choose::{Asked, HelperNames};
pub use find::FindError;

use super::answers::{Answer, Answers};
use super::credential::{Credential, Origin};
use super::docker_config::Entry;
use super::program::{self, Program};
use crate::threads::blocking;

/// Why a helper gave nothing, in words without anything that it wrote.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HelperError {
    /// It is not there, or is not run.
    #[error(transparent)]
    Find(#[from] FindError),
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
        "docker-credential-{name} failed ({status}); what it wrote is not shown, so run it by hand: 'echo {server} | docker-credential-{name} get'"
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
        "docker-credential-{name} {verb} failed for {server} ({status}); what it wrote is not shown: it may hold the password"
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
    #[error("docker-credential-{0} answered something that is no credential")]
    Answer(String),
}

type Run = BoxFuture<'static, Result<Option<Arc<Entry>>, HelperError>>;

/// Runs the helpers that are found in some folders.
pub struct Helpers {
    folders: Vec<PathBuf>,
    answers: Option<Answers>,
    runs: Mutex<HashMap<Asked, WeakShared<Run>>>,
}

impl fmt::Debug for Helpers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Helpers").field("folders", &self.folders).finish_non_exhaustive()
    }
}

impl Helpers {
    /// Those in the folders of a `PATH`. What is not an absolute path in it is left out.
    pub fn on_path(path: &OsStr) -> Helpers {
        let folders = std::env::split_paths(path).filter(|folder| folder.is_absolute()).collect();
        Helpers { folders, answers: None, runs: Mutex::default() }
    }

    /// The same, with what they answer to lookups noted.
    #[must_use]
    pub fn noting(self, answers: Answers) -> Helpers {
        Helpers { answers: Some(answers), ..self }
    }

    /// What a helper has for a normalised repository: a credential of the node, none if the helper has none, or if none
    /// is asked.
    pub async fn get(
        &self,
        names: &HelperNames,
        repository: &str,
    ) -> Result<Option<Credential>, HelperError> {
        let Some(asked) = names.asked(repository) else { return Ok(None) };
        let origin = Origin::Helper(asked.helper.clone());
        let entry = self.run(asked).await?;
        Ok(entry.map(|entry| Credential::of(&entry, None, &origin)))
    }

    /// The same, with trouble in the log.
    pub(super) async fn lookup(&self, names: &HelperNames, repository: &str) -> Option<Credential> {
        let asked = names.asked(repository)?;
        let got = self.get(names, repository).await;
        if let Some(answers) = &self.answers {
            let answer = match &got {
                Ok(Some(_)) => Answer::Gave,
                Ok(None) => Answer::None,
                Err(error) => Answer::Failed(error.to_string()),
            };
            answers.note(repository, Origin::Helper(asked.helper), answer);
        }
        got.unwrap_or_else(|error| {
            tracing::warn!(image = repository, "no credentials: {error}");
            None
        })
    }

    fn run(&self, asked: Asked) -> Shared<Run> {
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
async fn found(folders: Vec<PathBuf>, name: &str) -> Result<PathBuf, FindError> {
    let name = name.to_owned();
    blocking(move || find::find(&folders, &name)).await
}

async fn ask(folders: Vec<PathBuf>, asked: Asked) -> Result<Option<Arc<Entry>>, HelperError> {
    let Asked { helper: name, server } = asked;
    let path = found(folders, &name).await?;
    let args = ["get".to_owned()];
    let input = Zeroizing::new(server.as_bytes().to_vec());
    let run = Program { path: &path, args: &args, env: Vec::new(), input };
    let failed = |problem: String| HelperError::Run { name: name.clone(), problem };
    let ended = program::run(run).await.map_err(|error| failed(error.to_string()))?;
    if !ended.status.success() {
        if answer::says_none(&ended.stdout) {
            return Ok(None);
        }
        return Err(HelperError::Failed { name, status: ended.status.to_string(), server });
    }
    let entry = answer::decode(&ended.stdout).ok_or(HelperError::Answer(name))?;
    Ok(Some(Arc::new(entry)))
}

#[cfg(test)]
mod tests;
