//! Reads a layer without mounting it: by positional reads of its file, as any user.
//!
//! A layer file may be damaged, or made by an enemy. Each offset is checked before it is used, memory for one call is
//! bounded (256 KiB for attributes, a block for everything else), and a directory is entered once only, so that each
//! walk ends.
//!
//! Only layers as [`ErofsWriter`](crate::ErofsWriter) writes them are read: blocks of 4096 bytes, extended inodes, no
//! compression, no attributes that inodes share.

mod data;
mod directory;
mod walk;
mod xattrs;

use std::io;

use crate::entry::ErofsTime;
use crate::error::{ErofsReadError, LayerDamage};
use crate::format::{
    BLOCK, DataLayout, INODE, INODE_FORMAT_EXTENDED, SLOT, Superblock, device_parts, file_type,
};
use crate::input::ErofsInput;

pub use data::{ErofsExtent, ErofsExtents, ErofsFileReader};
pub use directory::{ErofsDirectory, ErofsDirectoryEntry};
pub use walk::{ErofsWalk, ErofsWalkEntry};

/// The longest text of a symbolic link.
const MAX_SYMLINK: u64 = 4095;

/// An open layer.
///
/// ```
/// # use larder_erofs::{ErofsOptions, ErofsReader, ErofsWriter};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (file, _) = ErofsWriter::new(Vec::new(), ErofsOptions::default())?.finish()?;
/// let layer = ErofsReader::open(&file[..])?;
/// for entry in layer.walk()? {
///     let entry = entry?;
///     println!("{:o} {}", entry.inode.mode, String::from_utf8_lossy(&entry.path));
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ErofsReader<I> {
    input: I,
    /// Bytes of the filesystem.
    size: u64,
    /// Offset of inode number 0.
    metadata: u64,
    root: u64,
    uuid: [u8; 16],
}

/// Kind of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InodeKind {
    /// A file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A character device; 0:0 is a whiteout.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A named pipe.
    Fifo,
}

/// Attributes of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErofsInode {
    /// Number of the inode: all names of a file have the same one.
    pub nid: u64,
    /// Kind of the inode.
    pub kind: InodeKind,
    /// Permission, set-id and sticky bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Time of the last change.
    pub mtime: ErofsTime,
    /// Number of names.
    pub nlink: u32,
    /// Bytes of a file's content, holes included, or of a link's text.
    pub size: u64,
    /// Major and minor number of a device.
    pub rdev: (u32, u32),
    layout: DataLayout,
    /// First block, or form of the chunks.
    place: u32,
    /// Bytes of encoded attributes behind the inode.
    xattr_bytes: u32,
}

impl ErofsInode {
    /// Returns true if the inode hides a name of the lower layers.
    pub fn is_whiteout(&self) -> bool {
        self.kind == InodeKind::CharDevice && self.rdev == (0, 0)
    }

    /// Returns true for a directory.
    pub fn is_directory(&self) -> bool {
        self.kind == InodeKind::Directory
    }

    fn damaged(&self, damage: LayerDamage) -> ErofsReadError {
        ErofsReadError::damaged(self.nid, damage)
    }
}

impl<I: ErofsInput> ErofsReader<I> {
    /// Reads the superblock, and checks that it fits the file.
    pub fn open(input: I) -> Result<ErofsReader<I>, ErofsReadError> {
        let file_size = input.size()?;
        let mut block = [0; BLOCK];
        if file_size < BLOCK as u64 {
            return Err(ErofsReadError::Superblock(LayerDamage::TooShort));
        }
        input.read_exact_at(&mut block, 0)?;
        let superblock = Superblock::parse(&block).map_err(ErofsReadError::Superblock)?;
        let size = u64::from(superblock.blocks) * BLOCK as u64;
        let metadata = u64::from(superblock.metadata_block) * BLOCK as u64;
        if size > file_size {
            return Err(ErofsReadError::Superblock(LayerDamage::TooShort));
        }
        let (root, uuid) = (superblock.root.into(), superblock.uuid);
        let reader = ErofsReader { input, size, metadata, root, uuid };
        if !reader.root()?.is_directory() {
            return Err(ErofsReadError::damaged(root, LayerDamage::Root));
        }
        Ok(reader)
    }

    /// Where metadata begins, in bytes: all from there on is metadata, and so is the first block.
    pub fn metadata_start(&self) -> u64 {
        self.metadata
    }

    /// Where the filesystem ends in the file, in bytes. What follows is the store's.
    pub fn filesystem_end(&self) -> u64 {
        self.size
    }

    /// The UUID of the filesystem.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// The file that is read.
    pub fn input(&self) -> &I {
        &self.input
    }

    /// The root directory.
    pub fn root(&self) -> Result<ErofsInode, ErofsReadError> {
        self.inode(self.root)
    }

