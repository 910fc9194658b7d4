//! The digest of a layer's EROFS file.
//!
//! It is the SHA-256 of the SHA-256 digests of the file's pieces of one MiB, one after the other. Pieces are hashed
//! while the file is written, and the few that are changed at its end once more. A digest of the whole file in one pass
//! could only begin when the first block is known, which is last; and cores share the work of checking a large layer.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

const PIECE: usize = 1 << 20;
/// Bytes that are read and hashed at once: they fit into a core's cache.
const BUFFER: usize = 128 << 10;

/// The size and digest of a layer's EROFS file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErofsFile {
    /// Length in bytes.
    pub bytes: u64,
    /// Of these, bytes at the end that list the directories that the archive only implies.
    pub implied_bytes: u64,
    /// SHA-256 of the SHA-256 digests of all pieces of one MiB, in hexadecimal digits.
    pub sha256_of_mib: String,
}

impl ErofsFile {
    /// Returns the file of a layer whose record is lost. No file has it.
    pub(crate) fn unknown() -> ErofsFile {
        ErofsFile { bytes: 0, implied_bytes: 0, sha256_of_mib: String::new() }
    }

    /// Size and digest of the file at `path`.
    pub fn of(path: &Path) -> io::Result<ErofsFile> {
        let file = fs_err::File::open(path)?.into_parts().0;
        let bytes = file.metadata()?.len();
        Ok(ErofsFile { bytes, implied_bytes: 0, sha256_of_mib: root_of(&hash_pieces(&file, bytes)?) })
    }
}

/// Digests of the pieces of a file that grows at its end.
pub(crate) struct PieceHasher {
    done: Vec<[u8; 32]>,
    current: Sha256,
    /// Bytes in `current`.
    filled: usize,
    changed: BTreeSet<u64>,
}

impl PieceHasher {
    pub(crate) fn new() -> PieceHasher {
        PieceHasher { done: Vec::new(), current: Sha256::new(), filled: 0, changed: BTreeSet::new() }
    }

    /// Takes bytes that follow the earlier ones.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(bytes.len().min(PIECE - self.filled));
            self.current.update(now);
            self.filled += now.len();
            bytes = rest;
            if self.filled == PIECE {
                self.end_piece();
            }
        }
    }

    fn end_piece(&mut self) {
        self.done.push(std::mem::take(&mut self.current).finalize().into());
        self.filled = 0;
    }

    /// Notes that bytes of the file were replaced.
    pub(crate) fn replace(&mut self, offset: u64, length: usize) {
        let last = (offset + length as u64).saturating_sub(1) / PIECE as u64;
        self.changed.extend(offset / PIECE as u64..=last);
    }

    /// Hashes the replaced pieces again, as they are in the file.
    pub(crate) fn finish(mut self, file: &File, bytes: u64) -> io::Result<ErofsFile> {
        if self.filled > 0 {
            self.end_piece();
        }
        for piece in &self.changed {
            if let Some(digest) = usize::try_from(*piece).ok().and_then(|at| self.done.get_mut(at)) {
                *digest = hash_piece(file, *piece * PIECE as u64, bytes)?;
            }
        }
        Ok(ErofsFile { bytes, implied_bytes: 0, sha256_of_mib: root_of(&self.done) })
    }
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
    let file = match fs_err::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some("missing".into())),
        file => file?,
    };
    if expected.sha256_of_mib.is_empty() {
        return Ok(Some("its digest is unknown".into()));
    }
    let bytes = file.metadata()?.len();
    // The store has more behind the filesystem.
    if bytes < expected.bytes {
        return Ok(Some(format!("size differs: {bytes} bytes, expected {}", expected.bytes)));
    }
    if check == LayerCheck::Size {
        return Ok(None);
    }
    let file = file.into_parts().0;
    if check == LayerCheck::Disk {
        fadvise(&file, 0, None, Advice::DontNeed)?;
    }
    fadvise(&file, 0, None, Advice::Sequential)?;
    let found = match hash_pieces(&file, expected.bytes) {
        Ok(pieces) => root_of(&pieces),
        Err(error) => return Ok(Some(format!("unreadable: {error}"))),
    };
    Ok((found != expected.sha256_of_mib).then(|| "content differs".into()))
}

fn hash_pieces(file: &File, bytes: u64) -> io::Result<Vec<[u8; 32]>> {
    (0..bytes.div_ceil(PIECE as u64)).map(|piece| hash_piece(file, piece * PIECE as u64, bytes)).collect()
}

/// The digest of the piece that begins at `offset`, of a file that has so many bytes.
fn hash_piece(file: &File, offset: u64, bytes: u64) -> io::Result<[u8; 32]> {
    let (mut hasher, mut buffer, mut done) = (Sha256::new(), vec![0; BUFFER], 0);
    let length = usize::try_from(bytes.saturating_sub(offset)).unwrap_or(PIECE).min(PIECE);
    while done < length {
        let room = BUFFER.min(length - done);
        match file.read_at(&mut buffer[..room], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => {
                hasher.update(&buffer[..read]);
                done += read;
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

    fn content() -> Vec<u8> {
        (0..2 * PIECE + 5000).map(|at| u8::try_from(at / 4096 % 251).unwrap_or(0)).collect()
    }

    #[test]
    fn pieces_are_hashed_as_they_come_and_replaced_ones_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layer");
        let mut content = content();
        let mut hasher = PieceHasher::new();
        content.chunks(70_001).for_each(|bytes| hasher.update(bytes));
        content[..9].copy_from_slice(b"beginning");
        content[PIECE - 2..PIECE + 2].copy_from_slice(b"edge");
        hasher.replace(0, 9);
        hasher.replace(PIECE as u64 - 2, 4);
        fs_err::write(&path, &content).unwrap();
        let bytes = content.len() as u64;
        let file = hasher.finish(fs_err::File::open(&path).unwrap().file(), bytes).unwrap();
        let pieces: Vec<u8> = content.chunks(PIECE).flat_map(Sha256::digest).collect();
        let expected = larder::reference::Digest::sha256(pieces).hex().to_owned();
        assert_eq!(file, ErofsFile { bytes, implied_bytes: 0, sha256_of_mib: expected });
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
        wrong[PIECE + 7] ^= 1;
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
