//! The digest of a layer's EROFS file.
//!
//! It is the SHA-256 of the SHA-256 digests of the file's pieces of one MiB, one after the other. Pieces are hashed
//! while the file is written, and the few that are changed at its end once more. A digest of the whole file in one pass
//! could only begin when the first block is known, which is last.
//!
//! The digests of the pieces follow the bytes that they cover, so that one piece can be checked without the others.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use larder::reference::Digest;
use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::lazy::group::open_to_check;

const PIECE: u64 = 1 << 20;
/// Bytes of a digest.
const DIGEST: u64 = 32;
/// Bytes of the first block, which the writer writes last. In a layer of one blob, that follows it.
pub(crate) const FIRST_BLOCK: u64 = 4096;
/// Bytes that are read and hashed at once: they fit into a core's cache.
const BUFFER: usize = 128 << 10;

/// The size and digest of a layer's EROFS file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErofsFile {
    /// Length in bytes.
    pub bytes: u64,
    /// Of these, bytes at the end that list the directories that the archive only implies.
    pub implied_bytes: u64,
    /// Where metadata begins: all from there on is metadata, and so is the first block.
    pub metadata_start: u64,
    /// Whether short ends of files are in the metadata.
    pub has_inline_tails: bool,
    /// SHA-256 of the SHA-256 digests of all pieces, in hexadecimal digits. Empty while it is not known.
    pub sha256_of_pieces: String,
}

/// The pieces of a file of so many bytes.
fn pieces(bytes: u64) -> impl Iterator<Item = Range<u64>> {
    (0..bytes.div_ceil(PIECE)).map(move |number| number * PIECE..bytes.min((number + 1) * PIECE))
}

impl ErofsFile {
    /// Returns the file of a layer whose record is lost, or whose data is missing. No file has it.
    pub(crate) fn unknown() -> ErofsFile {
        ErofsFile {
            bytes: 0,
            implied_bytes: 0,
            metadata_start: 0,
            has_inline_tails: false,
            sha256_of_pieces: String::new(),
        }
    }

    /// Size and digest of the file at `path`.
    pub fn of(path: &Path) -> io::Result<ErofsFile> {
        let file = fs_err::File::open(path)?.into_parts().0;
        let bytes = file.metadata()?.len();
        Ok(ErofsFile::new(bytes, &hash_pieces(&file, bytes)?))
    }

    fn new(bytes: u64, digests: &[[u8; 32]]) -> ErofsFile {
        ErofsFile { bytes, sha256_of_pieces: root_of(digests), ..ErofsFile::unknown() }
    }

    /// Offset behind the digests of the pieces, which are at [`bytes`](ErofsFile::bytes) if they are known.
    pub(crate) fn end_of_digests(&self) -> u64 {
        let is_known = !self.sha256_of_pieces.is_empty();
        self.bytes + if is_known { self.bytes.div_ceil(PIECE) * DIGEST } else { 0 }
    }
}

/// A piece of a layer's file, and its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FilePiece {
    pub(crate) range: Range<u64>,
    pub(crate) sha256: [u8; 32],
}

impl FilePiece {
    /// Returns true if the file has the bytes of the piece.
    pub(crate) fn is_in(&self, file: &File) -> io::Result<bool> {
        Ok(hash_piece(file, self.range.clone())? == self.sha256)
    }

    /// Returns true if these are the bytes of the piece.
    pub(crate) fn has_digest_of(&self, bytes: &[u8]) -> bool {
        Sha256::digest(bytes)[..] == self.sha256
    }

    /// Reads the bytes that the file has of the piece. After an error, `bytes` has its length all the same.
    pub(crate) fn read_from(&self, file: &File, bytes: &mut Vec<u8>) -> io::Result<()> {
        bytes.clear();
        bytes.resize(usize::try_from(self.range.end - self.range.start).unwrap_or(usize::MAX), 0);
        file.read_exact_at(bytes, self.range.start)
    }
}

/// A piece that does not have its digest.
#[derive(Debug)]
pub(crate) struct DamagedPiece {
    pub(crate) piece: FilePiece,
    /// As far as they are known.
    pub(crate) bytes: Vec<u8>,
}

/// The pieces of a layer's file, in their order. `None` if their digests are damaged, and so is one of the pieces: it
/// is unknown which.
///
/// Reads the digests only, unless these are damaged.
pub(crate) fn pieces_of(file: &File, expected: &ErofsFile) -> io::Result<Option<Vec<FilePiece>>> {
    let mut list = vec![0; usize::try_from(expected.end_of_digests() - expected.bytes).unwrap_or(usize::MAX)];
    let digests: Vec<[u8; 32]> = match file.read_exact_at(&mut list, expected.bytes) {
        Ok(()) => list.as_chunks().0.to_vec(),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Vec::new(),
        Err(error) => return Err(error),
    };
    let is_right = |digests: &[[u8; 32]]| root_of(digests) == expected.sha256_of_pieces;
    let digests = if is_right(&digests) { digests } else { hash_pieces(file, expected.bytes)? };
    let pieces =
        pieces(expected.bytes).zip(&digests).map(|(range, sha256)| FilePiece { range, sha256: *sha256 });
    Ok(is_right(&digests).then(|| pieces.collect()))
}

