//! The dashboard: one page for browsers on the address of the metrics, and its data as JSON. Read-only.
//!
//! ```text
//! request -> guard (method, Host, Origin) -> page | data (JSON) | stream (server-sent events)
//!                                                    \-> ControlApi, as the commands
//! ```
//!
//! Promises: a page of another site reads nothing, by whatever name it reaches the daemon; every response is bounded,
//! whatever the number of images, and comes within seconds; clients share one reading of the status, one listing of
//! images and one measurement of the disk usage.

mod cache;
mod data;
mod guard;
mod layers;
mod listing;
mod page;
mod samples;
mod stream;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hyper::body::Bytes;
use larder_api::v1 as api;
use larder_api::v1::control_server::Control as _;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::{self, Instant};
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use tonic::{Code, Status};

use crate::config::Config;
use crate::control::ControlApi;
use crate::serve::responses::{page as response, text};
use cache::ReadingCache;
use data::Query;
use listing::Listing;
use samples::{DiskDocument, DiskHistory, DiskSample};

/// Where it is.
const PREFIX: &str = "/dashboard";
/// How often the disk is measured for the history.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(30);
/// How often the status is read while a page is open.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);
/// How many requests for data there are at once, waiting ones included.
const REQUESTS: usize = 16;
/// How many of them are carried out at once.
const REQUESTS_UNDER_WAY: usize = 2;

/// The dashboard of one daemon.
pub(crate) struct Dashboard {
    control: ControlApi,
    /// Names by which it may be reached, beside loopback and its address.
    hosts: Vec<String>,
    history: Mutex<DiskHistory>,
    listing: Arc<ReadingCache<Arc<Listing>>>,
    /// Bytes that collection can free; `None` if unknown.
    reclaimable: Arc<ReadingCache<Option<u64>>>,
    /// The last status as JSON; empty before the first one.
    status: watch::Sender<Bytes>,
    /// Notified when a stream begins.
    joined: Notify,
    streams: Arc<Semaphore>,
    requests: Semaphore,
    slots: Semaphore,
}

impl Dashboard {
    /// The dashboard of these settings, if they have one.
    pub(crate) fn of(config: &Config, control: &ControlApi) -> Option<Dashboard> {
        config.serves_dashboard().then(|| Dashboard {
            control: control.clone(),
            hosts: config.dashboard.hosts.clone(),
            history: Mutex::default(),
            listing: Arc::default(),
            reclaimable: Arc::default(),
            status: watch::Sender::default(),
            joined: Notify::new(),
            streams: Arc::new(Semaphore::new(stream::AT_ONCE)),
            requests: Semaphore::new(REQUESTS),
            slots: Semaphore::new(REQUESTS_UNDER_WAY),
        })
    }

