//! The entries of a directory or archive, by name.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bzip2::bufread::MultiBzDecoder;
use flate2::read::MultiGzDecoder;
use larder::reference::Digest;
use larder::threads::in_place;
use lzma_rust2::XzReader;
use parking_lot::Mutex;

use super::archive::{MAX_ENTRIES, TarEntry, TarEntryKind, TarScanner, normalize_entry_name};
use super::error::{ImportError, file, read};
use super::spool::Spool;
use crate::disk::DiskSpace;
use crate::store::{BlobSource, LayerHandle, LayerKey, LayerRecord, Store};
use crate::unpack::DetectedCompression;
use larder_registry::manifest::MAX_BYTES;

/// How many links lead to an entry at most.
const MAX_LINKS: usize = 8;

/// Where images come from.
pub enum ImportSource {
    /// A directory with an OCI layout, or a file with an archive.
    Path(PathBuf),
    /// An archive that can be read once, such as standard input.
    Stream(Box<dyn Read + Send>),
    /// An OCI layout whose blobs another program has.
    Blobs {
        /// Its `index.json`.
        index: Vec<u8>,
        /// The sizes of the blobs that are present, in bytes.
        sizes: HashMap<Digest, u64>,
        /// Reads them.
        reader: Arc<dyn BlobReader>,
    },
}

/// Reads blobs of another program. Their bytes are checked by the store.
pub trait BlobReader: Send + Sync {
    /// Opens a blob. Reading it may block.
    fn open(&self, digest: &Digest) -> Box<dyn Read + Send>;
}

impl fmt::Debug for ImportSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImportSource::Path(path) => f.debug_tuple("Path").field(path).finish(),
            ImportSource::Stream(_) => f.write_str("Stream"),
            ImportSource::Blobs { sizes, .. } => f.debug_tuple("Blobs").field(&sizes.len()).finish(),
        }
    }
}

/// Layers that archives have had before, by the digest of their blob. They may go until they are held.
pub(super) struct PresentLayers(HashMap<Digest, LayerKey>);

impl PresentLayers {
    /// Lists the layers that archives have had. Only a transfer counts: an archive may claim any digest and any diff
    /// ID.
    pub(super) fn of(store: &Store) -> Result<PresentLayers, ImportError> {
        let archived = store.0.archived_layers().map_err(ImportError::Store)?;
        Ok(PresentLayers(archived.into_iter().collect()))
    }

    /// The layer whose blob has this name and size, if the store has it still, and if it fits whatever is below it.
    fn reference(&self, store: &Store, name: &str, size: u64) -> Result<Option<LayerHandle>, ImportError> {
        let Some(digest) = digest_of_blob(name) else { return Ok(None) };
        let Some(key) = self.0.get(&digest) else { return Ok(None) };
        let layer = store.layer(key)?.filter(|layer| is_known(layer.record()));
        Ok(layer.filter(|layer| layer.is_proved_for(&BlobSource::archive(digest, size))))
    }
}

/// Returns true if the blob of the layer can be no other layer: a file of an artifact is one at each of its paths.
fn is_known(record: &LayerRecord) -> bool {
    let facts = &record.facts;
    let may_be_file = facts.compressed_bytes == facts.plain_bytes && facts.diff_id != facts.digest;
    record.is_whole()
        && record.fits_any_lowers()
        && record.key == LayerKey::from(&facts.diff_id)
        && !may_be_file
}

/// References to layers whose bytes were not spooled. On drop, those that are unused by then are removed.
#[derive(Debug)]
struct LayerReferences {
    store: Store,
    layers: Vec<LayerHandle>,
}

impl Drop for LayerReferences {
    fn drop(&mut self) {
        if self.layers.is_empty() {
            return;
        }
        self.layers.clear();
        if let Err(error) = in_place(|| self.store.0.sweep()) {
            tracing::warn!(%error, "cannot remove the layers of an import");
        }
    }
}

/// Where an entry's bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
enum EntryLocation {
    /// A file of its own.
    File(PathBuf),
    /// A part of the archive.
    Part { at: u64, size: u64 },
    /// Another entry has them: the first of these that is there.
    Link(Vec<String>),
    /// Nowhere: the store has this layer.
    Known { size: u64 },
    /// In memory.
    Document(Vec<u8>),
    /// A blob of another program.
    Blob { digest: Digest, size: u64 },
}

/// Entries of the archive.
pub(super) struct ImportEntries {
    places: HashMap<String, EntryLocation>,
    /// The archive that parts are of.
    archive: Option<Arc<File>>,
    /// Reads the blobs of another program.
    reader: Option<Arc<dyn BlobReader>>,
    /// Layers whose blobs are not found by their digest: digest to name.
    layers: Mutex<HashMap<Digest, String>>,
    /// Where a stream's entries wait; removed in the end.
    spool: Option<Spool>,
    references: LayerReferences,
}

