//! Disk usage of the store. Layers are measured once, when they are added; everything else is small and measured on
//! demand.

use std::collections::HashMap;
use std::path::Path;

use larder::reference::Digest;
use serde::Deserialize;

use super::commit::RATIO;
use super::db::{DbRead, DbResult, IMAGES, LAYERS, LEASES, META, MOUNTS, USES, log_of};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::{OpenStore, Store};
use super::listing::ImageListing;
use super::partial::incomplete_records;
use super::records::{LayerKey, LayerRecord, LeaseRecord, MountRecord, UnpackRatio};
use super::references::ReferencedItem;
use super::snapshot_records::mountable_layers;
use crate::disk::{DiskSpace, SizeAccuracy, free_space, measure, measure_one};
use crate::lazy::toc::TocFormat;

/// Disk usage of the store by category, as `larder df` shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreUsage {
    /// Unpacked layers with their indexes, each once; of an incomplete one, what is here.
    pub layers: DiskSpace,
    /// Space that is promised to incomplete layers, and not used yet: in no other sum.
    pub promised: DiskSpace,
    /// Of these, layers shared by several images.
    pub shared_layers: DiskSpace,
    /// Manifests and configs, and the copies of image records.
    pub blobs: DiskSpace,
    /// What is kept of removed layers, with their indexes.
    pub remnants: DiskSpace,
    /// Blobs being fetched, or partially fetched.
    pub ingest: DiskSpace,
    /// Layers being unpacked.
    pub staging: DiskSpace,
    /// Removed files that wait to be deleted.
    pub trash: DiskSpace,
    /// Files written to writable mounts and to containerd's snapshots.
    pub mounts: DiskSpace,
    /// Layers extracted for mounts, where EROFS cannot be mounted.
    pub extracted: DiskSpace,
    /// The database, and the store's own directories.
    pub database: DiskSpace,
}

impl StoreUsage {
    /// The sum, equal to `du` of the store.
    pub fn total(&self) -> DiskSpace {
        let files = self.layers + self.remnants + self.blobs + self.ingest + self.staging + self.trash;
        files + self.mounts + self.extracted + self.database
    }
}

/// Space that incomplete layers are going to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromisedSpace {
    /// Their data.
    pub data: DiskSpace,
    /// Blobs that the data is unpacked from; they are removed when their layers are complete.
    pub blobs: DiskSpace,
}

impl PromisedSpace {
    /// The sum.
    pub fn total(&self) -> DiskSpace {
        self.data + self.blobs
    }
}

/// Disk usage of one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageUsage {
    /// The image's id.
    pub id: Digest,
    /// The type of an artifact; empty for an image.
    pub artifact_type: String,
    /// Its names with tags.
    pub tags: Vec<String>,
    /// Its names with digests.
    pub digests: Vec<String>,
    /// Never to be collected.
    pub pinned: bool,
    /// When it was last pulled or loaded, in seconds since 1970.
    pub pulled_at: u64,
    /// Config, manifests and the copy of its record, in whole blocks.
    pub own: DiskSpace,
    /// Total disk usage: the sum of the two below.
    pub total: DiskSpace,
    /// Of it, what other images, leases, mounts or pulls under way also need, or what stays for the next pull.
    pub shared: DiskSpace,
    /// Of it, what removing just this image frees.
    pub unique: DiskSpace,
    /// Compressed bytes of all layers.
    pub compressed_bytes: u64,
}

impl ImageUsage {
    /// With the files that it has beside its layers, alone and with other images, and no layers yet.
    fn of(image: ImageListing, own: DiskSpace, shared: DiskSpace) -> ImageUsage {
        ImageUsage {
            id: image.id,
            artifact_type: image.artifact_type,
            tags: image.tags,
            digests: image.digests,
            pinned: image.pinned,
            pulled_at: image.pulled_at,
            own,
            total: own + shared,
            shared,
            unique: own,
            compressed_bytes: 0,
        }
    }

    fn add(&mut self, layer: &LayerUsage, (freed, kept): (DiskSpace, DiskSpace), shared: bool) {
        self.total += layer.usage;
        self.shared += kept;
        *(if shared { &mut self.shared } else { &mut self.unique }) += freed;
        self.compressed_bytes = self.compressed_bytes.saturating_add(layer.facts.compressed_bytes);
    }
}

/// The parts of a [`LayerRecord`](super::records::LayerRecord) that sums of disk usage need: faster to read.
#[derive(Deserialize)]
pub(super) struct LayerUsage {
    pub(super) key: LayerKey,
    pub(super) usage: DiskSpace,
    pub(super) remnant: DiskSpace,
    facts: LayerArchiveSize,
    present: bool,
}

#[derive(Deserialize)]
struct LayerArchiveSize {
    compressed_bytes: u64,
}

