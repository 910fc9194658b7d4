//! Why images could not be read from a file.

use std::io;
use std::path::PathBuf;

use larder::hint::Hint;
use larder::reference::Digest;

use crate::store::StoreError;
use crate::store::admission::InsufficientSpace;
use larder_registry::manifest::ManifestError;

/// Why images could not be read from a file. Nothing of it is visible in the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The disk has not enough space to spool the stream.
    #[error(transparent)]
    InsufficientSpace(#[from] InsufficientSpace),
    /// The given file cannot be read.
    #[error("cannot read {what}")]
    Read {
        /// A path, or `the archive`.
        what: String,
        /// Why not.
        #[source]
        cause: io::Error,
    },
    /// The given file is no archive.
    #[error("{}", damaged(*at, reason))]
    Archive {
        /// Where, counted in plain bytes.
        at: u64,
        /// Reason why it is invalid.
        reason: String,
    },
    /// The archive has too many entries.
    #[error("the archive has more than {} entries", super::archive::MAX_ENTRIES)]
    TooManyEntries,
    /// There is neither an OCI layout nor a docker archive in it.
    #[error("no images found: not an OCI layout, and not the output of docker save")]
    NoImages,
    /// It has the files of a root filesystem, as `larder export` and `docker export` write them.
    #[error("no images found: these are the files of a root filesystem, such as {entry}")]
    Files {
        /// The name of an entry.
        entry: String,
    },
    /// The input ends before the archive does.
    #[error("the archive is truncated: it ends at byte {at}{}", within(.entry.as_deref()))]
    Truncated {
        /// Where, counted in plain bytes.
        at: u64,
        /// The entry whose content is incomplete.
        entry: Option<String>,
    },
    /// Something that it names is not in it.
    #[error("{name} not found in the archive or layout")]
    Missing {
        /// Name of the entry.
        name: String,
    },
    /// A document is too large.
    #[error("{name} is too large: {size} bytes, limit {}", larder_registry::manifest::MAX_BYTES)]
    TooLarge {
        /// Name of the entry.
        name: String,
        /// Its size.
        size: u64,
    },
    /// A document cannot be understood.
    #[error("invalid JSON in {name}")]
    Document {
        /// Name of the entry.
        name: String,
        /// Error of the parser.
        #[source]
        cause: serde_json::Error,
    },
    /// A manifest, index or config cannot be used.
    #[error("invalid document {name}")]
    Manifest {
        /// Name of the entry.
        name: String,
        /// Error of the manifest.
        #[source]
        cause: ManifestError,
    },
    /// A document has other bytes than its name says.
    #[error("digest mismatch: {name} does not have the digest {wanted}")]
    WrongDigest {
        /// Name of the entry.
        name: String,
        /// The digest that it should have.
        wanted: Digest,
    },
    /// An entry of the index is no manifest of an image.
    #[error("not a container image: media type {media_type:?}")]
    OtherContent {
        /// Its media type, as written.
        media_type: String,
    },
    /// All images in it are for other platforms.
    #[error("no image for platform {wanted}; available: {}", offered.join(", "))]
    NoPlatform {
        /// The platform that was asked for.
        wanted: String,
        /// Platforms that the archive has.
        offered: Vec<String>,
    },
    /// An image in it has an invalid name.
    #[error("invalid image name {name:?}")]
    Name {
        /// As written.
        name: String,
        /// Error of the name.
        #[source]
        cause: larder::reference::ReferenceError,
    },
    /// The digest in a name of an image is of no document that leads to the image.
    #[error("the archive names an image {name}, and has another manifest for it")]
    ForeignDigest {
        /// As written.
        name: String,
    },
    /// One name was given for several images without a name.
    #[error("cannot give the name {name} to several images")]
    OneName {
        /// As given.
        name: String,
    },
}

/// Hint for a truncated archive.
const WRITE_AGAIN: &str = "create the archive again: it may be truncated or modified";

impl ImportError {
    /// Returns true if the archive is in order, and has other content than an image there.
    pub(super) fn is_other_content(&self) -> bool {
        match self {
            ImportError::OtherContent { .. } => true,
            ImportError::Manifest { cause, .. } => cause.is_other_content(),
            _ => false,
        }
    }

    /// Returns the next step that the reader could try.
    pub fn hint(&self) -> Option<Hint> {
        let text = match self {
            ImportError::Truncated { .. } => {
                let text = "copy it again, or create it again: ";
                return Some(save_command(text).text(" and docker save -o FILE IMAGE write whole archives"));
            }
            ImportError::Files { .. } => {
                let text = "an image has a configuration, too: ";
                return Some(
                    save_command(text).text(" or docker save writes both, and export only the files"),
                );
            }
            ImportError::Store(error) => return error.hint(),
            ImportError::InsufficientSpace(error) => return Some(error.hint()),
            ImportError::Read { cause, .. } => match cause.kind() {
                io::ErrorKind::NotFound => "pass a file, a directory, or - for standard input",
                io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => {
                    WRITE_AGAIN
                }
                _ => return crate::store::error::hint_of_io(cause),
            },
            ImportError::Archive { at: 0, .. } | ImportError::NoImages => {
                "pass an OCI layout (skopeo copy ... oci:DIR), an archive of one, a directory of skopeo (dir:DIR), or the output of docker save"
            }
            ImportError::Archive { .. }
            | ImportError::Missing { .. }
            | ImportError::WrongDigest { .. }
            | ImportError::ForeignDigest { .. }
            | ImportError::Document { .. } => WRITE_AGAIN,
            ImportError::NoPlatform { offered, .. } => {
                let first = offered.first().cloned().unwrap_or_default();
                return Some(Hint::from("request another platform: ").setting("platform", first));
            }
            ImportError::Manifest { cause, .. } => return cause.hint().map(Hint::from),
            ImportError::Name { cause, .. } => return cause.hint().map(Hint::from),
            ImportError::OneName { .. } => {
                "pass a repository without a tag if the images have tags; otherwise put each image into its own file"
            }
            ImportError::OtherContent { .. } | ImportError::TooManyEntries | ImportError::TooLarge { .. } => {
                return None;
            }
        };
        Some(text.into())
    }
}

/// Whether the input is no archive at all, or damaged at an offset.
fn damaged(at: u64, reason: &str) -> String {
    match at {
        0 => "not an image archive".to_owned(),
        at => format!("the archive is damaged at byte {at}: {reason}"),
    }
}

fn save_command(text: &'static str) -> Hint {
    Hint::from(text).command(["save", "-o", "FILE", "IMAGE"])
}

fn within(entry: Option<&str>) -> String {
    entry.map_or_else(String::new, |entry| format!(", within {entry}"))
}

/// An error of reading `what`.
pub(super) fn read(what: impl Into<String>) -> impl FnOnce(io::Error) -> ImportError {
    let what = what.into();
    move |cause| ImportError::Read { what, cause }
}

/// An error of reading a file, which names its path itself.
pub(super) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> ImportError {
    read(path.into().display().to_string())
}
