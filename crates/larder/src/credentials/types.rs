//! First draft of the room's types: the signatures other rooms build on.

use std::collections::BTreeMap;
use std::fmt;

use async_trait::async_trait;

use crate::pod::Pod;

/// A password or token. It prints as `****`; [`Secret::reveal`] is the one way to read it.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Secret(String);

impl Secret {
    /// Hides a text.
    pub fn new(text: impl Into<String>) -> Self {
        Secret(text.into())
    }

    /// The text itself, to be sent and never printed.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Whether there is no text.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("****")
    }
}

/// What to show to a registry.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Credential {
    /// User name; may be empty.
    pub username: String,
    /// Password; may be empty.
    pub password: Secret,
    /// Email; kept because it is part of the hash, never sent.
    pub email: String,
    /// OAuth2 identity token, exchanged for access tokens; empty if none.
    pub identity_token: Secret,
    /// Token sent to the registry as it is; empty if none.
    pub registry_token: Secret,
    /// Whose it is; `None` when it belongs to the node and every pod on it.
    pub source: Option<Source>,
    /// Hash of what it holds, lower-case hex.
    pub hash: String,
}

/// Whose credential it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Source {
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

/// Where a service account is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct ServiceAccountCoordinates {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

/// A Kubernetes secret, as far as it concerns pulling.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct PullSecret {
    /// `type`.
    pub kind: String,
    /// Where it is.
    pub coordinates: SecretCoordinates,
    /// `data`, decoded from base64.
    pub data: BTreeMap<String, Vec<u8>>,
}

impl fmt::Debug for PullSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PullSecret")
            .field("kind", &self.kind)
            .field("coordinates", &self.coordinates)
            .finish_non_exhaustive()
    }
}

/// Why credentials could not be looked up. The text is what the pod's status shows; it holds no secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {
    /// A pull secret is broken.
    #[error("{0}")]
    Secret(String),
}

/// A source of credentials outside of docker config files: an exec plugin, a credential helper.
#[async_trait]
pub trait Provider: Send + Sync {
    /// Credentials for a normalised repository, in the order to try them. Trouble is logged and means none.
    async fn provide(&self, repository: &str, pod: &Pod) -> Vec<Credential>;
}

/// Where the node's own credentials come from.
#[derive(Default)]
pub struct Sources {}

impl Sources {
    /// The credentials to try for an image, in order; none means one anonymous pull.
    pub async fn lookup(
        &self,
        _image: &str,
        _secrets: &[PullSecret],
        _pod: &Pod,
    ) -> Result<Vec<Credential>, CredentialsError> {
        Ok(Vec::new())
    }
}

/// A lookup that is made at most once, and only if somebody asks.
pub struct LazyLookup<'a> {
    sources: &'a Sources,
    image: &'a str,
    secrets: &'a [PullSecret],
    pod: &'a Pod,
    found: Option<Result<Vec<Credential>, CredentialsError>>,
}

impl<'a> LazyLookup<'a> {
    /// Prepares a lookup without making it.
    pub fn new(sources: &'a Sources, image: &'a str, secrets: &'a [PullSecret], pod: &'a Pod) -> Self {
        LazyLookup { sources, image, secrets, pod, found: None }
    }

    /// The answer, looked up on the first call.
    pub async fn get(&mut self) -> Result<&[Credential], CredentialsError> {
        if self.found.is_none() {
            self.found = Some(self.sources.lookup(self.image, self.secrets, self.pod).await);
        }
        match self.found.as_ref() {
            Some(Ok(found)) => Ok(found),
            Some(Err(error)) => Err(error.clone()),
            None => Ok(&[]),
        }
    }

    /// The answer, looked up now unless it was before.
    pub async fn into_inner(mut self) -> Result<Vec<Credential>, CredentialsError> {
        match self.found.take() {
            Some(found) => found,
            None => self.sources.lookup(self.image, self.secrets, self.pod).await,
        }
    }
}
