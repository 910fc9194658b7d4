//! Writes EROFS layers: archive entries of a layer in, one file that Linux mounts out.
//!
//! ```text
//! entry, data, entry, ... -> ErofsWriter -> append, append, ..., write_at -> layer
//!                              | tree: names, directories, positions of inodes
//!                              | temporary file: inodes, until all data has come
//! ```
//!
//! Read [`ErofsWriter::add`] first, then `writer/finish.rs`. Everything here is synchronous, and nothing here opens a
//! file: the layer is written to an [`ErofsOutput`].
//!
//! ```text
//! block 0      1 ...                          first block of metadata, in the superblock
//! | superblock | data of files, in the order  | inodes of       | data of     | all other inodes, |
//! |            | in which they come           | directories     | large ones  | xattrs, tails     |
//! ```
//!
//! Guarantees:
//! - metadata is one region, so that it can be complete before the data is; the kernel reads nothing else for a mount;
//! - file data is appended as it comes; short files and tails are stored with their inodes, without a block of their
//!   own;
//! - equal input makes an equal layer: no clock, no randomness;
//! - memory is bounded by [`ErofsOptions::max_name_bytes`], 18 bytes for an entry, 32 for a directory, and about 4 MiB;
//! - entries are applied in order, as if each changed a directory on top of lower layers: a later entry replaces an
//!   earlier one, parents that never come are made, links in a path are resolved inside the layer. What a replacement
//!   hides from lower layers stays hidden.
//!
//! After an error the layer is useless, and so is the writer.

mod chunked;
mod entry;
mod entry_rules;
mod error;
mod format;
mod input;
mod metadata_blocks;
mod output;
mod paths;
mod reader;
mod sparse;
mod tree;
mod writer;
mod xattr;

pub use entry::{ErofsEntry, ErofsEntryKind, ErofsTime};
pub use error::{EntryProblem, ErofsError, ErofsReadError, LayerDamage};
pub use input::ErofsInput;
pub use output::{ErofsOutput, ErofsScratch};
pub use reader::{
    ErofsDirectory, ErofsDirectoryEntry, ErofsExtent, ErofsExtents, ErofsFileReader, ErofsInode, ErofsReader,
    ErofsWalk, ErofsWalkEntry, InodeKind,
};
pub use sparse::sparse_content;
pub use writer::{ErofsOptions, ErofsSummary, ErofsWriter, LowerLink, OverlayView};
pub use xattr::Xattrs;
