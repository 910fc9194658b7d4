//! Why an operation of the store failed.

use std::io;
use std::path::PathBuf;

use larder::files::hint_of_full_disk;
use larder::hint::Hint;
use larder::reference::{Digest, ImageName};

use super::db::DbError;
use super::records::LayerKey;
use super::{FORMAT, TITLE};
use larder_registry::manifest::ManifestError;

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreOpenError {
    /// Another process has it open.
    #[error("the store {} is in use by {holder}", root.display())]
    InUse {
        /// The store's directory.
        root: PathBuf,
        /// `process 4711 (larder)`, or `another process` if unknown.
        holder: String,
    },
    /// The directory has content that does not belong to a store.
    #[error("{} is not an image store and not empty", root.display())]
    NotAStore {
        /// The directory.
        root: PathBuf,
    },
    /// The directory has no store or does not exist, and the caller did not ask to create one.
    #[error("no image store in {}", root.display())]
    NoStore {
        /// The directory.
        root: PathBuf,
    },
    /// The root is a file.
    #[error("{} is not a directory", root.display())]
    NotADirectory {
        /// As given.
        root: PathBuf,
    },
    /// Another version of larder made this store, or the file that names its format is damaged.
    #[error("the store {} has unsupported format {found:?}: expected \"{TITLE} {FORMAT}\"", root.display())]
    Format {
        /// The store's directory.
        root: PathBuf,
        /// The beginning of the file `format`.
        found: String,
    },
    /// The database cannot be read.
    #[error("cannot open the store's database {}", path.display())]
    Database {
        /// The database file.
        path: PathBuf,
        /// Error of the database.
        #[source]
        cause: DbError,
    },
    /// The database cannot be rebuilt while images are mounted.
    #[error("cannot rebuild the database of the store {}: images are mounted at {}", root.display(), mounted.join(", "))]
    Mounted {
        /// The store's directory.
        root: PathBuf,
        /// Where.
        mounted: Vec<String>,
    },
    /// The disk refused a step.
    #[error("cannot {doing} the store {}", root.display())]
    Io {
        /// Such as `create` or `recover`.
        doing: &'static str,
        /// The store's directory.
        root: PathBuf,
        /// Error of the disk, with the path.
        #[source]
        cause: io::Error,
    },
    /// Cleaning up after a dead process failed.
    #[error("cannot recover the store {}", root.display())]
    Recovery {
        /// The store's directory.
        root: PathBuf,
        /// Why not.
        #[source]
        cause: Box<StoreError>,
    },
}

impl StoreOpenError {
    /// Whether the database is not as it was written, and is to be rebuilt.
    pub fn is_damage(&self) -> bool {
        matches!(self, StoreOpenError::Database { cause, .. } if cause.is_damage())
    }

    /// Returns the next step that the reader could try.
    pub fn hint(&self) -> Option<Hint> {
        Some(match self {
            StoreOpenError::InUse { .. } => {
                Hint::from("one process at a time can use a store: wait for the command to end, or stop ")
                    .command(["serve"])
            }
            // Its own `umount` needs the database.
            StoreOpenError::Mounted { .. } => "unmount them first: umount DIR".into(),
            StoreOpenError::NotAStore { .. } | StoreOpenError::NotADirectory { .. } => {
                named_root("to use the directory of a store, an empty or a new directory, pass ")
            }
            StoreOpenError::NoStore { .. } => Hint::new()
                .command(["pull", "IMAGE"])
                .text(" creates one there; for another store, pass ")
                .setting("root", "DIR"),
            // Each version of larder writes a whole line that begins so.
            StoreOpenError::Format { root, found }
                if !found.starts_with("larder ") || *found == format!("{TITLE} {FORMAT}") =>
            {
                Hint::from(format!(
                    "the file that names the format is empty or damaged; if this version wrote the store, restore it: \
                     echo {TITLE} {FORMAT} > {}; then ",
                    root.join("format").display()
                ))
                .command(["fsck"])
                .text(" checks the store")
            }
            StoreOpenError::Format { .. } => named_root(
                "use the version of larder that wrote it; to pull its images again, remove the directory, or pass ",
            ),
            // A full disk is no damage, nor are permissions.
            StoreOpenError::Database { cause: DbError::Io(cause), .. } => {
                hint_of_io(cause).unwrap_or_else(rebuild)
            }
            StoreOpenError::Database { .. } => rebuild(),
            StoreOpenError::Io { cause, .. } => hint_of_io(cause).unwrap_or_else(|| {
                named_root("run as the owner of the directory, or use another directory with ")
            }),
            StoreOpenError::Recovery { cause, .. } => return cause.hint(),
        })
    }
}

