//! A registry for one demo: in this process, on loopback, read only. It notes what it serves.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use http_body_util::StreamBody;
use hyper::body::{Frame, Incoming};
use hyper::header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderValue, RANGE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use larder::reference::Digest;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time;

use super::images::{DemoBlob, DemoBlobKind, DemoImages};

/// Layers are served in pieces of this size, with this pause after each: 13 MB/s for each of them, as from a registry
/// that is not next door. Without it there would be no progress to see.
const PIECE: usize = 128 << 10;
const PAUSE: Duration = Duration::from_millis(10);

/// Serves until it is dropped.
pub(super) struct DemoRegistry {
    address: SocketAddr,
    shared: Arc<DemoRegistryInner>,
    accepting: JoinHandle<()>,
}

struct DemoRegistryInner {
    content: DemoImages,
    log: Mutex<Vec<LoggedFetch>>,
}

struct LoggedFetch {
    kind: Option<DemoBlobKind>,
    digest: Option<Digest>,
    bytes: Arc<AtomicUsize>,
}

/// One request that was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FetchRecord {
    /// Kind of the requested document; `None` when there is no such thing.
    pub(super) kind: Option<DemoBlobKind>,
    pub(super) digest: Option<Digest>,
    /// Bytes of it that were sent; 0 for a look.
    pub(super) bytes: usize,
}

impl DemoRegistry {
    /// Listens on a free port of loopback.
    pub(super) async fn start(content: DemoImages) -> io::Result<DemoRegistry> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(DemoRegistryInner { content, log: Mutex::default() });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(DemoRegistry { address, shared, accepting })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn content(&self) -> &DemoImages {
        &self.shared.content
    }

    /// Returns the requests since the last call.
    pub(super) fn take_log(&self) -> Vec<FetchRecord> {
        let noted = std::mem::take(&mut *self.shared.log.lock());
        let served = noted.into_iter().map(|noted| FetchRecord {
            kind: noted.kind,
            digest: noted.digest,
            bytes: noted.bytes.load(Ordering::Relaxed),
        });
        served.collect()
    }
}

impl Drop for DemoRegistry {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Connections end with the task, since it owns theirs.
async fn accept(listener: TcpListener, shared: Arc<DemoRegistryInner>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            let answer = service_fn(|request| {
                let response = shared.answer(&request);
                async move { Ok::<_, Infallible>(response) }
            });
            // A client that disconnects is no error of the registry.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

type DemoBody = StreamBody<Pin<Box<dyn Stream<Item = Result<Frame<Bytes>, Infallible>> + Send>>>;

impl DemoRegistryInner {
    fn answer(&self, request: &Request<Incoming>) -> Response<DemoBody> {
        let path = request.uri().path();
        if path == "/v2/" {
            return empty(StatusCode::OK);
        }
        let document = self.content.documents.get(path);
        let sent = Arc::new(AtomicUsize::new(0));
        self.log.lock().push(LoggedFetch {
            kind: document.map(|document| document.kind),
            digest: document.map(|document| document.digest.clone()),
            bytes: Arc::clone(&sent),
        });
        let Some(document) = document else { return empty(StatusCode::NOT_FOUND) };
        let whole = 0..document.bytes.len();
        let wanted = request.headers().get(RANGE).and_then(|value| range(value.to_str().ok()?, whole.end));
        match *request.method() {
            Method::HEAD => headed(document, &whole, stream_of(Bytes::new(), Duration::ZERO, sent)),
            Method::GET => {
                let part = wanted.unwrap_or(whole);
                let pause = if document.kind == DemoBlobKind::Layer { PAUSE } else { Duration::ZERO };
                headed(document, &part, stream_of(document.bytes.slice(part.clone()), pause, sent))
            }
            _ => empty(StatusCode::METHOD_NOT_ALLOWED),
        }
    }
}

/// The part that a Range field asks for; `None` when it is none that can be served, and then all is.
fn range(field: &str, length: usize) -> Option<Range<usize>> {
    let (first, last) = field.strip_prefix("bytes=")?.split_once('-')?;
    let first: usize = first.parse().ok()?;
    let end = if last.is_empty() { length } else { last.parse::<usize>().ok()?.checked_add(1)?.min(length) };
    (first < end).then_some(first..end)
}

fn headed(document: &DemoBlob, part: &Range<usize>, body: DemoBody) -> Response<DemoBody> {
    let length = document.bytes.len();
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(document.media_type));
    headers.insert(CONTENT_LENGTH, part.len().into());
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Ok(digest) = HeaderValue::from_str(document.digest.as_str()) {
        headers.insert("docker-content-digest", digest);
    }
    if part.len() < length {
        let said = format!("bytes {}-{}/{length}", part.start, part.end - 1);
        if let Ok(said) = HeaderValue::from_str(&said) {
            headers.insert(CONTENT_RANGE, said);
        }
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    response
}

fn empty(status: StatusCode) -> Response<DemoBody> {
    let mut response = Response::new(stream_of(Bytes::new(), Duration::ZERO, Arc::default()));
    *response.status_mut() = status;
    response
}

/// The bytes in chunks, each counted as it is sent.
fn stream_of(bytes: Bytes, pause: Duration, sent: Arc<AtomicUsize>) -> DemoBody {
    let pieces = stream::unfold((bytes, sent), move |(mut bytes, sent)| async move {
        if bytes.is_empty() {
            return None;
        }
        let piece = bytes.split_to(PIECE.min(bytes.len()));
        if !pause.is_zero() {
            time::sleep(pause).await;
        }
        sent.fetch_add(piece.len(), Ordering::Relaxed);
        Some((Ok(Frame::data(piece)), (bytes, sent)))
    });
    StreamBody::new(Box::pin(pieces))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_within_the_length_are_served_and_others_are_not() {
        for (field, expected) in [
            ("bytes=0-9", Some(0..10)),
            ("bytes=90-", Some(90..100)),
            ("bytes=90-999", Some(90..100)),
            ("bytes=100-", None),
            ("bytes=-5", None),
            ("bytes=0-1,4-5", None),
            ("items=0-1", None),
        ] {
            assert_eq!(range(field, 100), expected, "{field}");
        }
    }
}
