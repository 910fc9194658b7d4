//! Which credentials a pull may use: pull secrets of the pod, docker config files of the node, and providers.
//!
//! ```text
//! secrets of the pod -> pull_secrets ┐
//! files of the node  -> node_files   ┼-> docker_config -> keyring -> Sources::lookup -> credentials, in order
//! programs -> helpers, then plugins  ┘
//! ```
//!
//! Read [`NodeKeyring::lookup`] first. The rules are kubelet's, but for identity and registry tokens, which kubelet
//! drops and larder keeps ([`TokenPolicy`] is the switch).
//!
//! Promises: a password or token never prints, neither in `Debug` nor in an error; no config file or secret panics,
//! and none costs more than linear time and memory; a config file is read up to [`MAX_CONFIG_BYTES`].

mod auth;
mod config_file;
mod credential;
mod docker_config;
pub(crate) mod hash;
pub mod helpers;
pub(crate) mod json;
mod keyring;
pub(crate) mod matching;
mod node_files;
mod node_keyring;
pub mod plugin;
mod pod_credentials;
mod program;
mod program_results;
#[cfg(test)]
mod properties;
mod pull_secrets;
mod search;
mod secret;

pub use auth::{AuthError, decode_auth, encode_auth};
pub use config_file::{
    ConfigFileError, ConfigFileProblem, DockerConfigFormat, MAX_CONFIG_BYTES, read_config_file,
};
pub use credential::{
    Credential, CredentialLocation, CredentialSource, SecretCoordinates, ServiceAccountCoordinates,
};
pub use docker_config::{
    ConfigError, DockerConfig, DockerConfigEntry, TokenPolicy, encode_entry, parse_config_json,
    parse_dockercfg,
};
pub use hash::hash;
pub use keyring::Keyring;
pub use node_files::NodeDockerConfig;
pub use node_keyring::{CredentialProvider, CredentialsError, LazyCredentialLookup, NodeKeyring};
pub use pod_credentials::PodCredentials;
pub use program::TrustError;
pub use program_results::{ProgramResult, ProgramResultLog};
pub use pull_secrets::{PullSecret, SecretError};
pub use search::{ConfigSearchResult, SearchPath};
pub use secret::Secret;
