//! Completes staged layers on the layers below, and moves them to their places.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use larder::reference::Digest;
use rustix::fs::{Mode, OFlags, open};

use super::StorePuller;
use super::error::PullError;
use super::fetch_layer::{LayerSource, StagedLayer, take_as_directory};
use super::layer_fetches::LayerFetches;
use super::lower_roots::{LowerRoots, LowerRootsPermit};
use super::plan::PlannedLayer;
use super::pull_tasks::PullTaskHandle;
use super::spans::settle_span;
use crate::disk::DiskSpace;
use crate::erofs::ErofsFile;
use crate::store::{FILES, FS, IMAGE, LayerHandle, LayerKey, LayerMetadata, LayerStaging};
use crate::unpack::layer_manifest::ManifestLocation;
use crate::unpack::{
    DirectoryImage, LowerMergeMode, LowerMergeReport, PendingImage, UnpackError, UnpackOptions, UnpackTarget,
    UnpackedLayer, merge_open_lowers,
};

impl StorePuller {
    /// Gives a staged layer what it takes from those below, and moves it to its place. What they have may not fit into an
    /// image; then the layer becomes a directory.
    pub(super) async fn settle_staged(
        &self,
        wanted: &PlannedLayer,
        staged: StagedLayer,
        below: &[LayerHandle],
        own: &mut LayerFetches,
    ) -> Result<LayerHandle, PullError> {
        let source = staged.source.clone();
        let layer = match self.settle_once(wanted, staged, below, (&own.worker, &own.lowers)).await {
            Err(PullError::Unpack { cause: UnpackError::NeedsDirectory { reason }, digest }) => {
                tracing::info!(%digest, reason, "unpacking a layer again, into a directory");
                let options = self.options(wanted.descriptor.size, &own.worker);
                let (store, wanted_again) = (self.store.clone(), wanted.clone());
                let staged = take_as_directory(store, source, wanted_again, options, &own.worker).await?;
                self.settle_once(wanted, staged, below, (&own.worker, &own.lowers)).await?
            }
            settled => settled?,
        };
        own.fetched.insert(layer.key().clone());
        Ok(layer)
    }

    async fn settle_once(
        &self,
        wanted: &PlannedLayer,
        staged: StagedLayer,
        below: &[LayerHandle],
        (worker, roots): (&PullTaskHandle, &LowerRoots),
    ) -> Result<LayerHandle, PullError> {
        let StagedLayer { staging, unpacked, image, source } = staged;
        let (diff_id, chain_id) = (wanted.diff_id.clone(), wanted.chain_id.clone());
        let (digest, lowers) = (wanted.descriptor.digest.clone(), below.to_vec());
        let (store, options) = (self.store.clone(), self.options(wanted.descriptor.size, worker));
        let right = if unpacked.pending.is_empty() { None } else { Some(self.may_open(below, roots).await?) };
        // The thread owns the directory, as during unpacking.
        let settle = move || {
            let nearest = image.as_ref().is_some_and(PendingImage::needs_nearest_only);
            let visible = if nearest { &lowers[lowers.len().saturating_sub(1)..] } else { &lowers[..] };
            let failed = |cause| PullError::Unpack { digest: digest.clone(), cause };
            let lowers =
                right.as_ref().map_or(Ok(Vec::new()), |right| right.open(visible)).map_err(failed)?;
            let facts = facts_of(&unpacked, diff_id.clone(), digest.clone());
            let key = |changed| LayerKey::from(if changed { &chain_id } else { &diff_id });
            let layer = if let Some(image) = image {
                let image = image.finish(lowers, &staging.dir().join(FILES)).map_err(failed)?;
                staging.finish_image(&key(image.changed), facts, image.file)?
            } else {
                let settled = settle_directory(&staging, &unpacked, lowers).map_err(failed)?;
                let usage = DiskSpace {
                    bytes: unpacked.usage.allocated_bytes + settled.added.allocated_bytes,
                    inodes: unpacked.usage.inodes + settled.added.inodes,
                };
                // The files that it links to were not known when an image was wanted.
                let had_links = unpacked.pending.cross_layer_links > 0 && store.uses_images()?;
                let image = if had_links { image_of(&staging, &diff_id, &options) } else { Ok(None) };
                match image.map_err(failed)? {
                    Some(image) => staging.finish_image(&key(settled.changed), facts, image)?,
                    None => staging.finish(&key(settled.changed), facts, Some(usage))?,
                }
            };
            // Its bytes are of no more use: if the image is not committed now, the layer itself is kept for the next try.
            if let LayerSource::Ingest(ingest) = source {
                ingest.discard()?;
            }
            Ok::<_, PullError>(layer)
        };
        settle_span(wanted).in_scope(|| worker.blocking(settle)).await?
    }

