//! The layer manifest, `files.v1`: the expected content of a layer's directory, so that any damage can be found.
//!
//! One record per path, written while the layer is unpacked; `docs/layer-manifest.md` has the byte format. Reading is
//! streaming: a manifest is never in memory as a whole. A truncated or modified manifest is an error, not a shorter
//! list: it ends with a count and a checksum of itself.

use std::ffi::OsStr;
use std::io::{self, BufReader, BufWriter, Read, Seek as _, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use fs_err::File;

use super::{OverlayForm, OwnerMode};

const MAGIC: &[u8; 14] = b"larder-files\0\x01";

/// A sane upper bound for any length in a manifest: the longest path or link target.
const MAX_TEXT: u64 = 64 << 10;

/// Parts of a sparse file, at most: what the archive reader allows.
const MAX_EXTENTS: u64 = 10_000;

/// A point in time: seconds since 1970, possibly negative, and nanoseconds that count upwards from there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileTime {
    /// Whole seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds, below a billion.
    pub nanos: u32,
}

/// What one path must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestRecord {
    /// Relative to the layer's directory, without links in it, any bytes but zero; empty for the root itself.
    pub path: Vec<u8>,
    /// What is there.
    pub kind: RecordKind,
    /// Permission, set-id and sticky bits, as the archive has them.
    pub mode: u32,
    /// Owner, as the archive has it.
    pub uid: u32,
    /// Group, as the archive has it.
    pub gid: u32,
    /// Time of the last change of its content.
    pub mtime: FileTime,
    /// Hash of its extended attributes; `None` when it has none.
    pub xattrs: Option<u32>,
}

/// What a path holds.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordKind {
    /// A file.
    File {
        /// Bytes, holes included.
        size: u64,
        /// CRC-32 (IEEE) of the content; of a sparse file, of its parts one after the other.
        checksum: u32,
        /// Offset and length of the parts of a sparse file; `None` for any other file.
        extents: Option<Vec<(u64, u64)>>,
    },
    /// A directory.
    Directory {
        /// The archive only implied it: its owner, mode and time are those of the lower layer's directory, once settled.
        implicit: bool,
        /// It hides what lower layers have in it.
        opaque: bool,
    },
    /// A symbolic link.
    Symlink {
        /// Its text.
        target: Vec<u8>,
    },
    /// Another name of a file of this layer.
    HardLink {
        /// The file's path, relative to the layer's directory.
        target: Vec<u8>,
    },
    /// Another name of a file that a lower layer has; not on disk until the layer is settled.
    PendingLink {
        /// The file's path in the merged tree, as the archive names it.
        target: Vec<u8>,
    },
    /// A device node.
    Device {
        /// Block device, else character device.
        block: bool,
        /// Major and minor number.
        numbers: (u32, u32),
        /// This process could not make it: it is not on disk.
        skipped: bool,
    },
    /// A named pipe.
    Fifo,
    /// Hides the path of lower layers.
    Whiteout,
}

/// How the layer was unpacked; the same for all records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnpackMode {
    /// Whether files on disk have their owners and exact modes.
    pub owners: OwnerMode,
    /// How whiteouts and opaque directories are written.
    pub overlay: OverlayForm,
}

/// Why a manifest cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerManifestError {
    /// The file cannot be read or written.
    #[error("cannot read or write the file")]
    Io(#[from] io::Error),
    /// Another file, or from a later release.
    #[error("unsupported version, or not a layer manifest")]
    Version,
    /// Changed or cut.
    #[error("damaged at byte {0}")]
    Damaged(u64),
}

