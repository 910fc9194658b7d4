//! The request to a provider and its response: one JSON document each. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use zeroize::Zeroizing;

use crate::config::GoDuration;
use crate::credentials::json;
use crate::credentials::{DockerConfig, DockerConfigEntry, Secret};

/// The current version of the protocol.
pub(super) const V1: &str = "credentialprovider.kubelet.k8s.io/v1";
/// All versions, as kubelet lists them.
pub(super) const VERSIONS: [&str; 3] =
    [V1, "credentialprovider.kubelet.k8s.io/v1alpha1", "credentialprovider.kubelet.k8s.io/v1beta1"];

/// A request to a provider.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CredentialProviderRequest {
    /// The repository, normalised, without tag and digest.
    pub image: String,
    /// A token of the pod's service account; empty without.
    pub token: Secret,
    /// Annotations of the service account that the provider requires.
    pub annotations: BTreeMap<String, String>,
}

/// A provider's response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialProviderResponse {
    /// The cache key type: `Image`, `Registry` or `Global`; not validated.
    pub cache_key_type: String,
    /// The cache duration; `None` uses the configuration.
    pub cache_duration: Option<GoDuration>,
    /// The credentials, by pattern.
    pub auth: DockerConfig,
}

/// Why a response is invalid. Never quotes the content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PluginResponseError {
    /// It has another version than the request.
    #[error("apiVersion from credential plugin response did not match expected apiVersion:{expected}")]
    Version {
        /// The configured one.
        expected: String,
        /// The version in the response, which could be a password.
        actual: Secret,
    },
    /// It cannot be decoded.
    #[error("error decoding credential provider plugin response from stdout")]
    Decode,
}

impl CredentialProviderRequest {
    /// One line, with its end. Holds the token.
    pub fn encode(&self, api_version: &str) -> Zeroizing<Vec<u8>> {
        let document = RequestDocument {
            kind: "CredentialProviderRequest",
            api_version,
            image: &self.image,
            service_account_token: self.token.reveal(),
            service_account_annotations: &self.annotations,
        };
        let mut text = json::encode(&document, 1024 + self.token.reveal().len() * 6);
        text.push(b'\n');
        text
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RequestDocument<'a> {
    kind: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    api_version: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    image: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    service_account_token: &'a str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    service_account_annotations: &'a BTreeMap<String, String>,
}

impl CredentialProviderResponse {
    /// Decodes the standard output of a provider of this version. Strict: an unknown field is an error.
    pub fn decode(
        stdout: &[u8],
        api_version: &str,
    ) -> Result<CredentialProviderResponse, PluginResponseError> {
        let head: ApiVersionHeader =
            serde_json::from_slice(stdout).map_err(|_| PluginResponseError::Decode)?;
        if head.api_version != api_version {
            let actual = Secret::new(head.api_version);
            return Err(PluginResponseError::Version { expected: api_version.to_owned(), actual });
        }
        let text: ResponseDocument =
            serde_json::from_slice(stdout).map_err(|_| PluginResponseError::Decode)?;
        if text.kind != "CredentialProviderResponse" {
            return Err(PluginResponseError::Decode);
        }
        let entry = |auth: AuthText| DockerConfigEntry {
            username: auth.username.unwrap_or_default(),
            password: auth.password.unwrap_or_default(),
            ..DockerConfigEntry::default()
        };
        let entries = text.auth.unwrap_or_default().into_iter();
        let entries = entries.map(|(pattern, auth)| (pattern, entry(auth.unwrap_or_default()))).collect();
        Ok(CredentialProviderResponse {
            cache_key_type: text.cache_key_type.unwrap_or_default(),
            cache_duration: text.cache_duration,
            auth: DockerConfig { entries, ..DockerConfig::default() },
        })
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ApiVersionHeader {
    #[serde(default)]
    api_version: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ResponseDocument {
    #[serde(default)]
    kind: String,
    #[serde(rename = "apiVersion")]
    _api_version: String,
    cache_key_type: Option<String>,
    cache_duration: Option<GoDuration>,
    auth: Option<BTreeMap<String, Option<AuthText>>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct AuthText {
    username: Option<String>,
    #[serde(deserialize_with = "hidden")]
    password: Option<Secret>,
}

/// Wiped, even if a later part of the response is invalid.
fn hidden<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Secret>, D::Error> {
    Ok(Option::<String>::deserialize(from)?.map(Secret::new))
}
