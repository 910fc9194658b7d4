//! An OCI layout as a tar archive, with the `manifest.json` of `docker save` beside it.

use std::collections::BTreeSet;
use std::io::Write;

use larder::reference::{Digest, Platform, Reference};
use serde_json::{Map, Value, json};
use tar_core::builder::EntryBuilder;
use tar_core::{EntryType, HEADER_SIZE};

use super::{ExportError, ExportedImage, LayerBlob};
use crate::store::LayerHandle;
use crate::store::import::PULLED_AS;
use larder_registry::manifest::{
    ArtifactLayer, ArtifactManifest, Descriptor, ManifestOrIndex, ResolvedArtifact,
};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Annotations with the full name, and with the tag alone, as Docker writes them.
const FULL_NAME: &str = "io.containerd.image.name";
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// Whether these bytes are a manifest with this config.
fn is_manifest_of(bytes: &[u8], config: &Digest) -> bool {
    let manifest: Value = serde_json::from_slice(bytes).unwrap_or_default();
    manifest["config"]["digest"] == config.as_str()
}

/// Writes the archive: small files first, so that a reader of a stream knows at once what it is.
pub(super) fn write(images: &[ExportedImage], out: &mut dyn Write) -> Result<(), ExportError> {
    let LayoutFiles { documents, blobs, layers } = layout_files(images)?;
    let mut archive = LayoutArchive { out };
    for (name, bytes) in &documents {
        archive.file(name, bytes)?;
    }
    archive.header("blobs/", EntryType::Directory, 0)?;
    let digests = blobs.iter().map(|(digest, _)| digest).chain(layers.iter().map(|layer| &layer.digest));
    for algorithm in digests.map(Digest::algorithm).collect::<BTreeSet<_>>() {
        archive.header(&format!("blobs/{algorithm}/"), EntryType::Directory, 0)?;
    }
    for (digest, bytes) in &blobs {
        archive.file(&blob_path(digest), bytes)?;
    }
    for layer in layers {
        archive.header(&blob_path(&layer.digest), EntryType::Regular, layer.size)?;
        layer.write(archive.out)?;
        archive.pad(layer.size)?;
    }
    archive.write(&[0; 2 * HEADER_SIZE])
}

/// All files of the layout.
struct LayoutFiles<'a> {
    documents: Vec<(&'static str, Vec<u8>)>,
    /// Manifests and configs.
    blobs: Vec<(Digest, Vec<u8>)>,
    layers: Vec<LayerBlob<'a>>,
}

fn layout_files(images: &[ExportedImage]) -> Result<LayoutFiles<'_>, ExportError> {
    let (mut entries, mut saved, mut blobs) = (Vec::<NamedEntry>::new(), Vec::new(), Vec::new());
    let mut layers = Vec::new();
    for image in images {
        let descriptor = if image.record.artifact_type.is_empty() {
            let (manifest, bytes) = manifest(image);
            let mut descriptor =
                json!({ "mediaType": MANIFEST, "digest": manifest.as_str(), "size": bytes.len() });
            descriptor["platform"] = platform(&image.config);
            let names: Vec<String> = image.layers.iter().map(|layer| blob_path(diff_id(layer))).collect();
            let tags = tags(image, images);
            let tags = if tags.is_empty() { Value::Null } else { json!(tags) };
            saved.push(json!({ "Config": blob_path(&image.record.id), "RepoTags": tags, "Layers": names }));
            blobs.push((manifest, bytes));
            blobs.push((image.record.id.clone(), image.config.clone()));
            layers.extend(image.layers.iter().map(LayerBlob::archive));
            descriptor
        } else {
            let artifact = artifact(image)?;
            layers.extend(artifact_blobs(image, &artifact)?);
            blobs.push((artifact.manifest.config.digest.clone(), artifact.config));
            let (digest, artifact_type) = (artifact.digest.as_str(), &image.record.artifact_type);
            json!({ "mediaType": MANIFEST, "digest": digest, "size": artifact.size, "artifactType": artifact_type })
        };
        blobs.extend(image.manifests.iter().cloned());
        for named in NamedEntry::of(image, &descriptor) {
            // The images of one tag, for several platforms, are those of one index.
            match entries.iter_mut().find(|entry| entry.tag.is_some() && entry.tag == named.tag) {
                Some(entry) => entry.manifests.extend(named.manifests),
                None => entries.push(named),
            }
        }
    }
    let manifests: Vec<Value> = entries.into_iter().map(|entry| entry.descriptor(&mut blobs)).collect();
    // An empty config may be a layer, too.
    let mut seen = BTreeSet::new();
    blobs.retain(|(digest, _)| seen.insert(digest.clone()));
    layers.retain(|layer| seen.insert(layer.digest.clone()));
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests });
    let mut documents = vec![
        ("oci-layout", json!({ "imageLayoutVersion": "1.0.0" }).to_string().into_bytes()),
        ("index.json", index.to_string().into_bytes()),
    ];
    // Docker knows no artifacts.
    if !saved.is_empty() {
        documents.push(("manifest.json", Value::from(saved).to_string().into_bytes()));
    }
    Ok(LayoutFiles { documents, blobs, layers })
}

