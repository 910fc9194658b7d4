//! Lists that may come as one reply or as a stream of parts.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};

use tonic::{Code, Response, Status, Streaming};

/// Whether a list is requested as a stream. Turned off for good when the runtime does not support streams.
#[derive(Debug)]
pub(crate) struct StreamSupport(AtomicBool);

impl StreamSupport {
    pub(crate) fn new(wanted: bool) -> StreamSupport {
        StreamSupport(AtomicBool::new(wanted))
    }

    /// The joined parts of a stream; `None` if the whole list must be requested in one response. An error drops the
    /// parts received before it.
    pub(crate) async fn collect<P, T>(
        &self,
        stream: impl Future<Output = Result<Response<Streaming<P>>, Status>>,
        items: fn(P) -> Vec<T>,
    ) -> Result<Option<Vec<T>>, Status> {
        if !self.0.load(Ordering::Relaxed) {
            return Ok(None);
        }
        match joined(stream, items).await {
            Err(status) if status.code() == Code::Unimplemented => {
                self.0.store(false, Ordering::Relaxed);
                Ok(None)
            }
            other => other.map(Some),
        }
    }
}

/// The joined parts of a streamed list.
pub async fn joined<P, T>(
    stream: impl Future<Output = Result<Response<Streaming<P>>, Status>>,
    items: fn(P) -> Vec<T>,
) -> Result<Vec<T>, Status> {
    let mut parts = stream.await?.into_inner();
    let mut all = Vec::new();
    while let Some(part) = parts.message().await? {
        all.append(&mut items(part));
    }
    Ok(all)
}
