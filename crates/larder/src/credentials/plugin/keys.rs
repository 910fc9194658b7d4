//! The keys of cached answers and of runs in progress: byte strings, as kubelet builds them. Pure.

use std::collections::BTreeMap;

use crate::credentials::{Secret, ServiceAccountCoordinates};
use crate::reference::Digest;

/// The base of an answer for every image.
pub(super) const GLOBAL: &str = "<global>";

/// The host, with its port, of an image.
pub(crate) fn registry_of(image: &str) -> &str {
    image.split('/').next().unwrap_or_default()
}

/// `sha256:` of a token; empty without one.
pub(crate) fn token_hash(token: &Secret) -> String {
    if token.is_empty() {
        return String::new();
    }
    Digest::sha256(token.reveal()).into()
}

/// The part of a cache key that identifies the service account, and its token if answers are cached per token.
pub(crate) fn account_key(
    at: &ServiceAccountCoordinates,
    annotations: &BTreeMap<String, String>,
    token: Option<&Secret>,
) -> Vec<u8> {
    let mut key = Vec::new();
    for text in [&at.namespace, &at.name, &at.uid] {
        push(&mut key, text.as_bytes());
    }
    push_annotations(&mut key, annotations);
    if let Some(token) = token {
        push(&mut key, b"token");
        push(&mut key, token_hash(token).as_bytes());
    }
    key
}

/// The key of an answer for `base` (an image, a registry, or `<global>`) and an account key; an empty account key is
/// every pod.
pub(crate) fn cache_key(base: &str, account_key: &[u8]) -> Vec<u8> {
    let mut key = Vec::new();
    push(&mut key, base.as_bytes());
    push(&mut key, account_key);
    key
}

/// A run for an image, with a token and annotations.
pub(crate) fn flight_key(image: &str, token: &Secret, annotations: &BTreeMap<String, String>) -> Vec<u8> {
    let mut key = Vec::new();
    push(&mut key, image.as_bytes());
    push(&mut key, token_hash(token).as_bytes());
    push_annotations(&mut key, annotations);
    key
}

fn push_annotations(key: &mut Vec<u8>, annotations: &BTreeMap<String, String>) {
    key.extend(u32::try_from(annotations.len()).unwrap_or(u32::MAX).to_be_bytes());
    for (name, value) in annotations {
        push(key, name.as_bytes());
        push(key, value.as_bytes());
    }
}

fn push(key: &mut Vec<u8>, bytes: &[u8]) {
    key.extend(u16::try_from(bytes.len()).unwrap_or(u16::MAX).to_be_bytes());
    key.extend(bytes);
}
