//! Puts a [`Manager`] together.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use tokio::time::Instant;

use super::backoff::Backoff;
use super::config::{NewCredentials, PullConfig, SameImage};
use super::flight::Flights;
use super::lease::Leases;
use super::manager::Manager;
use super::metrics::PullMetrics;
use super::puller::Puller;
use super::status::Board;
use super::times::PullTimeRecorder;
use crate::backend::Backend;
use crate::credentials::Sources;
use crate::events::{EventSink, LogSink};
use crate::gc::Gate;
use crate::image_service::ImageService;
use crate::records::PullRecords;

/// Puts a [`Manager`] together. What is not given is left out: events go to the log, nothing is recorded or counted.
pub struct ManagerBuilder {
    backend: Arc<dyn Backend>,
    config: PullConfig,
    credentials: Sources,
    records: Option<Arc<dyn PullRecords>>,
    events: Arc<dyn EventSink>,
    metrics: Option<Arc<dyn PullMetrics>>,
    times: Option<Arc<dyn PullTimeRecorder>>,
    leases: Leases,
}

impl ManagerBuilder {
    /// Begins with a backend and larder's defaults.
    pub(super) fn new(backend: Arc<dyn Backend>) -> ManagerBuilder {
        ManagerBuilder {
            backend,
            config: PullConfig::default(),
            credentials: Sources::default(),
            records: None,
            events: Arc::new(LogSink),
            metrics: None,
            times: None,
            leases: Leases::default(),
        }
    }

    /// How pulls are queued, throttled, merged and retried.
    #[must_use]
    pub fn config(mut self, config: PullConfig) -> Self {
        self.config = config;
        self
    }

    /// Credentials beside the pods' pull secrets.
    #[must_use]
    pub fn credentials(mut self, credentials: Sources) -> Self {
        self.credentials = credentials;
        self
    }

    /// Records that decide who may use a present image.
    #[must_use]
    pub fn records(mut self, records: Arc<dyn PullRecords>) -> Self {
        self.records = Some(records);
        self
    }

    /// Where events go.
    #[must_use]
    pub fn events(mut self, events: Arc<dyn EventSink>) -> Self {
        self.events = events;
        self
    }

    /// What counts calls and pulls.
    #[must_use]
    pub fn metrics(mut self, metrics: Arc<dyn PullMetrics>) -> Self {
        self.metrics = Some(metrics);
        self
    }

    /// What takes the time of pulls per pod.
    #[must_use]
    pub fn times(mut self, times: Arc<dyn PullTimeRecorder>) -> Self {
        self.times = Some(times);
        self
    }

    /// Collection with the same gate leaves an ensured image alone for this time.
    #[must_use]
    pub fn lease(mut self, gate: Arc<Gate>, time: Duration) -> Self {
        self.leases = Leases::at(gate, time);
        self
    }

    /// The manager. It starts nothing.
    pub fn build(self) -> Manager {
        let images = ImageService::new(self.backend);
        Manager {
            puller: RwLock::new(Arc::new(Puller::new(images.clone(), &self.config, Instant::now()))),
            images,
            credentials: self.credentials,
            records: self.records,
            events: self.events,
            metrics: self.metrics,
            times: self.times,
            backoff: Mutex::new(Backoff::new(self.config.backoff_initial, self.config.backoff_max)),
            flights: Flights::default(),
            once: AtomicBool::new(self.config.same_image == SameImage::Once),
            anew: AtomicBool::new(self.config.new_credentials == NewCredentials::PullAtOnce),
            board: Board::default(),
            leases: self.leases,
        }
    }
}
