//! Reads a `CredentialProviderConfig` from a file, or from the files of a directory.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer};

use crate::config::GoDuration;
use crate::credentials::Secret;
use crate::go_format;
use crate::reference::DigestHasher;

/// The largest configuration file that is read, in bytes.
const LARGEST: u64 = 1 << 20;
const KIND: &str = "CredentialProviderConfig";
const GROUP: &str = "kubelet.config.k8s.io/";
const ENDINGS: [&str; 3] = [".json", ".yaml", ".yml"];

/// One program that gives credentials, as configured. Not checked yet: see [`problems`](super::problems).
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct ProviderConfig {
    /// Its file name in the directory of programs.
    pub name: String,
    /// Images that it is asked for: host with wildcards, port, path prefix.
    pub match_images: Vec<String>,
    /// Cache duration of answers that have none; 0 disables the cache.
    pub default_cache_duration: Option<GoDuration>,
    /// The version of the protocol that it speaks.
    pub api_version: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Its environment, on top of this process's own: name and value.
    #[serde(deserialize_with = "env_entries")]
    pub env: Vec<(String, Secret)>,
    /// Whether and how it gets tokens of service accounts.
    pub token_attributes: Option<TokenAttributes>,
}

/// How a program gets tokens of service accounts.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct TokenAttributes {
    /// The audience of the tokens.
    #[serde(rename = "serviceAccountTokenAudience")]
    pub audience: String,
    /// The cache key of answers: `ServiceAccount` or `Token`.
    pub cache_type: String,
    /// Whether pods without a service account are skipped.
    pub require_service_account: Option<bool>,
    /// Required annotations: accounts without them are skipped.
    #[serde(rename = "requiredServiceAccountAnnotationKeys")]
    pub required_annotation_keys: Vec<String>,
    /// Optional annotations that are sent if present.
    #[serde(rename = "optionalServiceAccountAnnotationKeys")]
    pub optional_annotation_keys: Vec<String>,
}

/// A configuration as it is written: what a decoder makes of a text.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct CredentialProviderConfig {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    providers: Vec<ProviderConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EnvEntry {
    name: String,
    #[serde(default)]
    value: String,
}

fn env_entries<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, Secret)>, D::Error> {
    let entries = Vec::<EnvEntry>::deserialize(deserializer)?;
    Ok(entries.into_iter().map(|EnvEntry { name, value }| (name, Secret::new(value))).collect())
}

/// Reads the text of a file, YAML or JSON. The error states position and cause, never values.
pub type ProviderConfigDecoder<'a> = &'a dyn Fn(&str) -> Result<CredentialProviderConfig, String>;

/// All providers, in the order in which they are asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedProviders {
    /// The providers.
    pub providers: Vec<ProviderConfig>,
    /// `sha256:` of the files, as kubelet's metric has it.
    pub hash: String,
}

/// Why no configuration could be read. The texts are kubelet's where kubelet has them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProviderConfigError {
    /// A file or directory cannot be read.
    #[error("cannot read the credential provider configuration: {0}")]
    Unreadable(io::Error),
    /// A directory has no configuration files.
    #[error("no configuration files found in directory {}", go_format::quote(&.0.display().to_string()))]
    Empty(PathBuf),
    /// A file is wrong.
    #[error("error decoding config {}: {problem}", go_format::quote(&.path.display().to_string()))]
    Decode {
        /// The file.
        path: PathBuf,
        /// Where and what.
        problem: String,
    },
    /// Two providers have one name.
    #[error("duplicate provider name {} found in configuration file(s)", go_format::quote(.0))]
    Duplicate(String),
}

/// Reads a file, or all files of a directory (not of directories in it) that end in `.json`, `.yaml` or `.yml`, by
/// their names. Blocks on the disk.
pub fn load(path: &Path, decode: ProviderConfigDecoder<'_>) -> Result<LoadedProviders, ProviderConfigError> {
    let found = fs_err::metadata(path).map_err(ProviderConfigError::Unreadable)?;
    let files = if found.is_dir() {
        files_of(path).map_err(ProviderConfigError::Unreadable)?
    } else {
        vec![path.to_owned()]
    };
    if files.is_empty() {
        return Err(ProviderConfigError::Empty(path.to_owned()));
    }
    let (mut providers, mut hash) = (Vec::<ProviderConfig>::new(), DigestHasher::sha256());
    for path in files {
        let text = bounded(&path).map_err(ProviderConfigError::Unreadable)?;
        hash.update(&(text.len() as u64).to_be_bytes());
        hash.update(&text);
        let read = providers_of(&text, decode);
        for provider in read.map_err(|problem| ProviderConfigError::Decode { path: path.clone(), problem })? {
            if providers.iter().any(|other| other.name == provider.name) {
                return Err(ProviderConfigError::Duplicate(provider.name));
            }
            providers.push(provider);
        }
    }
    Ok(LoadedProviders { providers, hash: hash.finish().into() })
}

fn files_of(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs_err::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if ENDINGS.iter().any(|ending| name.ends_with(ending)) && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn bounded(path: &Path) -> io::Result<Vec<u8>> {
    if !fs_err::metadata(path)?.is_file() {
        return Err(io::Error::other(format!("{}: not a regular file", path.display())));
    }
    let mut text = Vec::new();
    fs_err::File::open(path)?.take(LARGEST + 1).read_to_end(&mut text)?;
    if text.len() as u64 > LARGEST {
        let what = format!("{}: larger than the limit of 1 MiB", path.display());
        return Err(io::Error::other(what));
    }
    Ok(text)
}

fn providers_of(text: &[u8], decode: ProviderConfigDecoder<'_>) -> Result<Vec<ProviderConfig>, String> {
    let text = str::from_utf8(text).map_err(|_| "not valid UTF-8")?;
    let CredentialProviderConfig { kind, api_version, providers } = decode(text)?;
    let version = api_version.strip_prefix(GROUP);
    if kind != KIND || !matches!(version, Some("v1" | "v1beta1" | "v1alpha1")) {
        let (kind, version) = (go_format::quote(&kind), go_format::quote(&api_version));
        return Err(format!(
            "unsupported kind {kind} of apiVersion {version}: expected {KIND} of {GROUP}v1, v1beta1 or v1alpha1"
        ));
    }
    if version != Some("v1") && providers.iter().any(|provider| provider.token_attributes.is_some()) {
        return Err(format!("unknown field \"tokenAttributes\": requires apiVersion {GROUP}v1"));
    }
    Ok(providers)
}
