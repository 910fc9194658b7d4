//! A credential for a registry, with its owner.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::docker_config::DockerConfigEntry;
use super::hash::hash;
use super::json::or_null;
use super::secret::Secret;

/// A credential for a registry.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Credential {
    /// User name; may be empty.
    pub username: String,
    /// Password; may be empty.
    pub password: Secret,
    /// Email; kept because it is part of the hash, never sent.
    pub email: String,
    /// Identity token of OAuth 2, exchanged for access tokens; empty if none.
    pub identity_token: Secret,
    /// Token sent to the registry as it is; empty if none.
    pub registry_token: Secret,
    /// Its owner; `None` when it belongs to the node and every pod on it.
    pub source: Option<CredentialSource>,
    /// Hash of its content, lower-case hex.
    pub hash: String,
    /// Where it was found.
    pub origin: CredentialLocation,
}

/// Where a credential was found. Its owner is [`CredentialSource`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum CredentialLocation {
    /// Given by the caller.
    #[default]
    Caller,
    /// A pull secret of the pod.
    PullSecret,
    /// A docker config of the node or the user.
    ConfigFile,
    /// The credential helper of this name, without `docker-credential-`.
    Helper(String),
    /// The credential provider of this name.
    Provider(String),
}

impl CredentialLocation {
    /// Whether a program returned it, which may return another one each time.
    pub(crate) fn is_program(&self) -> bool {
        matches!(self, CredentialLocation::Helper(_) | CredentialLocation::Provider(_))
    }
}

impl Credential {
    /// The credential that an entry of a docker config stands for.
    pub(crate) fn of(
        entry: &DockerConfigEntry,
        source: Option<&CredentialSource>,
        origin: &CredentialLocation,
    ) -> Self {
        let DockerConfigEntry { username, password, email, identity_token, registry_token } = entry.clone();
        Credential {
            username,
            password,
            email,
            identity_token,
            registry_token,
            source: source.cloned(),
            hash: hash(entry),
            origin: origin.clone(),
        }
    }
}

/// Omits the hash as well: short passwords can be guessed from it.
impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("username", &self.username)
            .field("source", &self.source)
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

/// The owner of a credential.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CredentialSource {
    /// A pull secret.
    Secret(SecretCoordinates),
    /// A service account, by way of a plugin.
    ServiceAccount(ServiceAccountCoordinates),
}

/// Where a pull secret is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct SecretCoordinates {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

/// `NAMESPACE/NAME`.
impl fmt::Display for SecretCoordinates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Where a service account is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServiceAccountCoordinates {
    /// `metadata.uid`.
    #[serde(deserialize_with = "or_null")]
    pub uid: String,
    /// `metadata.namespace`.
    #[serde(deserialize_with = "or_null")]
    pub namespace: String,
    /// `metadata.name`.
    #[serde(deserialize_with = "or_null")]
    pub name: String,
}
