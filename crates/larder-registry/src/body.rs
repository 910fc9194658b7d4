//! Response bodies: small ones read whole, blobs in chunks, both with a stall detector.

use bytes::{Bytes, BytesMut};
use reqwest::Response;
use tokio::time::{self, Instant};

use super::budget::ConnectionPermit;
use super::config::RegistryConfig;
use super::error::FetchErrorKind;
use super::stall_detector::StallDetector;
use super::transport::explain;

/// Reads a body of at most `limit` bytes.
pub(crate) async fn read_small(
    response: Response,
    limit: usize,
    config: &RegistryConfig,
) -> Result<Bytes, FetchErrorKind> {
    let too_large = FetchErrorKind::TooLarge { limit: limit as u64 };
    if response.content_length().is_some_and(|length| length > limit as u64) {
        return Err(too_large);
    }
    let mut watched = WatchedBody::new(response, config);
    let mut whole = BytesMut::new();
    while let Some(chunk) = watched.chunk().await? {
        if whole.len() + chunk.len() > limit {
            return Err(too_large);
        }
        whole.extend_from_slice(&chunk);
    }
    Ok(whole.freeze())
}

/// A body with its stall detector.
#[derive(Debug)]
struct WatchedBody {
    response: Response,
    watchdog: StallDetector,
    config: (std::time::Duration, u64),
}

impl WatchedBody {
    fn new(response: Response, config: &RegistryConfig) -> WatchedBody {
        let (window, min_bytes) = (config.stall_window, config.stall_bytes);
        WatchedBody { response, watchdog: StallDetector::new(window, min_bytes), config: (window, min_bytes) }
    }

    /// The next chunk, never an empty one.
    async fn chunk(&mut self) -> Result<Option<Bytes>, FetchErrorKind> {
        loop {
            let began = Instant::now();
            let timeout = self.watchdog.remaining();
            let (chunk, waited) = match time::timeout(timeout, self.response.chunk()).await {
                Ok(Ok(None)) => return Ok(None),
                Ok(Ok(Some(chunk))) => (chunk, began.elapsed()),
                Ok(Err(error)) => return Err(explain(error, std::time::Duration::ZERO)),
                // All of the wait counts, whatever the clock rounds to.
                Err(_) => (Bytes::new(), timeout),
            };
            if self.watchdog.count(waited, chunk.len() as u64) {
                let (window, min_bytes) = self.config;
                return Err(FetchErrorKind::Stalled { window, min_bytes });
            }
            if !chunk.is_empty() {
                return Ok(Some(chunk));
            }
        }
    }
}

/// A part of a blob that is being received. Holds one connection of the registry's budget until dropped.
#[derive(Debug)]
pub(crate) struct BlobBody {
    body: WatchedBody,
    permit: ConnectionPermit,
    /// Offset of the first byte: 0 if the server ignored the requested range.
    pub(crate) start: u64,
    at: u64,
    /// Offset after the last byte; may be less than requested.
    pub(crate) end: u64,
    /// Whether the server sends exactly the requested range.
    pub(crate) ranged: bool,
    /// The host that serves it.
    pub(crate) host: String,
}

/// A part of a blob before its first byte.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlobRange {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) ranged: bool,
}

impl BlobBody {
    pub(crate) fn new(
        response: Response,
        permit: ConnectionPermit,
        part: BlobRange,
        config: &RegistryConfig,
        host: String,
    ) -> BlobBody {
        let BlobRange { start, end, ranged } = part;
        let body = WatchedBody::new(response, config);
        BlobBody { body, permit, start, at: start, end, ranged, host }
    }

    /// The next chunk; `None` after the last byte. After an error, the blob can be opened again at the byte reached.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, FetchErrorKind> {
        let truncated =
            |at, end, cause: &str| FetchErrorKind::Truncated { got: at, expected: end, cause: cause.into() };
        match self.body.chunk().await {
            Ok(Some(chunk)) => {
                self.permit.add_received(chunk.len());
                let left = self.end - self.at;
                if chunk.len() as u64 > left {
                    return Err(FetchErrorKind::TooLarge { limit: self.end - self.start });
                }
                self.at += chunk.len() as u64;
                Ok(Some(chunk))
            }
            // The body is complete; how the connection ends does not matter.
            Ok(None) | Err(_) if self.at == self.end => Ok(None),
            Ok(None) => Err(truncated(self.at, self.end, "the connection was closed")),
            Err(FetchErrorKind::Unreachable(cause)) => Err(truncated(self.at, self.end, &cause)),
            Err(other) => Err(other),
        }
    }
}
