//! Finding what is damaged, and putting right what can be.
//!
//! ```text
//! records -> blobs -> layers (all files, at disk speed) -> leftovers
//! ```
//!
//! Nothing is changed without `repair`. Repairing never guesses content: the [`Refetch`] list says what a pull brings
//! back. A damaged layer stays as it is until then, and so do the images with it, since nobody knows whether another can
//! be had; a damaged manifest or config goes to the trash. Images that lack something are hidden, and those that are whole
//! stay as they are. The store may be in use meanwhile: each finding is looked at again, while nothing
//! moves, before it counts.

mod blobs;
mod layers;
mod leftovers;
mod names;
mod rebuild;

use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;

use larder::hint::Hint;
use larder::reference::Digest;

pub use layers::{CheckLayer, CheckUnpacked};
pub use rebuild::Rebuilt;

use crate::disk::{Amount, measure};
use crate::store::db::{IMAGES, LAYERS, Source as _};
use crate::store::error::Doing as _;
use crate::store::{ImageRecord, LayerKey, LayerRecord, Store, StoreError};

/// How to check a store.
#[derive(Debug, Clone, Copy)]
pub struct FsckOptions<'a> {
    /// Read every byte of every file. When false only names, sizes, modes and the like are compared.
    pub contents: bool,
    /// Put right what can be.
    pub repair: bool,
    /// Layers that are checked at once; at least 1.
    pub threads: usize,
    /// What compares a layer with its manifest.
    pub check: &'a dyn CheckLayer,
}

impl Default for FsckOptions<'static> {
    /// Everything is read, nothing is changed, on all cores up to four.
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4));
        FsckOptions { contents: true, repair: false, threads, check: &CheckUnpacked }
    }
}

/// What a check found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FsckReport {
    /// Images that were checked.
    pub images: u64,
    /// Layers that were checked.
    pub layers: u64,
    /// What is wrong.
    pub problems: Vec<Problem>,
    /// What a pull must bring back, for the images that lack it to be whole: each thing once.
    pub refetch: Vec<Refetch>,
    /// What was removed and waits to be deleted. This is no problem.
    pub trash: Amount,
}

impl FsckReport {
    /// Whether nothing is wrong, or nothing is wrong any more but for what must be fetched.
    pub fn is_sound(&self) -> bool {
        self.refetch.is_empty() && self.problems.iter().all(|problem| problem.repaired)
    }

    fn add(&mut self, found: Damage, repaired: bool) {
        self.problems.push(Problem { found, repaired });
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// What it is.
    pub found: Damage,
    /// Whether it was put right, or noted so that a pull puts it right.
    pub repaired: bool,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.found.fmt(f)?;
        if self.repaired { f.write_str(" (repaired)") } else { Ok(()) }
    }
}

/// What can be wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// A record of the database cannot be read.
    #[error("the record of {key} is damaged: {reason}")]
    Record {
        /// Its key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The indexes of the database do not agree with its images.
    #[error("the names and uses in the database do not agree with its images: {detail}")]
    Index {
        /// The first difference.
        detail: String,
    },
    /// A manifest or config is gone.
    #[error("{digest} of image {image} is missing")]
    BlobMissing {
        /// Digest of the blob.
        digest: Digest,
        /// Id of the image.
        image: Digest,
    },
    /// A manifest or config has other bytes.
    #[error("{digest} of image {image} is damaged")]
    BlobDamaged {
        /// Digest of the blob.
        digest: Digest,
        /// Id of the image.
        image: Digest,
    },
    /// A layer is gone.
    #[error("layer {key} is missing")]
    LayerMissing {
        /// The layer.
        key: LayerKey,
    },
    /// A layer is not as it was unpacked.
    #[error("layer {key} is damaged: {}", shown(first, *count))]
    LayerDamaged {
        /// The layer.
        key: LayerKey,
        /// The first things that are wrong: `usr/bin/tool: another content`.
        first: Vec<String>,
        /// How many are wrong in all.
        count: u64,
    },
    /// A layer is damaged, and cannot be taken away while it is used.
    #[error("layer {key} is damaged and in use, so it stays: {}", shown(first, *count))]
    LayerDamagedInUse {
        /// The layer.
        key: LayerKey,
        /// The first things that are wrong.
        first: Vec<String>,
        /// How many are wrong in all.
        count: u64,
    },
    /// A layer could not be checked.
    #[error("layer {key} could not be checked: {reason}")]
    LayerUnchecked {
        /// The layer.
        key: LayerKey,
        /// Why not.
        reason: String,
    },
    /// Something is there that nothing needs.
    #[error("nothing needs {}", path.display())]
    Leftover {
        /// What it is.
        path: PathBuf,
    },
}

