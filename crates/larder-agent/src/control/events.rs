//! Events for one reader: those that are kept, and with `watch` those that come.

use std::sync::Arc;

use futures_util::{Stream, stream};
use larder::events::{EventStreamItem, RingSink};
use larder_api::v1 as api;
use larder_api::v1::events_response;
use tokio::sync::watch;
use tonic::Status;

use crate::serve::connections::stop_requested;
use larder_api::convert;

/// The events of a watch, which ends when the daemon stops.
pub(super) fn follow(
    ring: &Arc<RingSink>,
    request: &api::EventsRequest,
    stop: watch::Receiver<bool>,
) -> impl Stream<Item = Result<api::EventsResponse, Status>> + Send + 'static {
    let (followed, watch) = (ring.follow(request.from), request.watch);
    stream::unfold((followed, stop), move |(mut followed, mut stop)| async move {
        let item = match followed.try_next() {
            Some(item) => item,
            None if watch => tokio::select! {
                biased;
                () = stop_requested(&mut stop) => return None,
                item = followed.next() => item,
            },
            None => return None,
        };
        Some((Ok(response(item)), (followed, stop)))
    })
}

fn response(item: EventStreamItem) -> api::EventsResponse {
    let item = match item {
        EventStreamItem::Event(number, event) => {
            events_response::Item::Event(convert::event(event, Some(number)))
        }
        EventStreamItem::Missed(count) => events_response::Item::Missed(count),
    };
    api::EventsResponse { item: Some(item) }
}
