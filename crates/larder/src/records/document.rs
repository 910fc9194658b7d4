//! The two documents of the records, in kubelet's own format (`kubelet.config.k8s.io/v1beta1`).
//!
//! Reading is strict: an unknown or repeated field, another case, another kind is an error, as in kubelet. `v1alpha1`
//! is read as well. What is written is one line, with fields and keys in kubelet's order and Go's escapes.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Not;

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::rfc3339::Rfc3339Time;
use crate::credentials::json::{self, or_null};
use crate::credentials::{SecretCoordinates, ServiceAccountCoordinates};
use crate::reference::{Digest, ImageId, ImageName};

const VERSION: &str = "kubelet.config.k8s.io/v1beta1";
const OLDER_VERSION: &str = "kubelet.config.k8s.io/v1alpha1";
const INTENT: &str = "ImagePullIntent";
const PULLED: &str = "ImagePulledRecord";

/// A pull that is running or was interrupted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePullIntent {
    /// The image as requested.
    pub image: ImageName,
}

/// The credentials that give access to an image.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImagePulledRecord {
    /// When it last changed; `None` if the file has no time.
    pub last_updated: Option<Rfc3339Time>,
    /// The runtime's id of the image.
    pub image_ref: ImageId,
    /// Access by name: the name in the pod without tag and digest.
    pub names: BTreeMap<String, ImagePullCredentials>,
}

/// The credentials that give access to an image under one name.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ImagePullCredentials {
    /// Pods with one of these pull secrets.
    #[serde(
        rename = "kubernetesSecrets",
        deserialize_with = "or_null",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub secrets: Vec<RecordedSecret>,
    /// Pods with one of these service accounts.
    #[serde(
        rename = "kubernetesServiceAccounts",
        deserialize_with = "or_null",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub service_accounts: Vec<ServiceAccountCoordinates>,
    /// Every pod on the node.
    #[serde(rename = "nodePodsAccessible", deserialize_with = "or_null", skip_serializing_if = "Not::not")]
    pub node_pods: bool,
}

impl ImagePullCredentials {
    /// Every pod on the node.
    pub fn node() -> ImagePullCredentials {
        ImagePullCredentials { node_pods: true, ..ImagePullCredentials::default() }
    }

    /// Returns true if the record grants no access.
    pub(crate) fn is_empty(&self) -> bool {
        !self.node_pods && self.secrets.is_empty() && self.service_accounts.is_empty()
    }
}

/// A pull secret that an image was pulled with. Its hash is left out of `Debug`: short passwords can be guessed from
/// it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "SecretText", into = "SecretText")]
pub struct RecordedSecret {
    /// Its coordinates.
    pub at: SecretCoordinates,
    /// [Hash](crate::credentials::hash) of its content.
    pub hash: String,
}

impl fmt::Debug for RecordedSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordedSecret").field("at", &self.at).finish_non_exhaustive()
    }
}

/// Why a record cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DocumentError {
    /// Not JSON of this shape.
    #[error("line {line}, column {column}: not a record: {what}")]
    Shape {
        /// From 1.
        line: usize,
        /// From 1.
        column: usize,
        /// Description of the problem.
        what: &'static str,
    },
    /// Of another kind, or of none.
    #[error("unexpected kind {0:?}")]
    Kind(String),
    /// Of another version, maybe a later one.
    #[error("unsupported apiVersion {0:?}: expected {VERSION} or {OLDER_VERSION}")]
    Version(String),
    /// `lastUpdatedTime` is not a time.
    #[error("invalid lastUpdatedTime: expected a time like 2024-10-21T12:26:40Z")]
    Time,
}

/// A document, and whether it has the current version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decoded<T> {
    /// The document.
    pub document: T,
    /// True if the record has the current version, and need not be rewritten.
    pub current_version: bool,
}

/// The file of an intent (by image as requested) or of a record (by image id).
pub fn file_name(key: &str) -> String {
    format!("sha256-{}", Digest::sha256(key).hex())
}

impl ImagePullIntent {
    /// Reads the text of a file.
    pub fn decode(text: &[u8]) -> Result<Decoded<ImagePullIntent>, DocumentError> {
        let read: IntentText = serde_json::from_slice(text).map_err(|error| shape(&error))?;
        let current_version = check_version(&read.kind, INTENT, &read.api_version)?;
        Ok(Decoded { document: ImagePullIntent { image: read.image }, current_version })
    }

    /// The text of its file.
    pub fn encode(&self) -> String {
        line(&IntentText { kind: INTENT.into(), api_version: VERSION.into(), image: self.image.clone() })
    }
}

impl ImagePulledRecord {
    /// Reads the text of a file.
    pub fn decode(text: &[u8]) -> Result<Decoded<ImagePulledRecord>, DocumentError> {
        let read: RecordText = serde_json::from_slice(text).map_err(|error| shape(&error))?;
        let current_version = check_version(&read.kind, PULLED, &read.api_version)?;
        let last_updated = read
            .last_updated_time
            .map(|time| Rfc3339Time::parse(&time).ok_or(DocumentError::Time))
            .transpose()?;
        let RecordText { image_ref, credential_mapping: names, .. } = read;
        Ok(Decoded { document: ImagePulledRecord { last_updated, image_ref, names }, current_version })
    }

