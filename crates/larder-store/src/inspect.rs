//! Details of one image or artifact, as JSON texts by their keys.

use std::collections::BTreeMap;

use larder::backend::{Image, ImageDetails};
use larder::reference::{Digest, ImageName};
use larder_registry::manifest::{
    ArtifactFile, ArtifactLayer, ArtifactManifest, Descriptor, ImageConfig, ImageManifest, ManifestError,
    ManifestOrIndex,
};
use serde::{Deserialize, Serialize};

use crate::pull::{StorePuller, image_warnings};
use crate::store::{ImageRecord, Store, StoreError};

/// The media type of the config of a model, in the CNCF model format.
const MODEL_CONFIG: &str = "application/vnd.cncf.model.config.v1+json";
/// Longest text of a model's config that is reported, in characters.
const MAX_TEXT: usize = 256;

/// The image with this name. Blocks.
pub(crate) fn image_details(
    store: &Store,
    puller: &StorePuller,
    name: &ImageName,
) -> Result<Option<ImageDetails>, StoreError> {
    let Some(record) = store.image(name)? else { return Ok(None) };
    let image = Image { fill: store.image_fill(&record.id)?, ..store.to_image(&record) };
    let mut details = ImageDetails { image, ..ImageDetails::default() };
    let mut add = |key: &str, text: String| details.info.insert(key.to_owned(), text);
    if let Some(config) = store.blob(&record.id)? {
        if let Ok(parsed) = ImageConfig::parse(&config) {
            let layers = record.layers.iter().map(|layer| store.layer(&layer.key));
            let layers = layers.collect::<Result<Vec<_>, _>>()?;
            let platform = puller.platform_of(&record);
            let config = Some(&parsed).filter(|_| record.artifact_type.is_empty());
            add("warnings", json(&image_warnings(config, &platform, layers.iter().flatten())));
        }
        add("config", String::from_utf8_lossy(&config).into_owned());
    }
    add("layers", json(&record.layers));
    match own_manifest(store, &record)? {
        Some(OwnManifest::Image(manifest)) => add_annotations(&mut add, &manifest.annotations),
        Some(OwnManifest::Artifact(manifest)) => {
            add_annotations(&mut add, &manifest.annotations);
            let config = store.blob(&manifest.config.digest)?.unwrap_or_default();
            if let Ok(artifact) = ArtifactInfo::new(&manifest, &config) {
                add("artifact", json(&artifact));
            }
        }
        None => {}
    }
    Ok(Some(details))
}

fn add_annotations(
    add: &mut impl FnMut(&str, String) -> Option<String>,
    annotations: &BTreeMap<String, String>,
) {
    if !annotations.is_empty() {
        add("annotations", json(annotations));
    }
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// The manifest of an image or artifact, without the indexes that led to it.
enum OwnManifest {
    Image(Box<ImageManifest>),
    Artifact(Box<ArtifactManifest>),
}

fn own_manifest(store: &Store, record: &ImageRecord) -> Result<Option<OwnManifest>, StoreError> {
    for digest in &record.manifests {
        let Some(raw) = store.blob(digest)? else { continue };
        match ManifestOrIndex::parse(&raw, "") {
            Ok(ManifestOrIndex::Manifest(manifest)) if manifest.config.digest == record.id => {
                return Ok(Some(OwnManifest::Image(manifest)));
            }
            Ok(ManifestOrIndex::Artifact(manifest)) if !record.artifact_type.is_empty() => {
                return Ok(Some(OwnManifest::Artifact(manifest)));
            }
            _ => {}
        }
    }
    Ok(None)
}

/// An artifact as its manifest and config describe it.
#[derive(Debug, Serialize)]
struct ArtifactInfo<'a> {
    r#type: &'a str,
    /// One for each path, and for each archive: manifests have few.
    files: Vec<ArtifactFileInfo>,
    /// Of an artifact in the CNCF model format.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<ModelInfo>,
}

/// A file or an archive of files.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct ArtifactFileInfo {
    /// `null` for an archive, which is unpacked.
    path: Option<String>,
    /// Permissions, octal.
    mode: Option<String>,
    /// Bytes as pulled.
    size_bytes: u64,
    digest: Digest,
    media_type: String,
}

impl<'a> ArtifactInfo<'a> {
    fn new(manifest: &'a ArtifactManifest, config: &[u8]) -> Result<Self, ManifestError> {
        let file = |blob: &Descriptor, file: Option<&ArtifactFile>| {
            let (path, mode) = file.map(|file| (file.path.clone(), format!("{:04o}", file.mode))).unzip();
            let Descriptor { digest, size, media_type, .. } = blob.clone();
            ArtifactFileInfo { path, mode, size_bytes: size, digest, media_type }
        };
        let files_of = |ArtifactLayer { blob, files }: ArtifactLayer| {
            let archive = files.is_empty().then(|| file(&blob, None));
            files.iter().map(|named| file(&blob, Some(named))).chain(archive).collect::<Vec<_>>()
        };
        let is_model = manifest.config.media_type == MODEL_CONFIG;
        Ok(ArtifactInfo {
            r#type: &manifest.artifact_type,
            files: manifest.contents()?.into_iter().flat_map(files_of).collect(),
            model: if is_model { ModelInfo::parse(config) } else { None },
        })
    }
}

/// Facts about a model, under the names that they have in its config. Other fields of the config cost no memory.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct ModelConfig {
    descriptor: ModelDescriptor,
    config: ModelParameters,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct ModelDescriptor {
    name: ShortText,
    family: ShortText,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ModelParameters {
    architecture: ShortText,
    format: ShortText,
    param_size: ShortText,
    precision: ShortText,
    quantization: ShortText,
}

/// A text that is cut; `null` if missing.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Option<String>")]
struct ShortText(Option<String>);

impl From<Option<String>> for ShortText {
    fn from(text: Option<String>) -> ShortText {
        ShortText(text.filter(|text| !text.is_empty()).map(|text| text.chars().take(MAX_TEXT).collect()))
    }
}

/// A model as its config describes it.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct ModelInfo {
    #[serde(flatten)]
    descriptor: ModelDescriptor,
    #[serde(flatten)]
    parameters: ModelParameters,
}

impl ModelInfo {
    /// `None` if the config is none of a model.
    fn parse(config: &[u8]) -> Option<ModelInfo> {
        let ModelConfig { descriptor, config: parameters } = serde_json::from_slice(config).ok()?;
        Some(ModelInfo { descriptor, parameters })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_of_a_model_are_read_from_its_config_and_cut() {
        let config = serde_json::json!({
            "descriptor": { "name": "small", "family": "", "authors": ["a"] },
            "modelfs": { "type": "layers", "diffIds": [] },
            "config": { "paramSize": "8b", "format": null, "precision": "x".repeat(1000) },
        });
        let model = serde_json::to_value(ModelInfo::parse(config.to_string().as_bytes())).unwrap();
        let expected = serde_json::json!({
            "name": "small", "family": null, "architecture": null, "format": null, "paramSize": "8b",
            "precision": "x".repeat(MAX_TEXT), "quantization": null,
        });
        assert_eq!(model, expected);
        for other in ["[1]", "{", "", r#"{"config": 7}"#, r#"{"config": {"format": 7}}"#] {
            assert_eq!(ModelInfo::parse(other.as_bytes()), None, "{other}");
        }
    }
}