/// The path of bytes from an archive or a manifest.
pub fn path_of(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// One number for a set of extended attributes, whatever their order.
pub(crate) fn xattr_hash<'a>(xattrs: impl IntoIterator<Item = (&'a [u8], &'a [u8])>) -> Option<u32> {
    let mut sorted: Vec<_> = xattrs.into_iter().collect();
    sorted.sort_unstable();
    let mut hasher = crc32fast::Hasher::new();
    for (name, value) in &sorted {
        for part in [name, value] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    (!sorted.is_empty()).then(|| hasher.finalize())
}

const KIND_END: u8 = 0;
const KIND_FILE: u8 = 1;
const KIND_SPARSE: u8 = 2;
const KIND_DIRECTORY: u8 = 3;
const KIND_SYMLINK: u8 = 4;
const KIND_HARD_LINK: u8 = 5;
const KIND_PENDING_LINK: u8 = 6;
const KIND_CHAR: u8 = 7;
const KIND_BLOCK: u8 = 8;
const KIND_FIFO: u8 = 9;
const KIND_WHITEOUT: u8 = 10;
const KIND_MASK: u8 = 0x0f;
const FLAG_XATTRS: u8 = 0x10;
/// On a directory: implicit. On a device: skipped.
const FLAG_A: u8 = 0x20;
/// On a directory: opaque.
const FLAG_B: u8 = 0x40;

/// Writes a manifest, record by record.
pub struct LayerManifestWriter {
    out: BufWriter<File>,
    /// The record in the making, and the path before it.
    bytes: Vec<u8>,
    last: Vec<u8>,
    count: u64,
    checksum: crc32fast::Hasher,
}

impl LayerManifestWriter {
    /// Begins a manifest in a new file, or in `/dev/null` if nothing will read it.
    pub fn create(path: &Path, form: UnpackMode) -> io::Result<LayerManifestWriter> {
        let is_new = path != Path::new("/dev/null");
        let file = fs_err::OpenOptions::new().write(true).create_new(is_new).open(path)?;
        let mut writer = LayerManifestWriter {
            out: BufWriter::with_capacity(64 << 10, file),
            bytes: Vec::with_capacity(512),
            last: Vec::new(),
            count: 0,
            checksum: crc32fast::Hasher::new(),
        };
        writer.bytes.extend_from_slice(MAGIC);
        writer.bytes.push(
            u8::from(form.owners == OwnerMode::Record) | u8::from(form.overlay == OverlayForm::User) << 1,
        );
        writer.flush_record()?;
        Ok(writer)
    }

    /// Records written so far.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Adds one record.
    pub fn add(&mut self, record: &ManifestRecord) -> io::Result<()> {
        self.bytes.push(head_of(record));
        let shared = record.path.iter().zip(&self.last).take_while(|(a, b)| a == b).count();
        self.number(shared as u64);
        self.text(&record.path[shared..]);
        self.number(u64::from(record.mode));
        self.number(u64::from(record.uid));
        self.number(u64::from(record.gid));
        self.number(zigzag(record.mtime.seconds));
        self.number(u64::from(record.mtime.nanos));
        if let Some(hash) = record.xattrs {
            self.bytes.extend_from_slice(&hash.to_le_bytes());
        }
        self.kind(&record.kind);
        self.last.truncate(shared);
        self.last.extend_from_slice(&record.path[shared..]);
        self.count += 1;
        self.flush_record()
    }

    /// Writes what only records of this kind have.
    fn kind(&mut self, kind: &RecordKind) {
        match kind {
            RecordKind::File { size, checksum, extents } => {
                self.number(*size);
                self.bytes.extend_from_slice(&checksum.to_le_bytes());
                if let Some(extents) = extents {
                    self.number(extents.len() as u64);
                    for (offset, length) in extents {
                        self.number(*offset);
                        self.number(*length);
                    }
                }
            }
            RecordKind::Symlink { target }
            | RecordKind::HardLink { target }
            | RecordKind::PendingLink { target } => self.text(target),
            RecordKind::Device { numbers: (major, minor), .. } => {
                self.number(u64::from(*major));
                self.number(u64::from(*minor));
            }
            RecordKind::Directory { .. } | RecordKind::Fifo | RecordKind::Whiteout => {}
        }
    }

    /// Ends the manifest. It is not synced.
    pub fn finish(mut self) -> io::Result<()> {
        self.bytes.push(KIND_END);
        self.number(self.count);
        self.flush_record()?;
        let checksum = self.checksum.clone().finalize();
        self.out.write_all(&checksum.to_le_bytes())?;
        self.out.flush()
    }

    fn flush_record(&mut self) -> io::Result<()> {
        self.checksum.update(&self.bytes);
        self.out.write_all(&self.bytes)?;
        self.bytes.clear();
        Ok(())
    }

    fn text(&mut self, text: &[u8]) {
        self.number(text.len() as u64);
        self.bytes.extend_from_slice(text);
    }

    /// Seven bits a byte, low ones first; the top bit says that more follow.
    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.bytes.push(number.to_le_bytes()[0] | 0x80);
            number >>= 7;
        }
        self.bytes.push(number.to_le_bytes()[0]);
    }
}

