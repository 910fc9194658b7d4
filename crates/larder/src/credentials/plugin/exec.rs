//! One run of a provider.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::config::ProviderConfig;
use super::wire::{CredentialProviderRequest, CredentialProviderResponse, PluginResponseError};
use crate::credentials::Secret;
use crate::credentials::program::{self, ProgramCommand};
use crate::threads::blocking;

/// Executes a request: a program, or a fake in tests.
#[async_trait]
pub trait PluginExecutor: Send + Sync {
    /// One answer. Dropping the future ends the run.
    async fn execute(
        &self,
        request: &CredentialProviderRequest,
    ) -> Result<CredentialProviderResponse, PluginExecError>;
}

/// Observes runs of providers. Called on the hot path: must be quick.
pub trait PluginRunObserver: Send + Sync {
    /// A run ended, with success or failure.
    fn plugin_finished(&self, provider: &str, took: Duration, failed: bool);
}

/// A program whose runs are observed.
pub(super) struct ObservedPlugin {
    pub(super) name: String,
    pub(super) program: Arc<dyn PluginExecutor>,
    pub(super) runs: Arc<dyn PluginRunObserver>,
}

#[async_trait]
impl PluginExecutor for ObservedPlugin {
    async fn execute(
        &self,
        request: &CredentialProviderRequest,
    ) -> Result<CredentialProviderResponse, PluginExecError> {
        let began = Instant::now();
        let result = self.program.execute(request).await;
        self.runs.plugin_finished(&self.name, began.elapsed(), result.is_err());
        result
    }
}

/// Why a run returned no credentials. The output is not shown because it may contain a password.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PluginExecError {
    /// Its exit code was not 0.
    #[error(
        "error execing credential provider plugin {name} for image {image}: {status}; standard error is not shown because it may contain a password"
    )]
    Exit {
        /// The program.
        name: String,
        /// The image.
        image: String,
        /// `exit status N`, or `signal: N`.
        status: String,
        /// The first part of its standard error.
        stderr: Secret,
    },
    /// It could not be run to its end.
    #[error("error execing credential provider plugin {name} for image {image}: the plugin {problem}")]
    Run {
        /// The program.
        name: String,
        /// The image.
        image: String,
        /// The problem.
        problem: String,
    },
    /// Its answer is invalid.
    #[error(transparent)]
    Response(#[from] PluginResponseError),
    /// Another error.
    #[error("{0}")]
    Other(String),
}

impl PluginExecError {
    /// The text that kubelet logs, which contains the program's output.
    pub fn kubelet_text(&self) -> Secret {
        match self {
            PluginExecError::Exit { name, image, status, stderr } => Secret::new(format!(
                "error execing credential provider plugin {name} for image {image}: {status}: {}",
                stderr.reveal()
            )),
            PluginExecError::Response(error @ PluginResponseError::Version { actual, .. }) => {
                Secret::new(format!("{error}, actual apiVersion:{}", actual.reveal()))
            }
            other => Secret::new(other.to_string()),
        }
    }
}

/// A program in the directory of providers.
#[derive(Debug)]
pub(crate) struct ProviderProgram {
    name: String,
    path: PathBuf,
    args: Vec<String>,
    env: Vec<(String, Secret)>,
    api_version: String,
}

impl ProviderProgram {
    /// Program of a provider, in this directory.
    pub(crate) fn new(config: &ProviderConfig, dir: impl Into<PathBuf>) -> ProviderProgram {
        ProviderProgram {
            name: config.name.clone(),
            path: dir.into().join(&config.name),
            args: config.args.clone(),
            env: config.env.clone(),
            api_version: config.api_version.clone(),
        }
    }

    /// Returns an error unless the program exists and only root and this user can replace it.
    pub(crate) fn check(&self) -> Result<(), program::TrustError> {
        program::check_program(&self.path).map(drop)
    }
}

#[async_trait]
impl PluginExecutor for ProviderProgram {
    async fn execute(
        &self,
        request: &CredentialProviderRequest,
    ) -> Result<CredentialProviderResponse, PluginExecError> {
        let failed = |problem: String| PluginExecError::Run {
            name: self.name.clone(),
            image: request.image.clone(),
            problem,
        };
        // Checked before each run: it may have been replaced.
        let path = self.path.clone();
        let path = blocking(move || program::check_program(&path)).await;
        let path = path.map_err(|error| failed(format!("is not trusted: {error}")))?;
        let env = self.env.iter().map(|(name, value)| (name.into(), OsString::from(value.reveal())));
        let input = request.encode(&self.api_version);
        let run = ProgramCommand { path: &path, args: &self.args, env: env.collect(), input };
        let ended = program::run(run).await.map_err(|error| failed(error.to_string()))?;
        if !ended.status.success() {
            return Err(PluginExecError::Exit {
                name: self.name.clone(),
                image: request.image.clone(),
                status: exit_text(ended.status),
                stderr: Secret::new(String::from_utf8_lossy(&ended.stderr)),
            });
        }
        Ok(CredentialProviderResponse::decode(&ended.stdout, &self.api_version)?)
    }
}

/// As Go prints it; a signal by its number.
fn exit_text(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal: {signal}"),
        (None, None) => "unknown exit status".to_owned(),
    }
}

/// The environment of a provider, `NAME=value` each; of one name the later counts.
pub fn environment(
    system: impl IntoIterator<Item = String>,
    provider: impl IntoIterator<Item = (String, String)>,
) -> Vec<String> {
    system.into_iter().chain(provider.into_iter().map(|(name, value)| format!("{name}={value}"))).collect()
}