impl fmt::Debug for ImportEntries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportEntries").field("places", &self.places).finish_non_exhaustive()
    }
}

impl ImportEntries {
    pub(super) fn read(
        store: &Store,
        from: ImportSource,
        known: &PresentLayers,
        reserve: DiskSpace,
    ) -> Result<ImportEntries, ImportError> {
        let mut entries = ImportEntries {
            places: HashMap::new(),
            archive: None,
            reader: None,
            layers: Mutex::default(),
            spool: None,
            references: LayerReferences { store: store.clone(), layers: Vec::new() },
        };
        match from {
            ImportSource::Path(path) if path.is_dir() => entries.add_dir(&path)?,
            ImportSource::Path(path) => entries.add_file(store, &path, known, reserve)?,
            ImportSource::Stream(stream) => entries.add_stream(store, stream, known, reserve)?,
            ImportSource::Blobs { index, sizes, reader } => {
                entries.add("index.json".to_owned(), EntryLocation::Document(index))?;
                for (digest, size) in sizes {
                    entries.add(blob_name(&digest), EntryLocation::Blob { digest, size })?;
                }
                entries.reader = Some(reader);
            }
        }
        Ok(entries)
    }

    fn add_dir(&mut self, root: &Path) -> Result<(), ImportError> {
        for (name, path) in files_of(root).map_err(file(root))? {
            self.add(name, EntryLocation::File(path))?;
        }
        Ok(())
    }

    /// An archive in a file: read where it lies, if it is plain.
    fn add_file(
        &mut self,
        store: &Store,
        path: &Path,
        known: &PresentLayers,
        reserve: DiskSpace,
    ) -> Result<(), ImportError> {
        let mut archive = fs_err::File::open(path).map_err(file(path))?.into_file();
        let mut magic = [0; 6];
        let length = archive.read(&mut magic).map_err(file(path))?;
        // A named pipe cannot go back.
        let seekable = archive.rewind().is_ok();
        if !seekable || DetectedCompression::detect(&magic[..length]) != DetectedCompression::None {
            let start = if seekable { Vec::new() } else { magic[..length].to_vec() };
            return self.add_stream(store, Box::new(io::Cursor::new(start).chain(archive)), known, reserve);
        }
        let size = archive.metadata().map_err(file(path))?.len();
        let mut walk = TarScanner::new(archive.try_clone().map_err(file(path))?, |file, length| {
            let offset = i64::try_from(length).map_err(io::Error::other)?;
            file.seek(SeekFrom::Current(offset)).map(|_| length)
        });
        while let Some(entry) = walk.next()? {
            if entry.at.saturating_add(entry.size) > size {
                return Err(ImportError::Truncated { at: size, entry: entry.name });
            }
            let place = EntryLocation::Part { at: entry.at, size: entry.size };
            self.add_entry(entry, place)?;
        }
        self.archive = Some(Arc::new(archive));
        Ok(())
    }

    /// An archive that can be read once. Its files are kept in the store's own directory.
    fn add_stream(
        &mut self,
        store: &Store,
        stream: Box<dyn Read + Send>,
        known: &PresentLayers,
        reserve: DiskSpace,
    ) -> Result<(), ImportError> {
        let mut walk = TarScanner::new(unpacked(stream)?, |_, _| Ok(0));
        let mut spool = Spool::new(store, reserve)?;
        while let Some(entry) = walk.next()? {
            let size = entry.size;
            let Some(name) = entry.name.as_deref().filter(|_| entry.kind == TarEntryKind::File) else {
                self.add_entry(entry, EntryLocation::Known { size })?;
                continue;
            };
            if let Some(layer) = known.reference(store, name, size)? {
                self.references.layers.push(layer);
                self.add_entry(entry, EntryLocation::Known { size })?;
                continue;
            }
            let path = spool.keep(&mut walk, size)?;
            self.add_entry(entry, EntryLocation::File(path))?;
        }
        self.spool = Some(spool);
        Ok(())
    }

