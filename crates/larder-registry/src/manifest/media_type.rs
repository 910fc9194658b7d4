//! The media types of images.

use std::fmt;

const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// The config of an image.
pub(super) const IMAGE_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const OCI_FOREIGN_LAYER: &str = "application/vnd.oci.image.layer.nondistributable.v1.tar";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const DOCKER_LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar";
const DOCKER_FOREIGN_LAYER: &str = "application/vnd.docker.image.rootfs.foreign.diff.tar";
const DOCKER_SCHEMA_1: &str = "application/vnd.docker.distribution.manifest.v1+json";
const DOCKER_SCHEMA_1_SIGNED: &str = "application/vnd.docker.distribution.manifest.v1+prettyjws";

/// Beginning of the media types of all layers of a model: `application/vnd.cncf.model.weight.v1.tar+gzip`.
const MODEL: &str = "application/vnd.cncf.model.";

/// The `Accept` header of requests for manifests, in order of preference.
pub(crate) const ACCEPTED_MANIFESTS: [&str; 4] = [OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST];

/// How a layer's archive is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Uncompressed.
    None,
    /// gzip, in one member or several.
    Gzip,
    /// Zstandard, in one frame or several.
    Zstd,
}

/// The kind of content that a descriptor points at.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MediaType {
    /// An index: OCI's image index or Docker's manifest list.
    Index,
    /// The manifest of one image, OCI's or Docker's schema 2.
    Manifest,
    /// The config of an image, OCI's or Docker's.
    Config,
    /// A layer that registries serve.
    Layer(Compression),
    /// A layer that registries do not serve.
    ForeignLayer,
    /// Docker's manifest before 2016, signed or not.
    SchemaOne,
    /// Anything else, as written.
    Other(Box<str>),
}

impl MediaType {
    /// Parses a media type as written in a descriptor or in `Content-Type`, with or without parameters.
    pub fn of(text: &str) -> MediaType {
        let bare = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        match bare.as_str() {
            OCI_INDEX | DOCKER_LIST => MediaType::Index,
            OCI_MANIFEST | DOCKER_MANIFEST => MediaType::Manifest,
            IMAGE_CONFIG | DOCKER_CONFIG => MediaType::Config,
            DOCKER_SCHEMA_1 | DOCKER_SCHEMA_1_SIGNED => MediaType::SchemaOne,
            other => layer(other).unwrap_or_else(|| MediaType::Other(text.chars().take(200).collect())),
        }
    }

    /// Whether registries serve it under `/manifests/`.
    pub fn is_manifest(&self) -> bool {
        matches!(self, MediaType::Index | MediaType::Manifest)
    }
}

/// Whether a media type is that of a layer of images, maybe in a compression that is not known.
pub(super) fn is_image_layer(media_type: &str) -> bool {
    let bare = media_type.to_ascii_lowercase();
    [OCI_LAYER, DOCKER_LAYER, OCI_FOREIGN_LAYER, DOCKER_FOREIGN_LAYER]
        .iter()
        .any(|known| bare.starts_with(known))
}

/// Returns true for the media type of a layer in version 1 of the CNCF model format, maybe in an encoding that is not
/// known.
pub(super) fn is_model_layer(media_type: &str) -> bool {
    let bare = media_type.to_ascii_lowercase();
    bare.strip_prefix(MODEL).is_some_and(|of| of.contains(".v1."))
}

fn layer(bare: &str) -> Option<MediaType> {
    if let Some((_, rest)) = bare.strip_prefix(MODEL).and_then(|of| of.split_once(".v1.tar")) {
        return match rest {
            "" => Some(MediaType::Layer(Compression::None)),
            "+gzip" => Some(MediaType::Layer(Compression::Gzip)),
            "+zstd" => Some(MediaType::Layer(Compression::Zstd)),
            _ => None,
        };
    }
    for (prefix, foreign) in
        [(OCI_LAYER, false), (DOCKER_LAYER, false), (OCI_FOREIGN_LAYER, true), (DOCKER_FOREIGN_LAYER, true)]
    {
        let compression = match bare.strip_prefix(prefix) {
            Some("") => Compression::None,
            Some("+gzip" | ".gzip") => Compression::Gzip,
            Some("+zstd" | ".zstd") => Compression::Zstd,
            _ => continue,
        };
        return Some(if foreign { MediaType::ForeignLayer } else { MediaType::Layer(compression) });
    }
    None
}

impl fmt::Display for MediaType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MediaType::Index => "an index",
            MediaType::Manifest => "a manifest",
            MediaType::Config => "an image config",
            MediaType::Layer(_) => "a layer",
            MediaType::ForeignLayer => "a foreign layer",
            MediaType::SchemaOne => "a manifest of schema 1",
            MediaType::Other(text) => return write!(f, "{text:?}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_types_of_oci_and_docker_are_known() {
        for (text, kind) in [
            (OCI_INDEX, MediaType::Index),
            (DOCKER_LIST, MediaType::Index),
            ("application/vnd.oci.image.manifest.v1+json; charset=utf-8", MediaType::Manifest),
            ("Application/vnd.docker.distribution.manifest.v2+JSON", MediaType::Manifest),
            (DOCKER_CONFIG, MediaType::Config),
            ("application/vnd.oci.image.layer.v1.tar", MediaType::Layer(Compression::None)),
            ("application/vnd.oci.image.layer.v1.tar+gzip", MediaType::Layer(Compression::Gzip)),
            ("application/vnd.oci.image.layer.v1.tar+zstd", MediaType::Layer(Compression::Zstd)),
            ("application/vnd.docker.image.rootfs.diff.tar.gzip", MediaType::Layer(Compression::Gzip)),
            ("application/vnd.docker.image.rootfs.diff.tar.zstd", MediaType::Layer(Compression::Zstd)),
            ("application/vnd.docker.image.rootfs.diff.tar", MediaType::Layer(Compression::None)),
            ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", MediaType::ForeignLayer),
            ("application/vnd.oci.image.layer.nondistributable.v1.tar+zstd", MediaType::ForeignLayer),
            (DOCKER_SCHEMA_1_SIGNED, MediaType::SchemaOne),
        ] {
            assert_eq!(MediaType::of(text), kind, "{text}");
        }
    }

    #[test]
    fn anything_else_is_kept_as_written() {
        let text = "application/vnd.oci.image.layer.v1.tar+encrypted";
        assert_eq!(MediaType::of(text), MediaType::Other(text.into()));
    }
}
