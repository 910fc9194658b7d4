//! OCI layouts: `index.json`, and blobs by their digests. Newer `docker save` archives are OCI layouts with an
//! additional `manifest.json` that has the full names.

use std::collections::HashMap;

use larder::reference::{Digest, Reference};
use serde_json::json;

use super::docker;
use super::entries::{ImportEntries, blob_name};
use super::error::ImportError;
use super::found_images::{FoundArtifact, FoundImages, LeftOutManifest, PlatformSearch};
use super::image::ImportImage;
use larder_registry::manifest::{
    ArtifactImage, ArtifactManifest, Descriptor, ImageConfig, ImageIndex, ImageManifest, MAX_DOCUMENTS,
    ManifestCandidate, ManifestError, ManifestOrIndex, PlatformMatcher,
};

/// Annotation with a full name.
const FULL_NAME: &str = "io.containerd.image.name";
/// Annotation of larder's archives with the name and digest that an image has in its repository, or nothing: the
/// manifest of such an archive has another digest, since its layers are uncompressed.
pub(crate) const PULLED_AS: &str = "dev.larder.image.pulled-as";
/// Annotation with a name, or just a tag.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

pub(super) fn images(
    entries: &ImportEntries,
    platform: &PlatformMatcher,
) -> Result<FoundImages, ImportError> {
    let raw = entries.document(INDEX)?;
    images_of(entries, &raw, &docker::names_by_config(entries)?, platform)
}

/// The image of a directory that `skopeo copy ... dir:` wrote: its manifest, and its blobs named by their digests.
pub(super) fn images_of_directory(
    entries: &mut ImportEntries,
    manifest: &[u8],
    platform: &PlatformMatcher,
) -> Result<FoundImages, ImportError> {
    let digest = Digest::sha256(manifest);
    entries.name_blobs((&digest, docker::MANIFEST))?;
    let descriptor = json!({ "digest": digest.as_str(), "size": manifest.len() });
    let index = json!({ "schemaVersion": 2, "manifests": [descriptor] }).to_string().into_bytes();
    images_of(entries, &index, &HashMap::new(), platform)
}

fn images_of(
    entries: &ImportEntries,
    index: &[u8],
    more_names: &HashMap<Digest, Vec<Reference>>,
    platform: &PlatformMatcher,
) -> Result<FoundImages, ImportError> {
    let used = |cause| ImportError::Manifest { name: INDEX.to_owned(), cause };
    let ManifestOrIndex::Index(index) = ManifestOrIndex::parse(index, OCI_INDEX).map_err(used)? else {
        return Err(ImportError::NoImages);
    };
    let found = find_images(entries, &index, more_names, platform, is_named)?;
    if !found.images.is_empty() || !found.offered.is_empty() {
        return Ok(found);
    }
    // A layout may have an artifact alone, without a name.
    find_images(entries, &index, more_names, platform, |_| true)
}

/// The images of an archive's index, and those of its artifacts that are taken. A signature or an SBOM beside an image
/// has no name of its own.
fn find_images(
    entries: &ImportEntries,
    index: &ImageIndex,
    more_names: &HashMap<Digest, Vec<Reference>>,
    platform: &PlatformMatcher,
    takes_artifact: impl Fn(&Descriptor) -> bool,
) -> Result<FoundImages, ImportError> {
    let mut found = FoundImages::default();
    for descriptor in &index.manifests {
        let takes_artifact = takes_artifact(descriptor);
        let (mut image, pulled_as) = match find_image(entries, descriptor, platform, takes_artifact) {
            Ok(FoundImage { image, pulled_as, other_platforms }) => {
                found.left_out.extend(other_platforms);
                (image, pulled_as)
            }
            Err(error) => {
                found.leave_out(&descriptor.digest, error)?;
                continue;
            }
        };
        name(&mut image, descriptor)?;
        if let Some(pulled) = pulled_as {
            name_as_pulled(&mut image, &pulled, entries, platform)?;
        }
        image.names.extend(more_names.get(&image.config.0).cloned().unwrap_or_default());
        found.add(image);
    }
    Ok(found)
}

