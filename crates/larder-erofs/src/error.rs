//! Why a layer could not be written.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

/// Why a layer could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErofsError {
    /// The output failed.
    #[error("cannot write the EROFS layer")]
    Output(#[from] io::Error),
    /// A file of a lower layer cannot be read.
    #[error("cannot copy a file of a lower layer")]
    LowerLayer(#[from] ErofsReadError),
    /// An entry that no layer can hold, or that contradicts the others.
    #[error("rejected entry {path:?}: {problem}")]
    Rejected {
        /// The entry, as the archive names it.
        path: PathBuf,
        /// Why.
        problem: EntryProblem,
    },
    /// The data of a file does not have the size of its entry.
    #[error("wrong amount of data for {path:?}: expected {expected} bytes, got {}{found}", if *.more { "more than " } else { "" })]
    DataSize {
        /// The file; empty when no file expects data.
        path: PathBuf,
        /// Bytes that the entry announced.
        expected: u64,
        /// Bytes that came, or that were enough.
        found: u64,
        /// Whether there were more.
        more: bool,
    },
    /// More than 16 million names, or more than 4 GiB of names, links and attributes of directories.
    #[error("EROFS layer limit exceeded at {path:?}: too many names")]
    TooManyNames {
        /// The entry that was one too many.
        path: PathBuf,
    },
    /// The caller wants no more of it.
    #[error("writing the EROFS layer was canceled")]
    Canceled,
    /// More than 16 TiB of data, or more than 128 GiB of inodes.
    #[error("EROFS layer limit exceeded: block addresses have 32 bits")]
    LayerTooLarge,
}

impl ErofsError {
    pub(crate) fn rejected(path: &[u8], problem: EntryProblem) -> ErofsError {
        ErofsError::Rejected { path: path_of(path), problem }
    }
}

/// Why a layer could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErofsReadError {
    /// The file cannot be read, or ends too early.
    #[error("cannot read the EROFS layer")]
    Input(#[from] io::Error),
    /// The file is no EROFS layer of larder, or its beginning is damaged.
    #[error("not an EROFS layer, or a damaged one: {0}")]
    Superblock(LayerDamage),
    /// An inode, or what belongs to it, is damaged.
    #[error("damaged EROFS layer: inode {nid}: {damage}")]
    Damaged {
        /// Number of the inode.
        nid: u64,
        /// Damage of the layer.
        damage: LayerDamage,
    },
}

impl ErofsReadError {
    pub(crate) fn damaged(nid: u64, damage: LayerDamage) -> ErofsReadError {
        ErofsReadError::Damaged { nid, damage }
    }
}

/// Damage of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerDamage {
    /// The file is shorter than its filesystem.
    #[error("file too short")]
    TooShort,
    /// No EROFS superblock.
    #[error("wrong magic number")]
    Magic,
    /// The superblock has no checksum, or a wrong one.
    #[error("wrong checksum of the superblock")]
    Checksum,
    /// The filesystem has features that larder does not write.
    #[error("unsupported features")]
    Features,
    /// The root is no directory.
    #[error("the root is not a directory")]
    Root,
    /// The inode, or its content, lies outside of the filesystem.
    #[error("outside of the filesystem")]
    Offset,
    /// Fields that contradict each other, or a form that larder does not write.
    #[error("invalid or unsupported form")]
    Format,
    /// An unknown type, or another one than the directory entry or the caller expects.
    #[error("unexpected type")]
    Kind,
    /// The text of a symbolic link is empty, too long, or has a zero byte.
    #[error("invalid symbolic link")]
    Symlink,
    /// Names of a directory that are invalid, or out of order.
    #[error("invalid directory")]
    Directory,
    /// A directory with several names, or one that contains itself.
    #[error("directory with several paths")]
    DirectoryLoop,
    /// Chunks of a sparse file that overlap, or are out of order.
    #[error("chunks out of order")]
    ChunkOrder,
    /// Extended attributes that cannot be decoded.
    #[error("invalid extended attributes")]
    Xattrs,
}

/// Any bytes as a path, for messages.
pub(crate) fn path_of(path: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(path))
}

/// Why an entry is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EntryProblem {
    /// A zero byte in a path or link.
    #[error("its path or link target contains a zero byte")]
    ZeroByte,
    /// A part of the path is over 255 bytes.
    #[error("a component of its path is longer than 255 bytes")]
    NameTooLong,
    /// Over 4096 bytes, once links in it are resolved.
    #[error("its path is too long after symbolic links are resolved")]
    PathTooLong,
    /// A file where a directory must be.
    #[error("its parent is not a directory")]
    ParentNotDirectory,
    /// Links that lead in a circle.
    #[error("too many symbolic links in its path")]
    TooManyLinks,
    /// The root as a file.
    #[error("only a directory can be the root")]
    RootNotDirectory,
    /// `.wh.`, `.wh..` or `.wh...`: hides nothing that can be named.
    #[error("a whiteout without a name")]
    Whiteout,
    /// An empty symbolic link, or one of 4096 bytes or more.
    #[error("its symbolic link has no target, or a target longer than 4095 bytes")]
    SymlinkTarget,
    /// A hard link to a directory.
    #[error("a hard link to a directory")]
    LinkToDirectory,
    /// A hard link to its own name.
    #[error("a hard link to itself")]
    LinkToItself,
    /// A hard link to a file that neither this layer nor one below has, or that the link itself replaces.
    #[error("a hard link to a file that does not exist")]
    LinkTarget,
    /// Hard links, each to a later one.
    #[error("the chain of hard links is too long")]
    LinkChain,
    /// No owner that a system has. 4294967295 is none: to chown(2) it means "leave it".
    #[error("its owner is not a 32-bit number")]
    Owner,
    /// A billion nanoseconds or more.
    #[error("invalid modification time")]
    Time,
    /// A device number that Linux cannot have.
    #[error("its device number is out of range: major up to 4095, minor up to 1048575")]
    Device,
    /// Extents out of order, or outside of the file.
    #[error("its sparse map is not sorted or exceeds its size")]
    SparseMap,
    /// A sparse file whose map and padding would need over 256 MiB.
    #[error("sparse file too large for its number of extents")]
    SparseOverhead,
}
