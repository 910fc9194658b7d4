//! Files of lower layers that become this layer's own: targets of its hard links.

use crate::entry::{ErofsEntry, ErofsEntryKind};
use crate::error::{EntryProblem, ErofsError};
use crate::input::ErofsInput;
use crate::output::ErofsOutput;
use crate::paths::{parts, split};
use crate::reader::{ErofsInode, ErofsReader, InodeKind};
use crate::tree::{NodeKind, ROOT};

use super::ErofsWriter;

/// Bytes of a file that are read at once.
const BUFFER: usize = 128 << 10;

/// Entry that an overlay shows at a path, as far as this layer decides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlayView {
    /// The entry of this layer, possibly a hard link that is not resolved yet.
    Own,
    /// The entry of the layers below.
    Lower,
    /// Nothing: this layer hides what the layers below have there.
    Hidden,
}

impl<O: ErofsOutput> ErofsWriter<O> {
    /// Returns the entry that an overlay of this layer shows at a path. Links in the path are not followed: below
    /// one, nothing is shown.
    pub fn view(&self, path: &[u8]) -> OverlayView {
        let (parent, name) = split(path);
        let (mut at, mut is_opaque) = (ROOT, self.tree.directory(ROOT).is_opaque());
        for part in parts(parent) {
            let found = self.tree.find(at, part).map(|node| self.tree.node(node));
            match found {
                None if is_opaque => return OverlayView::Hidden,
                None => return OverlayView::Lower,
                Some(node) if node.kind() == NodeKind::Directory => at = node.target,
                Some(_) => return OverlayView::Hidden,
            }
            is_opaque |= self.tree.directory(at).is_opaque();
        }
        match self.tree.find(at, name).map(|node| self.tree.node(node).kind()) {
            None if is_opaque => OverlayView::Hidden,
            None => OverlayView::Lower,
            Some(NodeKind::Whiteout) => OverlayView::Hidden,
            Some(_) => OverlayView::Own,
        }
    }

    /// Adds a file, symbolic link, pipe or device of a lower layer under `path`: its attributes, and a copy of its
    /// content. The target of a [`lower link`](ErofsWriter::lower_links), under whose path
    /// [`resolve_links`](ErofsWriter::resolve_links) finds it, or the link itself, if this layer hides the target.
    pub fn copy_file<I: ErofsInput>(
        &mut self,
        path: &[u8],
        lower: &ErofsReader<I>,
        file: &ErofsInode,
    ) -> Result<(), ErofsError> {
        let xattrs = lower.xattrs(file)?;
        let mut extents = Vec::new();
        let target;
        let (major, minor) = file.rdev;
        let kind = match file.kind {
            InodeKind::File => {
                for extent in lower.extents(file) {
                    let extent = extent?;
                    extents.extend(extent.layer_offset.map(|_| (extent.offset, extent.length)));
                }
                ErofsEntryKind::Sparse { size: file.size, extents: &extents }
            }
            InodeKind::Symlink => {
                target = lower.symlink_target(file)?;
                ErofsEntryKind::Symlink { target: &target }
            }
            InodeKind::Fifo => ErofsEntryKind::Fifo,
            InodeKind::CharDevice => ErofsEntryKind::CharDevice { major, minor },
            InodeKind::BlockDevice => ErofsEntryKind::BlockDevice { major, minor },
            InodeKind::Directory => return Err(ErofsError::rejected(path, EntryProblem::LinkToDirectory)),
        };
        self.add(&ErofsEntry {
            path,
            kind,
            mode: file.mode,
            uid: file.uid,
            gid: file.gid,
            mtime: file.mtime,
            xattrs: &xattrs,
        })?;
        extents.iter().try_for_each(|extent| self.copy_extent(lower, file, *extent))
    }

    fn copy_extent<I: ErofsInput>(
        &mut self,
        lower: &ErofsReader<I>,
        file: &ErofsInode,
        (offset, length): (u64, u64),
    ) -> Result<(), ErofsError> {
        let (mut at, end) = (offset, offset + length);
        let mut buffer = vec![0; usize::try_from(length).unwrap_or(BUFFER).min(BUFFER)];
        while at < end {
            let piece = usize::try_from(end - at).unwrap_or(BUFFER).min(buffer.len());
            let read = lower.read_at(file, &mut buffer[..piece], at)?;
            self.write_data(&buffer[..read])?;
            at += read as u64;
        }
        Ok(())
    }
}
