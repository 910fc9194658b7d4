//! `secrets.json`. Answers in kubelet's mode; where no token is in play, larder's own mode must agree.

use std::collections::BTreeMap;

use larder::credentials::{
    Credential, CredentialSource, NodeDockerConfig, NodeKeyring, PodCredentials, PullSecret, Secret,
    SecretCoordinates, ServiceAccountCoordinates, TokenPolicy,
};
use larder::pod::Pod;
use larder::records::RecordedCredentials;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::docker_config::in_both_modes;
use crate::keyring::{PlainConfig, docker_config, fields};
use crate::{CaseResult, parse};

pub(crate) fn room(op: &str, input: &Value) -> Option<CaseResult> {
    Some(match op {
        "secret_lookup" => in_both_modes(input, secret_lookup),
        "pod_credentials" => parse(input).map(pod_credentials),
        "recorded_credentials" => parse(input).map(recorded_credentials),
        _ => return None,
    })
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct SecretInput {
    r#type: String,
    uid: String,
    namespace: String,
    name: String,
    data: BTreeMap<String, String>,
}

impl From<SecretInput> for PullSecret {
    fn from(plain: SecretInput) -> Self {
        let SecretInput { r#type, uid, namespace, name, data } = plain;
        PullSecret {
            kind: r#type,
            coordinates: SecretCoordinates { uid, namespace, name },
            data: data.into_iter().map(|(key, value)| (key, value.into_bytes())).collect(),
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Coordinates {
    uid: String,
    namespace: String,
    name: String,
}

/// Whose a credential is: null is the node's.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
enum PlainSource {
    Secret(Coordinates),
    ServiceAccount(Coordinates),
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct PlainCredential {
    username: String,
    password: String,
    email: String,
    hash: String,
    source: Option<PlainSource>,
}

impl From<PlainCredential> for Credential {
    fn from(plain: PlainCredential) -> Self {
        let PlainCredential { username, password, email, hash, source } = plain;
        let source = source.map(|source| match source {
            PlainSource::Secret(Coordinates { uid, namespace, name }) => {
                CredentialSource::Secret(SecretCoordinates { uid, namespace, name })
            }
            PlainSource::ServiceAccount(Coordinates { uid, namespace, name }) => {
                CredentialSource::ServiceAccount(ServiceAccountCoordinates { uid, namespace, name })
            }
        });
        Credential { username, password: Secret::new(password), email, hash, source, ..Credential::default() }
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct SecretLookup {
    secrets: Vec<Value>,
    node_config: Value,
    image: String,
}

fn secret_lookup(input: &SecretLookup, tokens: TokenPolicy) -> CaseResult {
    let secrets = input.secrets.iter().map(|secret| parse::<SecretInput>(secret).map(PullSecret::from));
    let secrets = secrets.collect::<Result<Vec<_>, _>>()?;
    let node: Option<PlainConfig> = parse(&input.node_config)?;
    let node = NodeDockerConfig::fixed(&docker_config(node.unwrap_or_default()));
    let sources = NodeKeyring::new(node, Vec::new()).with_tokens(tokens);
    let runtime = tokio::runtime::Builder::new_current_thread().build().map_err(|error| error.to_string())?;
    Ok(match runtime.block_on(sources.lookup(&(&input.image).into(), &secrets, &Pod::default())) {
        Ok(found) => json!({
            "found": !found.is_empty(),
            "credentials": found.iter().map(tracked).collect::<Vec<_>>(),
        }),
        Err(error) => json!({"error": error.to_string()}),
    })
}

fn tracked(credential: &Credential) -> Value {
    let mut fields = fields(credential);
    fields.insert("hash".into(), credential.hash.clone().into());
    fields.insert("source".into(), credential.source.as_ref().map_or(Value::Null, source));
    fields.into()
}

fn source(source: &CredentialSource) -> Value {
    match source {
        CredentialSource::Secret(secret) => json!({"secret": secret_at(secret)}),
        CredentialSource::ServiceAccount(account) => json!({"service_account": account_at(account)}),
    }
}

fn secret_at(secret: &SecretCoordinates) -> Value {
    json!({"uid": secret.uid, "namespace": secret.namespace, "name": secret.name})
}

fn account_at(account: &ServiceAccountCoordinates) -> Value {
    json!({"uid": account.uid, "namespace": account.namespace, "name": account.name})
}

fn hashed(secret: &SecretCoordinates, hash: &str) -> Value {
    let mut at = secret_at(secret);
    at["credentialHash"] = hash.into();
    at
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct FoundCredentials {
    found: Vec<PlainCredential>,
}

fn pod_credentials(input: FoundCredentials) -> Value {
    let found: Vec<Credential> = input.found.into_iter().map(Credential::from).collect();
    let PodCredentials { secrets, service_account } = PodCredentials::from_lookup(&found);
    json!({
        "secrets": secrets.iter().map(|(secret, hash)| hashed(secret, hash)).collect::<Vec<_>>(),
        "service_account": service_account.as_ref().map(account_at),
    })
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct UsedCredential {
    used: Option<PlainCredential>,
}

fn recorded_credentials(input: UsedCredential) -> Value {
    let used = input.used.map(Credential::from);
    let recorded = match RecordedCredentials::of(used.as_ref()) {
        RecordedCredentials::NotRecorded => Value::Null,
        RecordedCredentials::NodePodsAccessible => json!({"nodePodsAccessible": true}),
        RecordedCredentials::Secret(secret, hash) => json!({"kubernetesSecrets": [hashed(&secret, &hash)]}),
        RecordedCredentials::ServiceAccount(account) => {
            json!({"kubernetesServiceAccounts": [account_at(&account)]})
        }
    };
    json!({"recorded": recorded})
}
