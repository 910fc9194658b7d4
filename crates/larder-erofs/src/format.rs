//! The on-disk format: superblock, inodes and directory entries. All numbers are little-endian.
//!
//! An inode is found by its number: its offset in units of 32 bytes. Layers of this crate have extended inodes only,
//! since compact ones have no time of their own, and no attributes that inodes share.

use crate::error::LayerDamage;

/// Bytes of a block; what a kernel before 6.4 mounts.
pub(crate) const BLOCK: usize = 4096;
/// Bytes of an inode slot: inode numbers count these.
pub(crate) const SLOT: usize = 32;
/// Bytes of an inode.
pub(crate) const INODE: usize = 64;
/// Offset of the number of links in an inode.
pub(crate) const NLINK_OFFSET: usize = 44;
/// Bytes of a directory entry without its name.
pub(crate) const DIRENT: usize = 12;
/// Inode slots of a block.
#[expect(clippy::cast_possible_truncation, reason = "128")]
pub(crate) const SLOTS_PER_BLOCK: u32 = (BLOCK / SLOT) as u32;
/// The first slot that has an inode: that of the root. Programs take inode number 0 for an unused directory entry.
pub(crate) const FIRST_SLOT: usize = 1;
/// In the place of a block address: no block.
pub(crate) const HOLE: u32 = u32::MAX;

/// The format of a chunk-based inode has five bits for the chunk's size: blocks, as a power of two.
pub(crate) const MAX_CHUNK_BITS: u32 = 31;
/// In an inode's format: it is an extended one.
pub(crate) const INODE_FORMAT_EXTENDED: u16 = 1;

/// Offset of the superblock, and in it of the number of blocks.
const SUPERBLOCK: usize = 1024;
const BLOCKS_OFFSET: usize = 36;
const MAGIC: u32 = 0xE0F5_E1E2;
const COMPAT_CHECKSUM: u32 = 1;
const COMPAT_MTIME: u32 = 2;
const INCOMPAT_CHUNKED_FILE: u32 = 4;

/// Where an inode's content is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataLayout {
    /// In consecutive blocks.
    Plain = 0,
    /// In consecutive blocks but for the last bytes, which follow the inode.
    Inline = 2,
    /// In chunks, whose map follows the inode.
    Chunks = 4,
}

impl DataLayout {
    pub(crate) fn from_number(number: u16) -> Option<DataLayout> {
        [DataLayout::Plain, DataLayout::Inline, DataLayout::Chunks]
            .into_iter()
            .find(|layout| *layout as u16 == number)
    }
}

/// The type bits of a mode.
pub(crate) mod file_type {
    pub(crate) const FIFO: u16 = 0o010_000;
    pub(crate) const CHAR_DEVICE: u16 = 0o020_000;
    pub(crate) const DIRECTORY: u16 = 0o040_000;
    pub(crate) const BLOCK_DEVICE: u16 = 0o060_000;
    pub(crate) const FILE: u16 = 0o100_000;
    pub(crate) const SYMLINK: u16 = 0o120_000;
    /// Of all bits, those of the type.
    pub(crate) const MASK: u16 = 0o170_000;
}

/// An inode.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inode {
    pub(crate) layout: DataLayout,
    /// With the type bits.
    pub(crate) mode: u16,
    pub(crate) size: u64,
    /// First block, device number, or form of the chunks.
    pub(crate) place: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) seconds: i64,
    pub(crate) nanos: u32,
    pub(crate) links: u32,
}

impl Inode {
    /// Its bytes, and room behind them for `xattrs`, which are added.
    pub(crate) fn encode(&self, xattrs: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(INODE + xattrs.len());
        // The header takes the place of the first unit of four bytes and of two more.
        let units = if xattrs.is_empty() { 0 } else { (xattrs.len() - 12) / 4 + 1 };
        bytes.extend((1 | (self.layout as u16) << 1).to_le_bytes());
        bytes.extend(u16::try_from(units).unwrap_or(u16::MAX).to_le_bytes());
        bytes.extend(self.mode.to_le_bytes());
        bytes.extend([0; 2]);
        bytes.extend(self.size.to_le_bytes());
        bytes.extend(self.place.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.uid.to_le_bytes());
        bytes.extend(self.gid.to_le_bytes());
        bytes.extend(self.seconds.to_le_bytes());
        bytes.extend(self.nanos.to_le_bytes());
        bytes.extend(self.links.to_le_bytes());
        bytes.resize(INODE, 0);
        bytes.extend_from_slice(xattrs);
        bytes
    }
}