    /// Returns true if the dashboard answers requests for this path.
    pub(crate) fn serves_path(path: &str) -> bool {
        path == "/" || path.strip_prefix(PREFIX).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Measures the disk from time to time, and reads the status while a page is open; until dropped.
    pub(crate) async fn run(&self) {
        let mut samples = time::interval(SAMPLE_INTERVAL);
        samples.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        loop {
            let is_watched = self.status.receiver_count() > 0;
            tokio::select! {
                _ = samples.tick() => {
                    self.sample().await;
                    self.listing.drop_unused(Instant::now());
                    self.reclaimable.drop_unused(Instant::now());
                }
                () = time::sleep(UPDATE_INTERVAL), if is_watched => self.update().await,
                () = self.joined.notified() => self.update().await,
            }
        }
    }

    /// Adds the disk usage to the history, if it can be measured.
    async fn sample(&self) {
        let Some(disk) = self.status().await.ok().and_then(|status| status.disk) else { return };
        let used_bytes = disk.size_bytes.saturating_sub(disk.available_bytes);
        let mut history = self.history.lock();
        history.add(DiskSample { at: unix_seconds(), used_bytes, size_bytes: disk.size_bytes });
    }

    async fn update(&self) {
        if let Ok(status) = self.status().await {
            self.status.send_replace(self.document(status).into());
        }
    }

    fn document(&self, status: api::StatusResponse) -> String {
        json(&data::status(status, self.control.removals(), unix_seconds()))
    }

    async fn status(&self) -> Result<api::StatusResponse, Status> {
        Ok(self.control.status(request(api::StatusRequest { look: false })).await?.into_inner())
    }

    /// Answers a request that reached the daemon at this address of its own.
    pub(crate) async fn answer<B>(&self, request: &Request<B>, local: IpAddr) -> Response<Body> {
        let (method, uri, headers) = (request.method(), request.uri(), request.headers());
        let target = guard::RequestTarget { is_page: is_page(uri.path()), local, hosts: &self.hosts };
        let mut response = match guard::check(method, uri, headers, &target) {
            Ok(()) => self.allowed(method, uri).await,
            Err(refused) => refused.response(),
        };
        page::protect(response.headers_mut());
        response
    }

    async fn allowed(&self, method: &Method, uri: &Uri) -> Response<Body> {
        match uri.path().strip_prefix(PREFIX) {
            Some("/") => page::document(),
            None | Some("") => page::redirect(),
            Some("/api/stream") if method == Method::GET => self.stream(),
            Some(path) => self.data(path, uri).await,
        }
    }

    /// One of the JSON documents.
    async fn data(&self, path: &str, uri: &Uri) -> Response<Body> {
        let Ok(_place) = self.requests.try_acquire() else {
            return text(StatusCode::SERVICE_UNAVAILABLE, "too many requests at once\n");
        };
        // The semaphore is never closed.
        let _slot = self.slots.acquire().await.ok();
        let query = Query::of(uri.query().unwrap_or_default());
        let answer = match path {
            "/api/status" => self.status().await.map(|status| self.document(status)),
            "/api/disk" => Ok(self.disk().await),
            "/api/images" => self.images(&query).await,
            "/api/layers" => self.listing().await.map(|listing| json(listing.layers())),
            "/api/explain" => self.explain(&query).await,
            "/api/history" => self.removals(&query).await,
            "/api/events" => self.events(&query).await,
            _ => return text(StatusCode::NOT_FOUND, "not found; the dashboard is /dashboard/\n"),
        };
        match answer {
            Ok(document) => response(StatusCode::OK, document, JSON),
            Err(status) => failed(&status),
        }
    }

    async fn disk(&self) -> String {
        let control = self.control.clone();
        let reading = async move {
            let usage = control.usage(request(api::UsageRequest {})).await?;
            Ok(usage.into_inner().reclaimable_bytes)
        };
        let reclaimable_bytes = self.reclaimable.get_or_read(reading).await.ok().flatten();
        json(&DiskDocument { reclaimable_bytes, ..self.history.lock().downsampled(samples::POINTS) })
    }

    async fn listing(&self) -> Result<Arc<Listing>, Status> {
        let control = self.control.clone();
        self.listing.get_or_read(async move { Listing::read(&control).await.map(Arc::new) }).await
    }

    async fn images(&self, query: &Query) -> Result<String, Status> {
        Ok(json(&self.listing().await?.page(query)))
    }

    async fn explain(&self, query: &Query) -> Result<String, Status> {
        let image = query.text("image").to_owned();
        let asked = api::ExplainRequest { image, limits: None };
        Ok(json(&data::explanation(self.control.explain(request(asked)).await?.into_inner())))
    }

    async fn removals(&self, query: &Query) -> Result<String, Status> {
        let wanted = api::HistoryRequest { newest: data::newest_removals(query) };
        let history = self.control.history(request(wanted)).await?.into_inner();
        Ok(json(&data::removals(history, query)))
    }

    async fn events(&self, query: &Query) -> Result<String, Status> {
        let next = self.status().await?.next_event;
        let from = query.number("from").unwrap_or(0).max(next.saturating_sub(data::EVENTS));
        let events = self.control.events(request(api::EventsRequest { from, watch: false })).await?;
        Ok(json(&data::events(events.into_inner(), next).await))
    }
}

const JSON: HeaderValue = HeaderValue::from_static("application/json");

fn is_page(path: &str) -> bool {
    path.strip_prefix(PREFIX).is_none_or(|rest| matches!(rest, "" | "/"))
}

/// Seconds since 1970.
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn request<T>(message: T) -> tonic::Request<T> {
    tonic::Request::new(message)
}

/// A document of types that always have a form in JSON.
fn json(document: &impl serde::Serialize) -> String {
    serde_json::to_string(document).unwrap_or_default()
}

/// Why there is no document.
fn failed(status: &Status) -> Response<Body> {
    let code = match status.code() {
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::InvalidArgument => StatusCode::BAD_REQUEST,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    response(code, json(&serde_json::json!({ "error": status.message() })), JSON)
}

/// Sets a header of a response.
fn set(headers: &mut HeaderMap, name: header::HeaderName, value: &'static str) {
    headers.insert(name, HeaderValue::from_static(value));
}
