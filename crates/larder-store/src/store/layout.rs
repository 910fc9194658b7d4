//! Paths in the store. `docs/store-format.md` describes each file.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use larder::reference::Digest;

use super::blob_source::IngestId;
use super::records::LayerKey;
use crate::disk::{Disk, ensure_dir};

/// Paths of one store.
#[derive(Debug)]
pub(crate) struct StoreLayout {
    root: PathBuf,
    /// The next name in `staging` and `trash`. Names count up, so that equal steps give equal names.
    next: AtomicU64,
}

/// End of the name of a layer that was extracted for overlays of a user namespace.
pub(crate) const FOR_USERS: &str = ".user";

/// The directories right below the root, made when the store is created.
const DIRECTORIES: [&str; 8] =
    ["blobs", "images", "ingest", "layers", "mounts", "staging", "trash", "blobs/sha256"];

impl StoreLayout {
    pub(crate) fn new(root: &Path) -> StoreLayout {
        StoreLayout { root: root.to_owned(), next: AtomicU64::new(1) }
    }

    pub(crate) fn create(&self, disk: &dyn Disk) -> io::Result<()> {
        for dir in DIRECTORIES {
            ensure_dir(disk, &self.root.join(dir))?;
        }
        Ok(())
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    /// Exists while reads of incomplete layers are guarded.
    pub(crate) fn guard(&self) -> PathBuf {
        self.root.join("guard")
    }

    pub(crate) fn format(&self) -> PathBuf {
        self.root.join("format")
    }

    pub(crate) fn database(&self) -> PathBuf {
        self.root.join("larder.db")
    }

    /// The database before a rebuild.
    pub(crate) fn old_database(&self) -> PathBuf {
        self.root.join("larder.db.old")
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    pub(crate) fn blob(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.algorithm()).join(digest.hex())
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// The copy of an image's record, for rebuilding the database.
    pub(crate) fn image(&self, id: &Digest) -> PathBuf {
        self.images().join(format!("{}-{}.json", id.algorithm(), id.hex()))
    }

    pub(crate) fn layers(&self) -> PathBuf {
        self.root.join("layers")
    }

    pub(crate) fn layer(&self, key: &LayerKey) -> PathBuf {
        self.layers().join(key.as_str())
    }

    /// Made with the first index.
    pub(crate) fn indexes(&self) -> PathBuf {
        self.root.join("indexes")
    }

    /// The index of a layer.
    pub(crate) fn index(&self, key: &LayerKey) -> PathBuf {
        self.indexes().join(key.as_str())
    }

    /// Made with the first remnant.
    pub(crate) fn remnants(&self) -> PathBuf {
        self.root.join("remnants")
    }

    /// What is kept of a removed layer.
    pub(crate) fn remnant(&self, key: &LayerKey) -> PathBuf {
        self.remnants().join(key.as_str())
    }

    pub(crate) fn ingests(&self) -> PathBuf {
        self.root.join("ingest")
    }

    pub(crate) fn ingest(&self, id: &IngestId) -> PathBuf {
        self.ingests().join(format!("{}-{}", id.digest().algorithm(), id.digest().hex()))
    }

    /// Where layers are mounted.
    pub(crate) fn lowers(&self) -> PathBuf {
        self.root.join("lowers")
    }

    pub(crate) fn lower(&self, key: &LayerKey) -> PathBuf {
        self.lowers().join(key.as_str())
    }

    /// Layers that were extracted for mounts.
    pub(crate) fn extracted(&self) -> PathBuf {
        self.root.join("extracted")
    }

    /// The wrapper of an extracted layer, which only larder changes, whatever the mode of the directory in it. Overlays
    /// of a user namespace have marks of their own, and so a directory of their own.
    pub(crate) fn extracted_layer(&self, key: &LayerKey, in_user_namespace: bool) -> PathBuf {
        self.extracted().join(if in_user_namespace { format!("{key}{FOR_USERS}") } else { key.to_string() })
    }

    pub(crate) fn mounts(&self) -> PathBuf {
        self.root.join("mounts")
    }

    pub(crate) fn mount(&self, id: &str) -> PathBuf {
        self.mounts().join(id)
    }

    /// The copy of a mount's record, for rebuilding the database.
    pub(crate) fn mount_record(&self, id: &str) -> PathBuf {
        self.mount(id).join("mount.json")
    }

    pub(crate) fn snapshots(&self) -> PathBuf {
        self.root.join("snapshots")
    }

    /// Files of snapshots whose records are lost.
    pub(crate) fn lost_snapshots(&self) -> PathBuf {
        self.root.join("lost-snapshots")
    }

    pub(crate) fn snapshot(&self, id: u64) -> PathBuf {
        self.snapshots().join(id.to_string())
    }

    /// The files of a snapshot, or a link to the layer that has them.
    pub(crate) fn snapshot_fs(&self, id: u64) -> PathBuf {
        self.snapshot(id).join("fs")
    }

    /// The copy of a snapshot's record, for rebuilding the database.
    pub(crate) fn snapshot_record(&self, id: u64) -> PathBuf {
        self.snapshot(id).join("snapshot.json")
    }

    pub(crate) fn staging(&self) -> PathBuf {
        self.root.join("staging")
    }

    pub(crate) fn trash(&self) -> PathBuf {
        self.root.join("trash")
    }

    /// A unique path in `staging`.
    pub(crate) fn new_staging(&self) -> PathBuf {
        self.staging().join(self.next_name())
    }

    /// A unique path in `trash`.
    pub(crate) fn new_trash(&self) -> PathBuf {
        self.trash().join(self.next_name())
    }

    fn next_name(&self) -> String {
        self.next.fetch_add(1, Ordering::Relaxed).to_string()
    }

    /// Makes sure that new names differ from those that an earlier process left.
    pub(crate) fn skip_names_in_use(&self) -> io::Result<()> {
        for dir in [self.staging(), self.trash()] {
            for name in names_in(&dir)? {
                if let Ok(number) = name.parse::<u64>() {
                    self.next.fetch_max(number.saturating_add(1), Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }
}

/// The digest that a directory in `ingest`, or a file in `images` without its ending, is named for.
pub(crate) fn digest_of_name(name: &str) -> Option<Digest> {
    let (algorithm, hex) = name.split_once('-')?;
    Digest::parse(&format!("{algorithm}:{hex}")).ok()
}

/// Names of the entries of a directory, in order; those that are not UTF-8 are not ours, and printed lossily. None if
/// it does not exist: a check does not create what is missing.
pub(crate) fn names_in(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    let entries = match fs_err::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(names),
        entries => entries?,
    };
    for entry in entries {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}
