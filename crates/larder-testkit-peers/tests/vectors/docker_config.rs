//! `docker_config.json`. Answers in kubelet's mode; where no token is in play, larder's own mode must agree.

use std::collections::BTreeMap;

use larder::credentials::{
    self, ConfigError, DockerConfig, DockerConfigEntry, DockerConfigFormat, SearchPath, TokenPolicy,
    parse_config_json, parse_dockercfg,
};
use larder::internals;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::keyring::PlainEntry;
use crate::{CaseResult, parse};

pub(crate) fn room(op: &str, input: &Value) -> Option<CaseResult> {
    Some(match op {
        "decode_auth" => parse(input).map(|input| decode_auth(&input)),
        "parse_config_json" => in_both_modes(input, |text: &ConfigText, tokens| {
            Ok(parsed(parse_config_json(text.text.as_bytes(), tokens)))
        }),
        "parse_dockercfg" => in_both_modes(input, |text: &ConfigText, tokens| {
            Ok(parsed(parse_dockercfg(text.text.as_bytes(), tokens)))
        }),
        "encode_entry" => parse::<PlainEntry>(input).map(|entry| encode_entry(&entry.into())),
        "hash_credentials" => parse::<PlainEntry>(input).map(|entry| hash_credentials(&entry.into())),
        "find_config" => in_both_modes(input, find_config),
        _ => return None,
    })
}

/// Kubelet's answer. It must be larder's too, unless the input has a token that kubelet ignores.
pub(crate) fn in_both_modes<T: serde::de::DeserializeOwned>(
    input: &Value,
    answer: impl Fn(&T, TokenPolicy) -> CaseResult,
) -> CaseResult {
    let parsed = parse(input)?;
    let kubelet = answer(&parsed, TokenPolicy::Ignore)?;
    let text = input.to_string().to_lowercase();
    let has_token = text.contains("identitytoken") || text.contains("registrytoken");
    let ours = answer(&parsed, TokenPolicy::Keep)?;
    if !has_token && ours != kubelet {
        return Err(format!("keeping tokens, larder answers {ours}"));
    }
    Ok(kubelet)
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct AuthField {
    auth: String,
}

fn decode_auth(input: &AuthField) -> Value {
    match credentials::decode_auth(&input.auth) {
        Ok((username, password)) => json!({"username": username, "password": password.reveal()}),
        Err(error) => json!({"error": error.to_string()}),
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct ConfigText {
    text: String,
}

fn parsed(config: Result<DockerConfig, ConfigError>) -> Value {
    match config {
        Ok(config) => entries(&config),
        Err(_) => json!({"error": ConfigError::KUBELET_TEXT}),
    }
}

fn entries(config: &DockerConfig) -> Value {
    let plain = |entry: &DockerConfigEntry| {
        json!({
            "username": entry.username,
            "password": entry.password.reveal(),
            "email": entry.email,
        })
    };
    let entries: BTreeMap<_, _> =
        config.entries.iter().map(|(location, entry)| (location, plain(entry))).collect();
    json!({"entries": entries})
}

fn encode_entry(entry: &DockerConfigEntry) -> Value {
    json!({"text": credentials::encode_entry(entry).reveal()})
}

fn hash_credentials(entry: &DockerConfigEntry) -> Value {
    json!({"hashed_text": internals::hashed_text(entry).reveal(), "hash": credentials::hash(entry)})
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct FindConfig {
    files: BTreeMap<String, String>,
    search_dirs: Vec<String>,
    config_json: bool,
}

fn find_config(input: &FindConfig, tokens: TokenPolicy) -> CaseResult {
    let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
    for (path, text) in &input.files {
        let path = dir.path().join(path);
        let parent = path.parent().ok_or("a file without a directory")?;
        fs_err::create_dir_all(parent).map_err(|error| error.to_string())?;
        fs_err::write(&path, text).map_err(|error| error.to_string())?;
    }
    let (name, format) = if input.config_json {
        ("config.json", DockerConfigFormat::ConfigJson)
    } else {
        (".dockercfg", DockerConfigFormat::Dockercfg)
    };
    let files = input.search_dirs.iter().map(|searched| (dir.path().join(searched).join(name), format));
    let found = SearchPath::new(files).find(tokens);
    Ok(match found.path {
        Some(_) => entries(&found.config),
        None => json!({"error": "no docker config was found"}),
    })
}
