//! The data of files, as it comes.

use crate::entry::{ErofsEntry, ErofsEntryKind};
use crate::error::{ErofsError, path_of};
use crate::format::{BLOCK, DataLayout, INODE, Inode, file_type};
use crate::output::ErofsOutput;
use crate::sparse::ChunkLayout;
use crate::tree::{DirId, NodeKind};

use super::{EntryPlace, ErofsWriter, inode_of, mode_bits};

/// Entries of a chunk map that are written at a time.
const MAP_PIECE: usize = 1024;

/// A file that does not have all its data yet.
pub(super) struct OpenFile {
    path: Vec<u8>,
    /// Bytes that came, and bytes to come in total.
    received: u64,
    expected: u64,
    /// `None` if the data is ignored: of a whiteout.
    stored: Option<StoredFile>,
}

/// A file of the layer, and how far it has been written.
struct StoredFile {
    dir: DirId,
    name: Vec<u8>,
    inode: Inode,
    xattrs: Vec<u8>,
    /// Where the bytes begin that follow the inode; the file's size if none do.
    tail_start: u64,
    tail: Vec<u8>,
    sparse: Option<SparseProgress>,
}

/// How far a sparse file has been written.
struct SparseProgress {
    layout: ChunkLayout,
    /// The extent that comes next or is under way, and what was received of it.
    extent: usize,
    within: u64,
    /// Offset in the file up to which its chunk has been appended, and the end of this chunk.
    written: u64,
    chunk_end: u64,
}

impl OpenFile {
    /// A file whose data means nothing, unless it has none.
    pub(super) fn ignored(entry: &ErofsEntry<'_>) -> Option<OpenFile> {
        let expected = match entry.kind {
            ErofsEntryKind::File { size } => size,
            ErofsEntryKind::Sparse { extents, .. } => {
                // Nothing checks these extents; more data than can be written is an error of its own.
                extents.iter().fold(0, |sum: u64, (_, length)| sum.saturating_add(*length))
            }
            _ => 0,
        };
        let file = OpenFile { path: entry.path.to_vec(), received: 0, expected, stored: None };
        (expected > 0).then_some(file)
    }

    /// The error of a file that another entry follows too early.
    pub(super) fn incomplete(&self) -> ErofsError {
        ErofsError::DataSize {
            path: path_of(&self.path),
            expected: self.expected,
            found: self.received,
            more: false,
        }
    }
}

impl<O: ErofsOutput> ErofsWriter<O> {
    pub(super) fn start_file(
        &mut self,
        place: EntryPlace<'_>,
        entry: &ErofsEntry<'_>,
        size: u64,
        extents: Option<&[(u64, u64)]>,
    ) -> Result<(), ErofsError> {
        let rejected = |problem| ErofsError::rejected(entry.path, problem);
        let layout = match extents {
            Some(extents) => ChunkLayout::choose(size, extents).map_err(rejected)?,
            None => None,
        };
        let xattrs = self.xattrs(entry, file_type::FILE);
        let mut inode = inode_of(entry, file_type::FILE | mode_bits(entry.mode));
        inode.size = size;
        let tail = size % BLOCK as u64;
        let record = tail + (INODE + xattrs.len()) as u64;
        let mut tail_start = size;
        if layout.is_some() {
            inode.layout = DataLayout::Chunks;
        } else if (1..=self.options.max_inline_tail).contains(&tail) && record <= BLOCK as u64 {
            inode.layout = DataLayout::Inline;
            tail_start -= tail;
        }
        let expected = layout.as_ref().map_or(size, ChunkLayout::data_size);
        if layout.is_some() || tail_start > 0 {
            inode.place = self.to.block()?;
        }
        let stored = StoredFile {
            dir: place.dir,
            name: place.name.to_vec(),
            inode,
            xattrs,
            tail_start,
            tail: Vec::new(),
            sparse: layout.map(|layout| SparseProgress {
                layout,
                extent: 0,
                within: 0,
                written: 0,
                chunk_end: 0,
            }),
        };
        if expected == 0 {
            return self.finish_file(stored);
        }
        self.file = Some(OpenFile { path: entry.path.to_vec(), received: 0, expected, stored: Some(stored) });
        Ok(())
    }

    /// Takes a piece of the data of the file that was added last. The piece with the file's last byte completes it.
    pub fn write_data(&mut self, data: &[u8]) -> Result<(), ErofsError> {
        if data.is_empty() {
            return Ok(());
        }
        let Some(mut file) = self.file.take() else {
            return Err(ErofsError::DataSize { path: path_of(b""), expected: 0, found: 0, more: true });
        };
        let left = file.expected - file.received;
        if data.len() as u64 > left {
            let found = file.expected;
            return Err(ErofsError::DataSize {
                path: path_of(&file.path),
                expected: found,
                found,
                more: true,
            });
        }
        if let Some(stored) = &mut file.stored {
            self.store(stored, file.received, data)?;
        }
        file.received += data.len() as u64;
        if file.received < file.expected {
            self.file = Some(file);
            return Ok(());
        }
        file.stored.map_or(Ok(()), |stored| self.finish_file(stored))
    }

