//! Why a table of contents cannot be used. The layer is then pulled in the ordinary way.

use std::io;
use std::ops::Range;
use std::path::PathBuf;

use larder::reference::Digest;

use crate::unpack::UnpackError;

/// Why a table of contents cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TocError {
    /// The place that an annotation or the footer names is not in the blob.
    #[error("the table of contents is not in the blob: bytes {}..{} of {blob_size}", place.start, place.end)]
    Place {
        /// The named place.
        place: Range<u64>,
        /// Size of the blob.
        blob_size: u64,
    },
    /// The bytes are not those of the range, or the range does not reach the end of the blob.
    #[error("{bytes} bytes for the range {}..{} of a blob of {blob_size}", range.start, range.end)]
    Range {
        /// The range.
        range: Range<u64>,
        /// Bytes for it.
        bytes: usize,
        /// Size of the blob.
        blob_size: u64,
    },
    /// The blob does not end as an eStargz blob does.
    #[error("the blob has no eStargz footer")]
    Footer,
    /// The table is not the one that the manifest names.
    #[error("the table of contents has the digest {found}, not {expected} as in the manifest")]
    Digest {
        /// Digest in the manifest.
        expected: Digest,
        /// Digest of the bytes.
        found: Digest,
    },
    /// The compressed table, or headers of the archive around it, are damaged.
    #[error("cannot decompress the table of contents")]
    Decompress(#[source] io::Error),
    /// The headers of the archive around the table are damaged.
    #[error("cannot read the archive around the table of contents")]
    Archive(#[source] UnpackError),
    /// The archive does not have the table as its last entry, or other entries than the table says.
    #[error("the archive around the table of contents has {found}, not {expected}")]
    Mismatch {
        /// Entry that should be there.
        expected: String,
        /// Entry that is there.
        found: String,
    },
    /// Not JSON, or JSON of another form.
    #[error("the table of contents is malformed: {0}")]
    Json(String),
    /// A version of the format that is not known.
    #[error("unknown version {0} of the table of contents")]
    Version(String),
    /// Offsets lead out of the buffer, or numbers are out of their range.
    #[error("the table of contents is malformed: no valid {0}")]
    Flat(&'static str),
    /// The blob is another than the table describes.
    #[error("the table of contents is that of a blob of {found} bytes, not of {expected}")]
    OtherBlob {
        /// Size of the blob.
        expected: u64,
        /// Size in the table.
        found: u64,
    },
    /// A part of the blob that cannot be used.
    #[error("span {number} of the table of contents: {problem}")]
    Span {
        /// Its number, from 0.
        number: usize,
        /// Reason why it cannot be used.
        problem: &'static str,
    },
    /// A part of the document is missing.
    #[error("the table of contents has no {0:?}")]
    Missing(&'static str),
    /// More than is read.
    #[error("the table of contents has more than {limit} {what}")]
    Limit {
        /// Exceeded quantity.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// An entry that cannot be used.
    #[error("entry {number} of the table of contents, {path:?}: {problem}")]
    Entry {
        /// Number of the entry in the document, from 0; chunks count.
        number: u64,
        /// Its name.
        path: PathBuf,
        /// Reason why it cannot be used.
        problem: TocEntryProblem,
    },
}

/// Reason why an entry of a table of contents cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TocEntryProblem {
    #[error("unknown type {0:?}")]
    Type(String),
    #[error("unknown chunk type {0:?}")]
    ChunkType(String),
    #[error("no name")]
    NoName,
    #[error("its name or link is longer than {0} bytes")]
    TooLong(u32),
    #[error("its name or link contains a zero byte")]
    ZeroByte,
    /// Writers replace bytes that are no UTF-8 by U+FFFD.
    #[error("its name, link or attributes may have lost bytes that are not UTF-8")]
    LostBytes,
    #[error("its attributes have more than {0} bytes")]
    Attributes(u32),
    #[error("its owner is not a 32-bit number")]
    Owner,
    #[error("its device number is not a 32-bit number")]
    Device,
    #[error("invalid time {0:?}")]
    Time(String),
    #[error("invalid digest {0:?}: expected sha256")]
    Digest(String),
    #[error("no digest of {0} bytes")]
    NoDigest(u64),
    #[error("a chunk without a file before it")]
    StrayChunk,
    #[error("a chunk of another file: {0:?}")]
    ForeignChunk(PathBuf),
    #[error("a chunk at byte {found} of the file, expected at {expected}")]
    ChunkOffset {
        /// End of the chunks before it.
        expected: u64,
        /// Its own beginning.
        found: u64,
    },
    #[error("a chunk of {chunk} bytes, {left} are left of the file")]
    ChunkSize {
        /// Size of the chunk.
        chunk: u64,
        /// Bytes of the file that other chunks do not have.
        left: u64,
    },
    #[error("its chunks have {found} bytes of {size}")]
    Uncovered {
        /// Size of the file.
        size: u64,
        /// Bytes in chunks.
        found: u64,
    },
    #[error("more than {limit} bytes must be decompressed for one chunk")]
    LargeChunk {
        /// The limit.
        limit: u64,
    },
    #[error("its data begin at byte {offset} of the blob, allowed are {}..{}", allowed.start, allowed.end)]
    Offset {
        /// Its own beginning.
        offset: u64,
        /// From the end of the data before it to the end of all data.
        allowed: Range<u64>,
    },
    #[error("its data begin {found} bytes after others in the same stream that end at {expected}")]
    InnerOffset {
        /// End of the data before it.
        expected: u64,
        /// Its own beginning.
        found: u64,
    },
}

/// Why the bytes of a chunk are not its content.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChunkError {
    /// The compressed bytes are damaged or end early.
    #[error("cannot decompress a chunk of {size} bytes at byte {offset} of the blob")]
    Decompress {
        /// Where it begins.
        offset: u64,
        /// Its plain size.
        size: u64,
        /// The decompressor's error.
        #[source]
        cause: io::Error,
    },
    /// Not the content that the table of contents names.
    #[error("wrong digest of a chunk of {size} bytes at byte {offset} of the blob")]
    Digest {
        /// Where it begins.
        offset: u64,
        /// Its plain size.
        size: u64,
    },
}

/// The beginning of a text of a stranger, for a message.
pub(super) fn excerpt(text: &str) -> String {
    text.chars().take(200).collect()
}
