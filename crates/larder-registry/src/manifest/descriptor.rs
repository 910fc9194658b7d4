//! Descriptors: media type, digest and size of content.

use std::collections::BTreeMap;

use larder::reference::{Digest, Platform};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use super::limits::MAX_ANNOTATIONS;
use super::platform::WrittenPlatform;
use super::{MediaType, bounded};

/// A pointer to content by its digest.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Media type, as written.
    #[serde(default, deserialize_with = "bounded::or_default")]
    pub media_type: String,
    /// Digest of the content.
    #[serde(deserialize_with = "digest")]
    pub digest: Digest,
    /// Size of the content in bytes, exactly.
    pub size: u64,
    /// The platform; in indexes. `None` as well if it names neither a system nor an architecture.
    #[serde(default, deserialize_with = "named_platform")]
    pub platform: Option<Platform>,
    /// The type of an artifact; in lists of referrers.
    #[serde(default, deserialize_with = "bounded::or_default")]
    pub artifact_type: String,
    /// Annotations.
    #[serde(default, deserialize_with = "bounded::texts::<MAX_ANNOTATIONS, _>")]
    pub annotations: BTreeMap<String, String>,
    /// Other locations of the content; foreign layers only, and never followed.
    #[serde(default, deserialize_with = "bounded::list::<MAX_ANNOTATIONS, _, _>")]
    pub urls: Vec<String>,
}

impl Descriptor {
    /// A descriptor without optional fields.
    pub fn new(media_type: impl Into<String>, digest: Digest, size: u64) -> Descriptor {
        Descriptor {
            media_type: media_type.into(),
            digest,
            size,
            platform: None,
            artifact_type: String::new(),
            annotations: BTreeMap::new(),
            urls: Vec::new(),
        }
    }

    /// The parsed media type.
    pub fn kind(&self) -> MediaType {
        MediaType::of(&self.media_type)
    }

    /// Returns true if the content may be a manifest or an index: it is said to be, or nothing is said.
    pub fn may_be_manifest(&self) -> bool {
        self.media_type.is_empty() || self.kind().is_manifest()
    }

    /// Returns true for metadata of an image (a signature, an attestation), which builders put into the same
    /// index.
    pub fn is_attestation(&self) -> bool {
        self.annotations.contains_key("vnd.docker.reference.type")
            || self.platform.as_ref().is_some_and(|platform| platform.os == "unknown")
    }
}

/// Go programs write a platform of empty fields where they mean none.
fn named_platform<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Platform>, D::Error> {
    let platform = Option::<WrittenPlatform>::deserialize(from)?.map(Platform::from);
    Ok(platform.filter(|platform| !(platform.os.is_empty() && platform.architecture.is_empty())))
}

fn digest<'de, D: Deserializer<'de>>(from: D) -> Result<Digest, D::Error> {
    let text = String::deserialize(from)?;
    Digest::parse(&text).map_err(|error| {
        D::Error::custom(format_args!("digest {:?}: {error}", text.chars().take(140).collect::<String>()))
    })
}
