//! Why a layer could not be unpacked.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use larder::hint::Hint;
use larder::reference::Digest;
use larder_erofs::EntryProblem;

use super::DetectedCompression;

/// Why a layer could not be unpacked, or merged with those below it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnpackError {
    /// The compressed bytes could not be read, from the network or the ingest file.
    #[error("cannot read the compressed layer")]
    Read(#[source] io::Error),
    /// The bytes do not have the expected digest.
    #[error("layer digest mismatch ({stage}): expected {expected}, got {found}")]
    Digest {
        /// Which bytes.
        stage: LayerEncoding,
        /// Digest in the manifest or the config.
        expected: Digest,
        /// Digest of the bytes.
        found: Digest,
    },
    /// More or fewer compressed bytes than declared.
    #[error("layer size mismatch: expected {expected} compressed bytes, got {}{found}", if *.more { "at least " } else { "" })]
    Size {
        /// Size in the manifest.
        expected: u64,
        /// Size of the bytes.
        found: u64,
        /// Whether there may be still more.
        more: bool,
    },
    /// The compressed stream is damaged, ends early, or continues after its end.
    #[error("the layer's {compression} stream is damaged at compressed byte {at}")]
    Decompress {
        /// Compression by the first bytes.
        compression: DetectedCompression,
        /// Compressed bytes that were read.
        at: u64,
        /// The decompressor's error.
        #[source]
        cause: io::Error,
    },
    /// Compressed in a way that no image layer may be.
    #[error("unsupported layer compression {0}: layers must be gzip, zstd or uncompressed tar")]
    ForeignCompression(DetectedCompression),
    /// Not a tar archive, or a damaged one.
    #[error("the layer's tar archive is damaged at byte {at}{}: {problem}", entry_of(entry.as_deref()))]
    Archive {
        /// Plain bytes before the entry.
        at: u64,
        /// The entry, if its name can be read.
        entry: Option<PathBuf>,
        /// Reason why it is invalid.
        problem: String,
    },
    /// A malicious or invalid entry.
    #[error("rejected layer entry {path:?}: {reason}")]
    Refused {
        /// The entry, as the archive names it.
        path: PathBuf,
        /// Why.
        reason: EntryRefusal,
    },
    /// Over one of [`super::UnpackLimits`].
    #[error("layer limit exceeded{}: more than {limit} {what}", entry_of(entry.as_deref()))]
    Limit {
        /// The entry, if one alone exceeds it.
        entry: Option<PathBuf>,
        /// Exceeded quantity.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// The setting that raises it, if there is one.
        setting: Option<&'static str>,
    },
    /// The local filesystem failed: no space, no permission, an I/O error.
    #[error("cannot {doing} {}", path.display())]
    File {
        /// Operation that failed.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// No EROFS filesystem can hold the layer, or writing one needs too much memory.
    #[error("the layer cannot be stored as EROFS: {reason}")]
    Unsupported {
        /// Why.
        reason: String,
    },
    /// The archive is another one than that of which the layer has the metadata.
    #[error(
        "the layer's archive is not what its table of contents says: other bytes from offset {offset} of the layer on"
    )]
    Differs {
        /// Offset in the layer's file.
        offset: u64,
    },
    /// [`super::UnpackProgress::cancel`] was called.
    #[error("unpacking was canceled")]
    Canceled,
    /// The half that reads the layer ended early; its own error is the one that is reported.
    #[doc(hidden)]
    #[error("the layer ended early")]
    Hangup,
}

/// Bytes of the name of an entry in a message.
const MAX_NAMED: usize = 512;

/// `, entry "etc/passwd"`, or nothing.
fn entry_of(entry: Option<&Path>) -> String {
    entry.map_or_else(String::new, |entry| format!(", entry {:?}", entry.to_string_lossy()))
}

/// Which of a layer's two forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerEncoding {
    /// As the registry has it.
    Compressed,
    /// The tar archive.
    Plain,
}

impl fmt::Display for LayerEncoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LayerEncoding::Compressed => "compressed",
            LayerEncoding::Plain => "plain",
        })
    }
}

/// Why an entry is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EntryRefusal {
    /// No filesystem takes it.
    #[error(transparent)]
    Entry(#[from] EntryProblem),
    /// A symbolic link to nothing.
    #[error("a symbolic link without a target")]
    EmptyLink,
    /// A link whose target is longer than this, in bytes.
    #[error("its link target is longer than {0} bytes")]
    LinkTooLong(u32),
    /// A type that images do not have.
    #[error("unknown entry type {0:#04x}")]
    Type(u8),
    /// A negative or immense size.
    #[error("its size is not a valid file size")]
    Size,
}

