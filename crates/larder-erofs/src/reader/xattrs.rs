//! Extended attributes of inodes.

use crate::error::{ErofsReadError, LayerDamage};
use crate::input::ErofsInput;
use crate::xattr::{OPAQUE, Xattrs, decode_xattrs, unescape};

use super::{ErofsInode, ErofsReader};

impl<I: ErofsInput> ErofsReader<I> {
    /// Full names and values of an inode's attributes as a mount of the layer shows them, sorted as the layer has them:
    /// with the mark of an opaque directory, and attributes of overlayfs from the archive under their escaped names.
    pub fn stored_xattrs(&self, inode: &ErofsInode) -> Result<Xattrs, ErofsReadError> {
        if inode.xattr_bytes == 0 {
            return Ok(Vec::new());
        }
        let length = inode.xattr_bytes as usize;
        let mut bytes = vec![0; length];
        self.read_metadata(inode, &mut bytes, self.end_of_xattrs(inode) - length as u64)?;
        decode_xattrs(&bytes).ok_or_else(|| inode.damaged(LayerDamage::Xattrs))
    }

    /// Full names and values of an inode's attributes as the archive had them and an overlay shows them: names of
    /// overlayfs' own attributes without their escape, and without the mark of an opaque directory. To write them to
    /// another layer again.
    pub fn xattrs(&self, inode: &ErofsInode) -> Result<Xattrs, ErofsReadError> {
        let mut xattrs = self.stored_xattrs(inode)?;
        xattrs.retain_mut(|(name, _)| unescape(name));
        Ok(xattrs)
    }

    /// Returns true for a directory that hides what lower layers have in it.
    pub fn is_opaque(&self, inode: &ErofsInode) -> Result<bool, ErofsReadError> {
        if !inode.is_directory() || inode.xattr_bytes == 0 {
            return Ok(false);
        }
        Ok(self.stored_xattrs(inode)?.iter().any(|(name, value)| name == OPAQUE && value == b"y"))
    }
}