impl Damage {
    /// What the reader could try next.
    pub fn hint(&self) -> Hint {
        match self {
            Damage::LayerDamagedInUse { .. } => {
                Hint::from("unmount the images that use it, then run ").command(["fsck", "--repair"])
            }
            Damage::LayerUnchecked { .. } => "see the reason; as root everything can be read".into(),
            _ => Hint::new().command(["fsck", "--repair"]).text(" puts it right"),
        }
    }
}

fn shown(first: &[String], count: u64) -> String {
    let more = count.saturating_sub(first.len() as u64);
    let list = first.join(", ");
    if more == 0 { list } else { format!("{list}, and {more} more") }
}

/// What a pull must bring back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refetch {
    /// Id of an image that lacks it.
    pub image: Digest,
    /// The names of that image, to pull it by; may be empty.
    pub names: Vec<String>,
    /// What it lacks.
    pub lacks: Lacking,
}

/// Something that an image lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lacking {
    /// A manifest or the config.
    Blob(Digest),
    /// A layer.
    Layer {
        /// Its key.
        key: LayerKey,
        /// Digest of the plain archive.
        diff_id: Digest,
        /// Digest of the archive to fetch.
        digest: Digest,
        /// Its size in bytes.
        size: u64,
        /// Its media type.
        media_type: String,
    },
}

impl Store {
    /// Checks the store.
    pub fn fsck(&self, options: &FsckOptions<'_>) -> Result<FsckReport, StoreError> {
        let mut report = FsckReport::default();
        self.0.check_records(options.repair, &mut report)?;
        self.0.check_names(options.repair, &mut report)?;
        self.0.check_blobs(options.repair, &mut report)?;
        self.0.check_layers(options, &mut report)?;
        self.0.check_leftovers(options.repair, &mut report)?;
        if options.repair {
            self.0.note_missing_images()?;
        }
        report.refetch = self.missing()?;
        report.trash = measure(&self.0.layout.trash()).doing("measure the trash")?;
        self.0.trash.kick();
        Ok(report)
    }

    /// What images lack, or have damaged, so that a pull can bring it back. Empty unless something was damaged.
    pub fn missing(&self) -> Result<Vec<Refetch>, StoreError> {
        let images: Vec<ImageRecord> = self.0.db.read("look for incomplete images", |reader| {
            let layers: Vec<LayerRecord> = reader.all(LAYERS)?;
            let damaged: HashSet<LayerKey> =
                layers.into_iter().filter(|layer| layer.damaged).map(|layer| layer.key).collect();
            let mut images: Vec<ImageRecord> = reader.all(IMAGES)?;
            images.retain(|image| !image.complete || image.keys().iter().any(|key| damaged.contains(*key)));
            // What several lack is told of one that a registry has, if there is one.
            images.sort_by_key(|image| image.digests.is_empty());
            Ok(images)
        })?;
        let mut refetch: Vec<Refetch> = Vec::new();
        for image in images {
            for lacks in self.lacking(&image)? {
                if !refetch.iter().any(|other| other.lacks == lacks) {
                    let names = image.names().cloned().collect();
                    refetch.push(Refetch { image: image.id.clone(), names, lacks });
                }
            }
        }
        Ok(refetch)
    }

    fn lacking(&self, image: &ImageRecord) -> Result<Vec<Lacking>, StoreError> {
        let absent = image.blobs().filter(|digest| !self.0.layout.blob(digest).exists());
        let mut lacking: Vec<Lacking> = absent.cloned().map(Lacking::Blob).collect();
        for layer in &image.layers {
            let record = self
                .0
                .db
                .read("look up a layer", |reader| reader.get::<LayerRecord>(LAYERS, layer.key.as_str()))?;
            if !record.is_some_and(|record| record.is_whole()) {
                lacking.push(Lacking::Layer {
                    key: layer.key.clone(),
                    diff_id: layer.diff_id.clone(),
                    digest: layer.digest.clone(),
                    size: layer.size,
                    media_type: layer.media_type.clone(),
                });
            }
        }
        Ok(lacking)
    }
}
