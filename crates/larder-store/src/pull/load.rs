//! Loads images from an archive or a layout into the store. Layers whose blob an archive has had before are skipped;
//! all others are unpacked and verified, whatever the config says that they are.

use std::sync::Arc;
use std::time::SystemTime;

use larder::backend::ProgressReporter;
use larder::reference::{Platform, Reference};
use larder_registry::manifest::PlatformMatcher;

use super::fetch_layer::LayerOrigin;
use super::plan::PullPlan;
use super::pull_progress::PullProgress;
use super::pull_workers::{PullWorkers, blocking};
use super::{PullError, StorePuller, image_warnings, unmounted};
use crate::store::admission::{InsufficientSpace, RemovableSpace};
use crate::store::commit::names_of;
use crate::store::import::{Import, ImportError, ImportImage, ImportSource, LeftOutManifest};
use crate::store::{ImageCommit, ImageRecord, Store, StoreError};

/// Options of a load.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// The repository of images whose names are but tags, or that have none; with a tag, their name itself.
    pub base_name: Option<Reference>,
    /// The platform whose images are loaded, under names with it; `None` is that of this machine.
    pub platform: Option<Platform>,
}

impl LoadOptions {
    /// Gives images without a name this one.
    pub fn named(base_name: Reference) -> LoadOptions {
        LoadOptions { base_name: Some(base_name), ..LoadOptions::default() }
    }
}

/// An image that is present now.
#[derive(Debug, Clone)]
pub struct LoadedImage {
    /// The image.
    pub image: ImageRecord,
    /// Its names with tags that it has from here; it may have more.
    pub tags: Vec<String>,
    /// Its names with digests.
    pub digests: Vec<String>,
    /// Tags without a repository that it had in the archive. Without a `base_name` they name nothing.
    pub bare_tags: Vec<String>,
    /// Warnings about the image, a sentence each.
    pub warnings: Vec<String>,
}

/// Images of an archive that are present now.
#[derive(Debug)]
pub struct LoadOutcome {
    /// The images.
    pub images: Vec<LoadedImage>,
    /// Manifests that the archive has beside them.
    pub left_out: Vec<LeftOutManifest>,
    /// The image that failed after them; those behind it were not tried.
    pub failed: Option<FailedImage>,
}

/// An image of an archive that could not be loaded.
#[derive(Debug)]
pub struct FailedImage {
    /// Its names in the archive; may be empty.
    pub names: Vec<String>,
    /// Why not.
    pub cause: PullError,
}

impl StorePuller {
    /// Makes the images of `from` present: an OCI layout in a directory or an archive, or the output of `docker save`.
    /// Images before one that fails remain; an error means that there are none.
    pub async fn load(&self, from: ImportSource, options: &LoadOptions) -> Result<LoadOutcome, PullError> {
        let LoadOptions { base_name, platform } = options.clone();
        let requested = platform.filter(|platform| !platform.is_host());
        let platform = self.matcher(requested.as_ref());
        let (store, reserve, of_images) = (self.store.clone(), self.config.reserve, platform.clone());
        let read = blocking(move || {
            let mut read = store
                .read_import(from, &of_images, base_name.as_ref(), reserve)
                .map_err(|error| with_unmounted(error, &store))?;
            for name in read.images.iter_mut().flat_map(|image| &mut image.names) {
                *name = name.for_platform(requested.as_ref());
            }
            Ok::<_, PullError>(read)
        });
        let read = read.await?;
        if read.as_ref().is_err_and(PullError::is_no_space) {
            self.reclaim().await?;
        }
        let import = Arc::new(read?);
        let left_out = import.left_out.clone();
        let mut outcome = LoadOutcome { images: Vec::new(), left_out, failed: None };
        for found in &import.images {
            let workers = PullWorkers::new(self.syncer.begin(), &self.ending);
            let image = self.load_image(&import, found, &platform, &workers).await;
            workers.end().await;
            match self.reclaim_if_full(image).await {
                Ok(image) => outcome.images.push(image),
                Err(cause) if outcome.images.is_empty() => return Err(cause),
                Err(cause) => {
                    let names = found.names.iter().map(ToString::to_string).collect();
                    outcome.failed = Some(FailedImage { names, cause });
                    break;
                }
            }
        }
        Ok(outcome)
    }

    async fn load_image(
        &self,
        import: &Arc<Import>,
        image: &ImportImage,
        platform: &PlatformMatcher,
        workers: &PullWorkers,
    ) -> Result<LoadedImage, PullError> {
        let progress = PullProgress::begin(&ProgressReporter::unwatched());
        let (config, artifact) = (image.config.clone(), image.artifact.as_ref());
        let plan = PullPlan::new(&image.manifest, &image.parsed_config, config, artifact);
        let origin = LayerOrigin::Import { import: Arc::clone(import), progress: Arc::clone(&progress) };
        let acquired = self.acquire_layers(&origin, plan, None, workers).await?;
        let (names, manifests) = (image.names.clone(), image.manifests.clone());
        let has_digest = image.has_digest;
        let store = self.store.clone();
        let config = Some(&image.parsed_config).filter(|_| image.artifact.is_none());
        let warnings = image_warnings(config, platform, &acquired.layers);
        // A worker of the load: if the caller gives up now, the image may still appear.
        let commit = move || {
            let commit = ImageCommit { has_digest, preloaded: true, ..acquired.commit(names, manifests) };
            Ok::<_, StoreError>((store.commit(&commit, SystemTime::now())?, names_of(&commit)))
        };
        let (committed, (tags, digests)) = workers.worker().blocking(commit).await??;
        Ok(LoadedImage { image: committed, tags, digests, bare_tags: image.bare_tags.clone(), warnings })
    }
}

/// Adds the space of images to an error of a full disk.
fn with_unmounted(error: ImportError, store: &Store) -> PullError {
    match error {
        ImportError::InsufficientSpace(full) => {
            let of_images =
                |space| InsufficientSpace { removable: RemovableSpace::Unmounted(space), ..full }.into();
            unmounted(store).map_or_else(PullError::from, of_images)
        }
        other => other.into(),
    }
}
