//! Writes the files that an overlay of several layers shows as one tar archive, in the order of their paths.
//!
//! Nothing is mounted, and nothing but directories is in memory: one level of names for each directory on the way down. What
//! layers hide from each other is looked up as when a layer is completed on lower ones (`lowers.rs`).

use std::collections::{BTreeSet, HashMap, btree_set};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, OFlags, SeekFrom, Stat, major, minor, readlinkat, seek};
use rustix::io::Errno;
use tar_core::builder::EntryBuilder;
use tar_core::{EntryType, HEADER_SIZE, SparseEntry};

use super::OwnerMode;
use super::beneath;
use super::layer_manifest::{LayerManifestError, LayerManifestReader, path_of};
use super::lowers::{LowerEntry, LowerLayers, MergedDir};
use super::metadata::{XattrTarget, Xattrs, read_xattrs};

const BUFFER: usize = 128 << 10;

/// Smaller files are not searched for holes.
const SEARCHED_FOR_HOLES: u64 = 64 << 10;

/// Parts of a sparse file, at most; one with more is written with its holes as zeros.
const MAX_EXTENTS: usize = 1000;

/// More data than this in a sparse file does not fit into a header.
const MAX_SPARSE: u64 = 8 << 30;

/// Bytes of memory for the names of files with several names: two million of usual length.
const MAX_LINKS: usize = 256 << 20;

/// What such a name takes beside its bytes.
const LINK_BYTES: usize = 64;

/// One layer of several.
#[derive(Debug)]
pub struct MergeLayer {
    /// Its files.
    pub root: OwnedFd,
    /// Its layer manifest, which has the owners where the files do not; `None` if they do.
    pub manifest: Option<PathBuf>,
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
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// A layer manifest cannot be read.
    #[error("cannot read the layer manifest {}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        cause: LayerManifestError,
    },
    /// The names of files with several names take more memory than an export may.
    #[error("the image has too many files with several names")]
    TooManyLinks,
    /// The archive cannot be written.
    #[error("cannot write the archive")]
    Output(#[source] io::Error),
}

/// Writes the files of these layers, the nearest first, to `out`.
pub fn write_merged_files(layers: Vec<MergeLayer>, out: &mut dyn Write) -> Result<(), MergeError> {
    let (mut roots, mut owners) = (Vec::new(), Vec::new());
    for MergeLayer { root, manifest } in layers {
        roots.push(Arc::new(root));
        let read = |path: PathBuf| {
            owners_in(&path).map_err(|cause| MergeError::Manifest { path: path.clone(), cause })
        };
        owners.push(manifest.map(read).transpose()?.flatten());
    }
    let layers = LowerLayers::new(roots);
    let links = HashMap::new();
    let mut archive =
        MergedArchive { layers: &layers, owners, links, links_left: MAX_LINKS, buffer: vec![0; BUFFER], out };
    archive.write_all()
}

/// Owner and mode of the files of a layer that was unpacked without root: those that are not root's, or whose mode differs.
type RecordedOwners = HashMap<Vec<u8>, (u32, u32, u32)>;

/// `None` if the files have their owners.
fn owners_in(manifest: &Path) -> Result<Option<RecordedOwners>, LayerManifestError> {
    let reader = LayerManifestReader::open(manifest)?;
    if reader.form().owners == OwnerMode::Apply {
        return Ok(None);
    }
    let mut owners = RecordedOwners::new();
    for record in reader {
        let record = record?;
        let is_default =
            (record.uid, record.gid) == (0, 0) && record.mode & 0o7000 == 0 && record.mode & 0o700 == 0o700;
        if is_default {
            owners.remove(&record.path);
        } else {
            owners.insert(record.path, (record.mode, record.uid, record.gid));
        }
    }
    Ok(Some(owners))
}

struct MergedArchive<'a> {
    layers: &'a LowerLayers,
    owners: Vec<Option<RecordedOwners>>,
    /// First paths of files with several names, by device and inode.
    links: HashMap<(u64, u64), Vec<u8>>,
    /// Bytes of memory that `links` may still take.
    links_left: usize,
    buffer: Vec<u8>,
    out: &'a mut dyn Write,
}

