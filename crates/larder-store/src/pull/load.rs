//! Loads images from an archive or a layout into the store. Layers whose blob an archive has had before are skipped; all
//! others are unpacked and verified, whatever the config says that they are.

use std::sync::Arc;
use std::time::SystemTime;

use larder::backend::ProgressReporter;
use larder::reference::Reference;

use super::fetch_layer::LayerOrigin;
use super::plan::PullPlan;
use super::pull_progress::PullProgress;
use super::pull_workers::{PullWorkers, blocking};
use super::{PullError, StorePuller, unmounted};
use crate::store::admission::{InsufficientSpace, RemovableSpace};
use crate::store::commit::names_of;
use crate::store::import::{Import, ImportError, ImportImage, ImportSource, LeftOutManifest};
use crate::store::{ImageCommit, ImageRecord, Store, StoreError};

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
#[derive(Debug, Clone)]
pub struct LoadOutcome {
    /// The images.
    pub images: Vec<LoadedImage>,
    /// Manifests that the archive has beside them.
    pub left_out: Vec<LeftOutManifest>,
}

impl StorePuller {
    /// Makes the images of `from` present: an OCI layout in a directory or an archive, or the output of `docker save`. An
    /// image whose names are but tags, or that has none, is one of the repository `base_name`; with a tag, it is the name
    /// itself. Images before one that fails remain.
    pub async fn load(
        &self,
        from: ImportSource,
        base_name: Option<Reference>,
    ) -> Result<LoadOutcome, PullError> {
        let (store, platform, reserve) =
            (self.store.clone(), self.config.platform.clone(), self.config.reserve);
        let read = blocking(move || {
            let read = store.read_import(from, &platform, base_name.as_ref(), reserve);
            read.map_err(|error| with_unmounted(error, &store))
        });
        let read = read.await?;
        if read.as_ref().is_err_and(PullError::is_no_space) {
            self.reclaim().await?;
        }
        let import = Arc::new(read?);
        let left_out = import.left_out.clone();
        let images = self.load_images(&import).await;
        Ok(LoadOutcome { images: images?, left_out })
    }

    async fn load_images(&self, import: &Arc<Import>) -> Result<Vec<LoadedImage>, PullError> {
        let mut loaded = Vec::with_capacity(import.images.len());
        for found in &import.images {
            let workers = PullWorkers::new(self.syncer.begin(), &self.ending);
            let image = self.load_image(import, found, &workers).await;
            workers.end().await;
            loaded.push(self.reclaim_if_full(image).await?);
        }
        Ok(loaded)
    }

    async fn load_image(
        &self,
        import: &Arc<Import>,
        image: &ImportImage,
        workers: &PullWorkers,
    ) -> Result<LoadedImage, PullError> {
        let progress = PullProgress::begin(&ProgressReporter::unwatched());
        let plan = PullPlan::new(&image.manifest, &image.parsed_config, image.config.clone());
        let origin = LayerOrigin::Import { import: Arc::clone(import), progress: Arc::clone(&progress) };
        let acquired = self.acquire_layers(&origin, plan, None, workers).await?;
        let (names, manifests) = (image.names.clone(), image.manifests.clone());
        let has_digest = image.has_digest;
        let store = self.store.clone();
        let warnings = self.image_warnings(&image.parsed_config, &acquired.layers);
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
