//! Descriptors: what something is, which digest it has, and how large it is.

use std::collections::BTreeMap;

use larder::reference::Digest;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use super::limits::MAX_ANNOTATIONS;
use super::platform::Platform;
use super::{MediaType, bounded};

/// A pointer to content by its digest.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it points at, as written.
    #[serde(default, deserialize_with = "bounded::or_default")]
    pub media_type: String,
    /// Digest of the content.
    #[serde(deserialize_with = "digest")]
    pub digest: Digest,
    /// Size of the content in bytes, exactly.
    pub size: u64,
    /// Which platform it is for; in indexes.
    #[serde(default)]
    pub platform: Option<Platform>,
    /// Annotations.
    #[serde(default, deserialize_with = "bounded::texts::<MAX_ANNOTATIONS, _>")]
    pub annotations: BTreeMap<String, String>,
    /// Where else the content may be had; foreign layers only, and never followed.
    #[serde(default, deserialize_with = "bounded::list::<MAX_ANNOTATIONS, _, _>")]
    pub urls: Vec<String>,
}

impl Descriptor {
    /// A descriptor of which nothing more is known.
    pub fn new(media_type: impl Into<String>, digest: Digest, size: u64) -> Descriptor {
        Descriptor {
            media_type: media_type.into(),
            digest,
            size,
            platform: None,
            annotations: BTreeMap::new(),
            urls: Vec::new(),
        }
    }

    /// What it points at.
    pub fn kind(&self) -> MediaType {
        MediaType::of(&self.media_type)
    }

    /// Whether it is no image but something said about one (a signature, an attestation), which builders put into the
    /// same index.
    pub fn is_attestation(&self) -> bool {
        self.annotations.contains_key("vnd.docker.reference.type")
            || self.platform.as_ref().is_some_and(|platform| platform.os == "unknown")
    }
}

fn digest<'de, D: Deserializer<'de>>(from: D) -> Result<Digest, D::Error> {
    let text = String::deserialize(from)?;
    Digest::parse(&text).map_err(|error| {
        D::Error::custom(format_args!("digest {:?}: {error}", text.chars().take(140).collect::<String>()))
    })
}
