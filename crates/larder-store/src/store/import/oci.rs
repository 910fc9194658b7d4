//! OCI layouts: `index.json`, and blobs by their digests. Newer `docker save` archives are OCI layouts with an additional
//! `manifest.json` that has the full names.

use larder::reference::{Digest, Reference};

use super::docker;
use super::entries::ImportEntries;
use super::error::ImportError;
use super::image::ImportImage;
use larder_registry::manifest::{
    Descriptor, ImageConfig, ImageIndex, ImageManifest, MAX_DEPTH, ManifestOrIndex, PlatformMatcher,
};

/// Annotation with a full name.
const FULL_NAME: &str = "io.containerd.image.name";
/// Annotation with a name, or just a tag.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

pub(super) fn images(
    entries: &ImportEntries,
    platform: &PlatformMatcher,
) -> Result<Vec<ImportImage>, ImportError> {
    const INDEX: &str = "index.json";
    let raw = entries.document(INDEX)?;
    let used = |cause| ImportError::Manifest { name: INDEX.to_owned(), cause };
    let ManifestOrIndex::Index(index) = ManifestOrIndex::parse(&raw, OCI_INDEX).map_err(used)? else {
        return Err(ImportError::NoImages);
    };
    let more_names = docker::names_by_config(entries)?;
    let mut images: Vec<ImportImage> = Vec::new();
    for descriptor in wanted(&index, platform)? {
        let mut image = image(entries, descriptor, platform)?;
        name(&mut image, descriptor)?;
        image.names.extend(more_names.get(&image.config.0).cloned().unwrap_or_default());
        match images.iter_mut().find(|other| other.manifests == image.manifests) {
            Some(other) => {
                other.names.extend(image.names);
                other.bare_tags.extend(image.bare_tags);
            }
            None => images.push(image),
        }
    }
    Ok(images)
}

/// Its media type need not be written in it.
const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The images of a layout: all but those that say they are for another platform.
fn wanted<'a>(index: &'a ImageIndex, platform: &PlatformMatcher) -> Result<Vec<&'a Descriptor>, ImportError> {
    let images = index.manifests.iter().filter(|entry| entry.kind().is_manifest() && !entry.is_attestation());
    let fits =
        |entry: &&Descriptor| entry.platform.as_ref().is_none_or(|offered| platform.rank(offered).is_some());
    let wanted: Vec<&Descriptor> = images.clone().filter(fits).collect();
    if wanted.is_empty() && images.count() > 0 {
        return Err(no_platform(index, platform));
    }
    Ok(wanted)
}

fn no_platform(index: &ImageIndex, platform: &PlatformMatcher) -> ImportError {
    ImportError::NoPlatform { wanted: platform.wanted().to_string(), offered: index.platforms() }
}

/// Follows a descriptor to an image.
fn image(
    entries: &ImportEntries,
    descriptor: &Descriptor,
    platform: &PlatformMatcher,
) -> Result<ImportImage, ImportError> {
    let mut manifests: Vec<(Digest, Vec<u8>)> = Vec::new();
    let mut next = descriptor.clone();
    for _ in 0..MAX_DEPTH {
        let raw = entries.blob(&next.digest)?;
        let used = |cause| ImportError::Manifest { name: next.digest.to_string(), cause };
        let document = ManifestOrIndex::parse(&raw, &next.media_type).map_err(used)?;
        manifests.push((next.digest.clone(), raw));
        match document {
            ManifestOrIndex::Manifest(manifest) => return finish(entries, manifests, *manifest),
            ManifestOrIndex::Index(index) => {
                // An archive may hold but some of the platforms that its index lists.
                let candidates = index.candidates(platform);
                let here = candidates
                    .iter()
                    .find(|candidate| entries.has(&super::entries::blob_name(&candidate.descriptor.digest)));
                next = match here.or(candidates.first()) {
                    Some(candidate) => candidate.descriptor.clone(),
                    None => return Err(no_platform(&index, platform)),
                };
            }
        }
    }
    Err(ImportError::NoImages)
}

fn finish(
    entries: &ImportEntries,
    manifests: Vec<(Digest, Vec<u8>)>,
    manifest: ImageManifest,
) -> Result<ImportImage, ImportError> {
    let digest = manifest.config.digest.clone();
    let config = entries.blob(&digest)?;
    let used = |cause| ImportError::Manifest { name: digest.to_string(), cause };
    let parsed_config = ImageConfig::parse(&config).map_err(used)?;
    parsed_config.check_layers(manifest.layers.len()).map_err(used)?;
    for layer in &manifest.layers {
        // That it is there is known now, and not only when half of the layers are unpacked.
        entries.resolve(&super::entries::blob_name(&layer.digest))?;
    }
    Ok(ImportImage {
        names: Vec::new(),
        bare_tags: Vec::new(),
        config: (digest, config),
        parsed_config,
        manifests,
        has_digest: true,
        manifest,
    })
}

/// Gives an image the name, or the tag, that its entry of the index has.
fn name(image: &mut ImportImage, descriptor: &Descriptor) -> Result<(), ImportError> {
    let (full, name) = (descriptor.annotations.get(FULL_NAME), descriptor.annotations.get(REF_NAME));
    match (full, name) {
        (None, Some(tag)) if !tag.contains(['/', ':']) => image.bare_tags.push(tag.clone()),
        (Some(name), _) | (None, Some(name)) => {
            let parsed =
                Reference::parse(name).map_err(|cause| ImportError::Name { name: name.clone(), cause })?;
            image.names.push(parsed);
        }
        (None, None) => {}
    }
    Ok(())
}