/// The first byte of a record: its kind and flags.
fn head_of(record: &ManifestRecord) -> u8 {
    let (kind, flag_a, flag_b) = match &record.kind {
        RecordKind::File { extents: None, .. } => (KIND_FILE, false, false),
        RecordKind::File { extents: Some(_), .. } => (KIND_SPARSE, false, false),
        RecordKind::Directory { implicit, opaque } => (KIND_DIRECTORY, *implicit, *opaque),
        RecordKind::Symlink { .. } => (KIND_SYMLINK, false, false),
        RecordKind::HardLink { .. } => (KIND_HARD_LINK, false, false),
        RecordKind::PendingLink { .. } => (KIND_PENDING_LINK, false, false),
        RecordKind::Device { block: false, skipped, .. } => (KIND_CHAR, *skipped, false),
        RecordKind::Device { block: true, skipped, .. } => (KIND_BLOCK, *skipped, false),
        RecordKind::Fifo => (KIND_FIFO, false, false),
        RecordKind::Whiteout => (KIND_WHITEOUT, false, false),
    };
    let flag = |set: bool, flag: u8| if set { flag } else { 0 };
    kind | flag(record.xattrs.is_some(), FLAG_XATTRS) | flag(flag_a, FLAG_A) | flag(flag_b, FLAG_B)
}

/// Rewrites a manifest: each record as `keep` returns it, called with its number, then `more`. The old file stays
/// until the new one is complete.
pub(super) fn rewrite(
    path: &Path,
    mut keep: impl FnMut(u64, ManifestRecord) -> Option<ManifestRecord>,
    more: &[ManifestRecord],
) -> Result<(), LayerManifestError> {
    let reader = LayerManifestReader::open(path)?;
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = Path::new(&name);
    match fs_err::remove_file(new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let mut writer = LayerManifestWriter::create(new, reader.form())?;
    for (number, record) in (0..).zip(reader) {
        if let Some(record) = keep(number, record?) {
            writer.add(&record)?;
        }
    }
    for record in more {
        writer.add(record)?;
    }
    writer.finish()?;
    fs_err::rename(new, path)?;
    Ok(())
}

fn zigzag(number: i64) -> u64 {
    ((number << 1) ^ (number >> 63)).cast_unsigned()
}

fn unzigzag(number: u64) -> i64 {
    (number >> 1).cast_signed() ^ -((number & 1).cast_signed())
}

/// Where a manifest is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestLocation {
    /// Its file.
    pub path: PathBuf,
    /// Where it begins in the file. The manifest itself has its end.
    pub offset: u64,
}

/// Reads a manifest to its end, where its checksum is.
pub(crate) fn check_manifest(at: &ManifestLocation) -> Result<(), LayerManifestError> {
    LayerManifestReader::open_at(at)?.try_for_each(|record| record.map(drop))
}

/// Reads a manifest, record by record. After an error it ends.
pub struct LayerManifestReader {
    input: BufReader<File>,
    /// The file has something else behind it.
    is_part: bool,
    form: UnpackMode,
    last: Vec<u8>,
    count: u64,
    at: u64,
    checksum: crc32fast::Hasher,
    ended: bool,
}

impl LayerManifestReader {
    /// Opens a manifest with a file of its own, and reads its head.
    pub fn open(path: &Path) -> Result<LayerManifestReader, LayerManifestError> {
        LayerManifestReader::open_at(&ManifestLocation { path: path.to_owned(), offset: 0 })
    }