    /// The right to have these layers open. What waits for it holds nothing else that is bounded, but for what it may keep.
    pub(super) async fn may_open(
        &self,
        below: &[LayerHandle],
        roots: &LowerRoots,
    ) -> Result<LowerRootsPermit, PullError> {
        // The layer itself as well, and a mount that is being opened.
        let files = u32::try_from(below.len() + 2).unwrap_or(u32::MAX);
        let roots = roots.clone();
        if roots.may_keep(files, &self.kept_lowers) {
            return Ok(LowerRootsPermit { roots, waited: None });
        }
        // An image of more layers than there may be is settled alone.
        let waited = Arc::clone(&self.lowers).acquire_many_owned(files.min(self.files.lowers)).await;
        Ok(LowerRootsPermit { roots, waited: Some(waited.map_err(|_| PullError::Abandoned)?) })
    }
}

/// Writes a settled directory as an EROFS image; `None` if no image can hold it.
fn image_of(
    staging: &LayerStaging,
    diff_id: &Digest,
    options: &UnpackOptions,
) -> Result<Option<ErofsFile>, UnpackError> {
    let [root, files, image] = [FS, FILES, IMAGE].map(|name| staging.dir().join(name));
    let implied = staging.dir().join("implied");
    let from = UnpackTarget { root: &root, files: &files };
    match (DirectoryImage { from, image: &image, manifest: &implied }).write(diff_id, options) {
        Ok(written) => {
            let moved =
                if implied.exists() { fs_err::rename(&implied, &files) } else { fs_err::remove_file(&files) };
            moved.map_err(|error| UnpackError::file("replace", &files, error))?;
            Ok(Some(written))
        }
        Err(UnpackError::NeedsDirectory { reason }) => {
            tracing::info!(%diff_id, reason, "a layer remains a directory");
            for path in [&image, &implied].into_iter().filter(|path| path.exists()) {
                fs_err::remove_file(path).map_err(|error| UnpackError::file("remove", path, error))?;
            }
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn settle_directory(
    staging: &LayerStaging,
    unpacked: &UnpackedLayer,
    lowers: Vec<Arc<OwnedFd>>,
) -> Result<LowerMergeReport, UnpackError> {
    if unpacked.pending.is_empty() {
        return Ok(LowerMergeReport::default());
    }
    let root = staging.dir().join(FS);
    let root =
        open(&root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| UnpackError::file("open the layer's directory", &root, errno))?;
    let manifest = ManifestLocation { path: staging.dir().join(FILES), offset: 0 };
    merge_open_lowers(root, &manifest, lowers, LowerMergeMode::Apply)
}

fn facts_of(unpacked: &UnpackedLayer, diff_id: Digest, digest: Digest) -> LayerMetadata {
    LayerMetadata {
        diff_id,
        digest,
        compressed_bytes: unpacked.compressed_bytes,
        plain_bytes: unpacked.plain_bytes,
        files: unpacked.entries,
        pending: !unpacked.pending.is_empty(),
    }
}
