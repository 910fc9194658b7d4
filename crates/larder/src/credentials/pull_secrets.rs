//! Pull secrets of a pod.

use std::collections::BTreeMap;
use std::fmt;

use super::credential::{CredentialLocation, CredentialSource, SecretCoordinates};
use super::docker_config::{ConfigError, DockerConfig, TokenPolicy, parse_config_json, parse_dockercfg};
use super::keyring::Keyring;
use super::node_keyring::CredentialsError;

/// A Kubernetes secret, with the fields that concern pulls. Its data is overwritten when it is dropped.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct PullSecret {
    /// `type`.
    pub kind: String,
    /// Where it is.
    pub coordinates: SecretCoordinates,
    /// `data`, decoded from base64.
    pub data: BTreeMap<String, Vec<u8>>,
}

impl Drop for PullSecret {
    fn drop(&mut self) {
        self.data.values_mut().for_each(zeroize::Zeroize::zeroize);
    }
}

impl fmt::Debug for PullSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PullSecret")
            .field("kind", &self.kind)
            .field("coordinates", &self.coordinates)
            .finish_non_exhaustive()
    }
}

impl PullSecret {
    /// The docker config in it. `None` if it is not for pulling: another type, or no value under the type's own key.
    pub fn docker_config(&self, tokens: TokenPolicy) -> Result<Option<DockerConfig>, CredentialsError> {
        let (key, parse): (_, fn(&[u8], TokenPolicy) -> _) = match self.kind.as_str() {
            "kubernetes.io/dockerconfigjson" => (".dockerconfigjson", parse_config_json),
            "kubernetes.io/dockercfg" => (".dockercfg", parse_dockercfg),
            _ => return Ok(None),
        };
        let Some(value) = self.data.get(key).filter(|value| !value.is_empty()) else { return Ok(None) };
        let config = parse(value, tokens);
        config
            .map(Some)
            .map_err(|cause| Box::new(SecretError { secret: self.coordinates.clone(), key, cause }).into())
    }
}

/// A secret of the right type with an invalid value. Names the position, never the content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("secret {secret}: key {key}: {cause}")]
pub struct SecretError {
    /// Which secret.
    pub secret: SecretCoordinates,
    /// The key in its data.
    pub key: &'static str,
    /// The error.
    pub cause: ConfigError,
}

/// One keyring of all secrets, in their order. One broken secret is an error for all of them.
pub(super) fn keyring(secrets: &[PullSecret], tokens: TokenPolicy) -> Result<Keyring, CredentialsError> {
    let mut keyring = Keyring::default();
    for secret in secrets {
        if let Some(config) = secret.docker_config(tokens)? {
            let source = CredentialSource::Secret(secret.coordinates.clone());
            keyring.add(&config, Some(&source), &CredentialLocation::PullSecret);
        }
    }
    Ok(keyring)
}