    /// The text of its file.
    pub fn encode(&self) -> String {
        line(&RecordText {
            kind: PULLED.into(),
            api_version: VERSION.into(),
            last_updated_time: self.last_updated.map(|time| time.to_string()),
            image_ref: self.image_ref.clone(),
            credential_mapping: self.names.clone(),
        })
    }
}

/// The line of a document as kubelet writes it.
fn line(document: &impl Serialize) -> String {
    let mut text = json::encode(document, 0);
    text.push(b'\n');
    String::from_utf8_lossy(&text).into_owned()
}

/// Serde's texts may quote the content, so only the position is reported.
fn shape(error: &serde_json::Error) -> DocumentError {
    let what = match error.classify() {
        serde_json::error::Category::Eof => "unexpected end of file",
        serde_json::error::Category::Data => "unknown, missing or repeated field, or field of the wrong type",
        serde_json::error::Category::Syntax | serde_json::error::Category::Io => "not JSON",
    };
    DocumentError::Shape { line: error.line(), column: error.column(), what }
}

fn check_version(kind: &str, expected: &str, version: &str) -> Result<bool, DocumentError> {
    if kind != expected {
        return Err(DocumentError::Kind(kind.to_owned()));
    }
    match version {
        VERSION => Ok(true),
        OLDER_VERSION => Ok(false),
        other => Err(DocumentError::Version(other.to_owned())),
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct IntentText {
    #[serde(default, deserialize_with = "or_null")]
    kind: String,
    #[serde(default, deserialize_with = "or_null")]
    api_version: String,
    #[serde(default, deserialize_with = "or_null")]
    image: ImageName,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RecordText {
    #[serde(default, deserialize_with = "or_null")]
    kind: String,
    #[serde(default, deserialize_with = "or_null")]
    api_version: String,
    last_updated_time: Option<String>,
    #[serde(default, deserialize_with = "or_null")]
    image_ref: ImageId,
    #[serde(default, deserialize_with = "without_repeats", skip_serializing_if = "BTreeMap::is_empty")]
    credential_mapping: BTreeMap<String, ImagePullCredentials>,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct SecretText {
    #[serde(deserialize_with = "or_null")]
    uid: String,
    #[serde(deserialize_with = "or_null")]
    namespace: String,
    #[serde(deserialize_with = "or_null")]
    name: String,
    #[serde(deserialize_with = "or_null")]
    credential_hash: String,
}

impl From<SecretText> for RecordedSecret {
    fn from(SecretText { uid, namespace, name, credential_hash }: SecretText) -> RecordedSecret {
        RecordedSecret { at: SecretCoordinates { uid, namespace, name }, hash: credential_hash }
    }
}

impl From<RecordedSecret> for SecretText {
    fn from(RecordedSecret { at, hash }: RecordedSecret) -> SecretText {
        SecretText { uid: at.uid, namespace: at.namespace, name: at.name, credential_hash: hash }
    }
}

/// Reads a mapping in which a repeated name is an error.
fn without_repeats<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, ImagePullCredentials>, D::Error> {
    struct CredentialMappingVisitor;

    impl<'de> Visitor<'de> for CredentialMappingVisitor {
        type Value = BTreeMap<String, ImagePullCredentials>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("image names")
        }

        fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
            Ok(BTreeMap::new())
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut names = BTreeMap::new();
            while let Some((name, access)) = map.next_entry::<String, Option<ImagePullCredentials>>()? {
                if names.insert(name, access.unwrap_or_default()).is_some() {
                    return Err(de::Error::custom("duplicate name"));
                }
            }
            Ok(names)
        }
    }

    deserializer.deserialize_any(CredentialMappingVisitor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_back_as_it_was_written() {
        let secret = RecordedSecret {
            at: SecretCoordinates { uid: "u".into(), namespace: "n".into(), name: "<&>\u{2028}\"".into() },
            hash: "h".into(),
        };
        let access = ImagePullCredentials { secrets: vec![secret], ..ImagePullCredentials::default() };
        let record = ImagePulledRecord {
            last_updated: Some(Rfc3339Time(1_700_000_000)),
            image_ref: "sha256:abc".into(),
            names: BTreeMap::from([("a".into(), access), ("b".into(), ImagePullCredentials::node())]),
        };
        let text = record.encode();
        assert!(text.contains("\\u003c\\u0026\\u003e\\u2028\\\""), "{text}");
        let read = ImagePulledRecord::decode(text.as_bytes()).unwrap();
        assert_eq!((read.document, read.current_version), (record, true));
    }

    #[test]
    fn repeated_keys_and_other_cases_are_refused_without_a_quote() {
        let head = r#"{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1beta1","#;
        for rest in [
            r#""imageRef":"hunter2","imageRef":"r"}"#,
            r#""ImageRef":"hunter2"}"#,
            r#""imageRef":"r","credentialMapping":{"hunter2":{},"hunter2":{}}}"#,
            r#""imageRef":"r","credentialMapping":{"a":{"kubernetesSecrets":["hunter2"]}}}"#,
            r#""imageRef":"r"} hunter2"#,
            r#""imageRef":"hunter2"#,
        ] {
            let error = ImagePulledRecord::decode(format!("{head}{rest}").as_bytes()).expect_err(rest);
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn a_hash_is_not_printed() {
        let secret = RecordedSecret { at: SecretCoordinates::default(), hash: "5f73892c".into() };
        assert!(!format!("{secret:?}").contains("5f73892c"));
    }
}