/// A device number as Linux stores it in 32 bits.
pub(crate) fn device_number(major: u32, minor: u32) -> Option<u32> {
    (major < 1 << 12 && minor < 1 << 20).then_some((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12))
}

/// Major and minor number of a device, which Linux stores in 32 bits.
pub(crate) fn device_parts(number: u32) -> (u32, u32) {
    (number >> 8 & 0xfff, number & 0xff | number >> 12 & 0xf_ff00)
}

/// The type of a directory entry.
pub(crate) fn dirent_type(mode: u16) -> u8 {
    match mode & file_type::MASK {
        file_type::FILE => 1,
        file_type::DIRECTORY => 2,
        file_type::CHAR_DEVICE => 3,
        file_type::BLOCK_DEVICE => 4,
        file_type::FIFO => 5,
        file_type::SYMLINK => 7,
        _ => 0,
    }
}

/// Contents of the superblock.
pub(crate) struct Superblock {
    pub(crate) blocks: u32,
    pub(crate) inodes: u64,
    /// The block from which inode numbers count: the first one of metadata.
    pub(crate) metadata_block: u32,
    pub(crate) root: u16,
    pub(crate) uuid: [u8; 16],
    pub(crate) has_chunks: bool,
}

impl Superblock {
    /// Writes the superblock into block 0, which has all else already.
    pub(crate) fn put(&self, block: &mut [u8; BLOCK]) {
        let mut put = |at: usize, bytes: &[u8]| {
            block[SUPERBLOCK + at..SUPERBLOCK + at + bytes.len()].copy_from_slice(bytes);
        };
        put(0, &MAGIC.to_le_bytes());
        put(8, &(COMPAT_CHECKSUM | COMPAT_MTIME).to_le_bytes());
        put(12, &[12]); // base-2 logarithm of the block size
        put(14, &self.root.to_le_bytes());
        put(16, &self.inodes.to_le_bytes());
        put(BLOCKS_OFFSET, &self.blocks.to_le_bytes());
        put(40, &self.metadata_block.to_le_bytes());
        put(48, &self.uuid);
        put(80, &(if self.has_chunks { INCOMPAT_CHUNKED_FILE } else { 0 }).to_le_bytes());
        let checksum = crc32c(&block[SUPERBLOCK..]);
        block[SUPERBLOCK + 4..SUPERBLOCK + 8].copy_from_slice(&checksum.to_le_bytes());
    }

    /// Reads the superblock from block 0, and checks what does not depend on the file.
    pub(crate) fn parse(block: &[u8; BLOCK]) -> Result<Superblock, LayerDamage> {
        let u32_at = |at: usize| {
            let at = SUPERBLOCK + at;
            u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        };
        if u32_at(0) != MAGIC {
            return Err(LayerDamage::Magic);
        }
        let mut checked = block[SUPERBLOCK..].to_vec();
        checked[4..8].fill(0);
        if u32_at(8) & COMPAT_CHECKSUM == 0 || u32_at(4) != crc32c(&checked) {
            return Err(LayerDamage::Checksum);
        }
        let has_chunks = u32_at(80) & INCOMPAT_CHUNKED_FILE != 0;
        let (block_bits, slots, directory_bits) =
            (block[SUPERBLOCK + 12], block[SUPERBLOCK + 13], block[SUPERBLOCK + 90]);
        if (block_bits, slots, directory_bits) != (12, 0, 0) || u32_at(80) & !INCOMPAT_CHUNKED_FILE != 0 {
            return Err(LayerDamage::Features);
        }
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&block[SUPERBLOCK + 48..SUPERBLOCK + 64]);
        Ok(Superblock {
            blocks: u32_at(36),
            inodes: u64::from(u32_at(16)) | u64::from(u32_at(20)) << 32,
            metadata_block: u32_at(40),
            root: u16::from_le_bytes([block[SUPERBLOCK + 14], block[SUPERBLOCK + 15]]),
            uuid,
            has_chunks,
        })
    }
}

/// CRC-32C that starts with all ones and is not inverted at the end. Slow, for a few kilobytes.
fn crc32c(bytes: &[u8]) -> u32 {
    bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82F6_3B78 * (crc & 1)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_of_the_check_string() {
        assert_eq!(!crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn device_numbers_have_twelve_and_twenty_bits() {
        assert_eq!(device_number(1, 3), Some(0x103));
        assert_eq!(device_number(8, 0x12345), Some(0x1230_0845));
        assert_eq!(device_number(4095, 1_048_575), Some(u32::MAX));
        assert_eq!(device_number(4096, 0), None);
        assert_eq!(device_number(0, 1 << 20), None);
    }
}