/// Digests of the pieces of a file that grows at its end.
#[derive(Default)]
pub(crate) struct PieceHasher {
    done: Vec<[u8; 32]>,
    current: Sha256,
    /// Bytes taken.
    position: u64,
    changed: BTreeSet<u64>,
    /// Bytes were left out: the digest is not known.
    skipped: bool,
}

impl PieceHasher {
    /// Leaves out bytes that are not known yet. The digest of the file is unknown then, too: empty.
    pub(crate) fn skip(&mut self, count: u64) {
        self.skipped = true;
        self.position += count;
    }

    /// Takes bytes that follow the earlier ones.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        if self.skipped {
            self.position += bytes.len() as u64;
            return;
        }
        while !bytes.is_empty() {
            let left = usize::try_from(PIECE - self.position % PIECE).unwrap_or(usize::MAX);
            let (now, rest) = bytes.split_at(bytes.len().min(left));
            self.current.update(now);
            self.position += now.len() as u64;
            bytes = rest;
            if self.position.is_multiple_of(PIECE) {
                self.end_piece();
            }
        }
    }

    /// Bytes taken so far.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    fn end_piece(&mut self) {
        self.done.push(self.current.finalize_reset().into());
    }

    /// Notes that bytes of the file were replaced.
    pub(crate) fn replace(&mut self, offset: u64, length: usize) {
        if self.skipped {
            return;
        }
        self.changed.extend(offset / PIECE..(offset + length as u64).div_ceil(PIECE));
    }

    /// Hashes the replaced pieces again, as they are in the file, and writes the digests of all behind them.
    pub(crate) fn finish(mut self, file: &File) -> io::Result<ErofsFile> {
        let bytes = self.position;
        if self.skipped {
            return Ok(ErofsFile { bytes, ..ErofsFile::unknown() });
        }
        if !bytes.is_multiple_of(PIECE) {
            self.end_piece();
        }
        for ((number, piece), digest) in (0..).zip(pieces(bytes)).zip(&mut self.done) {
            if self.changed.contains(&number) {
                *digest = hash_piece(file, piece)?;
            }
        }
        file.write_all_at(self.done.as_flattened(), bytes)?;
        Ok(ErofsFile::new(bytes, &self.done))
    }
}

/// The first bytes of a digest.
pub(crate) fn bytes_of<const COUNT: usize>(digest: &Digest) -> [u8; COUNT] {
    let mut bytes = [0; COUNT];
    for (byte, digits) in bytes.iter_mut().zip(digest.hex().as_bytes().chunks_exact(2)) {
        let digits = std::str::from_utf8(digits).unwrap_or_default();
        *byte = u8::from_str_radix(digits, 16).unwrap_or_default();
    }
    bytes
}

/// How a check reads the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerCheck {
    /// Compares its length only.
    Size,
    /// Reads every byte.
    Content,
    /// Reads every byte as it is on disk: what the page cache has of it is dropped, if it was written back.
    Disk,
}

/// Returns the damage of an EROFS file, if any.
pub(crate) fn check_erofs_file(
    path: &Path,
    expected: &ErofsFile,
    check: LayerCheck,
) -> io::Result<Option<String>> {
    let file = match open_to_check(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some("missing".into())),
        file => file?,
    };
    if expected.sha256_of_pieces.is_empty() {
        return Ok(Some("its digest is unknown".into()));
    }
    let bytes = file.metadata()?.len();
    // The store has more behind the filesystem.
    if bytes < expected.bytes {
        return Ok(Some(size_differs(bytes, expected.bytes)));
    }
    if check == LayerCheck::Size {
        return Ok(None);
    }
    if check == LayerCheck::Disk {
        fadvise(&file, 0, None, Advice::DontNeed)?;
    }
    fadvise(&file, 0, None, Advice::Sequential)?;
    let found = match hash_pieces(&file, expected.bytes) {
        Ok(pieces) => root_of(&pieces),
        Err(error) => return Ok(Some(format!("unreadable: {error}"))),
    };
    Ok((found != expected.sha256_of_pieces).then(|| "content differs".into()))
}

/// Damage of a file that is too short.
pub(crate) fn size_differs(bytes: u64, expected: u64) -> String {
    format!("size differs: {bytes} bytes, expected {expected}")
}