    /// Opens a manifest and reads its head.
    pub fn open_at(at: &ManifestLocation) -> Result<LayerManifestReader, LayerManifestError> {
        let mut file = File::open(&at.path)?;
        file.seek(SeekFrom::Start(at.offset))?;
        let mut reader = LayerManifestReader {
            input: BufReader::with_capacity(64 << 10, file),
            is_part: at.offset > 0,
            form: UnpackMode { owners: OwnerMode::Apply, overlay: OverlayForm::Trusted },
            last: Vec::new(),
            count: 0,
            at: 0,
            checksum: crc32fast::Hasher::new(),
            ended: false,
        };
        let head: [u8; MAGIC.len()] = reader.bytes().map_err(|_| LayerManifestError::Version)?;
        if &head != MAGIC {
            return Err(LayerManifestError::Version);
        }
        let [flags] = reader.bytes()?;
        if flags & !3 != 0 {
            return Err(LayerManifestError::Version);
        }
        if flags & 1 != 0 {
            reader.form.owners = OwnerMode::Record;
        }
        if flags & 2 != 0 {
            reader.form.overlay = OverlayForm::User;
        }
        Ok(reader)
    }

    /// How the layer was unpacked.
    pub fn form(&self) -> UnpackMode {
        self.form
    }

    fn record(&mut self) -> Result<Option<ManifestRecord>, LayerManifestError> {
        let [head] = self.bytes()?;
        if head & KIND_MASK == KIND_END {
            return self.end(head).map(|()| None);
        }
        let shared = usize::try_from(self.number()?).map_err(|_| self.damaged())?;
        let rest = self.text()?;
        if shared > self.last.len() {
            return Err(self.damaged());
        }
        self.last.truncate(shared);
        self.last.extend_from_slice(&rest);
        let mode = self.number32()?;
        let uid = self.number32()?;
        let gid = self.number32()?;
        let mtime = FileTime { seconds: unzigzag(self.number()?), nanos: self.number32()? };
        let xattrs = if head & FLAG_XATTRS != 0 { Some(u32::from_le_bytes(self.bytes()?)) } else { None };
        let kind = self.kind(head)?;
        self.count += 1;
        Ok(Some(ManifestRecord { path: self.last.clone(), kind, mode, uid, gid, mtime, xattrs }))
    }

    /// Reads what only records of this kind have.
    fn kind(&mut self, head: u8) -> Result<RecordKind, LayerManifestError> {
        let kind = head & KIND_MASK;
        Ok(match kind {
            KIND_FILE | KIND_SPARSE => RecordKind::File {
                size: self.number()?,
                checksum: u32::from_le_bytes(self.bytes()?),
                extents: if kind == KIND_SPARSE { Some(self.extents()?) } else { None },
            },
            KIND_DIRECTORY => {
                RecordKind::Directory { implicit: head & FLAG_A != 0, opaque: head & FLAG_B != 0 }
            }
            KIND_SYMLINK => RecordKind::Symlink { target: self.text()? },
            KIND_HARD_LINK => RecordKind::HardLink { target: self.text()? },
            KIND_PENDING_LINK => RecordKind::PendingLink { target: self.text()? },
            KIND_CHAR | KIND_BLOCK => RecordKind::Device {
                block: kind == KIND_BLOCK,
                numbers: (self.number32()?, self.number32()?),
                skipped: head & FLAG_A != 0,
            },
            KIND_FIFO => RecordKind::Fifo,
            KIND_WHITEOUT => RecordKind::Whiteout,
            _ => return Err(self.damaged()),
        })
    }

    fn end(&mut self, head: u8) -> Result<(), LayerManifestError> {
        let count = self.number()?;
        let expected = self.checksum.clone().finalize();
        let found = u32::from_le_bytes(self.bytes()?);
        let nothing_follows = self.is_part || self.input.read(&mut [0])? == 0;
        if head == KIND_END && count == self.count && expected == found && nothing_follows {
            return Ok(());
        }
        Err(self.damaged())
    }

    fn extents(&mut self) -> Result<Vec<(u64, u64)>, LayerManifestError> {
        let count = self.number()?;
        if count > MAX_EXTENTS {
            return Err(self.damaged());
        }
        (0..count).map(|_| Ok((self.number()?, self.number()?))).collect()
    }

    fn text(&mut self) -> Result<Vec<u8>, LayerManifestError> {
        let length = self.number()?;
        if length > MAX_TEXT {
            return Err(self.damaged());
        }
        let mut text = vec![0; usize::try_from(length).map_err(|_| self.damaged())?];
        self.exact(&mut text)?;
        Ok(text)
    }