const INDEX: &str = "index.json";
/// Its media type need not be written in it.
const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The image of an entry of the archive's index.
struct FoundImage {
    image: ImportImage,
    /// The name and digest that larder noted, where an index leads to several images for each of them.
    pulled_as: Option<String>,
    /// Manifests for other platforms that the archive has beside it.
    other_platforms: Vec<LeftOutManifest>,
}

/// Returns true for an entry of the archive's index with a name of its own.
fn is_named(descriptor: &Descriptor) -> bool {
    [FULL_NAME, REF_NAME]
        .iter()
        .any(|key| descriptor.annotations.get(*key).is_some_and(|name| !name.is_empty()))
}

/// Follows a descriptor to the image for the platform, as a pull follows a name.
fn find_image(
    entries: &ImportEntries,
    descriptor: &Descriptor,
    platform: &PlatformMatcher,
    takes_artifact: bool,
) -> Result<FoundImage, ImportError> {
    if descriptor.is_attestation() || !descriptor.may_be_manifest() {
        return Err(ImportError::OtherContent { media_type: descriptor.media_type.clone() });
    }
    let mut search = PlatformSearch::new(platform, takes_artifact);
    let matches = match &descriptor.platform {
        Some(offered) if platform.rank(offered).is_none() => return Err(search.no_platform(offered)),
        offered => offered.is_some(),
    };
    let first = ManifestCandidate { descriptor, matches };
    if let Some(image) = follow(entries, first, &mut Vec::new(), &mut search)? {
        let PlatformSearch { pulled_as, other_platforms, .. } = search;
        return Ok(FoundImage { image, pulled_as, other_platforms });
    }
    let used = |cause| ImportError::Manifest { name: descriptor.digest.to_string(), cause };
    let Some(found) = search.take_artifact().map_err(used)? else { return Err(search.end()) };
    let FoundArtifact { manifest, documents, pulled_as } = found;
    let image = finish_artifact(entries, documents, manifest)?;
    Ok(FoundImage { image, pulled_as, other_platforms: search.other_platforms })
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
        ManifestOrIndex::Artifact(manifest) if search.takes_artifact => {
            let (documents, manifest) = (parents.clone(), *manifest);
            let (artifact_type, pulled_as) =
                (manifest.artifact_type.clone(), descriptor.annotations.get(PULLED_AS).cloned());
            let found = FoundArtifact { manifest, documents, pulled_as };
            search.artifacts.add(found, matches, &artifact_type, &descriptor.digest);
            None
        }
        ManifestOrIndex::Artifact(artifact) => {
            let cause = ManifestError::NotAnImage(artifact.artifact_type);
            search.failed(ImportError::Manifest { name: descriptor.digest.to_string(), cause })
        }
        ManifestOrIndex::Manifest(manifest) => {
            let image = finish(entries, parents.clone(), *manifest)?;
            let accepted = search.accepts(&image, matches).then_some(image);
            if accepted.is_some() {
                search.pulled_as = descriptor.annotations.get(PULLED_AS).cloned();
            }
            accepted
        }
        ManifestOrIndex::Index(index) => {
            search.offer(&index);
            for entry in &index.manifests {
                if entries.has(&blob_name(&entry.digest)) {
                    search.pass_over(entry);
                }
            }
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
    check_presence(entries, &manifest)?;
    Ok(ImportImage {
        names: Vec::new(),
        bare_tags: Vec::new(),
        config: (digest, config),
        parsed_config,
        manifests,
        has_digest: true,
        manifest,
        artifact: None,
    })
}

/// Fails if a layer is missing, before any is unpacked.
fn check_presence(entries: &ImportEntries, manifest: &ImageManifest) -> Result<(), ImportError> {
    manifest.layers.iter().try_for_each(|layer| entries.resolve(&blob_name(&layer.digest)).map(drop))
}

/// An artifact, as a pull makes an image of it.
fn finish_artifact(
    entries: &ImportEntries,
    manifests: Vec<(Digest, Vec<u8>)>,
    artifact: ArtifactManifest,
) -> Result<ImportImage, ImportError> {
    let Some((digest, _)) = manifests.last() else { return Err(ImportError::NoImages) };
    let own_config = match artifact.known_config() {
        Some(raw) => raw.to_vec(),
        None => entries.blob(&artifact.config.digest)?,
    };
    let used = |cause| ImportError::Manifest { name: digest.to_string(), cause };
    let ArtifactImage { artifact, manifest, config, config_raw } =
        artifact.into_image(digest.clone(), own_config).map_err(used)?;
    check_presence(entries, &manifest)?;
    Ok(ImportImage {
        names: Vec::new(),
        bare_tags: Vec::new(),
        config: (manifest.config.digest.clone(), config_raw),
        parsed_config: config,
        manifests,
        has_digest: true,
        manifest,
        artifact: Some(artifact),
    })
}

/// Gives an image of an archive of larder the name and the documents that it was pulled with. A document is one of the
/// image if it leads to the same config, whose diff IDs its layers have.
fn name_as_pulled(
    image: &mut ImportImage,
    name: &str,
    entries: &ImportEntries,
    platform: &PlatformMatcher,
) -> Result<(), ImportError> {
    image.has_digest = false;
    if name.is_empty() {
        return Ok(());
    }
    let parsed = parse_name(name)?;
    let leads = match parsed.digest() {
        Some(digest) => documents_to(image, digest, entries, platform, &mut 0)?,
        None => None,
    };
    image.manifests = leads.ok_or_else(|| ImportError::ForeignDigest { name: name.to_owned() })?;
    image.names.push(parsed);
    Ok(())
}

/// Indexes and a manifest with their bytes, the outermost first.
type Documents = Vec<(Digest, Vec<u8>)>;

/// The documents that lead from this digest to the image, of an index by an entry for the platform; `None` if none
/// does.
fn documents_to(
    image: &ImportImage,
    from: &Digest,
    entries: &ImportEntries,
    platform: &PlatformMatcher,
    read: &mut usize,
) -> Result<Option<Documents>, ImportError> {
    *read += 1;
    if *read > MAX_DOCUMENTS || !entries.has(&blob_name(from)) {
        return Ok(None);
    }
    let raw = entries.blob(from)?;
    let used = |cause| ImportError::Manifest { name: from.to_string(), cause };
    let document = ManifestOrIndex::parse(&raw, "").map_err(used)?;
    let mut documents = vec![(from.clone(), raw)];
    match document {
        ManifestOrIndex::Artifact(_) => {
            let leads = image.artifact.as_ref().is_some_and(|artifact| artifact.digest == *from);
            return Ok(leads.then_some(documents));
        }
        ManifestOrIndex::Manifest(manifest) => {
            let layers = manifest.layers.len();
            let leads = manifest.config.digest == image.config.0;
            return Ok((leads && image.parsed_config.check_layers(layers).is_ok()).then_some(documents));
        }
        ManifestOrIndex::Index(index) => {
            for listed in index.candidates(platform) {
                if let Some(rest) = documents_to(image, &listed.descriptor.digest, entries, platform, read)? {
                    documents.extend(rest);
                    return Ok(Some(documents));
                }
            }
        }
    }
    Ok(None)
}

/// Gives an image the name, or the tag, that its entry of the index has. A name with a digest must be the image's.
fn name(image: &mut ImportImage, descriptor: &Descriptor) -> Result<(), ImportError> {
    let annotation = |key| descriptor.annotations.get(key).filter(|name| !name.is_empty());
    let (full, name) = (annotation(FULL_NAME), annotation(REF_NAME));
    match (full, name) {
        (None, Some(tag)) if !tag.contains(['/', ':']) => image.bare_tags.push(tag.clone()),
        (Some(name), _) | (None, Some(name)) => {
            let parsed = parse_name(name)?;
            let is_own = |digest| image.manifests.iter().any(|(own, _)| own == digest);
            if !parsed.digest().is_none_or(is_own) {
                return Err(ImportError::ForeignDigest { name: name.clone() });
            }
            image.names.push(parsed);
        }
        (None, None) => {}
    }
    Ok(())
}

fn parse_name(name: &str) -> Result<Reference, ImportError> {
    Reference::parse(name).map_err(|cause| ImportError::Name { name: name.to_owned(), cause })
}
