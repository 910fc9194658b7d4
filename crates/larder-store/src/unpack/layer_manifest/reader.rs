//! Reads a manifest.

use std::io::{self, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use fs_err::File;

use super::{
    FLAG_A, FLAG_B, FLAG_XATTRS, FileTime, KIND_BLOCK, KIND_CHAR, KIND_DIRECTORY, KIND_END, KIND_FIFO,
    KIND_FILE, KIND_HARD_LINK, KIND_MASK, KIND_PENDING_LINK, KIND_SPARSE, KIND_SYMLINK, KIND_WHITEOUT,
    LayerManifestError, MAGIC, MAX_EXTENTS, MAX_TEXT, ManifestLocation, ManifestRecord, RecordKind,
    UnpackMode,
};
use crate::unpack::{OverlayForm, OwnerMode};

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

fn unzigzag(number: u64) -> i64 {
    (number >> 1).cast_signed() ^ -((number & 1).cast_signed())
}