    fn number32(&mut self) -> Result<u32, LayerManifestError> {
        let number = self.number()?;
        u32::try_from(number).map_err(|_| self.damaged())
    }

    fn number(&mut self) -> Result<u64, LayerManifestError> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let [byte] = self.bytes()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(self.damaged())
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], LayerManifestError> {
        let mut bytes = [0; N];
        self.exact(&mut bytes)?;
        Ok(bytes)
    }

    fn exact(&mut self, into: &mut [u8]) -> Result<(), LayerManifestError> {
        match self.input.read_exact(into) {
            Ok(()) => {
                self.at += into.len() as u64;
                self.checksum.update(into);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(self.damaged()),
            Err(error) => Err(error.into()),
        }
    }

    fn damaged(&self) -> LayerManifestError {
        LayerManifestError::Damaged(self.at)
    }
}

impl Iterator for LayerManifestReader {
    type Item = Result<ManifestRecord, LayerManifestError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let record = self.record().transpose();
        self.ended = !matches!(record, Some(Ok(_)));
        record
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<ManifestRecord> {
        let record = |path: &[u8], kind| ManifestRecord {
            path: path.to_vec(),
            kind,
            mode: 0o4755,
            uid: 0,
            gid: u32::MAX - 1,
            mtime: FileTime { seconds: -5, nanos: 999_999_999 },
            xattrs: None,
        };
        vec![
            record(b"", RecordKind::Directory { implicit: true, opaque: false }),
            record(b"usr/bin/a", RecordKind::File { size: 1 << 40, checksum: 7, extents: None }),
            ManifestRecord { xattrs: Some(9), ..record(b"usr/bin/ab", RecordKind::Fifo) },
            record(
                b"usr/b\xff",
                RecordKind::File { size: 9, checksum: 1, extents: Some(vec![(0, 4), (8, 1)]) },
            ),
            record(b"l", RecordKind::Symlink { target: b"../x".to_vec() }),
            record(b"l2", RecordKind::HardLink { target: b"l".to_vec() }),
            record(b"l3", RecordKind::PendingLink { target: b"usr/lib/x".to_vec() }),
            record(b"d", RecordKind::Device { block: true, numbers: (8, 300), skipped: true }),
            record(b"w", RecordKind::Whiteout),
            record(b"o", RecordKind::Directory { implicit: false, opaque: true }),
        ]
    }

    fn written(dir: &Path) -> PathBuf {
        let path = dir.join("files.v1");
        let mut writer = LayerManifestWriter::create(
            &path,
            UnpackMode { owners: OwnerMode::Record, overlay: OverlayForm::User },
        )
        .unwrap();
        for record in records() {
            writer.add(&record).unwrap();
        }
        writer.finish().unwrap();
        path
    }

    #[test]
    fn written_records_are_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let reader = LayerManifestReader::open(&written(dir.path())).unwrap();
        assert_eq!(reader.form(), UnpackMode { owners: OwnerMode::Record, overlay: OverlayForm::User });
        assert_eq!(reader.collect::<Result<Vec<_>, _>>().unwrap(), records());
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let sound = fs_err::read(written(dir.path())).unwrap();
        let path = dir.path().join("bad");
        let is_bad = |bytes: &[u8]| {
            fs_err::write(&path, bytes).unwrap();
            LayerManifestReader::open(&path).map_or(true, |mut reader| reader.any(|record| record.is_err()))
        };
        assert!(!is_bad(&sound));
        for at in 0..sound.len() {
            assert!(is_bad(&sound[..at]), "cut at {at}");
            let mut changed = sound.clone();
            changed[at] ^= 0x55;
            assert!(is_bad(&changed), "changed at {at}");
        }
        assert!(is_bad(&[&sound[..], b"x"].concat()), "longer");
    }

    #[test]
    fn attributes_have_the_same_hash_in_any_order() {
        let (a, b) = ((&b"user.a"[..], &b"1"[..]), (&b"user.b"[..], &b"2"[..]));
        assert_eq!(xattr_hash([a, b]), xattr_hash([b, a]));
        assert_ne!(xattr_hash([a]), xattr_hash([b]));
        assert_eq!(xattr_hash([]), None);
    }
}
