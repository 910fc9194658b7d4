//! Kubelet's exec credential providers: programs that give credentials for the images that they are configured for.
//!
//! ```text
//! load -> problems -> Plugins -> Plugin::provide -> cache, or one run of the program -> keyring
//! ```
//!
//! Configuration, protocol, cache and messages are kubelet's (v1.36). Unlike kubelet, larder runs all providers of an
//! image concurrently, reads a bounded answer, refuses a program that other users can replace, and never logs a
//! program's output.

mod accounts;
mod cache;
mod config;
pub(crate) mod exec;
pub(crate) mod keys;
mod provider;
mod validate;
mod wire;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future;

pub use accounts::{
    NoServiceAccountClient, ServiceAccount, ServiceAccountClient, ServiceAccountTokenRequest,
};
pub use config::{
    CredentialProviderConfig, LoadedProviders, ProviderConfig, ProviderConfigDecoder, ProviderConfigError,
    TokenAttributes, load,
};
pub use exec::{PluginExecError, PluginExecutor, PluginRunObserver, environment};
pub use provider::{Plugin, ProvideError, ProvidedCredentials};
pub use validate::problems;
pub use wire::{CredentialProviderRequest, CredentialProviderResponse, PluginResponseError};

use self::exec::ProviderProgram;
use super::credential::{Credential, CredentialLocation, CredentialSource};
use super::keyring::Keyring;
use super::node_keyring::CredentialProvider;
use super::program::TrustError;
use super::program_results::{ProgramResult, ProgramResultLog};
use crate::go_format;
use crate::pod::Pod;

/// Why providers cannot be used, with every error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PluginsError {
    /// The configuration cannot be read.
    #[error(transparent)]
    Load(#[from] ProviderConfigError),
    /// The configuration is invalid.
    #[error("invalid credential provider configuration in {}: {}", .path.display(), go_format::aggregate(.problems.iter().map(String::as_str)))]
    Invalid {
        /// The file or directory.
        path: PathBuf,
        /// The errors, in kubelet's words.
        problems: Vec<String>,
    },
    /// The program of a provider is missing or not trusted.
    #[error("credential provider {}: {cause}", go_format::quote(.name))]
    Program {
        /// The provider.
        name: String,
        /// Why it is not trusted.
        cause: TrustError,
    },
}

impl PluginsError {
    /// The next step.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            PluginsError::Program { cause, .. } => Some(cause.hint()),
            PluginsError::Load(_) | PluginsError::Invalid { .. } => None,
        }
    }
}

/// All providers of a configuration, as one source of credentials.
pub struct Plugins {
    all: Vec<Plugin>,
    config_hash: String,
    /// The directory of the programs.
    dir: PathBuf,
    answers: Option<ProgramResultLog>,
}

impl Plugins {
    /// Reads a configuration and finds its programs. Blocks on the disk.
    pub fn open(
        config: &Path,
        programs: &Path,
        decode: ProviderConfigDecoder<'_>,
        accounts: &Arc<dyn ServiceAccountClient>,
    ) -> Result<Plugins, PluginsError> {
        let loaded = load(config, decode)?;
        let problems = problems(&loaded.providers, true);
        if !problems.is_empty() {
            return Err(PluginsError::Invalid { path: config.to_owned(), problems });
        }
        let plugin = |provider: &ProviderConfig| {
            let program = ProviderProgram::new(provider, programs);
            program.check().map_err(|cause| PluginsError::Program { name: provider.name.clone(), cause })?;
            Ok(Plugin::new(provider, Arc::new(program), Arc::clone(accounts)))
        };
        let plugins = loaded.providers.iter().map(plugin).collect::<Result<_, PluginsError>>()?;
        Ok(Plugins { all: plugins, config_hash: loaded.hash, dir: programs.to_owned(), answers: None })
    }

    /// Providers, in the order of their credentials.
    pub fn new(plugins: Vec<Plugin>) -> Plugins {
        Plugins { all: plugins, config_hash: String::new(), dir: PathBuf::new(), answers: None }
    }

    /// Reports each run to the observer.
    #[must_use]
    pub fn with_run_observer(mut self, runs: &Arc<dyn PluginRunObserver>) -> Plugins {
        self.all = self.all.into_iter().map(|plugin| plugin.observed_by(runs)).collect();
        self
    }

    /// Records the results of lookups.
    #[must_use]
    pub fn with_result_log(self, answers: ProgramResultLog) -> Plugins {
        Plugins { answers: Some(answers), ..self }
    }

    fn note(&self, plugin: &Plugin, repository: &str, answer: ProgramResult) {
        if let Some(answers) = self.answers.as_ref().filter(|_| plugin.matches(repository)) {
            answers.record(repository, CredentialLocation::Provider(plugin.name().to_owned()), answer);
        }
    }

    /// `sha256:` of the configuration that they were made of, as kubelet's metric has it; empty without one.
    pub fn config_hash(&self) -> &str {
        &self.config_hash
    }

    /// The names of all providers.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.all.iter().map(Plugin::name)
    }

    /// The names of the providers of a repository.
    pub fn for_image<'a>(&'a self, repository: &'a str) -> impl Iterator<Item = &'a str> {
        self.all.iter().filter(move |plugin| plugin.matches(repository)).map(Plugin::name)
    }
}

#[async_trait]
impl CredentialProvider for Plugins {
    async fn provide(&self, repository: &str, pod: &Pod) -> Vec<Credential> {
        let asked = self.all.iter().map(|plugin| plugin.provide(repository, pod));
        let mut keyring = Keyring::default();
        for (plugin, provided) in self.all.iter().zip(future::join_all(asked).await) {
            match provided {
                Ok(ProvidedCredentials { auth, account }) => {
                    let gave =
                        if auth.entries.is_empty() { ProgramResult::None } else { ProgramResult::Found };
                    self.note(plugin, repository, gave);
                    let origin = CredentialLocation::Provider(plugin.name().to_owned());
                    keyring.add(&auth, account.map(CredentialSource::ServiceAccount).as_ref(), &origin);
                }
                Err(error) => {
                    self.note(plugin, repository, ProgramResult::Failed(error.to_string()));
                    tracing::warn!(provider = plugin.name(), image = repository, "no credentials: {error}");
                }
            }
        }
        keyring.lookup(repository)
    }

    fn programs(&self) -> Vec<String> {
        let described = |plugin: &Plugin| {
            format!("{} (configuration {})", self.dir.join(plugin.name()).display(), self.config_hash)
        };
        self.all.iter().map(described).collect()
    }
}