    /// The inode with this number, as a directory entry has it.
    pub fn inode(&self, nid: u64) -> Result<ErofsInode, ErofsReadError> {
        let damaged = |damage| ErofsReadError::damaged(nid, damage);
        let offset = self.inode_offset(nid).ok_or_else(|| damaged(LayerDamage::Offset))?;
        let mut bytes = [0; INODE];
        self.input.read_exact_at(&mut bytes, offset)?;
        let inode = parse_inode(nid, &bytes).map_err(damaged)?;
        if offset + INODE as u64 + u64::from(inode.xattr_bytes) > self.size {
            return Err(damaged(LayerDamage::Offset));
        }
        self.check_data(&inode).map_err(damaged)?;
        Ok(inode)
    }

    /// The text of a symbolic link.
    pub fn symlink_target(&self, link: &ErofsInode) -> Result<Vec<u8>, ErofsReadError> {
        if link.kind != InodeKind::Symlink {
            return Err(link.damaged(LayerDamage::Kind));
        }
        let mut target = vec![0; usize::try_from(link.size).unwrap_or(0)];
        self.read_exact_at(link, &mut target, 0)?;
        if target.contains(&0) { Err(link.damaged(LayerDamage::Symlink)) } else { Ok(target) }
    }

    fn inode_offset(&self, nid: u64) -> Option<u64> {
        let offset = nid.checked_mul(SLOT as u64)?.checked_add(self.metadata)?;
        offset.checked_add(INODE as u64).filter(|end| *end <= self.size).map(|_| offset)
    }

    /// Where the attributes of an inode end; its tail or map of chunks follows.
    fn end_of_xattrs(&self, inode: &ErofsInode) -> u64 {
        // `inode` checked that this is inside the filesystem.
        self.metadata + inode.nid * SLOT as u64 + INODE as u64 + u64::from(inode.xattr_bytes)
    }

    /// Reads bytes that lie inside the filesystem.
    fn read_metadata(
        &self,
        inode: &ErofsInode,
        buffer: &mut [u8],
        offset: u64,
    ) -> Result<(), ErofsReadError> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.size) {
            return Err(inode.damaged(LayerDamage::Offset));
        }
        self.input.read_exact_at(buffer, offset).map_err(ErofsReadError::Input)
    }

    /// Checks that an inode's content lies inside the filesystem.
    fn check_data(&self, inode: &ErofsInode) -> Result<(), LayerDamage> {
        match inode.kind {
            InodeKind::CharDevice | InodeKind::BlockDevice | InodeKind::Fifo => return Ok(()),
            InodeKind::Symlink if inode.size == 0 || inode.size > MAX_SYMLINK => {
                return Err(LayerDamage::Symlink);
            }
            InodeKind::Directory | InodeKind::Symlink if inode.layout == DataLayout::Chunks => {
                return Err(LayerDamage::Format);
            }
            _ => {}
        }
        self.check_extent(inode)
    }
}

fn parse_inode(nid: u64, bytes: &[u8; INODE]) -> Result<ErofsInode, LayerDamage> {
    let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    let layout = match u16_at(0) {
        format if format & INODE_FORMAT_EXTENDED == 0 => return Err(LayerDamage::Format),
        format => DataLayout::from_number(format >> 1).ok_or(LayerDamage::Format)?,
    };
    let mode = u16_at(4);
    let kind = match mode & file_type::MASK {
        file_type::FILE => InodeKind::File,
        file_type::DIRECTORY => InodeKind::Directory,
        file_type::SYMLINK => InodeKind::Symlink,
        file_type::CHAR_DEVICE => InodeKind::CharDevice,
        file_type::BLOCK_DEVICE => InodeKind::BlockDevice,
        file_type::FIFO => InodeKind::Fifo,
        _ => return Err(LayerDamage::Kind),
    };
    let (place, size) = (u32_at(16), u64_at(8));
    let mtime = ErofsTime { seconds: u64_at(32).cast_signed(), nanos: u32_at(40) };
    if mtime.nanos >= 1_000_000_000 || i64::try_from(size).is_err() {
        return Err(LayerDamage::Format);
    }
    let is_device = matches!(kind, InodeKind::CharDevice | InodeKind::BlockDevice);
    Ok(ErofsInode {
        nid,
        kind,
        mode: u32::from(mode & !file_type::MASK),
        uid: u32_at(24),
        gid: u32_at(28),
        mtime,
        nlink: u32_at(44),
        size,
        rdev: if is_device { device_parts(place) } else { (0, 0) },
        layout,
        place,
        xattr_bytes: match u32::from(u16_at(2)) {
            0 => 0,
            units => 12 + (units - 1) * 4,
        },
    })
}

impl From<ErofsReadError> for io::Error {
    fn from(error: ErofsReadError) -> io::Error {
        match error {
            ErofsReadError::Input(error) => error,
            damaged => io::Error::new(io::ErrorKind::InvalidData, damaged),
        }
    }
}
