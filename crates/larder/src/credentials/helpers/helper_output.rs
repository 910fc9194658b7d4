//! Decodes a helper's answer to `get`. Pure.

use crate::credentials::docker_config::DockerConfigEntry;
use crate::credentials::json::{self, JsonScanner};
use crate::credentials::secret::Secret;

/// The user name of an answer whose secret is an identity token.
const TOKEN_USER: &str = "<token>";
/// The protocol's messages for a missing credential.
const NONE: [&str; 2] = ["credentials not found in native keychain", "credentials not found"];

/// Whether a failed helper reports that it has no credentials for this server.
pub(super) fn is_not_found(stdout: &[u8]) -> bool {
    let text = String::from_utf8_lossy(stdout);
    NONE.contains(&text.trim())
}

/// The credential in an answer; `None` if it is invalid.
pub(super) fn decode(stdout: &[u8]) -> Option<DockerConfigEntry> {
    let text = json::text_of(stdout);
    let mut reader = JsonScanner::new(&text);
    let (mut username, mut secret) = (String::new(), Secret::default());
    let has_object = reader
        .object("an answer", |reader, field| {
            if json::is_field(field, "Username") {
                username = reader.string("Username")?.unwrap_or_default();
            } else if json::is_field(field, "Secret") {
                secret = Secret::new(reader.string("Secret")?.unwrap_or_default());
            } else {
                reader.skip()?;
            }
            Ok(())
        })
        .ok()?;
    reader.end().ok()?;
    if !has_object || secret.is_empty() {
        return None;
    }
    Some(if username == TOKEN_USER {
        DockerConfigEntry { identity_token: secret, ..DockerConfigEntry::default() }
    } else {
        DockerConfigEntry { username, password: secret, ..DockerConfigEntry::default() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_and_identity_tokens_are_distinguished() {
        let entry = decode(br#"{"ServerURL": "r", "Username": "bob", "Secret": "hunter2"}"#).unwrap();
        assert_eq!((entry.username.as_str(), entry.password.reveal()), ("bob", "hunter2"));
        let entry = decode(br#"{"Username": "<token>", "Secret": "it"}"#).unwrap();
        assert_eq!((entry.username.as_str(), entry.identity_token.reveal()), ("", "it"));
        assert!(entry.password.is_empty());
    }

    #[test]
    fn an_invalid_answer_is_none() {
        for text in ["", "null", "[]", "hunter2", "{\"Secret\": 1}", "{\"Username\": \"bob\"}", "{} {}"] {
            assert_eq!(decode(text.as_bytes()), None, "{text}");
        }
    }
}