/// The path of an entry in an error, possibly cut.
pub(crate) fn named(path: &[u8]) -> PathBuf {
    let path = super::beneath::path_of(path);
    if path.as_os_str().len() <= MAX_NAMED {
        return path.to_owned();
    }
    let cut = path.as_os_str().as_encoded_bytes()[..MAX_NAMED].to_vec();
    PathBuf::from(format!("{}...", String::from_utf8_lossy(&cut)))
}

impl UnpackError {
    pub(crate) fn file(doing: &'static str, path: impl AsRef<Path>, cause: impl Into<io::Error>) -> Self {
        UnpackError::File { doing, path: path.as_ref().to_owned(), cause: cause.into() }
    }

    pub(super) fn refused(path: &[u8], reason: impl Into<EntryRefusal>) -> Self {
        UnpackError::Refused { path: named(path), reason: reason.into() }
    }

    /// More than `limit` of something in the whole layer.
    pub(crate) fn over(limit: u64, what: &'static str) -> Self {
        UnpackError::Limit { entry: None, what, limit, setting: None }
    }

    /// More than a setting allows in the layer or its image.
    pub(super) fn over_setting(limit: u64, what: &'static str, setting: &'static str) -> Self {
        UnpackError::Limit { entry: None, what, limit, setting: Some(setting) }
    }

    /// The error of the system that it reports, or itself as one.
    pub(crate) fn into_io(self) -> io::Error {
        match self {
            UnpackError::File { cause, .. }
                if cause.raw_os_error().is_some() || cause.kind() == io::ErrorKind::StorageFull =>
            {
                cause
            }
            other => io::Error::other(other),
        }
    }

    /// Whether the disk is full: of bytes, inodes or quota.
    pub fn is_no_space(&self) -> bool {
        matches!(self, UnpackError::File { cause, .. } if matches!(
            cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
    }

    /// Whether the bytes are at fault, so that fetching them again, from another host, may help.
    pub fn is_wrong_bytes(&self) -> bool {
        match self {
            UnpackError::Digest { stage: LayerEncoding::Compressed, .. } | UnpackError::Size { .. } => true,
            UnpackError::Digest { stage: LayerEncoding::Plain, .. }
            | UnpackError::Read(_)
            | UnpackError::Decompress { .. }
            | UnpackError::ForeignCompression(_)
            | UnpackError::Archive { .. }
            | UnpackError::Refused { .. }
            | UnpackError::Limit { .. }
            | UnpackError::Differs { .. }
            | UnpackError::File { .. }
            | UnpackError::Unsupported { .. }
            | UnpackError::Canceled
            | UnpackError::Hangup => false,
        }
    }

    /// A local failure or a cancellation, not the layer's bytes: reading on would not change the outcome.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self, UnpackError::File { .. } | UnpackError::Unsupported { .. } | UnpackError::Canceled)
    }

    /// Returns true if the bytes are those of the manifest, and no layer: another attempt ends the same way.
    pub(crate) fn is_final(&self) -> bool {
        let may_pass = matches!(self, UnpackError::Read(_) | UnpackError::Hangup);
        !(may_pass || self.is_local() || self.is_wrong_bytes())
    }

    /// Returns the next step that the reader could try.
    pub fn hint(&self) -> Option<Hint> {
        let text = match self {
            UnpackError::Digest { stage: LayerEncoding::Compressed, .. } | UnpackError::Size { .. } => {
                "the registry or a proxy sent content that does not match the manifest; retry, or use another mirror"
            }
            UnpackError::Digest { stage: LayerEncoding::Plain, .. } => {
                "the image's config does not match its layers; rebuild or push the image again"
            }
            UnpackError::Decompress { .. }
            | UnpackError::Archive { .. }
            | UnpackError::ForeignCompression(_) => {
                "the content matches the manifest, so the image itself is invalid; rebuild the image"
            }
            UnpackError::Differs { .. } => {
                "pull again: the layer is fetched in full then; report the image to its publisher"
            }
            UnpackError::Refused { .. } => "do not trust this image; report it to its publisher",
            UnpackError::Limit { setting: Some(setting), .. } => {
                return Some(format!("if you trust the image, raise the setting {setting}").into());
            }
            UnpackError::Limit { setting: None, .. } => {
                "the limit guards against hostile archives and has no setting; rebuild the image with smaller layers"
            }
            UnpackError::File { .. } if self.is_no_space() => "free space or inodes, then retry",
            UnpackError::Read(_)
            | UnpackError::File { .. }
            | UnpackError::Unsupported { .. }
            | UnpackError::Canceled
            | UnpackError::Hangup => return None,
        };
        Some(text.into())
    }
}