impl MergedArchive<'_> {
    fn write_all(&mut self) -> Result<(), MergeError> {
        let root = MergedDir::root(self.layers);
        let Some(top) = at(b"", self.layers.find(b"", false))? else { return Ok(()) };
        self.add(&top)?;
        let mut levels: Vec<(MergedDir, btree_set::IntoIter<Vec<u8>>)> = Vec::new();
        let names = self.names(&root)?;
        levels.push((root, names));
        while let Some((dir, names)) = levels.last_mut() {
            let Some(name) = names.next() else {
                levels.pop();
                continue;
            };
            let path = dir.path_of(&name);
            let Some((found, layers)) = at(&path, self.layers.look(dir, path.clone()))? else { continue };
            self.add(&found)?;
            if found.is_directory() {
                let inner = MergedDir { path: found.path, layers };
                let names = self.names(&inner)?;
                levels.push((inner, names));
            }
        }
        self.write(&[0; 2 * HEADER_SIZE])
    }

    fn names(&self, dir: &MergedDir) -> Result<btree_set::IntoIter<Vec<u8>>, MergeError> {
        let names: BTreeSet<Vec<u8>> = at(&dir.path, self.layers.names(dir))?;
        Ok(names.into_iter())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), MergeError> {
        self.out.write_all(bytes).map_err(MergeError::Output)
    }

    fn add(&mut self, found: &LowerEntry) -> Result<(), MergeError> {
        let kind = FileType::from_raw_mode(found.stat.st_mode);
        if kind == FileType::Socket {
            return Ok(()); // tar has none
        }
        let linked = kind != FileType::Directory && found.stat.st_nlink > 1;
        if linked {
            let key = (found.stat.st_dev, found.stat.st_ino);
            if let Some(first) = self.links.get(&key) {
                let mut header = at(&found.path, self.header(found))?;
                header.entry_type(EntryType::Link).link_name(first);
                return self.write(&header.finish_bytes());
            }
            let taken = found.path.len() + LINK_BYTES;
            self.links_left = self.links_left.checked_sub(taken).ok_or(MergeError::TooManyLinks)?;
            self.links.insert(key, found.path.clone());
        }
        if kind == FileType::RegularFile {
            return self.add_file(found);
        }
        let header = at(&found.path, self.header_of_special(found, kind))?;
        self.write(&header)
    }

    fn add_file(&mut self, found: &LowerEntry) -> Result<(), MergeError> {
        let root = self.layers.root(found.layer);
        let file = at(&found.path, beneath::open(root, &found.path, OFlags::RDONLY | OFlags::NONBLOCK))?;
        let size = u64::try_from(found.stat.st_size).unwrap_or(0);
        let extents = at(&found.path, extents(&file, size))?;
        let xattrs = at(&found.path, read_xattrs(XattrTarget::Open(file.as_fd())))?;
        let mut header = at(&found.path, self.header(found))?;
        add_xattrs(&mut header, &xattrs);
        header.entry_type(EntryType::Regular);
        let data: u64 = extents.iter().map(|extent| extent.length).sum();
        at(&found.path, header.size(data).map_err(io::Error::other))?;
        if data != size {
            header.sparse(&extents, size);
        }
        self.write(&header.finish_bytes())?;
        let file = File::from(file);
        for SparseEntry { offset, length } in &extents {
            let (mut from, end) = (*offset, offset + length);
            while from < end {
                let wanted = usize::try_from(end - from).unwrap_or(usize::MAX).min(BUFFER);
                at(&found.path, file.read_exact_at(&mut self.buffer[..wanted], from))?;
                self.out.write_all(&self.buffer[..wanted]).map_err(MergeError::Output)?;
                from += wanted as u64;
            }
        }
        let padding = usize::try_from(data.wrapping_neg() % HEADER_SIZE as u64).unwrap_or(0);
        self.write(&[0; HEADER_SIZE][..padding])
    }

    fn header_of_special(&self, found: &LowerEntry, kind: FileType) -> io::Result<Vec<u8>> {
        let root = self.layers.root(found.layer);
        let mut header = self.header(found)?;
        let xattrs = if kind == FileType::Directory {
            let open = beneath::open(root, &found.path, beneath::DIRECTORY)?;
            read_xattrs(XattrTarget::Open(open.as_fd()))?
        } else {
            read_xattrs(XattrTarget::Named(root, &found.path))?
        };
        add_xattrs(&mut header, &xattrs);
        let numbers = (major(found.stat.st_rdev), minor(found.stat.st_rdev));
        match kind {
            FileType::Directory => header.entry_type(EntryType::Directory),
            FileType::Symlink => {
                let target = readlinkat(root, path_of(&found.path), Vec::new())?;
                header.entry_type(EntryType::Symlink).link_name(target.as_bytes())
            }
            FileType::CharacterDevice => {
                header.entry_type(EntryType::Char).device(numbers.0, numbers.1).map_err(io::Error::other)?
            }
            FileType::BlockDevice => {
                header.entry_type(EntryType::Block).device(numbers.0, numbers.1).map_err(io::Error::other)?
            }
            _ => header.entry_type(EntryType::Fifo),
        };
        Ok(header.finish_bytes())
    }

    /// Path, mode, owner and time.
    fn header(&self, found: &LowerEntry) -> io::Result<EntryBuilder> {
        let stat = &found.stat;
        let mut path = found.path.clone();
        if path.is_empty() {
            path.push(b'.');
        }
        if found.is_directory() {
            path.push(b'/');
        }
        let (mode, uid, gid) = match &self.owners[found.layer] {
            None => (stat.st_mode, stat.st_uid, stat.st_gid),
            Some(owners) => owners.get(&found.path).copied().unwrap_or((stat.st_mode, 0, 0)),
        };
        let mut header = EntryBuilder::new_ustar();
        header.path(path);
        let mut set = || {
            header.mode(mode & 0o7777)?.uid(uid.into())?.gid(gid.into())?;
            header.mtime(u64::try_from(stat.st_mtime).unwrap_or(0)).map(drop)
        };
        set().map_err(io::Error::other)?;
        if let Some(time) = precise_time(stat) {
            header.add_pax("mtime", time);
        }
        Ok(header)
    }
}

