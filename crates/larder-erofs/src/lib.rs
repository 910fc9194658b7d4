//! Writes EROFS layers: archive entries of a layer in, one file that Linux mounts out.
//!
//! ```text
//! entry, data, entry, ... -> ErofsWriter -> append, append, ..., write_at -> layer
//!                              | tree: names, directories, positions of inodes
//!                              | metadata blocks that are not full yet
//! ```
//!
//! Read [`ErofsWriter::add`] first, then `writer/finish.rs`. Everything here is synchronous, and nothing here opens a
//! file: the layer is written to an [`ErofsOutput`].
//!
//! ```text
//! block 0        1 ...                                                    last
//! | superblock, | file data and, as they fill up, blocks | directory | directory |
//! | root inode  | of inodes with xattrs and file tails   | data      | inodes    |
//! ```
//!
//! Guarantees:
//! - file data is appended as it comes; a file's inode follows its data, with its last bytes behind it, so that a small
//!   file occupies no block of its own;
//! - equal input makes an equal layer: no clock, no randomness;
//! - memory is bounded by [`ErofsOptions::max_tree_bytes`] and about 400 KiB, whatever the entries are;
//! - entries are applied in order, as if each changed a directory on top of lower layers: a later entry replaces an earlier
//!   one, parents that never come are made, links in a path are resolved inside the layer. What a replacement hides from
//!   lower layers stays hidden.
//!
//! After an error the layer is useless, and so is the writer.

mod chunked;
mod entry;
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
pub use format::filesystem_end;
pub use input::ErofsInput;
pub use output::ErofsOutput;
pub use reader::{
    ErofsDirectory, ErofsDirectoryEntry, ErofsExtent, ErofsExtents, ErofsFileReader, ErofsInode, ErofsReader,
    ErofsWalk, ErofsWalkEntry, InodeKind,
};
pub use writer::{ErofsOptions, ErofsSummary, ErofsWriter, LowerLink};
pub use xattr::Xattrs;