    /// Leaves out all data of the file that was added last, and returns its place: offset and length in the layer. The
    /// layer is as with the data, but for that place, which is full blocks. `None` if the layer has no data of it.
    ///
    /// For layers without inline tails ([`ErofsOptions::max_inline_tail`](crate::ErofsOptions)) and files without
    /// holes.
    pub fn leave_data(&mut self) -> Result<Option<(u64, u64)>, ErofsError> {
        let Some(file) = self.file.take() else { return Ok(None) };
        let Some(stored) = file.stored else { return Ok(None) };
        if file.received > 0 || stored.sparse.is_some() || stored.tail_start < stored.inode.size {
            return Err(ErofsError::DataSize {
                path: path_of(&file.path),
                expected: file.expected,
                found: file.received,
                more: false,
            });
        }
        let start = self.to.position();
        self.to.skip(file.expected.next_multiple_of(BLOCK as u64))?;
        self.finish_file(stored)?;
        Ok(Some((start, file.expected)))
    }

    fn store(&mut self, file: &mut StoredFile, received: u64, data: &[u8]) -> Result<(), ErofsError> {
        if let Some(sparse) = &mut file.sparse {
            return self.write_sparse(sparse, data);
        }
        let blocks = usize::try_from(file.tail_start.saturating_sub(received))
            .map_or(data.len(), |blocks| blocks.min(data.len()));
        self.to.append(&data[..blocks])?;
        file.tail.extend_from_slice(&data[blocks..]);
        Ok(())
    }

    fn write_sparse(&mut self, sparse: &mut SparseProgress, data: &[u8]) -> Result<(), ErofsError> {
        let mut data = data;
        while let Some((offset, left)) = sparse.layout.locate(sparse.extent, sparse.within) {
            if data.is_empty() {
                return Ok(());
            }
            if offset >= sparse.chunk_end {
                self.to.append_zeros(sparse.chunk_end - sparse.written)?;
                sparse.written = offset / sparse.layout.chunk_size() * sparse.layout.chunk_size();
                sparse.chunk_end = sparse.layout.chunk_end(offset);
            }
            self.to.append_zeros(offset - sparse.written)?;
            // No further than the chunk: the next one may follow it, or not.
            let most = left.min(sparse.chunk_end - offset);
            let piece = usize::try_from(most).map_or(data.len(), |most| most.min(data.len()));
            self.to.append(&data[..piece])?;
            data = &data[piece..];
            sparse.written = offset + piece as u64;
            sparse.within += piece as u64;
            if piece as u64 == left {
                (sparse.extent, sparse.within) = (sparse.extent + 1, 0);
            }
        }
        Ok(())
    }

    fn finish_file(&mut self, mut file: StoredFile) -> Result<(), ErofsError> {
        if let Some(sparse) = &file.sparse {
            self.to.append_zeros(sparse.chunk_end - sparse.written)?;
        }
        self.to.pad()?;
        let slot = match &file.sparse {
            Some(sparse) => {
                let first = file.inode.place;
                file.inode.place = sparse.layout.block_bits;
                self.place_chunks(&file.inode, &file.xattrs, &sparse.layout, first)?
            }
            None => self.place_inode(&file.inode, &file.xattrs, &file.tail)?,
        };
        let place = EntryPlace { dir: file.dir, name: &file.name, path: &file.name };
        self.put(place, NodeKind::File, slot, b"");
        Ok(())
    }

    /// Stores the inode of a sparse file and the map behind it.
    fn place_chunks(
        &mut self,
        inode: &Inode,
        xattrs: &[u8],
        layout: &ChunkLayout,
        first: u32,
    ) -> Result<u32, ErofsError> {
        self.has_chunks = true;
        let beginning = inode.encode(xattrs);
        let length = beginning.len() as u64 + 4 * layout.chunks();
        let mut map = layout.map(first).map(u32::to_le_bytes);
        if length <= BLOCK as u64 {
            let record: Vec<u8> = beginning.into_iter().chain(map.flatten()).collect();
            return self.blocks.place(&record);
        }
        let mut record = self.blocks.start_long(length)?;
        let mut piece = beginning;
        while !piece.is_empty() {
            self.blocks.write(&mut record, &piece)?;
            piece = map.by_ref().take(MAP_PIECE).flatten().collect();
        }
        Ok(record.slot)
    }
}