fn add_xattrs(header: &mut EntryBuilder, xattrs: &Xattrs) {
    for (name, value) in xattrs {
        // The format has names in UTF-8 only.
        if let Ok(name) = std::str::from_utf8(name) {
            header.add_pax(&format!("SCHILY.xattr.{name}"), value);
        }
    }
}

/// The time of a file that a header cannot hold: before 1970, or not of a whole second.
fn precise_time(stat: &Stat) -> Option<String> {
    let (seconds, nanos) = (stat.st_mtime, stat.st_mtime_nsec);
    match (seconds < 0, nanos) {
        (false, 0) => None,
        (true, 0) => Some(seconds.to_string()),
        (false, nanos) => Some(format!("{seconds}.{nanos:09}")),
        (true, nanos) => Some(format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos)),
    }
}

/// The parts of a file that have data; all of it, if it has no holes.
fn extents(file: &OwnedFd, size: u64) -> Result<Vec<SparseEntry>, Errno> {
    let whole = vec![SparseEntry { offset: 0, length: size }];
    if size < SEARCHED_FOR_HOLES {
        return Ok(whole);
    }
    let (mut extents, mut at, mut data) = (Vec::new(), 0, 0);
    while at < size {
        let start = match seek(file, SeekFrom::Data(at)) {
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(whole),
            start => start?,
        };
        at = seek(file, SeekFrom::Hole(start))?.min(size);
        extents.push(SparseEntry { offset: start, length: at - start });
        data += at - start;
    }
    let fits = extents.len() <= MAX_EXTENTS && data < MAX_SPARSE && data < size;
    Ok(if fits { extents } else { whole })
}

fn at<T>(path: &[u8], result: Result<T, impl Into<io::Error>>) -> Result<T, MergeError> {
    result.map_err(|cause| MergeError::File { path: Path::new("/").join(path_of(path)), cause: cause.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_fractions_and_may_lie_before_1970() {
        let Ok(mut stat) = rustix::fs::stat("/") else { panic!("no root") };
        for (seconds, nanos, text) in [
            (5, 0, None),
            (5, 250_000_000, Some("5.250000000")),
            (-1, 0, Some("-1")),
            (-2, 750_000_000, Some("-1.250000000")),
            (-1, 750_000_000, Some("-0.250000000")),
        ] {
            (stat.st_mtime, stat.st_mtime_nsec) = (seconds, nanos);
            assert_eq!(precise_time(&stat).as_deref(), text, "{seconds} {nanos}");
        }
    }
}