/// The documents of an artifact.
struct ExportedArtifact {
    /// Digest and size of its manifest.
    digest: Digest,
    size: usize,
    manifest: ArtifactManifest,
    config: Vec<u8>,
    contents: Vec<ArtifactLayer>,
}

/// The artifact as which this image was pulled: the one whose manifest leads to the image ID.
fn artifact(image: &ExportedImage) -> Result<ExportedArtifact, ExportError> {
    let missing = || ExportError::Blob { digest: image.record.id.clone() };
    let own_config = image.artifact_config.as_ref().ok_or_else(missing)?;
    let artifact_of = |(digest, bytes): &(Digest, Vec<u8>)| {
        let Ok(ManifestOrIndex::Artifact(manifest)) = ManifestOrIndex::parse(bytes, MANIFEST) else {
            return None;
        };
        let found = manifest.into_image(digest.clone(), own_config.clone()).ok()?;
        let ResolvedArtifact { digest, manifest, config, contents } = found.artifact;
        let is_own = found.manifest.config.digest == image.record.id;
        is_own.then_some(ExportedArtifact { digest, size: bytes.len(), manifest, config, contents })
    };
    image.manifests.iter().find_map(artifact_of).ok_or_else(missing)
}

/// The blobs of an artifact. A compressed archive cannot be written as it was, and another one would be another
/// artifact.
fn artifact_blobs<'a>(
    image: &'a ExportedImage,
    artifact: &ExportedArtifact,
) -> Result<Vec<LayerBlob<'a>>, ExportError> {
    let layers = image.layers.iter().zip(&artifact.contents);
    let blob = |(layer, content): (&'a LayerHandle, &ArtifactLayer)| {
        let Descriptor { digest, size, media_type, .. } = content.blob.clone();
        let file = content.files.first().cloned();
        if file.is_none() && content.diff_id() != digest {
            return Err(ExportError::Compressed { layer: digest, media_type });
        }
        Ok(LayerBlob { layer, digest, size, file })
    };
    layers.map(blob).collect()
}

fn diff_id(layer: &LayerHandle) -> &Digest {
    &layer.record().facts.diff_id
}

/// An entry of the archive's index: a name, or an image without one.
struct NamedEntry {
    /// The name in the archive, if it has a tag. A name with a digest is no name of the archive's manifest.
    tag: Option<Reference>,
    /// Each says as what its image was pulled.
    manifests: Vec<Value>,
}

impl NamedEntry {
    /// The entries of each name of an image, or of the image alone.
    fn of(image: &ExportedImage, manifest: &Value) -> Vec<NamedEntry> {
        let entry = |tag, pulled_as: String, platform: Option<Value>| {
            let mut manifest = manifest.clone();
            manifest["annotations"] = json!({ PULLED_AS: pulled_as });
            if let Some(platform) = platform {
                manifest["platform"] = platform;
            }
            NamedEntry { tag, manifests: vec![manifest] }
        };
        if image.names.is_empty() {
            return vec![entry(None, String::new(), None)];
        }
        let named = image.names.iter().map(|name| {
            let tag = Some(name.for_platform(None)).filter(|name| name.digest().is_none());
            entry(tag, pulled_as(name, image).unwrap_or_default(), platform_of_artifact(name, image))
        });
        named.collect()
    }

    /// Its descriptor: of the manifest, or of an index with the manifests, which is added to `blobs`.
    fn descriptor(self, blobs: &mut Vec<(Digest, Vec<u8>)>) -> Value {
        let NamedEntry { tag, mut manifests } = self;
        let mut descriptor = if manifests.len() == 1 {
            manifests.remove(0)
        } else {
            // An artifact without a platform is this machine's.
            for manifest in manifests.iter_mut().filter(|manifest| manifest.get("platform").is_none()) {
                manifest["platform"] = json_of(Platform::host());
            }
            let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests });
            let bytes = index.to_string().into_bytes();
            let digest = Digest::sha256(&bytes);
            let descriptor = json!({ "mediaType": INDEX, "digest": digest.as_str(), "size": bytes.len() });
            blobs.push((digest, bytes));
            descriptor
        };
        if let Some(tag) = tag {
            descriptor["annotations"][FULL_NAME] = tag.to_string().into();
            descriptor["annotations"][REF_NAME] = tag.tag().into();
        }
        descriptor
    }
}

