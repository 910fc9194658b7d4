//! Writes the files that an overlay of several layers shows as one tar archive, in the order of their paths.
//!
//! Nothing is mounted, and nothing but directories is in memory: one level of names for each directory on the way down.

use std::collections::{HashSet, btree_set};
use std::io::{self, Read as _, Write};
use std::path::{Path, PathBuf};

use larder_erofs::ErofsTime;
use tar_core::builder::EntryBuilder;
use tar_core::{EntryType, HEADER_SIZE, SparseEntry};

use super::archive::{LayerEntry, LayerEntryKind, SparseExtent};
use super::beneath::path_of;
use super::first_paths::FirstPaths;
use super::layer_entries::{EntryData, entry_of};
use super::merged_layers::{MergedDir, MergedEntry, MergedLayers, MergedName};

const BUFFER: usize = 128 << 10;

/// Parts of a sparse file, at most; one with more is written with its holes as zeros.
const MAX_EXTENTS: usize = 1000;

/// The data of a sparse file and its map, which takes less than the rest, do not fit into a header from 8 GiB on.
const MAX_SPARSE: u64 = (8 << 30) - (1 << 20);

/// Bytes of holes that an archive has as zeros.
const MAX_ZEROS: u64 = 1 << 30;

/// How an archive has the holes of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoleEncoding {
    /// As zeros, up to 1 GiB in all files, so that readers that know no sparse files (busybox) restore them. Other
    /// files are as with [`HoleEncoding::Sparse`].
    Zeros,
    /// In GNU tar's sparse format 1.0.
    Sparse,
}

/// Why the files could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MergeError {
    /// A layer's file cannot be read.
    #[error("cannot read {} in the layers", path.display())]
    File {
        /// Where it is in the image.
        path: PathBuf,
        /// The error.
        #[source]
        cause: io::Error,
    },
    /// The names of files with several names take more memory than an export may.
    #[error("the image has too many files with several names")]
    TooManyLinks,
    /// The archive cannot be written.
    #[error("cannot write the archive")]
    Output(#[source] io::Error),
}

/// Writes the files of these layers to `out`.
pub fn write_merged_files(
    layers: &MergedLayers,
    holes: HoleEncoding,
    out: &mut dyn Write,
) -> Result<(), MergeError> {
    let zeros_left = if holes == HoleEncoding::Zeros { MAX_ZEROS } else { 0 };
    let (first_paths, entered, buffer) = (FirstPaths::default(), HashSet::new(), vec![0; BUFFER]);
    MergedArchive { layers, first_paths, zeros_left, entered, buffer, out }.write_all()
}

struct MergedArchive<'a> {
    layers: &'a MergedLayers,
    first_paths: FirstPaths,
    /// Bytes of holes that the archive may still have as zeros.
    zeros_left: u64,
    /// Directories by layer and inode. A damaged layer could have one in itself.
    entered: HashSet<(usize, u64)>,
    buffer: Vec<u8>,
    out: &'a mut dyn Write,
}

impl MergedArchive<'_> {
    fn write_all(&mut self) -> Result<(), MergeError> {
        let root = at(b"", self.layers.root())?;
        let mut levels = vec![self.enter(root)?];
        while let Some((dir, names)) = levels.last_mut() {
            let Some(name) = names.next() else {
                levels.pop();
                continue;
            };
            match at(&dir.path_of(&name), self.layers.lookup(dir, &name))? {
                None => {}
                Some(MergedName::Other(found)) => self.add(&found)?,
                Some(MergedName::Directory(dir)) => levels.push(self.enter(dir)?),
            }
        }
        self.write(&[0; 2 * HEADER_SIZE])
    }

    /// Adds a directory, and returns it with the names in it.
    fn enter(&mut self, dir: MergedDir) -> Result<(MergedDir, btree_set::IntoIter<Vec<u8>>), MergeError> {
        if !dir.parts().all(|part| self.entered.insert(part)) {
            let damaged = io::Error::new(io::ErrorKind::InvalidData, "a directory with several names");
            return at(&dir.path, Err(damaged));
        }
        if let Some(entry) = dir.entry() {
            self.add(&entry)?;
        }
        let names = at(&dir.path, self.layers.names(&dir))?;
        Ok((dir, names.into_iter()))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), MergeError> {
        self.out.write_all(bytes).map_err(MergeError::Output)
    }

    fn add(&mut self, found: &MergedEntry) -> Result<(), MergeError> {
        let layer = self.layers.layer(found.layer);
        let mut entry = at(&found.path, entry_of(layer, &found.inode, found.path.clone()))?;
        if let Some(first) = self.first_paths.of(found).map_err(|_| MergeError::TooManyLinks)? {
            entry.xattrs.clear();
            let mut header = at(&found.path, header_of(&entry))?;
            header.entry_type(EntryType::Link).link_name(first);
            return self.write(&header.finish_bytes());
        }
        match entry.kind {
            LayerEntryKind::File | LayerEntryKind::Sparse(_) => self.add_file(found, entry),
            _ => {
                let header = at(&found.path, header_of_special(&entry))?;
                self.write(&header)
            }
        }
    }

    fn add_file(&mut self, found: &MergedEntry, mut entry: LayerEntry) -> Result<(), MergeError> {
        let mut header = at(&found.path, header_of(&entry))?;
        header.entry_type(EntryType::Regular);
        let mut data = entry.size;
        if let Some(extents) = self.sparse_map(&mut entry) {
            data = extents.iter().map(|extent| extent.length).sum();
            at(&found.path, header.size(data).map_err(io::Error::other))?;
            header.sparse(&extents, entry.size);
        } else {
            at(&found.path, header.size(data).map_err(io::Error::other))?;
        }
        self.write(&header.finish_bytes())?;
        let mut content = EntryData::of(self.layers.layer(found.layer), &found.inode, &entry);
        let mut left = data;
        while left > 0 {
            let wanted = usize::try_from(left).unwrap_or(BUFFER).min(BUFFER);
            at(&found.path, content.read_exact(&mut self.buffer[..wanted]))?;
            self.out.write_all(&self.buffer[..wanted]).map_err(MergeError::Output)?;
            left -= wanted as u64;
        }
        let padding = usize::try_from(data.wrapping_neg() % HEADER_SIZE as u64).unwrap_or(0);
        self.write(&[0; HEADER_SIZE][..padding])
    }

    /// Decides how the archive has a file. `None` for one without holes, or with its holes as zeros.
    fn sparse_map(&mut self, entry: &mut LayerEntry) -> Option<Vec<SparseEntry>> {
        let LayerEntryKind::Sparse(extents) = &entry.kind else { return None };
        let data: u64 = extents.iter().map(|(_, length)| length).sum();
        let left = self.zeros_left.checked_sub(entry.size.saturating_sub(data));
        if left.is_none() && extents.len() <= MAX_EXTENTS && data < MAX_SPARSE {
            return Some(closed_map(extents, entry.size));
        }
        self.zeros_left = left.unwrap_or(0);
        entry.kind = LayerEntryKind::File;
        None
    }
}

