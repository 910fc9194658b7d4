//! Writes a manifest.

use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use fs_err::File;

use super::{
    FLAG_A, FLAG_B, FLAG_XATTRS, KIND_BLOCK, KIND_CHAR, KIND_DIRECTORY, KIND_END, KIND_FIFO, KIND_FILE,
    KIND_HARD_LINK, KIND_PENDING_LINK, KIND_SPARSE, KIND_SYMLINK, KIND_WHITEOUT, MAGIC, ManifestRecord,
    RecordKind, UnpackMode,
};
use crate::unpack::{OverlayForm, OwnerMode};

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

fn zigzag(number: i64) -> u64 {
    ((number << 1) ^ (number >> 63)).cast_unsigned()
}
