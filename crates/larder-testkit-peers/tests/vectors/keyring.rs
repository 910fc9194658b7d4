//! `keyring_match.json`.

use std::collections::BTreeMap;

use larder::credentials::{Credential, CredentialLocation, DockerConfig, DockerConfigEntry, Keyring, Secret};
use larder::internals;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{CaseResult, parse};

/// An entry of a docker config as the vectors write it.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PlainEntry {
    username: String,
    password: String,
    email: String,
}

pub(crate) type PlainConfig = BTreeMap<String, PlainEntry>;

impl From<PlainEntry> for DockerConfigEntry {
    fn from(plain: PlainEntry) -> Self {
        let PlainEntry { username, password, email } = plain;
        DockerConfigEntry { username, password: Secret::new(password), email, ..DockerConfigEntry::default() }
    }
}

pub(crate) fn docker_config(plain: PlainConfig) -> DockerConfig {
    let entries = plain.into_iter().map(|(location, entry)| (location, entry.into())).collect();
    DockerConfig { entries, ..DockerConfig::default() }
}

/// The fields of a credential that are sent or hashed, empty ones left out.
pub(crate) fn fields(credential: &Credential) -> Map<String, Value> {
    [
        ("username", credential.username.as_str()),
        ("password", credential.password.reveal()),
        ("email", &credential.email),
        ("identity_token", credential.identity_token.reveal()),
        ("registry_token", credential.registry_token.reveal()),
    ]
    .into_iter()
    .filter(|(_, value)| !value.is_empty())
    .map(|(name, value)| (name.to_owned(), value.into()))
    .collect()
}

pub(crate) fn room(op: &str, input: &Value) -> Option<CaseResult> {
    Some(match op {
        "url_match" => parse(input).map(|input| url_match(&input)),
        "is_default_registry" => parse(input).map(|input| is_default_registry(&input)),
        "index_keys" => parse(input).map(index_keys),
        "keyring_lookup" => parse(input).map(keyring_lookup),
        _ => return None,
    })
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct UrlMatch {
    pattern: String,
    target: String,
}

fn url_match(input: &UrlMatch) -> Value {
    match internals::url_match(&input.pattern, &input.target) {
        Some(matches) => json!({"match": matches}),
        None => json!({"match": false, "pattern_error": true}),
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct LookupImage {
    image: String,
}

fn is_default_registry(input: &LookupImage) -> Value {
    json!({"default_registry": internals::is_default_registry(&input.image)})
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct IndexKeys {
    entries: Vec<String>,
}

fn index_keys(input: IndexKeys) -> Value {
    let mut keyring = Keyring::default();
    let entries = input.entries.into_iter().map(|location| (location, PlainEntry::default())).collect();
    keyring.add(&docker_config(entries), None, &CredentialLocation::default());
    json!({"keys": keyring.keys().collect::<Vec<_>>()})
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct CredentialLookupCase {
    configs: Vec<PlainConfig>,
    image: String,
}

fn keyring_lookup(input: CredentialLookupCase) -> Value {
    let mut keyring = Keyring::default();
    for config in input.configs {
        keyring.add(&docker_config(config), None, &CredentialLocation::default());
    }
    let found = keyring.lookup(&input.image);
    json!({"found": !found.is_empty(), "credentials": found.iter().map(fields).collect::<Vec<_>>()})
}