/// The map of a sparse file. Readers take its last entry for the end of the file, so that one that ends with a hole has
/// an empty entry there.
fn closed_map(extents: &[SparseExtent], size: u64) -> Vec<SparseEntry> {
    let mut map: Vec<SparseEntry> =
        extents.iter().map(|&(offset, length)| SparseEntry { offset, length }).collect();
    if map.last().is_none_or(|last| last.offset + last.length < size) {
        map.push(SparseEntry { offset: size, length: 0 });
    }
    map
}

fn header_of_special(entry: &LayerEntry) -> io::Result<Vec<u8>> {
    let mut header = header_of(entry)?;
    let (major, minor) = entry.device;
    match entry.kind {
        LayerEntryKind::Directory => header.entry_type(EntryType::Directory),
        LayerEntryKind::Symlink => header.entry_type(EntryType::Symlink).link_name(&entry.link),
        LayerEntryKind::CharDevice => {
            header.entry_type(EntryType::Char).device(major, minor).map_err(io::Error::other)?
        }
        LayerEntryKind::BlockDevice => {
            header.entry_type(EntryType::Block).device(major, minor).map_err(io::Error::other)?
        }
        _ => header.entry_type(EntryType::Fifo),
    };
    Ok(header.finish_bytes())
}

/// Path, mode, owner, time and attributes.
fn header_of(entry: &LayerEntry) -> io::Result<EntryBuilder> {
    let mut path = entry.path.clone();
    if path.is_empty() {
        path.push(b'.');
    }
    if entry.kind == LayerEntryKind::Directory {
        path.push(b'/');
    }
    let mut header = EntryBuilder::new_ustar();
    header.path(path);
    let mut set = || {
        header.mode(entry.mode)?.uid(entry.uid.into())?.gid(entry.gid.into())?;
        header.mtime(u64::try_from(entry.mtime.seconds).unwrap_or(0)).map(drop)
    };
    set().map_err(io::Error::other)?;
    if let Some(time) = precise_time(entry.mtime) {
        header.add_pax("mtime", time);
    }
    for (name, value) in &entry.xattrs {
        // The format has names in UTF-8 only.
        if let Ok(name) = std::str::from_utf8(name) {
            header.add_pax(&format!("SCHILY.xattr.{name}"), value);
        }
    }
    Ok(header)
}

/// The time of a file that a header cannot hold: before 1970, or not of a whole second.
fn precise_time(ErofsTime { seconds, nanos }: ErofsTime) -> Option<String> {
    match (seconds < 0, nanos) {
        (false, 0) => None,
        (true, 0) => Some(seconds.to_string()),
        (false, nanos) => Some(format!("{seconds}.{nanos:09}")),
        (true, nanos) => Some(format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos)),
    }
}

fn at<T>(path: &[u8], result: io::Result<T>) -> Result<T, MergeError> {
    result.map_err(|cause| MergeError::File { path: Path::new("/").join(path_of(path)), cause })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_fractions_and_may_lie_before_1970() {
        for (seconds, nanos, text) in [
            (5, 0, None),
            (5, 250_000_000, Some("5.250000000")),
            (-1, 0, Some("-1")),
            (-2, 750_000_000, Some("-1.250000000")),
            (-1, 750_000_000, Some("-0.250000000")),
        ] {
            assert_eq!(precise_time(ErofsTime { seconds, nanos }).as_deref(), text, "{seconds} {nanos}");
        }
    }
}
