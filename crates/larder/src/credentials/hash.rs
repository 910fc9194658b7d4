//! The hash by which pull records tell one credential from another.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

use super::docker_config::Entry;
use super::json;
use super::secret::Secret;

/// SHA-256 of [`hashed_text`], lower-case hex.
pub fn hash(entry: &Entry) -> String {
    let digest = Sha256::digest(hashed_text(entry).reveal());
    digest.iter().fold(String::with_capacity(64), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// What is hashed: a JSON object of the fields that are not empty, in this order, escaped as Go does. Without tokens
/// it is kubelet's; with them the tokens follow, so that two tokens never look equal.
pub fn hashed_text(entry: &Entry) -> Secret {
    let mut text = String::from("{");
    json::push_fields(&mut text, &fields(entry));
    text.push('}');
    Secret::new(text)
}

fn fields(entry: &Entry) -> [(&'static str, &str); 5] {
    [
        ("username", &entry.username),
        ("password", entry.password.reveal()),
        ("email", &entry.email),
        ("identitytoken", entry.identity_token.reveal()),
        ("registrytoken", entry.registry_token.reveal()),
    ]
}
