//! Manifests and indexes, and the distinction between them.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::limits::{MAX_ANNOTATIONS, MAX_BYTES, MAX_LAYERS, MAX_MANIFESTS};
use super::media_type::is_image_layer;
use super::platform::PlatformMatcher;
use super::{ArtifactManifest, Descriptor, ManifestError, MediaType, bounded};

/// A document that a registry serves under `/manifests/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ManifestOrIndex {
    /// The manifest of one image.
    Manifest(Box<ImageManifest>),
    /// The manifest of an artifact.
    Artifact(Box<ArtifactManifest>),
    /// A list of manifests.
    Index(ImageIndex),
}

/// The manifest of one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageManifest {
    /// Its config, whose digest is the image ID.
    pub config: Descriptor,
    /// Its layers, from the bottom up; each of a media type that can be unpacked.
    pub layers: Vec<Descriptor>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
}

/// A list of manifests, usually one for each platform.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageIndex {
    /// Its entries, in the order of the document.
    pub manifests: Vec<Descriptor>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
}

/// An entry of an index that may lead to the requested image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ManifestCandidate<'a> {
    /// The entry.
    pub descriptor: &'a Descriptor,
    /// Whether the index declares the platform; if not, the content of the entry decides.
    pub matches: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ManifestDocument {
    #[serde(default, deserialize_with = "bounded::or_default")]
    schema_version: u64,
    #[serde(default, deserialize_with = "bounded::or_default")]
    media_type: String,
    #[serde(default, deserialize_with = "bounded::or_default")]
    artifact_type: String,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default, deserialize_with = "some_list::<MAX_LAYERS, _>")]
    layers: Option<Vec<Descriptor>>,
    #[serde(default, deserialize_with = "some_list::<MAX_MANIFESTS, _>")]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default, deserialize_with = "bounded::present")]
    fs_layers: bool,
    #[serde(default, deserialize_with = "bounded::texts::<MAX_ANNOTATIONS, _>")]
    annotations: BTreeMap<String, String>,
}

/// A list field that is present, possibly `null`.
fn some_list<'de, const N: usize, D: serde::Deserializer<'de>>(
    from: D,
) -> Result<Option<Vec<Descriptor>>, D::Error> {
    bounded::list::<N, _, _>(from).map(Some)
}

impl ManifestOrIndex {
    /// Parses a manifest or an index. The type in the document counts first, then `media_type` (of the descriptor that
    /// points at it, or of the response): a digest covers the former and not the latter.
    pub fn parse(raw: &[u8], media_type: &str) -> Result<ManifestOrIndex, ManifestError> {
        if raw.len() > MAX_BYTES {
            return Err(ManifestError::TooLarge { size: raw.len() as u64 });
        }
        if MediaType::of(media_type) == MediaType::SchemaOne {
            return Err(ManifestError::SchemaOne);
        }
        let written: ManifestDocument = bounded::object(raw)?;
        let kind = written.kind(media_type)?;
        match (kind, written.config) {
            (MediaType::Index, None) if written.layers.is_none() => Ok(ManifestOrIndex::Index(ImageIndex {
                manifests: written.manifests.unwrap_or_default(),
                annotations: written.annotations,
            })),
            (MediaType::Manifest, Some(config)) if written.manifests.is_none() => {
                let layers = written.layers.unwrap_or_default();
                if let Some(artifact_type) = artifact_type(&written.artifact_type, &config, &layers) {
                    let annotations = written.annotations;
                    let artifact = ArtifactManifest { artifact_type, config, layers, annotations };
                    return Ok(ManifestOrIndex::Artifact(Box::new(artifact)));
                }
                ImageManifest::new(config, layers, written.annotations)
                    .map(|manifest| ManifestOrIndex::Manifest(Box::new(manifest)))
            }
            (MediaType::Manifest, None) if written.manifests.is_none() => {
                Err(ManifestError::Malformed(serde::de::Error::missing_field("config")))
            }
            _ => Err(ManifestError::Ambiguous),
        }
    }
}