fn hash_pieces(file: &File, bytes: u64) -> io::Result<Vec<[u8; 32]>> {
    pieces(bytes).map(|piece| hash_piece(file, piece)).collect()
}

/// The digest of these bytes of a file.
fn hash_piece(file: &File, mut piece: Range<u64>) -> io::Result<[u8; 32]> {
    let (mut hasher, mut buffer) = (Sha256::new(), vec![0; BUFFER]);
    while !piece.is_empty() {
        let room = usize::try_from(piece.end - piece.start).unwrap_or(BUFFER).min(BUFFER);
        match file.read_at(&mut buffer[..room], piece.start) {
            Ok(0) => break,
            Ok(read) => {
                hasher.update(&buffer[..read]);
                piece.start += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(hasher.finalize().into())
}

fn root_of(pieces: &[[u8; 32]]) -> String {
    let mut hasher = Sha256::new();
    for piece in pieces {
        hasher.update(piece);
    }
    hasher.finalize().iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn content() -> Vec<u8> {
        (0..2 * MIB + 5000).map(|at| u8::try_from(at / 4096 % 251).unwrap_or(0)).collect()
    }

    fn finish(hasher: PieceHasher, path: &Path) -> ErofsFile {
        let file = fs_err::OpenOptions::new().read(true).write(true).open(path).unwrap();
        hasher.finish(file.file()).unwrap()
    }

    #[test]
    fn a_piece_is_checked_alone_and_damaged_digests_are_computed_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layer");
        let content = content();
        let mut hasher = PieceHasher::default();
        hasher.update(&content);
        fs_err::write(&path, &content).unwrap();
        let erofs = finish(hasher, &path);
        let length = fs_err::metadata(&path).unwrap().len();
        assert_eq!(erofs.end_of_digests(), length);
        let flip = |at: usize| {
            let mut bytes = fs_err::read(&path).unwrap();
            bytes[at] ^= 1;
            fs_err::write(&path, bytes).unwrap();
        };
        let found = || {
            let file = fs_err::File::open(&path).unwrap().into_parts().0;
            let pieces = pieces_of(&file, &erofs).unwrap()?;
            Some(pieces.iter().map(|piece| piece.is_in(&file).unwrap()).collect::<Vec<_>>())
        };
        assert_eq!(found(), Some(vec![true; 3]));
        for (at, expected) in
            [(0, [false, true, true]), (MIB - 1, [false, true, true]), (MIB, [true, false, true])]
        {
            flip(at);
            assert_eq!(found(), Some(expected.to_vec()), "byte {at}");
            flip(at);
        }
        flip(content.len() + 40);
        assert_eq!(found(), Some(vec![true; 3]), "the digests are damaged, and no piece is");
        flip(content.len() - 1);
        assert_eq!(found(), None, "both are");
    }

    #[test]
    fn pieces_are_hashed_as_they_come_and_replaced_ones_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layer");
        let mut content = content();
        let mut hasher = PieceHasher::default();
        content.chunks(70_001).for_each(|bytes| hasher.update(bytes));
        content[..9].copy_from_slice(b"beginning");
        content[MIB - 2..MIB + 2].copy_from_slice(b"edge");
        hasher.replace(0, 9);
        hasher.replace(MIB as u64 - 2, 4);
        fs_err::write(&path, &content).unwrap();
        let bytes = content.len() as u64;
        let file = finish(hasher, &path);
        let pieces: Vec<u8> = content.chunks(MIB).flat_map(Sha256::digest).collect();
        let expected = Digest::sha256(pieces).hex().to_owned();
        assert_eq!(file, ErofsFile { bytes, sha256_of_pieces: expected, ..ErofsFile::unknown() });
        for check in [LayerCheck::Size, LayerCheck::Content, LayerCheck::Disk] {
            assert_eq!(check_erofs_file(&path, &file, check).unwrap(), None);
        }
    }

    #[test]
    fn each_kind_of_damage_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layer");
        let content = content();
        fs_err::write(&path, &content).unwrap();
        let file = ErofsFile::of(&path).unwrap();
        let mut wrong = content.clone();
        wrong[MIB + 7] ^= 1;
        fs_err::write(&path, &wrong).unwrap();
        let found = |check| check_erofs_file(&path, &file, check).unwrap();
        assert_eq!(found(LayerCheck::Size), None);
        assert_eq!(found(LayerCheck::Content).as_deref(), Some("content differs"));
        fs_err::write(&path, &content[1..]).unwrap();
        assert!(found(LayerCheck::Size).is_some_and(|damage| damage.starts_with("size differs")));
        fs_err::remove_file(&path).unwrap();
        assert_eq!(found(LayerCheck::Content).as_deref(), Some("missing"));
    }
}
