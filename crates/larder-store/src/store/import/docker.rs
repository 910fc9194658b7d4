//! Archives of `docker save`: `manifest.json`, a config, and an archive for each layer. They have no manifest as
//! registries have it, so one is generated, always the same for the same image.

use std::collections::HashMap;
use std::io::Read;

use larder::reference::{Digest, DigestHasher, Reference};
use serde::Deserialize;
use serde_json::{Value, json};

use super::archive::normalize_entry_name;
use super::entries::{ImportEntries, digest_of_blob};
use super::error::{ImportError, read};
use super::found_images::{FoundImages, PlatformSearch};
use super::image::ImportImage;
use crate::unpack::DetectedCompression;
use larder_registry::manifest::{ImageConfig, ManifestOrIndex, PlatformMatcher};

pub(super) const MANIFEST: &str = "manifest.json";

/// Most images of one archive.
const MAX_IMAGES: usize = 10_000;

const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// One image of `manifest.json`, with the keys in lower case.
#[derive(Deserialize)]
struct DockerArchiveImage {
    config: String,
    #[serde(rename = "repotags")]
    repo_tags: Option<Vec<String>>,
    layers: Option<Vec<String>>,
}

/// The images of `manifest.json`. As Go programs read it: keys in any case, and `null` where nothing is.
fn saved(entries: &ImportEntries) -> Result<Vec<DockerArchiveImage>, ImportError> {
    let raw = entries.document(MANIFEST)?;
    let document = |cause| ImportError::Document { name: MANIFEST.to_owned(), cause };
    let saved: Option<Vec<HashMap<String, Value>>> = serde_json::from_slice(&raw).map_err(document)?;
    let saved = saved.unwrap_or_default();
    if saved.len() > MAX_IMAGES {
        return Err(ImportError::TooManyEntries);
    }
    let image = |fields: HashMap<String, Value>| {
        let fields: serde_json::Map<_, _> =
            fields.into_iter().map(|(key, value)| (key.to_ascii_lowercase(), value)).collect();
        serde_json::from_value(fields.into()).map_err(document)
    };
    saved.into_iter().map(image).collect()
}

/// Names by the digest of the config, where there is such a list.
pub(super) fn names_by_config(
    entries: &ImportEntries,
) -> Result<HashMap<Digest, Vec<Reference>>, ImportError> {
    let mut names: HashMap<Digest, Vec<Reference>> = HashMap::new();
    if entries.has(MANIFEST) {
        for image in saved(entries)? {
            if let Some(digest) = normalize_entry_name(&image.config).as_deref().and_then(digest_of_blob) {
                names.entry(digest).or_default().extend(names_of(&image)?);
            }
        }
    }
    Ok(names)
}

pub(super) fn images(
    entries: &ImportEntries,
    platform: &PlatformMatcher,
) -> Result<FoundImages, ImportError> {
    let mut found = FoundImages::default();
    for saved in saved(entries)? {
        let image = image(entries, &saved)?;
        let mut search = PlatformSearch::new(platform, false);
        if search.accepts(&image, false) {
            found.images.push(image);
        } else {
            let digest = image.config.0.clone();
            found.leave_out(&digest, search.end())?;
        }
    }
    Ok(found)
}

fn names_of(image: &DockerArchiveImage) -> Result<Vec<Reference>, ImportError> {
    let parse = |name: &String| {
        Reference::parse(name).map_err(|cause| ImportError::Name { name: name.clone(), cause })
    };
    image.repo_tags.iter().flatten().filter(|name| !name.is_empty()).map(parse).collect()
}

fn image(entries: &ImportEntries, saved: &DockerArchiveImage) -> Result<ImportImage, ImportError> {
    let config_name = entry_name(&saved.config)?;
    let config = entries.document(&config_name)?;
    let digest = config_digest(&config_name, &config)?;
    let used = |cause| ImportError::Manifest { name: config_name.clone(), cause };
    let parsed_config = ImageConfig::parse(&config).map_err(used)?;
    let names = saved.layers.as_deref().unwrap_or_default();
    parsed_config.check_layers(names.len()).map_err(used)?;

    let mut layers = Vec::new();
    for (name, diff_id) in names.iter().zip(&parsed_config.diff_ids) {
        layers.push(layer(entries, &entry_name(name)?, diff_id)?);
    }
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": { "mediaType": OCI_CONFIG, "digest": digest.as_str(), "size": config.len() },
        "layers": layers,
    })
    .to_string()
    .into_bytes();
    let ManifestOrIndex::Manifest(parsed) = ManifestOrIndex::parse(&manifest, OCI_MANIFEST).map_err(used)?
    else {
        return Err(ImportError::NoImages);
    };
    Ok(ImportImage {
        names: names_of(saved)?,
        bare_tags: Vec::new(),
        config: (digest, config),
        parsed_config,
        manifests: vec![(Digest::sha256(&manifest), manifest)],
        has_digest: false,
        manifest: *parsed,
        artifact: None,
    })
}

fn entry_name(name: &str) -> Result<String, ImportError> {
    normalize_entry_name(name).ok_or_else(|| ImportError::Missing { name: name.to_owned() })
}

/// The digest of a config, which its name says as well: `HEX.json`, or `blobs/sha256/HEX`.
fn config_digest(name: &str, config: &[u8]) -> Result<Digest, ImportError> {
    let hex = name.strip_suffix(".json").and_then(|hex| Digest::parse(&format!("sha256:{hex}")).ok());
    match digest_of_blob(name).or(hex) {
        Some(digest) if digest.check(config).is_err() => {
            Err(ImportError::WrongDigest { name: name.to_owned(), wanted: digest })
        }
        Some(digest) => Ok(digest),
        None => Ok(Digest::sha256(config)),
    }
}

/// The descriptor of a layer, whose digest must be found out unless its name or the config says it.
fn layer(entries: &ImportEntries, name: &str, diff_id: &Digest) -> Result<Value, ImportError> {
    let name = entries.resolve(name)?;
    let size = entries.size(name)?;
    let named = digest_of_blob(name);
    let (compression, digest) = if entries.is_known(name)? {
        // The store has it, and its name is its digest.
        match named {
            Some(digest) if digest != *diff_id => (DetectedCompression::Gzip, digest),
            _ => (DetectedCompression::None, diff_id.clone()),
        }
    } else {
        let mut magic = Vec::new();
        entries.open(name)?.take(6).read_to_end(&mut magic).map_err(read(name))?;
        let compression = DetectedCompression::detect(&magic);
        let digest = match (compression, named) {
            (DetectedCompression::None, _) => diff_id.clone(),
            (_, Some(digest)) => digest,
            (_, None) => digest_of(entries, name)?,
        };
        entries.note_layer(digest.clone(), name.to_owned());
        (compression, digest)
    };
    let suffix = match compression {
        DetectedCompression::None | DetectedCompression::Xz | DetectedCompression::Bzip2 => "",
        DetectedCompression::Gzip => "+gzip",
        DetectedCompression::Zstd => "+zstd",
    };
    Ok(json!({ "mediaType": format!("{OCI_LAYER}{suffix}"), "digest": digest.as_str(), "size": size }))
}

/// The digest of an entry, by reading all of it.
fn digest_of(entries: &ImportEntries, name: &str) -> Result<Digest, ImportError> {
    let mut hasher = DigestHasher::sha256();
    let mut from = entries.open(name)?;
    let mut buffer = vec![0; 256 << 10];
    loop {
        match from.read(&mut buffer).map_err(read(name))? {
            0 => return Ok(hasher.finish()),
            length => hasher.update(&buffer[..length]),
        }
    }
}
