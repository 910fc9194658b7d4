//! The status as server-sent events, for a bounded number of pages.
//!
//! A client that reads slowly skips states: it costs one of them in memory. Each stream ends after a while; the browser
//! opens the next one by itself, so that a client that is gone without a word holds its place for a bounded time.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use http_body_util::StreamBody;
use hyper::body::{Bytes, Frame};
use tokio::time::{self, Instant};
use tonic::body::Body;
use tonic::codegen::http::{Response, StatusCode, header};

use super::Dashboard;
use crate::serve::responses::{LongResponse, text};

/// How many streams there are at once.
pub(super) const AT_ONCE: usize = 8;
/// How long one lasts.
const LIFETIME: Duration = Duration::from_secs(300);
/// How much longer its connection may last.
const GRACE: Duration = Duration::from_secs(10);
/// The longest time that the browser hears nothing.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// Milliseconds after which the browser opens the next stream.
const BEGIN: &[u8] = b"retry: 3000\n\n";
const KEEPALIVE_COMMENT: &[u8] = b": \n\n";

impl Dashboard {
    /// The states of the daemon from now on.
    pub(super) fn stream(&self) -> Response<Body> {
        let Ok(place) = Arc::clone(&self.streams).try_acquire_owned() else {
            return text(StatusCode::SERVICE_UNAVAILABLE, "too many pages are open\n");
        };
        let states = self.status.subscribe();
        self.joined.notify_one();
        let ends = Instant::now() + LIFETIME;
        let items = stream::unfold((states, place, false), move |(mut states, place, begun)| async move {
            if !begun {
                return Some((Bytes::from_static(BEGIN), (states, place, true)));
            }
            let item = tokio::select! {
                () = time::sleep_until(ends) => return None,
                changed = states.changed() => {
                    changed.ok()?;
                    event(&states.borrow_and_update())
                }
                () = time::sleep(KEEPALIVE_INTERVAL) => Bytes::from_static(KEEPALIVE_COMMENT),
            };
            Some((item, (states, place, true)))
        });
        let frames = futures_util::StreamExt::map(items, |item| Ok::<_, Infallible>(Frame::data(item)));
        let mut response = Response::new(Body::new(StreamBody::new(frames)));
        super::set(response.headers_mut(), header::CONTENT_TYPE, "text/event-stream");
        response.extensions_mut().insert(LongResponse(LIFETIME + GRACE));
        response
    }
}

/// A state as one event. JSON on one line has no line breaks.
fn event(state: &Bytes) -> Bytes {
    [b"data: ", &state[..], b"\n\n"].concat().into()
}
