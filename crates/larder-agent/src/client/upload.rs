//! An archive on its way to a node: read on a thread of its own, sent in chunks. A directory is packed on the way.

use std::io::{self, Write};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread;

use futures_util::Stream;
use larder_api::v1::LoadRequest;
use larder_store::store::import::files_of;
use parking_lot::Mutex;
use tokio::sync::mpsc;

/// Bytes of one piece: so much of each message the daemon takes however busy it is.
const PIECE: usize = 48 << 10;
/// Pieces that wait to be sent.
const AHEAD: usize = 16;

/// An archive in pieces, read by a thread of its own. Dropping it stops the reader.
pub struct ArchiveUpload(mpsc::Receiver<LoadRequest>);

/// Why an [`ArchiveUpload`] could not be read, if it could not.
pub struct ArchiveReadError(Arc<Mutex<Option<io::Error>>>);

impl ArchiveUpload {
    /// The archive, the directory with a layout, or `-`. The first message has what `request` has beside a piece.
    pub fn of(file: &Path, request: LoadRequest) -> (ArchiveUpload, ArchiveReadError) {
        let (pieces, chunks) = mpsc::channel(AHEAD);
        let file = file.to_owned();
        let error = Arc::new(Mutex::new(None));
        let shared = Arc::clone(&error);
        thread::spawn(move || {
            let mut pieces = UploadChunks { to: pieces, first: request, next: Vec::with_capacity(PIECE) };
            let packed = pack(&file, &mut pieces).and_then(|()| pieces.send());
            // Who takes no more has an answer already.
            if let Err(error) = packed
                && error.kind() != io::ErrorKind::BrokenPipe
            {
                *shared.lock() = Some(error);
            }
        });
        (ArchiveUpload(chunks), ArchiveReadError(error))
    }
}

impl ArchiveReadError {
    /// The read error, once the call has ended.
    pub fn take(&self) -> Option<io::Error> {
        self.0.lock().take()
    }
}

impl Stream for ArchiveUpload {
    type Item = LoadRequest;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<LoadRequest>> {
        self.0.poll_recv(context)
    }
}

fn pack(file: &Path, into: &mut UploadChunks) -> io::Result<()> {
    if file == Path::new("-") {
        return io::copy(&mut io::stdin().lock(), into).map(drop);
    }
    let mut opened = fs_err::File::open(file)?;
    if !opened.metadata()?.is_dir() {
        return io::copy(&mut opened, into).map(drop);
    }
    let mut archive = tar::Builder::new(into);
    for (name, path) in files_of(file)? {
        archive.append_path_with_name(path, name)?;
    }
    archive.finish()
}

struct UploadChunks {
    to: mpsc::Sender<LoadRequest>,
    /// Goes with the first piece.
    first: LoadRequest,
    next: Vec<u8>,
}

impl UploadChunks {
    fn send(&mut self) -> io::Result<()> {
        let piece = std::mem::replace(&mut self.next, Vec::with_capacity(PIECE));
        let message = LoadRequest { piece, ..std::mem::take(&mut self.first) };
        self.to.blocking_send(message).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl Write for UploadChunks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(PIECE - self.next.len());
        self.next.extend_from_slice(&bytes[..taken]);
        if self.next.len() == PIECE {
            self.send()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