impl ManifestDocument {
    fn kind(&self, media_type: &str) -> Result<MediaType, ManifestError> {
        if self.schema_version == 1 || self.fs_layers {
            return Err(ManifestError::SchemaOne);
        }
        for said in [self.media_type.as_str(), media_type] {
            match MediaType::of(said) {
                MediaType::SchemaOne => return Err(ManifestError::SchemaOne),
                kind @ (MediaType::Index | MediaType::Manifest) => return Ok(kind),
                _ => {}
            }
        }
        // OCI documents need not name their type, and some servers send them as plain JSON.
        let unnamed = self.media_type.is_empty() && is_vague(media_type);
        match (self.manifests.is_some(), self.layers.is_some() || self.config.is_some()) {
            (true, true) => Err(ManifestError::Ambiguous),
            (true, false) if unnamed => Ok(MediaType::Index),
            (false, true) if unnamed => Ok(MediaType::Manifest),
            _ => {
                let said = if self.media_type.is_empty() { media_type } else { &self.media_type };
                Err(ManifestError::UnknownType(said.chars().take(200).collect()))
            }
        }
    }
}

/// The type of content other than an image; `None` for an image. Neither layers nor a config of other kinds are an
/// image's.
fn artifact_type(said: &str, config: &Descriptor, layers: &[Descriptor]) -> Option<String> {
    let is_config = config.kind() == MediaType::Config || is_vague(&config.media_type);
    let has_image_layers = layers.iter().any(|layer| is_image_layer(&layer.media_type));
    if is_config && (layers.is_empty() || has_image_layers) {
        return None;
    }
    let first = layers.first().map_or("", |layer| &layer.media_type);
    let of_config = if is_config || config.media_type == EMPTY { "" } else { &config.media_type };
    let named = [said, of_config, first].into_iter().find(|text| !text.is_empty()).unwrap_or("unknown");
    Some(named.chars().filter(|c| !c.is_control()).take(200).collect())
}

/// The media type of an empty config.
const EMPTY: &str = "application/vnd.oci.empty.v1+json";

/// Whether a media type is too general to identify a document.
fn is_vague(media_type: &str) -> bool {
    let bare = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    matches!(
        bare.as_str(),
        "" | "application/json" | "text/plain" | "application/octet-stream" | "binary/octet-stream"
    )
}

impl ImageManifest {
    fn new(
        config: Descriptor,
        layers: Vec<Descriptor>,
        annotations: BTreeMap<String, String>,
    ) -> Result<ImageManifest, ManifestError> {
        if config.size > MAX_BYTES as u64 {
            return Err(ManifestError::TooLarge { size: config.size });
        }
        for layer in &layers {
            let digest = || layer.digest.clone();
            match layer.kind() {
                MediaType::Layer(_) if layer.urls.is_empty() => {}
                MediaType::Layer(_) | MediaType::ForeignLayer => {
                    return Err(ManifestError::ForeignLayer { digest: digest() });
                }
                _ => {
                    let media_type = layer.media_type.chars().take(200).collect();
                    return Err(ManifestError::UnknownLayer { digest: digest(), media_type });
                }
            }
        }
        Ok(ImageManifest { config, layers, annotations })
    }

    /// Bytes to fetch in total, layers compressed; a layer that occurs twice counts twice.
    pub fn size(&self) -> u64 {
        self.layers.iter().fold(self.config.size, |sum, layer| sum.saturating_add(layer.size))
    }
}

