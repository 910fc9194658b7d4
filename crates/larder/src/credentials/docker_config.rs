//! Docker config files: `config.json` and the older `.dockercfg`, read as kubelet reads them.
//!
//! One broken entry makes the whole text invalid. The errors here name line, column and registry, never content.

use std::collections::BTreeMap;
use std::fmt;

use zeroize::{Zeroize as _, Zeroizing};

use super::auth;
use super::json::{self, JsonScanner, JsonSyntaxError};
use super::matching;
use super::secret::Secret;
use crate::{go_format, reference};

/// A docker config, with the fields that concern pulls.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct DockerConfig {
    /// Credentials by location: a registry with or without scheme, path and wildcards, as written.
    pub entries: BTreeMap<String, DockerConfigEntry>,
    /// `credsStore`: the helper program for all registries.
    pub creds_store: Option<String>,
    /// `credHelpers`: helper programs by registry.
    pub cred_helpers: BTreeMap<String, String>,
}

impl DockerConfig {
    /// A config with one entry.
    pub fn with_entry(location: impl Into<String>, entry: DockerConfigEntry) -> Self {
        DockerConfig { entries: BTreeMap::from([(location.into(), entry)]), ..DockerConfig::default() }
    }

    /// Number of entries that are ignored because their location is not a URL. The locations are not reported, because
    /// they may contain a password.
    pub fn unusable_entries(&self) -> usize {
        self.entries.keys().filter(|location| matching::key_of(location).is_err()).count()
    }

    /// Returns true if the config refers to helper programs.
    pub(crate) fn uses_helpers(&self) -> bool {
        self.creds_store.is_some() || !self.cred_helpers.is_empty()
    }
}

/// Counts the entries only: a location may carry a password, as in `https://user:password@registry`.
impl fmt::Debug for DockerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DockerConfig")
            .field("entries", &self.entries.len())
            .field("uses_helpers", &self.uses_helpers())
            .finish_non_exhaustive()
    }
}

/// One entry of a docker config.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DockerConfigEntry {
    /// `username`, or the first part of `auth`.
    pub username: String,
    /// `password`, or the second part of `auth`.
    pub password: Secret,
    /// `email`; part of the hash, never sent.
    pub email: String,
    /// `identitytoken`; empty with [`TokenPolicy::Ignore`].
    pub identity_token: Secret,
    /// `registrytoken`; empty with [`TokenPolicy::Ignore`].
    pub registry_token: Secret,
}

/// How identity and registry tokens of an entry are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TokenPolicy {
    /// Keep them and make them part of the hash. The default.
    #[default]
    Keep,
    /// Ignore them, as kubelet does.
    Ignore,
}

/// Why a docker config is invalid. Names the position and the registry, never the content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// Line of the error, from 1.
    pub line: usize,
    /// Column of the error in characters, from 1.
    pub column: usize,
    /// The registry of the entry, if it can be shown.
    pub registry: Option<String>,
    /// The error.
    pub problem: String,
}

impl ConfigError {
    /// Kubelet's text for every broken config file.
    pub const KUBELET_TEXT: &str = "error occurred while trying to unmarshal json";

    fn new(text: &str, registry: Option<String>, JsonSyntaxError { at, problem }: JsonSyntaxError) -> Self {
        let (line, column) = json::line_and_column(text, at);
        ConfigError { line, column, registry, problem }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: ", self.line, self.column)?;
        if let Some(registry) = &self.registry {
            write!(f, "entry {}: ", go_format::quote(registry))?;
        }
        f.write_str(&self.problem)
    }
}

impl std::error::Error for ConfigError {}

/// Reads a `config.json`, also the value of `.dockerconfigjson`: `{"auths": {LOCATION: ENTRY}}`.
pub fn parse_config_json(bytes: &[u8], tokens: TokenPolicy) -> Result<DockerConfig, ConfigError> {
    parse(bytes, |reader, entry_of, config| {
        let has_object = reader.object("a docker config", |reader, field| {
            if json::is_field(field, "auths") {
                read_entries(reader, "\"auths\"", tokens, entry_of, &mut config.entries)
            } else if json::is_field(field, "HttpHeaders") {
                check_texts(reader, "\"HttpHeaders\"")
            } else if json::is_field(field, "credsStore") && reader.next_is_string() {
                config.creds_store = reader.string("\"credsStore\"")?.filter(|helper| !helper.is_empty());
                Ok(())
            } else if json::is_field(field, "credHelpers") {
                config.cred_helpers = read_helpers(reader)?;
                Ok(())
            } else {
                reader.skip()
            }
        });
        has_object.map(drop)
    })
}