/// Lists the disk usage of each present layer, in the order of keys.
pub(super) fn layers(source: &impl DbRead) -> DbResult<Vec<LayerUsage>> {
    let mut layers: Vec<LayerUsage> = source.all(LAYERS)?;
    layers.retain(|layer| layer.present);
    Ok(layers)
}

/// The layer of this key, among layers in the order of keys.
fn find<'a>(layers: &'a [LayerUsage], key: &str) -> Option<&'a LayerUsage> {
    let at = layers.binary_search_by(|layer| layer.key.as_str().cmp(key)).ok()?;
    layers.get(at)
}

/// Returns the users of layers beside images, as text: leases, mounts and snapshots. Pulls under way are not in the
/// database.
pub(super) fn layer_users_beside_images(source: &impl DbRead) -> DbResult<HashMap<LayerKey, String>> {
    let mut held: HashMap<LayerKey, String> = HashMap::new();
    source.for_each(LEASES, |lease: LeaseRecord| {
        for key in lease.leased.layers {
            held.insert(key, format!("lease {}", lease.id));
        }
    })?;
    source.for_each(MOUNTS, |mount: MountRecord| {
        for key in mount.layers {
            held.insert(key, format!("the mount {}", mount.target.display()));
        }
    })?;
    // A committed snapshot alone is removed with the image that it is of.
    for key in mountable_layers(source)? {
        held.insert(key, "a container of containerd".to_owned());
    }
    Ok(held)
}

/// Visits each layer with the ids of the images that need it.
pub(super) fn each_layers_users(source: &impl DbRead, visit: impl FnMut(&str, &[String])) -> DbResult<()> {
    each_users(source, "layer/", visit)
}

/// Visits what the table of uses has under this prefix, with the ids of the images that need it.
fn each_users(source: &impl DbRead, prefix: &str, mut visit: impl FnMut(&str, &[String])) -> DbResult<()> {
    let (mut last, mut users) = (String::new(), Vec::new());
    // The uses of one thing follow each other.
    source.visit(USES, prefix, &mut |entry, _| {
        let (key, image) = entry[prefix.len()..].split_once('/').unwrap_or_default();
        if key != last {
            visit(&last, &users);
            users.clear();
            key.clone_into(&mut last);
        }
        users.push(image.to_owned());
        Ok(true)
    })?;
    visit(&last, &users);
    Ok(())
}

impl OpenStore {
    /// Divides the disk usage of a layer into what its removal frees, and its remnant.
    pub(super) fn freed_and_kept(&self, layer: &LayerUsage) -> (DiskSpace, DiskSpace) {
        let kept = if self.config.keep_remnants { layer.remnant } else { DiskSpace::ZERO };
        (kept.shortfall_to(layer.usage), kept)
    }

    /// Returns the disk usage of each image beside its layers, in whole blocks: config, manifests, the copy of its
    /// record. A blob that several images have is private to none of them. What cannot be measured counts 0, so that
    /// it is not promised.
    pub(super) fn own_files(&self, source: &impl DbRead) -> DbResult<HashMap<String, DiskSpace>> {
        let mut own: HashMap<String, DiskSpace> = HashMap::new();
        each_users(source, "blob/", |blob, users| {
            if let ([image], Ok(digest)) = (users, Digest::parse(blob)) {
                *own.entry(image.clone()).or_default() += taken(&self.layout.blob(&digest));
            }
        })?;
        for (image, own) in &mut own {
            if let Ok(id) = Digest::parse(image) {
                *own += taken(&self.layout.image(&id));
            }
        }
        Ok(own)
    }

    /// Returns the disk usage of the manifests that each image has together with others.
    fn shared_files(&self, source: &impl DbRead) -> DbResult<HashMap<String, DiskSpace>> {
        let mut shared: HashMap<String, DiskSpace> = HashMap::new();
        each_users(source, "blob/", |blob, users| {
            if let (true, Ok(digest)) = (users.len() > 1, Digest::parse(blob)) {
                let space = taken(&self.layout.blob(&digest));
                for image in users {
                    *shared.entry(image.clone()).or_default() += space;
                }
            }
        })?;
        Ok(shared)
    }
}

/// Returns the disk usage of a file, as far as that can be measured.
pub(super) fn taken(path: &Path) -> DiskSpace {
    measure_one(path).unwrap_or_default()
}

impl Store {
    /// Whether layer sizes are estimates on this filesystem.
    pub fn estimates_sizes(&self) -> bool {
        self.0.sizes == SizeAccuracy::Estimated
    }