impl ImageIndex {
    /// The entries that may lead to an image for the platform, best first: those that declare it, then those without a
    /// platform.
    pub fn candidates(&self, platform: &PlatformMatcher) -> Vec<ManifestCandidate<'_>> {
        let mut ranked: Vec<_> = self
            .manifests
            .iter()
            .filter(|entry| entry.may_be_manifest() && !entry.is_attestation())
            .filter_map(|entry| match &entry.platform {
                Some(offered) => {
                    Some((platform.rank(offered)?, ManifestCandidate { descriptor: entry, matches: true }))
                }
                None => Some((usize::MAX, ManifestCandidate { descriptor: entry, matches: false })),
            })
            .collect();
        ranked.sort_by_key(|(rank, _)| *rank); // stable: equals stay in the order of the document
        ranked.into_iter().map(|(_, next)| next).collect()
    }

    /// The platforms of its entries, each once, in the order of the document.
    pub fn platforms(&self) -> Vec<String> {
        let mut offered = Vec::new();
        for entry in self.manifests.iter().filter(|entry| !entry.is_attestation()) {
            if let Some(platform) = &entry.platform {
                let text = platform.to_string();
                if !offered.contains(&text) {
                    offered.push(text);
                }
            }
        }
        offered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";

    fn hex(byte: &str) -> String {
        format!("sha256:{}", byte.repeat(32))
    }

    fn layer() -> Value {
        json!({"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": hex("aa"), "size": 7})
    }

    fn manifest() -> Value {
        json!({"schemaVersion": 2,
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": hex("cc"), "size": 3},
            "layers": [layer()]})
    }

    fn parse(value: &Value, media_type: &str) -> Result<ManifestOrIndex, ManifestError> {
        ManifestOrIndex::parse(value.to_string().as_bytes(), media_type)
    }

    #[test]
    fn a_manifest_is_distinguished_from_an_index_by_type_or_else_by_content() {
        for media_type in [OCI_MANIFEST, "", "application/json; charset=utf-8"] {
            let Ok(ManifestOrIndex::Manifest(read)) = parse(&manifest(), media_type) else {
                panic!("{media_type:?}");
            };
            assert_eq!((read.layers.len(), read.size()), (1, 10));
        }
        let index = json!({"schemaVersion": 2, "manifests": []});
        for media_type in [OCI_INDEX, "", "text/plain"] {
            assert!(matches!(parse(&index, media_type), Ok(ManifestOrIndex::Index(_))), "{media_type:?}");
        }
    }

    #[test]
    fn the_media_type_of_a_document_takes_precedence_over_the_header() {
        let mut value = manifest();
        value["mediaType"] = OCI_MANIFEST.into();
        assert!(matches!(parse(&value, OCI_INDEX), Ok(ManifestOrIndex::Manifest(_))));
    }

    #[test]
    fn a_document_that_could_be_both_is_refused() {
        for media_type in [OCI_MANIFEST, OCI_INDEX, ""] {
            let mut value = manifest();
            value["manifests"] = json!([]);
            assert!(matches!(parse(&value, media_type), Err(ManifestError::Ambiguous)), "{media_type:?}");
        }
    }

    #[test]
    fn a_manifest_of_other_content_is_an_artifact_of_its_type() {
        let document = |config: &str, layer_type: &str, artifact_type: &str| {
            let mut value = manifest();
            value["config"]["mediaType"] = config.into();
            value["layers"][0]["mediaType"] = layer_type.into();
            value["artifactType"] = artifact_type.into();
            value
        };
        let (config, empty) = ("application/vnd.oci.image.config.v1+json", EMPTY);
        let image_layer = "application/vnd.oci.image.layer.v1.tar+gzip";
        for (value, expected) in [
            (document(empty, "text/plain", "application/vnd.example"), "application/vnd.example"),
            (document(empty, "text/plain", ""), "text/plain"),
            (
                document("application/vnd.cncf.helm.config.v1+json", "x/y", ""),
                "application/vnd.cncf.helm.config.v1+json",
            ),
            (
                document(config, "application/vnd.dev.cosign.simplesigning.v1+json", ""),
                "application/vnd.dev.cosign.simplesigning.v1+json",
            ),
            (document(empty, image_layer, "application/vnd.example"), "application/vnd.example"),
        ] {
            let Ok(ManifestOrIndex::Artifact(artifact)) = parse(&value, "") else { panic!("{value}") };
            assert_eq!(artifact.artifact_type, expected);
        }
        let image = document(config, image_layer, "application/vnd.example");
        assert!(
            matches!(parse(&image, ""), Ok(ManifestOrIndex::Manifest(_))),
            "an image with an artifact type"
        );
    }

    #[test]
    fn each_unusable_document_has_its_own_error() {
        let with = |pointer: &str, value: Value| {
            let mut manifest = manifest();
            let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
            manifest.pointer_mut(parent).expect(parent)[key] = value;
            manifest
        };
        let first_layer = |value: Value| with("/layers", json!([value]));
        let mut foreign = layer();
        foreign["urls"] = json!(["https://elsewhere.example/layer"]);
        let mut windows = layer();
        windows["mediaType"] = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip".into();
        let mut encrypted = layer();
        encrypted["mediaType"] = "application/vnd.oci.image.layer.v1.tar+gzip+encrypted".into();
        let mut no_digest = layer();
        no_digest["digest"] = "sha256:../../etc/passwd".into();
        for (document, text) in [
            (json!({"schemaVersion": 1, "fsLayers": [], "history": []}), "schema 1"),
            (json!({"schemaVersion": 2}), "neither"),
            (json!({"schemaVersion": 2, "layers": []}), "malformed document"),
            (with("/mediaType", "application/vnd.example.chart".into()), "neither"),
            (with("/config/size", (5 << 20).into()), "too large"),
            (with("/config/size", (-1).into()), "malformed document"),
            (first_layer(foreign), "foreign"),
            (first_layer(windows), "foreign"),
            (first_layer(encrypted), "unsupported media type"),
            (first_layer(no_digest), "malformed document"),
            (json!([]), "malformed document"),
        ] {
            let error = parse(&document, "").expect_err(&document.to_string());
            assert!(error.to_string().contains(text), "{document}: {error}");
        }
        assert!(matches!(
            parse(&json!({}), "application/vnd.docker.distribution.manifest.v1+prettyjws"),
            Err(ManifestError::SchemaOne)
        ));
        let huge = vec![b' '; MAX_BYTES + 1];
        assert!(matches!(ManifestOrIndex::parse(&huge, ""), Err(ManifestError::TooLarge { .. })));
    }

    #[test]
    fn a_field_that_occurs_twice_is_refused() {
        let text = manifest().to_string().replacen("\"layers\"", "\"layers\":[],\"layers\"", 1);
        assert!(matches!(ManifestOrIndex::parse(text.as_bytes(), ""), Err(ManifestError::Malformed(_))));
    }

    #[test]
    fn lists_without_end_and_deep_nesting_are_refused() {
        let mut value = manifest();
        value["layers"] = json!(vec![layer(); MAX_LAYERS + 1]);
        assert!(matches!(parse(&value, ""), Err(ManifestError::Malformed(_))));
        value["layers"] = json!(vec![layer(); MAX_LAYERS]);
        assert!(parse(&value, "").is_ok());
        let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        let text = format!("{{\"schemaVersion\":2,\"layers\":{nested}}}");
        assert!(matches!(ManifestOrIndex::parse(text.as_bytes(), ""), Err(ManifestError::Malformed(_))));
    }

    #[test]
    fn the_best_platform_is_first_and_unnamed_ones_are_last() {
        let entry = |digest: &str, platform: Value| json!({"mediaType": OCI_MANIFEST, "digest": hex(digest), "size": 1, "platform": platform});
        let mut attestation = entry("ff", json!({"os": "unknown", "architecture": "unknown"}));
        attestation["annotations"] = json!({"vnd.docker.reference.type": "attestation-manifest"});
        let index = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [
            attestation,
            entry("01", Value::Null),
            entry("02", json!({"os": "windows", "architecture": "amd64"})),
            entry("03", json!({"os": "linux", "architecture": "arm", "variant": "v6"})),
            entry("04", json!({"os": "linux", "architecture": "arm", "variant": "v7"})),
        ]});
        let Ok(ManifestOrIndex::Index(index)) = parse(&index, "") else { panic!("an index") };
        let wanted = PlatformMatcher::for_platform(&"linux/arm/v7".parse().unwrap());
        let found: Vec<_> = index
            .candidates(&wanted)
            .iter()
            .map(|next| next.descriptor.digest.hex()[..2].to_owned())
            .collect();
        assert_eq!(found, ["04", "03", "01"]);
        assert_eq!(index.platforms(), ["windows/amd64", "linux/arm/v6", "linux/arm/v7"]);
    }
}
