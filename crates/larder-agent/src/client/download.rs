//! An archive that a node sends in pieces.

use std::io::{self, Read};

use futures_util::TryStreamExt as _;
use larder_api::v1::{ExportRequest, ExportResponse};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use super::{Client, ResponseStream};
use crate::error::Error;

/// Pieces that wait to be read.
const AHEAD: usize = 4;

/// An archive on its way. Dropping it ends the export.
pub struct ArchiveDownload {
    client: Client,
    pieces: ResponseStream<ExportResponse>,
    image_ids: Vec<String>,
}

impl ArchiveDownload {
    /// Asks for an archive.
    pub async fn begin(client: &Client, request: ExportRequest) -> Result<ArchiveDownload, Error> {
        let pieces = client.wait(async |mut calls| calls.export(request).await).await?;
        let mut download = ArchiveDownload { client: client.clone(), pieces, image_ids: Vec::new() };
        let first = download.message().await?;
        download.image_ids = first.image_ids;
        Ok(download)
    }

    /// IDs of its images.
    pub fn image_ids(&self) -> &[String] {
        &self.image_ids
    }

    async fn message(&mut self) -> Result<ExportResponse, Error> {
        let message = self.pieces.try_next().await.map_err(|status| self.client.error(&status))?;
        message.ok_or_else(|| {
            Error::unreachable(format!("{} ended before the archive was complete", self.client.shown()))
        })
    }

    /// The next piece; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let message = self.message().await?;
        Ok((!message.complete).then_some(message.piece))
    }

    /// Reads the archive on a thread that may block, and returns once that has ended. Fails if not all of the archive
    /// came, whatever the reader made of that; `None` if `stop` ended first.
    pub async fn read_with<T: Send + 'static>(
        mut self,
        stop: impl Future<Output = ()>,
        read: impl FnOnce(&mut dyn Read) -> T + Send + 'static,
    ) -> Result<Option<T>, Error> {
        let (feed, arriving) = mpsc::channel(AHEAD);
        let mut pieces = PieceReader { arriving, piece: Vec::new(), at: 0, ended: false };
        let reading = spawn_blocking(move || read(&mut pieces));
        let sent = async {
            while let Some(piece) = self.next().await? {
                if feed.send(piece).await.is_err() {
                    return Ok(()); // the reader has failed, and says why
                }
            }
            let _ = feed.send(Vec::new()).await; // the end
            Ok(())
        };
        let sent = tokio::select! {
            sent = sent => Some(sent),
            () = stop => None,
        };
        drop(feed);
        let read = reading.await.map_err(|error| Error::failed(format!("the reader ended: {error}")));
        sent.map(|sent| sent.and(read)).transpose()
    }
}

struct PieceReader {
    /// An empty piece is the end; without it, the archive is not complete.
    arriving: mpsc::Receiver<Vec<u8>>,
    piece: Vec<u8>,
    /// So much of the piece has been read.
    at: usize,
    ended: bool,
}

impl Read for PieceReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.at == self.piece.len() && !self.ended {
            self.piece = self.arriving.blocking_recv().ok_or(io::ErrorKind::ConnectionAborted)?;
            (self.at, self.ended) = (0, self.piece.is_empty());
        }
        let left = &self.piece[self.at..];
        let read = left.len().min(into.len());
        into[..read].copy_from_slice(&left[..read]);
        self.at += read;
        Ok(read)
    }
}