    /// Adds an entry of an archive; a later one of the same name counts.
    fn add_entry(&mut self, entry: TarEntry, place: EntryLocation) -> Result<(), ImportError> {
        let Some(name) = entry.name else { return Ok(()) };
        let place = match entry.kind {
            TarEntryKind::File => place,
            TarEntryKind::HardLink(target) => match normalize_entry_name(&target) {
                Some(target) => EntryLocation::Link(vec![target]),
                None => return Ok(()),
            },
            TarEntryKind::Symlink(target) if !target.starts_with('/') => {
                // Some writers of `docker save` archives leave out the `../` before the target.
                let dir = name.rsplit_once('/').map_or("", |(dir, _)| dir);
                let targets = [format!("{dir}/{target}"), target];
                EntryLocation::Link(
                    targets.iter().filter_map(|target| normalize_entry_name(target)).collect(),
                )
            }
            TarEntryKind::Symlink(_) | TarEntryKind::Other => return Ok(()),
        };
        self.add(name, place)
    }

    /// Gives each file that `skopeo copy ... dir:` named by its digest the name of a blob, and `manifest` that of this
    /// digest.
    pub(super) fn name_blobs(&mut self, manifest: (&Digest, &str)) -> Result<(), ImportError> {
        let names: Vec<String> = self.places.keys().cloned().collect();
        for name in names {
            let hex = name.strip_suffix(".manifest.json").unwrap_or(&name);
            // Those by another algorithm than SHA-256 may be `sha512-HEX`.
            let digest_by = |algorithm: &str| {
                let hex = hex.strip_prefix(&format!("{algorithm}-")).unwrap_or(hex);
                Digest::parse(&format!("{algorithm}:{hex}")).ok()
            };
            if let Some(digest) = ["sha256", "sha384", "sha512"].into_iter().find_map(digest_by) {
                self.add(blob_name(&digest), EntryLocation::Link(vec![name]))?;
            }
        }
        let (digest, name) = manifest;
        self.add(blob_name(digest), EntryLocation::Link(vec![name.to_owned()]))
    }

    fn add(&mut self, name: String, place: EntryLocation) -> Result<(), ImportError> {
        if self.places.len() >= MAX_ENTRIES {
            return Err(ImportError::TooManyEntries);
        }
        self.places.insert(name, place);
        Ok(())
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// Returns the name of an entry that root filesystems have, and no archive of images.
    pub(super) fn root_file(&self) -> Option<&String> {
        let is_of_root = |name: &&String| {
            ["bin/", "etc/", "lib/", "sbin/", "usr/"].iter().any(|dir| name.starts_with(dir))
        };
        self.places.keys().filter(is_of_root).min()
    }

    /// Where the bytes of this name are, and the name that they have themselves.
    fn find<'a>(&'a self, name: &'a str) -> Result<(&'a str, &'a EntryLocation), ImportError> {
        let mut at = name;
        for _ in 0..MAX_LINKS {
            match self.places.get(at) {
                Some(EntryLocation::Link(targets)) => {
                    let Some(target) = targets.iter().find(|target| self.has(target)) else { break };
                    at = target;
                }
                Some(place) => return Ok((at, place)),
                None => break,
            }
        }
        Err(ImportError::Missing { name: name.to_owned() })
    }

    /// Size of an entry in bytes.
    pub(super) fn size(&self, name: &str) -> Result<u64, ImportError> {
        match self.find(name)?.1 {
            EntryLocation::File(path) => Ok(fs_err::metadata(path).map_err(file(path))?.len()),
            EntryLocation::Part { size, .. }
            | EntryLocation::Known { size }
            | EntryLocation::Blob { size, .. } => Ok(*size),
            EntryLocation::Document(bytes) => Ok(bytes.len() as u64),
            EntryLocation::Link(_) => Ok(0),
        }
    }

    /// Whether an entry's bytes were left out because the store has the layer.
    pub(super) fn is_known(&self, name: &str) -> Result<bool, ImportError> {
        Ok(matches!(self.find(name)?.1, EntryLocation::Known { .. }))
    }

    /// The name of the entry that has the bytes of this one.
    pub(super) fn resolve<'a>(&'a self, name: &'a str) -> Result<&'a str, ImportError> {
        Ok(self.find(name)?.0)
    }

    /// The bytes of an entry.
    pub(super) fn open(&self, name: &str) -> Result<Box<dyn Read + Send>, ImportError> {
        match (self.find(name)?.1, &self.archive, &self.reader) {
            (EntryLocation::File(path), ..) => {
                Ok(Box::new(fs_err::File::open(path).map_err(file(path))?.into_file()))
            }
            (EntryLocation::Part { at, size }, Some(archive), _) => {
                Ok(Box::new(ArchiveSection { archive: archive.clone(), at: *at, end: at + size }))
            }
            (EntryLocation::Document(bytes), ..) => Ok(Box::new(io::Cursor::new(bytes.clone()))),
            (EntryLocation::Blob { digest, .. }, _, Some(reader)) => Ok(reader.open(digest)),
            _ => Err(ImportError::Missing { name: name.to_owned() }),
        }
    }

