//! What holds the disk. Layers are counted once, when they arrive; everything else is small and counted on demand.

use std::collections::HashMap;

use super::Store;
use super::commit::RATIO;
use super::db::{IMAGES, META, Source as _};
use super::error::{Doing as _, StoreError};
use super::images::{layer_usages, total};
use super::layers::own_usage;
use super::records::{ImageRecord, LayerKey, Ratio};
use crate::disk::{Amount, measure};

/// What holds the disk: `larder df`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreUsage {
    /// Unpacked layers, each once.
    pub layers: Amount,
    /// Manifests and configs, and the copies of image records.
    pub blobs: Amount,
    /// Blobs being fetched, or half fetched.
    pub ingest: Amount,
    /// Layers being unpacked.
    pub staging: Amount,
    /// What was removed and waits to be deleted.
    pub trash: Amount,
    /// What was written to writable mounts.
    pub mounts: Amount,
    /// The database, and the store's own folders.
    pub database: Amount,
}

impl StoreUsage {
    /// The sum: what `du` says of the store.
    pub fn total(&self) -> Amount {
        self.layers + self.blobs + self.ingest + self.staging + self.trash + self.mounts + self.database
    }
}

/// What one image takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageUsage {
    /// The image.
    pub image: ImageRecord,
    /// What it takes by itself: the sum of the two below.
    pub total: Amount,
    /// Of it, layers that other images have as well.
    pub shared: Amount,
    /// Of it, what removing just this image frees.
    pub unique: Amount,
    /// Bytes to fetch it all.
    pub compressed_bytes: u64,
}

impl Store {
    /// What holds the disk.
    pub fn usage(&self) -> Result<StoreUsage, StoreError> {
        let doing = "measure the store";
        let layout = &self.0.layout;
        // In this order: what is committed meanwhile is counted in one of the two, at worst in both.
        let fresh = self.0.arrivals.usage();
        let layers = self.0.db.read(doing, layer_usages)?;
        let measured = |path| measure(path).doing(doing);
        Ok(StoreUsage {
            layers: layers.into_values().sum::<Amount>() + fresh,
            blobs: measured(&layout.blobs())? + measured(&layout.images())?,
            ingest: measured(&layout.ingests())?,
            staging: measured(&layout.staging())?,
            trash: measured(&layout.trash())?,
            mounts: measured(&layout.mounts())?,
            database: measured(&layout.database())?
                + measured(&layout.lock())?
                + measured(&layout.format())?
                + own_usage(&layout.layers()).doing(doing)?
                + own_usage(layout.root()).doing(doing)?,
        })
    }

    /// What each image takes, in the order of their ids; images that lack a layer are in it as well.
    pub fn image_usages(&self) -> Result<Vec<ImageUsage>, StoreError> {
        let (images, layers) = self.0.db.read("measure images", |reader| {
            Ok((reader.all::<ImageRecord>(IMAGES)?, layer_usages(reader)?))
        })?;
        let mut users: HashMap<LayerKey, u64> = HashMap::new();
        for key in images.iter().flat_map(|image| image.keys()) {
            *users.entry(key.clone()).or_default() += 1;
        }
        let usage = |image: ImageRecord| {
            let total = total(&image, &layers);
            let shared: Amount = image
                .keys()
                .into_iter()
                .filter(|key| users.get(*key).is_some_and(|users| *users > 1))
                .filter_map(|key| layers.get(key))
                .copied()
                .sum();
            let unique = Amount {
                bytes: total.bytes.saturating_sub(shared.bytes),
                inodes: total.inodes.saturating_sub(shared.inodes),
            };
            let compressed_bytes =
                image.layers.iter().fold(image.blob_bytes, |sum, layer| sum.saturating_add(layer.size));
            ImageUsage { image, total, shared, unique, compressed_bytes }
        };
        Ok(images.into_iter().map(usage).collect())
    }

    /// What is free on the store's file system, for unprivileged users.
    pub fn free(&self) -> Result<Amount, StoreError> {
        let stat = rustix::fs::statvfs(self.0.layout.root())
            .map_err(std::io::Error::from)
            .doing("look at the store's file system")?;
        // Some file systems make inodes as they go and report none.
        let inodes = if stat.f_files == 0 { u64::MAX } else { stat.f_favail };
        Ok(Amount { bytes: stat.f_bavail.saturating_mul(stat.f_frsize), inodes })
    }

    /// What a fetched byte becomes on disk, as learned on this node.
    pub fn ratio(&self) -> Result<Ratio, StoreError> {
        let doing = "look up what images became on disk";
        let ratio = self.0.db.read(doing, |reader| reader.get::<Ratio>(META, RATIO))?;
        Ok(ratio.unwrap_or_default())
    }
}
