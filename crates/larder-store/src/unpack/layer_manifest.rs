//! The layer manifest, `files.v1`: the expected content of a layer's directory, so that any damage can be found.
//!
//! One record per path, written while the layer is unpacked; `docs/layer-manifest.md` has the byte format. Reading is
//! streaming: a manifest is never in memory as a whole. A truncated or modified manifest is an error, not a shorter
//! list: it ends with a count and a checksum of itself.

mod reader;
mod writer;

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

pub use reader::LayerManifestReader;
pub use writer::LayerManifestWriter;

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
