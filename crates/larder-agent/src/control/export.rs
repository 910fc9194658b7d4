//! Images as an archive, written by a thread and sent in pieces. A client that disconnects ends it. The layers stay
//! until then, even if the images are removed.

use std::io::{self, BufWriter, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, stream};
use larder::error_chain;
use larder::reference::{ImageName, Reference};
use larder_api::v1 as api;
use larder_api::v1::ExportFormat;
use larder_store::export::{ExportError, ExportRequest, ImageExport};
use larder_store::unpack::HoleEncoding;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::spawn_blocking;
use tokio::time;
use tonic::Status;

use super::find::{FoundImage, find};
use super::{named, unanswered};
use crate::error::Error;
use crate::node::Storage;

/// How many archives are sent at once. Each has a thread.
pub(super) const AT_ONCE: usize = 4;
/// Bytes of one piece.
const PIECE: usize = 256 << 10;
/// Pieces that wait for the client.
const AHEAD: usize = 4;

/// The pieces of one archive, or what went wrong.
pub(super) type ExportStream = Pin<Box<dyn Stream<Item = Result<api::ExportResponse, Status>> + Send>>;

/// Finds the images, and begins to write them.
pub(super) async fn start(
    storage: &Storage,
    slots: Arc<Semaphore>,
    request: api::ExportRequest,
) -> Result<ExportStream, Status> {
    let store = storage.require_store()?.store().clone();
    let format = request.format();
    let holes = if request.sparse { HoleEncoding::Sparse } else { HoleEncoding::Zeros };
    let is_one = format == ExportFormat::Files;
    if format == ExportFormat::Unspecified || request.images.is_empty() || is_one && request.images.len() > 1
    {
        return Err(Error::bad_input("name images and a format; the files are those of one image").into());
    }
    let Ok(slot) = slots.try_acquire_owned() else {
        return Err(Status::resource_exhausted(format!("limit of {AT_ONCE} concurrent exports reached")));
    };
    let mut wanted = Vec::with_capacity(request.images.len());
    for image in &request.images {
        wanted.push(requested(&find(named(image)?, &**storage.backend()).await?));
    }
    let begun = spawn_blocking(move || store.begin_export(&wanted)).await;
    let export = begun.map_err(|error| unanswered("the store", &error))?.map_err(|error| failed(&error))?;
    let (pieces, arriving) = mpsc::channel(AHEAD);
    let ids = export.ids().map(ToString::to_string).collect();
    let first = Ok(api::ExportResponse { image_ids: ids, ..Default::default() });
    let pieces = PieceSender { to: pieces, runtime: Handle::current() };
    spawn_blocking(move || {
        write(&export, format, holes, &pieces);
        drop(slot);
    });
    let rest = stream::unfold(arriving, |mut arriving| async { Some((arriving.recv().await?, arriving)) });
    Ok(Box::pin(stream::StreamExt::chain(stream::iter([first]), rest)))
}

/// An image has the name in the archive by which it was found, as with `docker save`.
fn requested(found: &FoundImage) -> ExportRequest {
    let name = found.name.as_deref().and_then(|name| Reference::parse(name).ok());
    ExportRequest { image: ImageName::from(found.key()), name }
}

/// How long the client may take for one piece. It holds the layers and a slot until then.
const SEND_TIMEOUT: Duration = Duration::from_secs(600);

/// Hands pieces to the client, from a thread that may block.
#[derive(Clone)]
struct PieceSender {
    to: mpsc::Sender<Result<api::ExportResponse, Status>>,
    runtime: Handle,
}

impl PieceSender {
    /// Fails if the client has gone away or takes nothing.
    fn send(&self, piece: Result<api::ExportResponse, Status>) -> io::Result<()> {
        let sent = self.runtime.block_on(async { time::timeout(SEND_TIMEOUT, self.to.send(piece)).await });
        match sent {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(io::ErrorKind::BrokenPipe.into()),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

fn write(export: &ImageExport, format: ExportFormat, holes: HoleEncoding, to: &PieceSender) {
    let mut out = BufWriter::with_capacity(PIECE, PieceWriter(to.clone()));
    let written = match format {
        ExportFormat::Files => export.write_files(holes, &mut out),
        _ => export.write_oci(&mut out),
    };
    let ended = match written {
        Ok(()) => out.flush().map_err(ExportError::Output),
        Err(error) => {
            let _ = out.into_parts(); // what is left of it is of no use
            Err(error)
        }
    };
    match ended {
        Ok(()) => drop(to.send(Ok(api::ExportResponse { complete: true, ..Default::default() }))),
        // The client has gone away, or stalls.
        Err(ExportError::Output(_)) => {}
        Err(error) => {
            tracing::warn!("export: {}", error_chain(&error));
            let _ = to.send(Err(failed(&error).into()));
        }
    }
}

struct PieceWriter(PieceSender);

impl Write for PieceWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = bytes.len().min(PIECE);
        let piece = api::ExportResponse { piece: bytes[..length].to_vec(), ..Default::default() };
        self.0.send(Ok(piece))?;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn failed(error: &ExportError) -> Error {
    Error::failed(error_chain(error)).hints(error.hint())
}
