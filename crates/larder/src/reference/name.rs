//! Texts that stand for an image: what callers write, and what backends answer with.

use std::borrow::Borrow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::error::{ReferenceError, ReferenceErrorKind};
use super::{DEFAULT_TAG, Digest, PLATFORM_MARK, Reference, trim_tag_and_digest};

/// Implements the methods that every type of this page has in common with its text.
macro_rules! text {
    ($name:ident) => {
        impl $name {
            /// Takes the text as it is.
            pub fn new(text: impl Into<Self>) -> Self {
                text.into()
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                self.as_str()
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                self.as_str()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self.as_str(), f)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                text.to_owned().into()
            }
        }

        impl From<&String> for $name {
            fn from(text: &String) -> Self {
                text.as_str().into()
            }
        }

        impl From<&$name> for $name {
            fn from(text: &$name) -> Self {
                text.clone()
            }
        }

        impl From<&$name> for String {
            fn from(text: &$name) -> Self {
                text.as_str().to_owned()
            }
        }

        impl From<Digest> for $name {
            fn from(digest: Digest) -> Self {
                String::from(digest).into()
            }
        }

        impl From<&Digest> for $name {
            fn from(digest: &Digest) -> Self {
                digest.as_str().into()
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                self.as_str() == other
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, other: &&str) -> bool {
                self.as_str() == *other
            }
        }

        impl PartialEq<String> for $name {
            fn eq(&self, other: &String) -> bool {
                self.as_str() == other
            }
        }

        impl PartialEq<$name> for str {
            fn eq(&self, other: &$name) -> bool {
                self == other.as_str()
            }
        }

        impl PartialEq<$name> for &str {
            fn eq(&self, other: &$name) -> bool {
                *self == other.as_str()
            }
        }
    };
}

/// Image ID of a backend, such as `sha256:9f86...`: kubelet's `imageRef`. Nothing is asked of the text, since
/// runtimes answer with ids of several forms, and before Kubernetes 1.30 with names.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ImageId(String);

/// Layer ID of a backend: the digest of its blob, a diff ID, a chain ID, or the short ID of an engine.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerId(String);

text!(ImageId);
text!(LayerId);

macro_rules! owned_text {
    ($name:ident) => {
        impl $name {
            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// Whether there is no text.
            pub fn is_empty(&self) -> bool {
                self.0.is_empty()
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                $name(text)
            }
        }

        impl From<$name> for String {
            fn from(text: $name) -> Self {
                text.0
            }
        }
    };
}

owned_text!(ImageId);
owned_text!(LayerId);

impl ImageId {
    /// The digest that it is, if it is one.
    pub fn digest(&self) -> Option<Digest> {
        Digest::parse(&self.0).ok()
    }
}

/// Image as named by a caller, exactly as written: a name (`busybox:1.36` stays short) or an ID. Any text is
/// accepted; what is wrong with it is an error where its parts are asked for. It is parsed once. Cloning is cheap.
#[derive(Clone, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct ImageName(Arc<NameWithParse>);

struct NameWithParse {
    text: Box<str>,
    parsed: Result<Reference, ReferenceErrorKind>,
}

text!(ImageName);

impl ImageName {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0.text
    }

    /// Returns the parsed name. The error reads `couldn't parse image name "IMAGE": CAUSE`.
    pub fn reference(&self) -> Result<&Reference, ReferenceError> {
        self.0.parsed.as_ref().map_err(|kind| ReferenceError::named(self.as_str(), kind.clone()))
    }

    /// The name as it is sent to the runtime: as written, with `:latest` if it has neither tag nor digest, and without
    /// this machine's platform. It is never qualified or rewritten. Fails as [`reference`](ImageName::reference) does.
    pub fn with_default_tag(&self) -> Result<ImageName, ReferenceError> {
        let parsed = self.reference()?;
        let needs_tag = parsed.tag().is_none() && parsed.digest().is_none();
        let (written, platform) = self.as_str().split_once(PLATFORM_MARK).unwrap_or((self.as_str(), ""));
        if !needs_tag && platform.is_empty() {
            return Ok(self.clone());
        }
        let tag = if needs_tag { format!(":{DEFAULT_TAG}") } else { String::new() };
        let platform = parsed.platform().map(|platform| format!("{PLATFORM_MARK}{platform}"));
        Ok(format!("{written}{tag}{}", platform.unwrap_or_default()).into())
    }

    /// See [`trim_tag_and_digest`].
    pub fn trimmed(&self) -> Result<&str, ReferenceError> {
        trim_tag_and_digest(self.as_str())
    }
}

impl Default for ImageName {
    fn default() -> Self {
        String::new().into()
    }
}

impl From<String> for ImageName {
    fn from(text: String) -> Self {
        let parsed = Reference::parse_kind(&text);
        ImageName(Arc::new(NameWithParse { text: text.into(), parsed }))
    }
}

impl From<ImageName> for String {
    fn from(name: ImageName) -> Self {
        name.as_str().to_owned()
    }
}

impl From<ImageId> for ImageName {
    fn from(id: ImageId) -> Self {
        id.0.into()
    }
}

impl From<&ImageId> for ImageName {
    fn from(id: &ImageId) -> Self {
        id.as_str().into()
    }
}

impl From<Reference> for ImageName {
    fn from(reference: Reference) -> Self {
        let text = reference.to_string().into();
        ImageName(Arc::new(NameWithParse { text, parsed: Ok(reference) }))
    }
}

impl From<&Reference> for ImageName {
    fn from(reference: &Reference) -> Self {
        reference.clone().into()
    }
}

impl PartialEq for ImageName {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for ImageName {}

impl Hash for ImageName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl PartialOrd for ImageName {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ImageName {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.as_str().cmp(other.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_kept_as_written_and_means_the_image_in_full() {
        let name = ImageName::new("busybox");
        let parsed = name.reference().unwrap();
        assert_eq!((parsed.name(), parsed.tag_or_default()), ("docker.io/library/busybox", Some("latest")));
        assert_eq!(name.with_default_tag().unwrap(), "busybox:latest");
        assert_eq!(name.trimmed().unwrap(), "busybox");
        let bad = ImageName::new("Busybox");
        let error = bad.with_default_tag().unwrap_err().to_string();
        assert!(error.starts_with("couldn't parse image name \"Busybox\": "), "{error}");
    }

    #[test]
    fn ids_and_names_are_found_in_maps_by_their_text() {
        let ids = std::collections::HashMap::from([(ImageId::new("sha256:a"), 1)]);
        assert_eq!(ids.get("sha256:a"), Some(&1));
        let names = std::collections::HashSet::from([ImageName::new("a:1")]);
        assert!(names.contains("a:1"));
    }
}