/// Reads a `.dockercfg`, also the value of that key in a secret: `{LOCATION: ENTRY}`.
pub fn parse_dockercfg(bytes: &[u8], tokens: TokenPolicy) -> Result<DockerConfig, ConfigError> {
    parse(bytes, |reader, entry_of, config| {
        read_entries(reader, "a docker config", tokens, entry_of, &mut config.entries)
    })
}

/// An entry as it is written to a file: the fields that are not empty, and always `auth`. Holds the password.
pub fn encode_entry(entry: &DockerConfigEntry) -> Secret {
    let auth = auth::encode_auth(&entry.username, &entry.password);
    json::encode_fields(&[
        ("username", &entry.username),
        ("password", entry.password.reveal()),
        ("email", &entry.email),
        ("auth", auth.reveal()),
        ("identitytoken", entry.identity_token.reveal()),
        ("registrytoken", entry.registry_token.reveal()),
    ])
}

/// Reads all of a text with `read`, which leaves in its second argument the entry that it is in.
fn parse(
    bytes: &[u8],
    read: impl FnOnce(&mut JsonScanner<'_>, &mut Option<String>, &mut DockerConfig) -> Result<(), JsonSyntaxError>,
) -> Result<DockerConfig, ConfigError> {
    let text = json::text_of(bytes);
    let mut config = DockerConfig::default();
    let mut entry_of = None;
    let mut reader = JsonScanner::new(&text);
    read(&mut reader, &mut entry_of, &mut config)
        .and_then(|()| reader.end())
        .map_err(|broken| ConfigError::new(&text, entry_of.as_deref().and_then(shown_registry), broken))?;
    Ok(config)
}

/// A repeated list of entries adds to the one before, `null` empties it, as in Go.
fn read_entries(
    reader: &mut JsonScanner<'_>,
    what: &str,
    tokens: TokenPolicy,
    entry_of: &mut Option<String>,
    entries: &mut BTreeMap<String, DockerConfigEntry>,
) -> Result<(), JsonSyntaxError> {
    let has_object = reader.object(what, |reader, location| {
        *entry_of = Some(location.to_owned());
        entries.insert(location.to_owned(), read_entry(reader, tokens)?);
        *entry_of = None;
        Ok(())
    })?;
    if !has_object {
        entries.clear();
    }
    Ok(())
}

fn read_entry(
    reader: &mut JsonScanner<'_>,
    tokens: TokenPolicy,
) -> Result<DockerConfigEntry, JsonSyntaxError> {
    let mut entry = DockerConfigEntry::default();
    let hidden = || Zeroizing::new(String::new());
    let (mut password, mut auth, mut identity_token, mut registry_token) =
        (hidden(), hidden(), hidden(), hidden());
    let mut auth_at = 0;
    let fields: &mut [(&str, &mut String)] = &mut [
        ("username", &mut entry.username),
        ("password", &mut password),
        ("email", &mut entry.email),
        ("auth", &mut auth),
        ("identitytoken", &mut identity_token),
        ("registrytoken", &mut registry_token),
    ];
    let known = match tokens {
        TokenPolicy::Keep => fields.len(),
        TokenPolicy::Ignore => fields.len() - 2,
    };
    read_fields(reader, &mut fields[..known], &mut auth_at)?;
    entry.password = Secret::new(std::mem::take(&mut *password));
    entry.identity_token = Secret::new(std::mem::take(&mut *identity_token));
    entry.registry_token = Secret::new(std::mem::take(&mut *registry_token));
    if !auth.is_empty() {
        (entry.username, entry.password) = auth::decode_auth(&auth)
            .map_err(|error| JsonSyntaxError { at: auth_at, problem: format!("\"auth\" is {error}") })?;
    }
    Ok(entry)
}

fn read_fields(
    reader: &mut JsonScanner<'_>,
    fields: &mut [(&str, &mut String)],
    auth_at: &mut usize,
) -> Result<(), JsonSyntaxError> {
    let has_object = reader.object("an entry", |reader, name| {
        let Some((field, slot)) = fields.iter_mut().find(|(field, _)| json::is_field(name, field)) else {
            return reader.skip();
        };
        if *field == "auth" {
            *auth_at = reader.position();
        }
        // As in Go, a later `null` does not reset an earlier duplicate.
        if let Some(text) = reader.string(&go_format::quote(field))? {
            slot.zeroize();
            **slot = text;
        }
        Ok(())
    });
    has_object.map(drop)
}

/// Checks an object whose values must be strings, and drops them.
fn check_texts(reader: &mut JsonScanner<'_>, what: &str) -> Result<(), JsonSyntaxError> {
    let has_object = reader.object(what, |reader, _| {
        let text = reader.string(&format!("each value of {what}"))?;
        drop(text.map(Zeroizing::new));
        Ok(())
    });
    has_object.map(drop)
}

/// The helpers by registry. Kubelet does not know the field, so nothing in it may make the file invalid.
fn read_helpers(reader: &mut JsonScanner<'_>) -> Result<BTreeMap<String, String>, JsonSyntaxError> {
    let mut helpers = BTreeMap::new();
    if !reader.next_is_object() {
        return reader.skip().map(|()| helpers);
    }
    reader.object("\"credHelpers\"", |reader, registry| {
        if !reader.next_is_string() {
            return reader.skip();
        }
        let helper = reader.string("a helper")?.unwrap_or_default();
        helpers.insert(registry.to_owned(), helper);
        Ok(())
    })?;
    Ok(helpers)
}

/// The host of a location, if it is certainly one. Anything else could be a password.
fn shown_registry(location: &str) -> Option<String> {
    let bare =
        location.strip_prefix("https://").or_else(|| location.strip_prefix("http://")).unwrap_or(location);
    let host = bare.split('/').next().unwrap_or_default();
    let labels_are_short = host.split(['.', ':']).all(|label| label.len() <= 63);
    let looks_like_a_host = host.contains(['.', ':']) || host == "localhost";
    let is_domain = reference::is_domain(&host.replace('*', "x"));
    (labels_are_short && looks_like_a_host && is_domain).then(|| host.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> DockerConfig {
        parse_config_json(text.as_bytes(), TokenPolicy::Keep).expect(text)
    }

    fn error(text: &str) -> String {
        parse_config_json(text.as_bytes(), TokenPolicy::Keep).expect_err(text).to_string()
    }

    #[test]
    fn field_names_match_without_regard_to_case() {
        let config = config(r#"{"AUTHS": {"r.example": {"UserName": "u", "PASSWORD": "p"}}}"#);
        assert_eq!(config.entries["r.example"].username, "u");
        assert_eq!(config.entries["r.example"].password.reveal(), "p");
    }

    #[test]
    fn the_last_duplicate_wins() {
        let config =
            config(r#"{"auths": {"r": {"username": "a", "USERNAME": "b"}, "r": {"password": "p"}}}"#);
        assert_eq!(
            config.entries["r"],
            DockerConfigEntry { password: Secret::new("p"), ..DockerConfigEntry::default() }
        );
    }

    #[test]
    fn null_is_an_empty_value_everywhere() {
        assert_eq!(config("null"), DockerConfig::default());
        assert_eq!(config(r#"{"auths": {"r": null}}"#).entries["r"], DockerConfigEntry::default());
        assert_eq!(
            config(r#"{"auths": {"r": {"auth": null}}, "HttpHeaders": null}"#).entries["r"],
            DockerConfigEntry::default()
        );
        assert_eq!(parse_dockercfg(b"null", TokenPolicy::Keep), Ok(DockerConfig::default()));
    }

    #[test]
    fn a_repeated_list_adds_and_null_empties() {
        let two = config(r#"{"auths": {"a": {}}, "auths": {"b": {}}}"#);
        assert_eq!(two.entries.len(), 2);
        assert_eq!(config(r#"{"auths": {"a": {}}, "auths": null}"#).entries.len(), 0);
    }

    #[test]
    fn tokens_are_kept_or_ignored_as_asked() {
        let text = br#"{"r": {"identitytoken": "it", "registrytoken": "rt"}}"#;
        let kept = parse_dockercfg(text, TokenPolicy::Keep).expect("a config");
        assert_eq!(kept.entries["r"].identity_token.reveal(), "it");
        assert_eq!(kept.entries["r"].registry_token.reveal(), "rt");
        let ignored = parse_dockercfg(text, TokenPolicy::Ignore).expect("a config");
        assert_eq!(ignored.entries["r"], DockerConfigEntry::default());
        let of_another_type = br#"{"r": {"identitytoken": 1}}"#;
        assert!(parse_dockercfg(of_another_type, TokenPolicy::Keep).is_err());
        assert!(parse_dockercfg(of_another_type, TokenPolicy::Ignore).is_ok());
    }

    #[test]
    fn two_tokens_have_two_hashes() {
        let entry =
            |token| DockerConfigEntry { identity_token: Secret::new(token), ..DockerConfigEntry::default() };
        assert_ne!(crate::credentials::hash(&entry("one")), crate::credentials::hash(&entry("two")));
        let registry =
            DockerConfigEntry { registry_token: Secret::new("one"), ..DockerConfigEntry::default() };
        assert_ne!(crate::credentials::hash(&entry("one")), crate::credentials::hash(&registry));
    }

    #[test]
    fn helpers_are_noted() {
        let noted = config(r#"{"credsStore": "desktop", "credHelpers": {"r.example": "ecr", "x": 1}}"#);
        assert_eq!(noted.creds_store.as_deref(), Some("desktop"));
        assert_eq!(noted.cred_helpers, BTreeMap::from([("r.example".to_owned(), "ecr".to_owned())]));
        assert!(noted.uses_helpers());
        assert!(!config(r#"{"credsStore": "", "credHelpers": []}"#).uses_helpers());
        assert!(!config(r#"{"credsStore": 1}"#).uses_helpers());
    }

    #[test]
    fn errors_name_line_column_and_registry() {
        for (text, message) in [
            ("", "line 1, column 1: empty input"),
            ("{\"auths\":", "line 1, column 10: unexpected end of input"),
            ("[]", "line 1, column 1: a docker config must be an object"),
            ("{\n \"auths\": []}", "line 2, column 11: \"auths\" must be an object"),
            (
                "{\"auths\": {\n\"https://r.example/v1/\": {\"auth\": \"pants\"}}}",
                "line 2, column 35: entry \"r.example\": \"auth\" is not valid base64",
            ),
            (
                "{\"auths\": {\"*.r.example:5000\": {\"auth\": \"cGFudHM=\"}}}",
                "line 1, column 41: entry \"*.r.example:5000\": \"auth\" is not the base64 of user:password",
            ),
            (
                "{\"auths\": {\"r.example\": {\"email\": 1}}}",
                "line 1, column 35: entry \"r.example\": \"email\" must be a string",
            ),
            (
                "{\"HttpHeaders\": {\"a\": 1}}",
                "line 1, column 23: each value of \"HttpHeaders\" must be a string",
            ),
            ("{} x", "line 1, column 4: data after the end of the value"),
        ] {
            assert_eq!(error(text), message);
        }
    }

    #[test]
    fn errors_and_debug_texts_hold_no_content() {
        for text in [
            r#"{"auths": {"https://bob:hunter2@r.example": {"auth": "hunter2"}}}"#,
            r#"{"auths": {"hunter2": {"auth": "hunter2"}}}"#,
            r#"{"auths": {"r.example": "hunter2"}}"#,
            r#"{"auths": "hunter2""#,
            "hunter2",
        ] {
            let error = parse_config_json(text.as_bytes(), TokenPolicy::Keep).expect_err(text);
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
        let config = config(r#"{"auths": {"https://bob:hunter2@r.example": {"password": "hunter2"}}}"#);
        assert!(!format!("{config:?} {:?}", config.entries.values()).contains("hunter2"));
    }
}
