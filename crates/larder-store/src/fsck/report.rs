//! The findings of a check.

use std::fmt;
use std::path::PathBuf;

use larder::hint::Hint;
use larder::reference::Digest;

use crate::disk::DiskSpace;
use crate::store::LayerKey;

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FsckReport {
    /// Images that were checked.
    pub images: u64,
    /// Layers that were checked.
    pub layers: u64,
    /// Remnants of removed layers that were checked.
    pub remnants: u64,
    /// The problems found.
    pub problems: Vec<FsckProblem>,
    /// Content that a pull must fetch to complete images, each item once.
    pub refetch: Vec<IncompleteImage>,
    /// Removed files that wait to be deleted. Not a problem.
    pub trash: DiskSpace,
}

impl FsckReport {
    /// Whether the store has no unrepaired problem and nothing must be fetched. Leftovers only take space.
    pub fn is_sound(&self) -> bool {
        let harmless = |problem: &FsckProblem| {
            problem.repair != RepairState::Open || matches!(problem.found, StoreDamage::Leftover { .. })
        };
        self.refetch.is_empty() && self.problems.iter().all(harmless)
    }

    /// Returns true when the check changed the store.
    pub fn has_repairs(&self) -> bool {
        self.problems.iter().any(|problem| problem.repair != RepairState::Open)
    }

    pub(super) fn add(&mut self, found: StoreDamage, repair: RepairState) {
        self.problems.push(FsckProblem { found, repair });
    }
}

/// A problem and its repair state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FsckProblem {
    /// Damage that was found.
    pub found: StoreDamage,
    /// State of its repair.
    pub repair: RepairState,
}

/// The state of the repair of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairState {
    /// Nothing was changed.
    Open,
    /// The damage was repaired with what the store has.
    Repaired,
    /// The damage is recorded. The next pull or load of the image brings the content.
    AwaitsPull,
}

impl RepairState {
    /// Returns `state` if the check repairs, else that nothing was changed.
    pub(super) fn when(repairs: bool, state: RepairState) -> RepairState {
        if repairs { state } else { RepairState::Open }
    }
}

impl fmt::Display for FsckProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.found.fmt(f)?;
        match (self.repair, &self.found) {
            (RepairState::Open, _) => Ok(()),
            (
                RepairState::Repaired,
                StoreDamage::Leftover { .. }
                | StoreDamage::RemnantDamaged { .. }
                | StoreDamage::IndexDamaged { .. },
            ) => f.write_str(" (removed)"),
            (RepairState::Repaired, _) => f.write_str(" (repaired)"),
            (RepairState::AwaitsPull, StoreDamage::BlobDamaged { .. }) => {
                f.write_str(" (removed; the next pull or load of the image brings it back)")
            }
            (RepairState::AwaitsPull, StoreDamage::LayerDamaged { .. }) => {
                f.write_str(" (marked as damaged; the next pull or load of its image replaces it)")
            }
            (RepairState::AwaitsPull, _) => {
                f.write_str(" (marked as missing; the next pull or load of its image brings it back)")
            }
        }
    }
}

/// The kinds of damage.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreDamage {
    /// A record of the database cannot be read.
    #[error("damaged record {key}: {reason}")]
    Record {
        /// Its key.
        key: String,
        /// Reason why it is invalid.
        reason: String,
    },
    /// The indexes of the database do not agree with its images.
    #[error("the database index does not match its images: {detail}")]
    Index {
        /// The first difference.
        detail: String,
    },
    /// A manifest or config is gone.
    #[error("missing blob {digest} of image {image}")]
    BlobMissing {
        /// Digest of the blob.
        digest: Digest,
        /// Id of the image.
        image: Digest,
    },
    /// A manifest or config has other bytes.
    #[error("damaged blob {digest} of image {image}")]
    BlobDamaged {
        /// Digest of the blob.
        digest: Digest,
        /// Id of the image.
        image: Digest,
    },
    /// A layer is gone.
    #[error("missing layer {key}")]
    LayerMissing {
        /// The layer.
        key: LayerKey,
    },
    /// A layer is not as it was unpacked.
    #[error("damaged layer {key}: {damage}")]
    LayerDamaged {
        /// The layer.
        key: LayerKey,
        /// Damage: `EROFS: content differs`.
        damage: String,
    },
    /// Damage of a layer that snapshots of containerd have, and no image: no pull is known that replaces it.
    #[error("{damage}; only snapshots of containerd have it")]
    SnapshotLayer {
        /// The damage itself.
        damage: Box<StoreDamage>,
    },
    /// A layer could not be checked.
    #[error("cannot check layer {key}: {reason}")]
    LayerUnchecked {
        /// The layer.
        key: LayerKey,
        /// Why not.
        reason: String,
    },
    /// The remnant of a removed layer is damaged.
    #[error("damaged remnant of removed layer {key}: {damage}")]
    RemnantDamaged {
        /// The removed layer.
        key: LayerKey,
        /// Damage: `content differs`.
        damage: &'static str,
    },
    /// The index of a layer is not as it was written.
    #[error("damaged index of layer {key}")]
    IndexDamaged {
        /// The layer.
        key: LayerKey,
    },
    /// The files of a snapshot whose record was lost with the database. A container may have written them.
    #[error("lost snapshot: no record, its files are in {}", path.display())]
    LostSnapshot {
        /// Its directory.
        path: PathBuf,
    },
    /// A file or directory that no record refers to.
    #[error("leftover {}", path.display())]
    Leftover {
        /// Path of the file.
        path: PathBuf,
    },
}

impl StoreDamage {
    /// Returns the next step that the reader could try.
    pub fn hint(&self) -> Hint {
        match self {
            StoreDamage::SnapshotLayer { .. } => {
                "remove its containers and its image from containerd, then pull the image again".into()
            }
            StoreDamage::LostSnapshot { .. } => {
                "copy the files that are needed, then remove the directory".into()
            }
            StoreDamage::LayerUnchecked { .. } => "if permission is denied, run as root".into(),
            StoreDamage::RemnantDamaged { .. } => Hint::new()
                .command(["fsck", "--repair"])
                .text(" removes it; the next pull of the layer fetches all of it"),
            StoreDamage::IndexDamaged { .. } => Hint::new()
                .command(["fsck", "--repair"])
                .text(" removes it; only a repair of the layer needs it, which then fetches all of it"),
            _ => Hint::new().command(["fsck", "--repair"]).text(" repairs it"),
        }
    }
}

/// Content that a pull must fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IncompleteImage {
    /// Id of an image that lacks it.
    pub image: Digest,
    /// The names of that image, to pull it by; may be empty.
    pub names: Vec<String>,
    /// Whether an administrator loaded it from an archive.
    pub preloaded: bool,
    /// Content that the image lacks.
    pub lacks: MissingContent,
}

/// The missing content of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MissingContent {
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

impl fmt::Display for MissingContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MissingContent::Blob(digest) => write!(f, "blob {digest}"),
            MissingContent::Layer { key, .. } => write!(f, "layer {key}"),
        }
    }
}
