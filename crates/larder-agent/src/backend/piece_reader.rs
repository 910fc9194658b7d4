//! Bytes that arrive in pieces, read on a thread that may block.

use std::io::{self, Read};

use tokio::sync::mpsc;

/// Reads pieces in order; ends when their sender is dropped, and fails with its error.
pub(crate) struct PieceReader {
    pieces: mpsc::Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    /// So much of the piece has been read.
    at: usize,
}

impl PieceReader {
    /// Reads `piece` and those that arrive after it.
    pub(crate) fn new(piece: Vec<u8>, pieces: mpsc::Receiver<io::Result<Vec<u8>>>) -> PieceReader {
        PieceReader { pieces, piece, at: 0 }
    }
}

impl Read for PieceReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.at == self.piece.len() {
            let Some(next) = self.pieces.blocking_recv() else { return Ok(0) };
            (self.piece, self.at) = (next?, 0);
        }
        let left = &self.piece[self.at..];
        let read = left.len().min(into.len());
        into[..read].copy_from_slice(&left[..read]);
        self.at += read;
        Ok(read)
    }
}
