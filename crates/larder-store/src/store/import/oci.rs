//! OCI layouts: `index.json`, and blobs by their digests. Newer `docker save` archives are OCI layouts with an additional
//! `manifest.json` that has the full names.

use larder::reference::{Digest, Reference};

use super::docker;
use super::entries::ImportEntries;
use super::error::ImportError;
use super::found_images::{FoundImages, PlatformSearch};
use super::image::ImportImage;
use larder_registry::manifest::{
    Descriptor, ImageConfig, ImageManifest, ManifestCandidate, ManifestOrIndex, PlatformMatcher,
};

/// Annotation with a full name.
const FULL_NAME: &str = "io.containerd.image.name";
/// Annotation with a name, or just a tag.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

pub(super) fn images(
    entries: &ImportEntries,
    platform: &PlatformMatcher,
) -> Result<FoundImages, ImportError> {
    const INDEX: &str = "index.json";
    let raw = entries.document(INDEX)?;
    let used = |cause| ImportError::Manifest { name: INDEX.to_owned(), cause };
    let ManifestOrIndex::Index(index) = ManifestOrIndex::parse(&raw, OCI_INDEX).map_err(used)? else {
        return Err(ImportError::NoImages);
    };
    let more_names = docker::names_by_config(entries)?;
    let mut found = FoundImages::default();
    for descriptor in &index.manifests {
        let mut image = match find_image(entries, descriptor, platform) {
            Ok(image) => image,
            Err(error) => {
                found.leave_out(&descriptor.digest, error)?;
                continue;
            }
        };
        name(&mut image, descriptor)?;
        image.names.extend(more_names.get(&image.config.0).cloned().unwrap_or_default());
        match found.images.iter_mut().find(|other| other.manifests == image.manifests) {
            Some(other) => {
                other.names.extend(image.names);
                other.bare_tags.extend(image.bare_tags);
            }
            None => found.images.push(image),
        }
    }
    Ok(found)
}

/// Its media type need not be written in it.
const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Follows a descriptor to the image for the platform, as a pull follows a name.
fn find_image(
    entries: &ImportEntries,
    descriptor: &Descriptor,
    platform: &PlatformMatcher,
) -> Result<ImportImage, ImportError> {
    if descriptor.is_attestation() || !descriptor.may_be_manifest() {
        return Err(ImportError::OtherContent { media_type: descriptor.media_type.clone() });
    }
    let mut search = PlatformSearch::new(platform);
    let matches = match &descriptor.platform {
        Some(offered) if platform.rank(offered).is_none() => return Err(search.no_platform(offered)),
        offered => offered.is_some(),
    };
    let first = ManifestCandidate { descriptor, matches };
    follow(entries, first, &mut Vec::new(), &mut search)?.ok_or_else(|| search.end())
}

/// Reads a manifest, or an index and what it lists, until an image fits. `parents` are the documents that lead there.
fn follow(
    entries: &ImportEntries,
    next: ManifestCandidate<'_>,
    parents: &mut Vec<(Digest, Vec<u8>)>,
    search: &mut PlatformSearch<'_>,
) -> Result<Option<ImportImage>, ImportError> {
    let ManifestCandidate { descriptor, matches } = next;
    let used = |cause| ImportError::Manifest { name: descriptor.digest.to_string(), cause };
    search.count(parents.len()).map_err(used)?;
    let raw = match entries.blob(&descriptor.digest) {
        // An archive may hold but some of the platforms that its index lists.
        Err(error @ ImportError::Missing { .. }) => return Ok(search.failed(error)),
        raw => raw?,
    };
    let document = match ManifestOrIndex::parse(&raw, &descriptor.media_type) {
        Err(cause) if cause.is_other_content() => return Ok(search.failed(used(cause))),
        document => document.map_err(used)?,
    };
    parents.push((descriptor.digest.clone(), raw));
    let found = match document {
        ManifestOrIndex::Manifest(manifest) => {
            let image = finish(entries, parents.clone(), *manifest)?;
            search.accepts(&image, matches).then_some(image)
        }
        ManifestOrIndex::Index(index) => {
            search.offer(&index);
            let mut found = None;
            for candidate in index.candidates(search.platform) {
                found = follow(entries, candidate, parents, search)?;
                if found.is_some() {
                    break;
                }
            }
            found
        }
    };
    parents.pop();
    Ok(found)
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
    let annotation = |key| descriptor.annotations.get(key).filter(|name| !name.is_empty());
    let (full, name) = (annotation(FULL_NAME), annotation(REF_NAME));
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
