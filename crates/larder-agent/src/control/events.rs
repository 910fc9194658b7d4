//! Events for one reader: those that are kept, and with `watch` those that come.

use std::sync::Arc;

use futures_util::{Stream, stream};
use larder::events::{EventStreamItem, RingSink};
use larder_api::v1alpha1 as api;
use larder_api::v1alpha1::events_response;
use tokio::sync::watch;
use tonic::Status;

use crate::serve::connections::stop_requested;
use larder_api::convert;

/// What a reader is told. A watch ends when the daemon does: it must not keep it from stopping.
pub(super) fn follow(
    ring: &Arc<RingSink>,
    request: &api::EventsRequest,
    stop: watch::Receiver<bool>,
) -> impl Stream<Item = Result<api::EventsResponse, Status>> + Send + 'static {
    let (followed, watch) = (ring.follow(request.from), request.watch);
    stream::unfold((followed, stop), move |(mut followed, mut stop)| async move {
        let told = match followed.try_next() {
            Some(told) => told,
            None if watch => tokio::select! {
                biased;
                () = stop_requested(&mut stop) => return None,
                told = followed.next() => told,
            },
            None => return None,
        };
        Some((Ok(response(told)), (followed, stop)))
    })
}

fn response(told: EventStreamItem) -> api::EventsResponse {
    let told = match told {
        EventStreamItem::Event(number, event) => {
            events_response::Told::Event(convert::event(event, Some(number)))
        }
        EventStreamItem::Missed(count) => events_response::Told::Missed(count),
    };
    api::EventsResponse { told: Some(told) }
}