/// The tags that `docker load` gives an image. Docker has one image for a tag: this machine's, if it is among them.
fn tags(image: &ExportedImage, all: &[ExportedImage]) -> Vec<String> {
    let is_own = |name: &Reference| all.iter().any(|other| other.names.contains(name));
    let tags = image.names.iter().filter(|name| name.digest().is_none()).filter_map(|name| {
        let in_archive = name.for_platform(None);
        (name.platform().is_none() || !is_own(&in_archive)).then(|| in_archive.to_string())
    });
    tags.collect()
}

/// The platform for which an artifact was pulled by this name, as of an entry of an index.
fn platform_of_artifact(name: &Reference, image: &ExportedImage) -> Option<Value> {
    let is_artifact = !image.record.artifact_type.is_empty();
    name.platform().filter(|_| is_artifact).map(json_of)
}

fn json_of(platform: &Platform) -> Value {
    let Platform { os, architecture, variant } = platform;
    json!({ "os": os, "architecture": architecture, "variant": variant })
}

/// The platform that a config names.
fn platform(config: &[u8]) -> Value {
    let config: Map<String, Value> = serde_json::from_slice(config).unwrap_or_default();
    let named = ["architecture", "os", "variant"].into_iter();
    let named = named
        .filter_map(|key| Some((key.to_owned(), config.get(key).filter(|value| value.is_string())?.clone())));
    Value::Object(named.collect())
}

/// The name with the digest of the document that its repository served, if that is kept.
fn pulled_as(name: &Reference, image: &ExportedImage) -> Option<String> {
    let digest = name.digest().or_else(|| image.record.served_digest(name))?;
    let is_kept = image.manifests.iter().any(|(kept, _)| kept == digest);
    is_kept.then(|| format!("{}@{digest}", name.name()))
}

/// The manifest of an image with uncompressed layers, and its digest. Annotations and artifact type are kept.
fn manifest(image: &ExportedImage) -> (Digest, Vec<u8>) {
    let pulled = image.manifests.iter().find(|(_, bytes)| is_manifest_of(bytes, &image.record.id));
    let pulled: Map<String, Value> =
        pulled.and_then(|(_, bytes)| serde_json::from_slice(bytes).ok()).unwrap_or_default();
    let config = pulled.get("config").and_then(|config| config["mediaType"].as_str());
    let layers: Vec<Value> = image
        .layers
        .iter()
        .map(|layer| {
            let size = layer.record().facts.plain_bytes;
            json!({ "mediaType": LAYER, "digest": diff_id(layer).as_str(), "size": size })
        })
        .collect();
    let mut manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {
            "mediaType": config.filter(|config| *config != DOCKER_CONFIG).unwrap_or(CONFIG),
            "digest": image.record.id.as_str(),
            "size": image.config.len(),
        },
        "layers": layers,
    });
    for key in ["annotations", "artifactType"] {
        if let Some(value) = pulled.get(key) {
            manifest[key] = value.clone();
        }
    }
    let bytes = manifest.to_string().into_bytes();
    (Digest::sha256(&bytes), bytes)
}

fn blob_path(digest: &Digest) -> String {
    format!("blobs/{}/{}", digest.algorithm(), digest.hex())
}

struct LayoutArchive<'a> {
    out: &'a mut dyn Write,
}

impl LayoutArchive<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), ExportError> {
        self.out.write_all(bytes).map_err(ExportError::Output)
    }

    /// Writes a header that is equal for equal images: root's, and without a time.
    fn header(&mut self, name: &str, kind: EntryType, size: u64) -> Result<(), ExportError> {
        let mut header = EntryBuilder::new_ustar();
        header.path(name).entry_type(kind);
        let mode = if kind == EntryType::Directory { 0o755 } else { 0o644 };
        let set = header.mode(mode).and_then(|header| header.size(size)).and_then(|header| header.mtime(0));
        set.and_then(|header| header.uid(0)).and_then(|header| header.gid(0)).map_err(|error| {
            ExportError::Output(std::io::Error::other(error)) // only a size that no file has
        })?;
        self.write(&header.finish_bytes())
    }

    fn pad(&mut self, size: u64) -> Result<(), ExportError> {
        let padding = usize::try_from(size.wrapping_neg() % HEADER_SIZE as u64).unwrap_or(0);
        self.write(&[0; HEADER_SIZE][..padding])
    }

    fn file(&mut self, name: &str, bytes: &[u8]) -> Result<(), ExportError> {
        self.header(name, EntryType::Regular, bytes.len() as u64)?;
        self.write(bytes)?;
        self.pad(bytes.len() as u64)
    }
}
