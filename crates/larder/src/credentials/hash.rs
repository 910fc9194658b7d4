//! The hash that identifies a credential in pull records.

use super::docker_config::DockerConfigEntry;
use super::json;
use super::secret::Secret;
use crate::reference::Digest;

/// SHA-256 of the fields of an entry as a JSON object, lower-case hex.
pub fn hash(entry: &DockerConfigEntry) -> String {
    Digest::sha256(hashed_text(entry).reveal()).hex().to_owned()
}

/// The hashed text: a JSON object of the fields that are not empty, in this order, escaped as Go does. Without tokens
/// it is kubelet's; with them the tokens follow, so that two tokens never look equal.
pub(crate) fn hashed_text(entry: &DockerConfigEntry) -> Secret {
    json::encode_fields(&[
        ("username", &entry.username),
        ("password", entry.password.reveal()),
        ("email", &entry.email),
        ("identitytoken", entry.identity_token.reveal()),
        ("registrytoken", entry.registry_token.reveal()),
    ])
}
