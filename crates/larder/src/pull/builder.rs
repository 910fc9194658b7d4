//! Builds an [`ImageManager`].

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::backoff::Backoff;
use super::config::{DuplicatePullPolicy, NewCredentialsPolicy, PullConfig};
use super::lease::EnsureLeases;
use super::manager::ImageManager;
use super::metrics::PullMetrics;
use super::puller::ImagePuller;
use super::room::RoomMaker;
use super::shared_pull::SharedPulls;
use super::status::PullTracker;
use super::times::PullTimeRecorder;
use crate::backend::Backend;
use crate::credentials::NodeKeyring;
use crate::events::{EventSink, LogSink};
use crate::hidden::PrefetchCredentials;
use crate::image_service::ImageService;
use crate::records::PullRecords;
use crate::retention::RemovalGate;

/// Builds an [`ImageManager`]. By default events go to the log, and nothing is recorded or counted.
pub struct ImageManagerBuilder {
    backend: Arc<dyn Backend>,
    config: PullConfig,
    credentials: NodeKeyring,
    records: Option<Arc<dyn PullRecords>>,
    events: Arc<dyn EventSink>,
    metrics: Option<Arc<dyn PullMetrics>>,
    times: Option<Arc<dyn PullTimeRecorder>>,
    leases: EnsureLeases,
    prefetch_credentials: PrefetchCredentials,
    room: Option<Arc<dyn RoomMaker>>,
}

impl ImageManagerBuilder {
    /// Begins with a backend and larder's defaults.
    pub(super) fn new(backend: Arc<dyn Backend>) -> ImageManagerBuilder {
        ImageManagerBuilder {
            backend,
            config: PullConfig::default(),
            credentials: NodeKeyring::default(),
            records: None,
            events: Arc::new(LogSink),
            metrics: None,
            times: None,
            leases: EnsureLeases::default(),
            prefetch_credentials: PrefetchCredentials::default(),
            room: None,
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
    pub fn credentials(mut self, credentials: NodeKeyring) -> Self {
        self.credentials = credentials;
        self
    }

    /// Records that decide who may use a present image.
    #[must_use]
    pub fn records(mut self, records: Arc<dyn PullRecords>) -> Self {
        self.records = Some(records);
        self
    }

    /// The sink of events.
    #[must_use]
    pub fn events(mut self, events: Arc<dyn EventSink>) -> Self {
        self.events = events;
        self
    }

    /// The sink of metrics.
    #[must_use]
    pub fn metrics(mut self, metrics: Arc<dyn PullMetrics>) -> Self {
        self.metrics = Some(metrics);
        self
    }

    /// The recorder of pull times per pod.
    #[must_use]
    pub fn times(mut self, times: Arc<dyn PullTimeRecorder>) -> Self {
        self.times = Some(times);
        self
    }

    /// The gate and the time for which an ensured image is leased. Garbage collection must use the same gate.
    #[must_use]
    pub fn lease(mut self, gate: Arc<RemovalGate>, time: Duration) -> Self {
        self.leases = EnsureLeases::at(gate, time);
        self
    }

    /// How credentials are handled in requests that are ahead of kubelet.
    #[must_use]
    pub fn prefetch_credentials(mut self, credentials: PrefetchCredentials) -> Self {
        self.prefetch_credentials = credentials;
        self
    }

    /// Frees disk space for pulls that are refused for lack of it; without this they fail.
    #[must_use]
    pub fn room(mut self, room: Arc<dyn RoomMaker>) -> Self {
        self.room = Some(room);
        self
    }

    /// The manager. It starts nothing.
    pub fn build(self) -> ImageManager {
        let images = ImageService::new(self.backend);
        ImageManager {
            puller: RwLock::new(Arc::new(ImagePuller::new(
                images.clone(),
                self.room,
                &self.config,
                Instant::now(),
            ))),
            images,
            credentials: self.credentials,
            records: self.records,
            events: self.events,
            metrics: self.metrics,
            times: self.times,
            backoff: Mutex::new(Backoff::new(self.config.backoff_initial, self.config.backoff_max)),
            shared_pulls: SharedPulls::default(),
            coalesce_pulls: AtomicBool::new(self.config.same_image == DuplicatePullPolicy::Coalesce),
            retry_on_new_credentials: AtomicBool::new(
                self.config.new_credentials == NewCredentialsPolicy::PullAtOnce,
            ),
            pull_tracker: PullTracker::default(),
            leases: self.leases,
            prefetch_credentials: self.prefetch_credentials,
            stopping: watch::Sender::new(false),
        }
    }
}