    /// Measures the disk usage of the store.
    pub fn usage(&self) -> Result<StoreUsage, StoreError> {
        let doing = "measure the store";
        let layout = &self.0.layout;
        // In this order: what is committed between the two is counted at least once.
        let uncommitted = self.0.uncommitted_layers.usage();
        let (layers, shared_layers) = self.0.db.read(doing, |reader| {
            let layers = layers(reader)?;
            let mut shared = DiskSpace::default();
            each_layers_users(reader, |key, users| {
                if users.len() > 1
                    && let Some(layer) = find(&layers, key)
                {
                    shared += layer.usage;
                }
            })?;
            Ok((layers, shared))
        })?;
        let measured = |path| measure(path).context(doing);
        let promised = self.promised()?;
        let whole = layers.iter().map(|layer| layer.usage).sum::<DiskSpace>() + uncommitted;
        Ok(StoreUsage {
            layers: promised.data.shortfall_to(whole),
            promised: promised.total(),
            shared_layers,
            blobs: measured(&layout.blobs())? + measured(&layout.images())?,
            remnants: self.0.remnant_usage()?,
            ingest: measured(&layout.ingests())?,
            staging: measured(&layout.staging())?,
            trash: measured(&layout.trash())?,
            mounts: measured(&layout.mounts())? + measured(&layout.snapshots())?,
            extracted: measured(&layout.extracted())?,
            database: measured(&layout.database())?
                + taken(&log_of(&layout.database()))
                + measured(&layout.lock())?
                + measured(&layout.format())?
                + taken(&layout.guard())
                + measure_one(&layout.layers()).context(doing)?
                + taken(&layout.indexes())
                + measure_one(layout.root()).context(doing)?,
        })
    }

    /// Disk usage of each image, ordered by ID, including incomplete images.
    pub fn image_usages(&self) -> Result<Vec<ImageUsage>, StoreError> {
        self.0.db.read("measure images", |reader| {
            let layers = layers(reader)?;
            let held = layer_users_beside_images(reader)?;
            let is_held = |key: &LayerKey| {
                held.contains_key(key) || self.0.references.has(&ReferencedItem::Layer(key.clone()))
            };
            let mut images: Vec<ImageUsage> = Vec::new();
            let (own, shared) = (self.0.own_files(reader)?, self.0.shared_files(reader)?);
            let space_of = |files: &HashMap<String, DiskSpace>, image: &ImageListing| {
                files.get(image.id.as_str()).copied().unwrap_or_default()
            };
            reader.for_each(IMAGES, |image: ImageListing| {
                let (own, shared) = (space_of(&own, &image), space_of(&shared, &image));
                images.push(ImageUsage::of(image, own, shared));
            })?;
            each_layers_users(reader, |key, users| {
                let Some(layer) = find(&layers, key) else { return };
                let is_shared = users.len() > 1 || is_held(&layer.key);
                let mut next = 0;
                for user in users {
                    // Often it is the one that follows.
                    if images.get(next).is_none_or(|image| image.id.as_str() != user) {
                        next += images[next..].partition_point(|image| image.id.as_str() < user.as_str());
                    }
                    if let Some(image) = images.get_mut(next).filter(|image| image.id.as_str() == user) {
                        image.add(layer, self.0.freed_and_kept(layer), is_shared);
                        next += 1;
                    }
                }
            })?;
            Ok(images)
        })
    }

    /// Space that the rest of incomplete layers takes. Each layer counts from the commit of its image on; before that,
    /// the pull claims it.
    pub fn promised(&self) -> Result<PromisedSpace, StoreError> {
        let mut promised = PromisedSpace::default();
        let layers = self.0.db.read("list incomplete layers", incomplete_records)?;
        for (LayerRecord { key, usage, .. }, partial) in layers {
            let here = self.0.space_here(&key);
            promised.data.bytes += usage.bytes.saturating_sub(here.bytes);
            // The next process reads the table of contents there, too.
            let table = TocFormat::of(&partial.descriptor()).and_then(|format| partial.blob.table(&format));
            for blob in table.iter().chain([&partial.blob]) {
                let fetched = self.ingested_bytes([&blob.ingest_id()]);
                promised.blobs.bytes += blob.size.saturating_sub(fetched);
            }
        }
        Ok(promised)
    }

    /// Free space of the store's filesystem without what is promised to incomplete layers.
    pub fn unpromised(&self) -> Result<DiskSpace, StoreError> {
        // What is written in between counts twice, and not as free.
        let (promised, free) = (self.promised()?, self.free()?);
        Ok(promised.total().shortfall_to(free))
    }

    /// Free space of the store's filesystem, for unprivileged users.
    pub fn free(&self) -> Result<DiskSpace, StoreError> {
        free_space(self.0.layout.root()).context("inspect the store's filesystem")
    }

    /// Returns the ratio of bytes on disk to fetched bytes, as learned on this node.
    pub fn ratio(&self) -> Result<UnpackRatio, StoreError> {
        let doing = "look up the unpack ratio";
        let ratio = self.0.db.read(doing, |reader| reader.get::<UnpackRatio>(META, RATIO))?;
        Ok(ratio.unwrap_or_default())
    }
}