/// Why an operation of the store failed. The visible state has not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The disk refused a step.
    #[error("cannot {operation}")]
    Io {
        /// Such as `commit the image`.
        operation: &'static str,
        /// Error of the disk, with the path.
        #[source]
        cause: io::Error,
    },
    /// The database refused a step.
    #[error("cannot {operation}: database error")]
    Database {
        /// Such as `list images`.
        operation: &'static str,
        /// Error of the database.
        #[source]
        cause: DbError,
    },
    /// There is no such image.
    #[error("image {image} not found in the store")]
    NoImage {
        /// As asked.
        image: ImageName,
    },
    /// The image is mounted.
    #[error("image {image} is in use: mounted at {}", mounts.join(", "))]
    Mounted {
        /// As asked.
        image: ImageName,
        /// Where.
        mounts: Vec<String>,
    },
    /// A blob given to be stored is not what its digest says.
    #[error("digest mismatch: expected {wanted}, got {found}")]
    WrongDigest {
        /// The digest that was promised.
        wanted: Digest,
        /// The digest they have.
        found: Digest,
    },
    /// The layers given for an image are not those that its config lists.
    #[error("the config of image {id} does not match its layers")]
    WrongLayers {
        /// Digest of the config.
        id: Digest,
    },
    /// The config of an image cannot be read.
    #[error("invalid config of image {id}")]
    Config {
        /// Digest of the config.
        id: Digest,
        /// Error of the manifest.
        #[source]
        cause: Box<ManifestError>,
    },
    /// A layer that was expected to be present is missing or damaged.
    #[error("layer {key} not found in the store")]
    NoLayer {
        /// The layer's key.
        key: LayerKey,
    },
    /// A layer that a dead process unpacked was not completely written to disk. It is removed.
    #[error("layer {key}, which an interrupted pull had unpacked, was not completely written to disk")]
    LostWrites {
        /// The layer's key.
        key: LayerKey,
    },
    /// Another pull of this process fetches this blob.
    #[error("{digest} is already being fetched")]
    Busy {
        /// Digest of the blob.
        digest: Digest,
    },
    /// More bytes were written than declared.
    #[error("{digest}: a write ends at byte {end}, beyond its declared size of {size} bytes")]
    TooLong {
        /// Digest of the blob.
        digest: Digest,
        /// Its declared size in bytes.
        size: u64,
        /// Where the bytes would have ended.
        end: u64,
    },
}

impl StoreError {
    /// Returns the next step that the reader could try.
    pub fn hint(&self) -> Option<Hint> {
        Some(match self {
            StoreError::Io { cause, .. } => return hint_of_io(cause),
            StoreError::Database { cause, .. } => return cause.hint(),
            StoreError::NoImage { .. } => {
                Hint::new().command(["images"]).text(" lists the images in the store")
            }
            StoreError::Mounted { .. } => Hint::new()
                .command(["umount", "DIR"])
                .text(" first; or ")
                .command(["rm", "--force"])
                .text(", which keeps the mounted layers until umount"),
            StoreError::WrongDigest { .. } => {
                "retry; if the digest still differs, report it to the registry's operator".into()
            }
            StoreError::LostWrites { .. } => {
                "retry, which fetches the layer again; the kernel log shows disk errors".into()
            }
            StoreError::NoLayer { .. } => {
                Hint::from("pull the image again; ").command(["fsck"]).text(" finds other damage")
            }
            StoreError::WrongLayers { .. }
            | StoreError::Config { .. }
            | StoreError::Busy { .. }
            | StoreError::TooLong { .. } => return None,
        })
    }

    /// Whether the disk is full, or this user's share of it.
    pub fn is_no_space(&self) -> bool {
        match self {
            StoreError::Io { cause, .. } => is_no_space(cause),
            StoreError::Database { cause, .. } => cause.is_no_space(),
            _ => false,
        }
    }
}

/// Adds the failed operation to an error of the disk or database.
pub(crate) trait StoreErrorContext<T> {
    /// `cannot {operation}`.
    fn context(self, doing: &'static str) -> Result<T, StoreError>;
}

impl<T> StoreErrorContext<T> for io::Result<T> {
    fn context(self, doing: &'static str) -> Result<T, StoreError> {
        self.map_err(|cause| StoreError::Io { operation: doing, cause })
    }
}

impl<T> StoreErrorContext<T> for Result<T, DbError> {
    fn context(self, doing: &'static str) -> Result<T, StoreError> {
        self.map_err(|cause| StoreError::Database { operation: doing, cause })
    }
}

/// Whether the error means that no disk space or quota is left.
pub(crate) fn is_no_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

pub(crate) fn hint_of_io(error: &io::Error) -> Option<Hint> {
    Some(match error.kind() {
        io::ErrorKind::PermissionDenied => "run as the user who owns the store, or as root".into(),
        io::ErrorKind::ReadOnlyFilesystem => {
            named_root("the filesystem is read-only: mount it for writing, or use another directory with ")
                .text("; the kernel log shows whether an error caused this")
        }
        kind => return hint_of_full_disk(kind),
    })
}

fn named_root(text: &'static str) -> Hint {
    Hint::from(text).setting("root", "DIR")
}

/// Returns the next step where the database cannot be read.
pub(crate) fn rebuild() -> Hint {
    Hint::new().command(["fsck", "--rebuild"]).text(" rebuilds the database from the images on disk")
}
