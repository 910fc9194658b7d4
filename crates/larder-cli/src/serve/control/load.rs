//! An archive that a client sends in pieces, into larder's own store. A client that goes away ends it; what the archive's
//! images need is checked by the store, as of a file; and the store leases them, so that collection leaves them alone.

use std::io::{self, Read};

use larder_control::v1alpha1 as api;
use larder_store::store::import::ImportFrom;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use crate::commands::load;
use crate::failure::Failure;
use crate::serve::node::Node;

/// Pieces that wait for the store.
const AHEAD: usize = 4;

pub(super) async fn load(
    node: &Node,
    mut pieces: Streaming<api::LoadRequest>,
) -> Result<api::LoadResponse, Status> {
    let store = super::own_store(node)?;
    let Some(first) = pieces.message().await? else {
        return Err(Failure::bad_input("nothing was sent").hint("send an archive, in pieces").into());
    };
    let name = Some(first.name).filter(|name| !name.is_empty());
    let name = name.as_deref().map(load::base_name).transpose()?;
    let (feed, arriving) = mpsc::channel(AHEAD);
    let arriving = Arriving { pieces: arriving, piece: first.piece, at: 0 };
    let feeding = async {
        while let Some(piece) = pieces.message().await.transpose() {
            let is_last = piece.is_err();
            let piece = piece.map(|next| next.piece).map_err(|_| io::ErrorKind::ConnectionReset.into());
            if feed.send(piece).await.is_err() || is_last {
                break;
            }
        }
        drop(feed);
        // What is there then is up to the store.
        std::future::pending::<()>().await;
    };
    let images = tokio::select! {
        loaded = load::load(store, ImportFrom::Stream(Box::new(arriving)), name) => loaded?,
        () = feeding => Vec::new(),
    };
    Ok(api::LoadResponse { images })
}

/// What has arrived, as the store reads it on a thread that may block.
struct Arriving {
    pieces: mpsc::Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    /// So much of the piece has been read.
    at: usize,
}

impl Read for Arriving {
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