    /// A whole document.
    pub(super) fn document(&self, name: &str) -> Result<Vec<u8>, ImportError> {
        let mut bytes = Vec::new();
        let document = self.open(name)?;
        document.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(read(name))?;
        if bytes.len() > MAX_BYTES {
            let size = self.size(name)?;
            return Err(ImportError::TooLarge { name: name.to_owned(), size });
        }
        Ok(bytes)
    }

    /// A document of `blobs`, with the digest that its name says.
    pub(super) fn blob(&self, digest: &Digest) -> Result<Vec<u8>, ImportError> {
        let name = blob_name(digest);
        let bytes = self.document(&name)?;
        if digest.check(&bytes).is_err() {
            return Err(ImportError::WrongDigest { name, wanted: digest.clone() });
        }
        Ok(bytes)
    }

    /// Notes under which name a layer of this digest is.
    pub(super) fn note_layer(&self, digest: Digest, name: String) {
        self.layers.lock().insert(digest, name);
    }

    pub(super) fn open_layer(&self, digest: &Digest) -> Result<Box<dyn Read + Send>, ImportError> {
        let noted = self.layers.lock().get(digest).cloned();
        self.open(&noted.unwrap_or_else(|| blob_name(digest)))
    }
}

/// Name of the entry for a blob.
pub(super) fn blob_name(digest: &Digest) -> String {
    format!("blobs/{}/{}", digest.algorithm(), digest.hex())
}

/// The digest that a blob's name says it has.
pub(super) fn digest_of_blob(name: &str) -> Option<Digest> {
    let (algorithm, hex) = name.strip_prefix("blobs/")?.split_once('/')?;
    Digest::parse(&format!("{algorithm}:{hex}")).ok()
}

/// Most memory for the window of an xz archive; `xz -9` needs 65 MiB.
const XZ_MEMORY_KIB: u32 = 100 << 10;

/// The plain bytes of a stream that may be packed.
fn unpacked(mut stream: Box<dyn Read + Send>) -> Result<Box<dyn Read + Send>, ImportError> {
    let mut start = Vec::new();
    stream.by_ref().take(6).read_to_end(&mut start).map_err(read("the archive"))?;
    let compression = DetectedCompression::detect(&start);
    let whole = io::BufReader::with_capacity(256 << 10, io::Cursor::new(start).chain(stream));
    Ok(match compression {
        DetectedCompression::Gzip => Box::new(MultiGzDecoder::new(whole)),
        DetectedCompression::Zstd => {
            Box::new(zstd::stream::read::Decoder::with_buffer(whole).map_err(read("the archive"))?)
        }
        DetectedCompression::Xz => Box::new(XzReader::new_mem_limit(whole, true, XZ_MEMORY_KIB)),
        DetectedCompression::Bzip2 => Box::new(MultiBzDecoder::new(whole)),
        DetectedCompression::None => Box::new(whole),
    })
}

/// A part of an archive. Several may be read at once.
struct ArchiveSection {
    archive: Arc<File>,
    at: u64,
    end: u64,
}

impl Read for ArchiveSection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
        let length = left.min(buffer.len());
        let read = self.archive.read_at(&mut buffer[..length], self.at)?;
        if read == 0 && length > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += read as u64;
        Ok(read)
    }
}

/// The files in a directory by their names in it, two levels deep: no layout, and nothing that `docker save` wrote, has
/// more. A symbolic link counts as the file that it leads to, unless that is outside of the directory.
pub fn files_of(root: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let real_root = fs_err::canonicalize(root)?;
    let mut files = Vec::new();
    let mut waiting = vec![(root.to_owned(), String::new(), 0)];
    while let Some((dir, prefix, depth)) = waiting.pop() {
        for entry in fs_err::read_dir(&dir)? {
            let path = entry?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let name = format!("{prefix}{name}");
            let metadata = fs_err::symlink_metadata(&path)?;
            if metadata.is_dir() && depth < 2 {
                waiting.push((path, format!("{name}/"), depth + 1));
            } else if metadata.is_file() {
                files.push((name, path));
            } else if metadata.is_symlink() {
                let target = fs_err::canonicalize(path).ok();
                let inside = target.filter(|target| target.starts_with(&real_root) && target.is_file());
                files.extend(inside.map(|target| (name, target)));
            }
            if files.len() > MAX_ENTRIES {
                return Ok(files);
            }
        }
    }
    Ok(files)
}

/// Digests that a list names more than once are there once.
pub(super) fn each_once<T: Clone + Eq + std::hash::Hash>(list: Vec<T>) -> Vec<T> {
    let mut seen = HashSet::new();
    list.into_iter().filter(|item| seen.insert(item.clone())).collect()
}
