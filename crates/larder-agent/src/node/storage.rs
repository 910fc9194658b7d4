//! Storage of the images of a node: the backend, its publication to a containerd, and its health.

use std::sync::Arc;
use std::time::Duration;

use larder::backend::{Backend, BackendError, CallErrorKind};
use larder::error_chain;
use larder::gc::{ClockReading, Collector, CollectorBuilder};
use larder::go_format;
use larder::hidden::HiddenImages;
use larder::hint::Hint;
use larder::retry::retry_until;
use larder_cri::CriBackend;
use larder_registry::RegistryLoad;
use larder_store::backend::StoreBackend;
use larder_store::lazy::ReadVerification;
use larder_store::store::{DamagedImage, IncompleteLayer, StoreError, Suspect};
use tokio::task::spawn_blocking;
use tokio::time;

use super::Observability;
use super::health::{BackendHealth, HealthMonitor};
use crate::backend::publisher::{self, StorePublisher, UnknownContainers};
use crate::backend::{BackendHandle, docker, gc_wiring};
use crate::config::Config;
use crate::error::Error;

/// How long collection and prefetches wait for a runtime that starts after larder.
const RUNTIME_STARTS_WITHIN: Duration = Duration::from_secs(60);
/// First and longest time between two questions whether it answers.
const RUNTIME_RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// The image backend of a node, its publication to a containerd, and its health.
pub(crate) struct Storage {
    description: String,
    /// The backend itself; pulls go through the manager, removals through the gate or the collector.
    backend: Arc<dyn Backend>,
    /// Backend in its concrete type, if it is one of larder's.
    handle: Option<BackendHandle>,
    /// Publishes the images of the store to a containerd.
    publisher: Option<Arc<StorePublisher>>,
    /// Socket of the containerd that uses images of the store, where this process does not publish to it.
    unpublished: Option<String>,
    health: HealthMonitor,
}

impl Storage {
    /// Storage in an opened backend, and a collector's builder that knows how to ask it. With `has_publisher`, images
    /// are published to the containerd of the settings, except hidden ones.
    pub(crate) fn build(
        config: &Config,
        mut handle: BackendHandle,
        has_publisher: bool,
        hidden: Option<&Arc<HiddenImages>>,
        observability: &Arc<Observability>,
    ) -> (Storage, CollectorBuilder) {
        let publisher = handle.store().filter(|_| has_publisher);
        let publisher = publisher.and_then(|store| StorePublisher::of(store, config, hidden.cloned()));
        let publisher = publisher.map(Arc::new);
        if let Some(publisher) = &publisher {
            handle.publish_with(Arc::clone(publisher));
        }
        for runtime in handle
            .runtime()
            .map(Arc::as_ref)
            .into_iter()
            .chain(publisher.iter().map(|publisher| publisher.cri()))
        {
            runtime.observe_with(observability.metrics().clone());
            observability.metrics().runtime_configured();
        }
        if let Some(store) = handle.store() {
            store.store().observe_fills(observability.metrics().store_configured());
            let events = Arc::clone(observability);
            store.store().observe_damage(Box::new(move |damage| events.record_damage(damage)));
        }
        let (backend, mut collector) =
            gc_wiring::backend_and_collector(&handle, config, publisher.as_deref());
        let unpublished =
            publisher::socket(config).filter(|_| handle.store().is_some() && publisher.is_none());
        if let Some(socket) = unpublished {
            collector = collector.retention_source(Arc::new(UnknownContainers(socket.to_owned())));
        }
        if let Some(cache) = docker::builder_cache(&handle).filter(|_| config.prune_build_cache) {
            collector = collector.reclaimer(cache);
        }
        let (description, unpublished) = (handle.description(), unpublished.map(str::to_owned));
        let storage = Storage {
            publisher,
            unpublished,
            ..Storage::of(description, backend, Some(handle), observability)
        };
        (storage, collector)
    }

    /// Storage in a backend of another program, and a collector's builder that asks nothing else.
    pub(crate) fn on_backend(
        description: &str,
        backend: Arc<dyn Backend>,
        observability: &Arc<Observability>,
    ) -> (Storage, CollectorBuilder) {
        let collector = Collector::builder(Arc::clone(&backend));
        (Storage::of(description.to_owned(), backend, None, observability), collector)
    }

    fn of(
        description: String,
        backend: Arc<dyn Backend>,
        handle: Option<BackendHandle>,
        observability: &Arc<Observability>,
    ) -> Storage {
        let runtime = handle.as_ref().and_then(BackendHandle::runtime).cloned();
        let health =
            HealthMonitor::new(Arc::clone(&backend), runtime, description.clone(), Arc::clone(observability));
        Storage { description, backend, handle, publisher: None, unpublished: None, health }
    }

    /// A fake backend that is also known by this handle.
    #[cfg(test)]
    pub(crate) fn with_handle(self, handle: BackendHandle) -> Storage {
        Storage { handle: Some(handle), ..self }
    }

    /// A description of the backend, for operators.
    pub(crate) fn description(&self) -> &str {
        &self.description
    }

    /// The backend.
    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The backend in its concrete type; `None` for one of the embedding program.
    pub(crate) fn handle(&self) -> Option<&BackendHandle> {
        self.handle.as_ref()
    }

    /// larder's own store, if that is the backend.
    pub(crate) fn store(&self) -> Option<&StoreBackend> {
        self.handle.as_ref().and_then(BackendHandle::store)
    }

    /// The container runtime, if that is the backend.
    pub(crate) fn runtime(&self) -> Option<&Arc<CriBackend>> {
        self.handle.as_ref().and_then(BackendHandle::runtime)
    }

    /// Publishes the images of the store to a containerd, if the settings name one.
    pub(crate) fn publisher(&self) -> Option<&Arc<StorePublisher>> {
        self.publisher.as_ref()
    }

    /// larder's own store, for calls that need it.
    pub(crate) fn require_store(&self) -> Result<&StoreBackend, Error> {
        self.store().ok_or_else(|| {
            Error::failed(format!("requires larder's own store, but the backend is {}", self.description))
                .hint(Hint::from("select a store with ").setting("root", "DIR").text(", or omit the backend"))
        })
    }

    /// Fails where images are published to a containerd that only a daemon asks for its containers.
    pub(crate) fn require_publisher(&self) -> Result<(), Error> {
        match &self.unpublished {
            Some(socket) => Err(Error::failed(publisher::daemon_required(socket))
                .hint(Hint::from("start it with ").command(["serve"]).text(", or restart it"))),
            None => Ok(()),
        }
    }

    /// Health of the backend.
    pub(crate) fn health(&self) -> &HealthMonitor {
        &self.health
    }

    /// The error of calls while the backend is known to hang, or is another larder.
    pub(crate) fn unusable(&self) -> Option<BackendError> {
        match &*self.health.state() {
            BackendHealth::Down { why, unusable: true, .. } => {
                let message = format!("the image backend is unavailable: {why}");
                Some(BackendError::call(CallErrorKind::Unavailable, message))
            }
            _ => None,
        }
    }

    /// Load of the registries and mirrors that the store asks, for metrics.
    pub(crate) fn registry_series(&self) -> Vec<RegistryLoad> {
        self.store().map(|store| store.puller().client().series()).unwrap_or_default()
    }

    /// Load of the registries and mirrors that the store asks.
    pub(crate) fn registry_loads(&self) -> Vec<RegistryLoad> {
        self.store().map(|store| store.puller().client().loads()).unwrap_or_default()
    }

    /// The layers of the store that are not complete, the oldest first. Blocks.
    pub(crate) fn incomplete_layers(&self) -> Result<Vec<IncompleteLayer>, StoreError> {
        self.store().map_or(Ok(Vec::new()), |store| store.store().incomplete_layers(&ClockReading::now()))
    }

    /// The containers and mounts that may have read zeros of incomplete layers, and are still there. Blocks.
    pub(crate) fn suspects(&self) -> Result<Vec<Suspect>, StoreError> {
        self.store().map_or(Ok(Vec::new()), |store| store.store().suspects())
    }

    /// Images with layers that are recorded as damaged.
    pub(crate) async fn damaged_images(&self) -> Vec<DamagedImage> {
        let Some(store) = self.store().map(|store| store.store().clone()) else { return Vec::new() };
        let listed = spawn_blocking(move || store.damaged_images()).await;
        // The blocking call fails only when the runtime stops.
        listed.unwrap_or(Ok(Vec::new())).unwrap_or_else(|error| {
            tracing::warn!(error = error_chain(&error), "cannot list damaged images");
            Vec::new()
        })
    }

    /// Verification of layers when they are read; `None` where reads are not verified.
    pub(crate) fn read_verification(&self) -> Option<ReadVerification> {
        self.store()?.store().read_verification()
    }

    /// Warnings about the registries that requested a wait, and about images that no known credential completes.
    pub(crate) fn warnings(&self) -> impl Iterator<Item = String> {
        let refused = self.store().map(|store| store.puller().refused_fills()).unwrap_or_default();
        let refused = refused.into_iter().map(|image| {
            format!("{image}: incomplete, its registry refuses the credentials of this node; pull it again")
        });
        let limited = self.registry_loads().into_iter().filter(|load| !load.held_for.is_zero());
        let limited = limited.map(|load| {
            let left = go_format::duration(Duration::from_secs(load.held_for.as_secs()));
            format!("registry {}: rate limited; requests of some repositories wait for {left}", load.host)
        });
        limited.chain(refused)
    }

    /// Waits until the runtime answers that runs the images; for a bounded time, since what it does not answer is an
    /// error then.
    pub(super) async fn wait_for_runtime(&self) {
        let runtime: &dyn Backend = match &self.publisher {
            Some(publisher) => publisher.cri(),
            None => &*self.backend,
        };
        let answers = retry_until(RUNTIME_RETRY, async || runtime.info().await.is_ok());
        let _ = time::timeout(RUNTIME_STARTS_WITHIN, answers).await;
    }

    /// Checks the health of the backend, and publishes what containerd lacks, until dropped.
    pub(super) async fn run(&self) {
        let publish = async {
            if let Some(publisher) = &self.publisher {
                publisher.run().await;
            }
        };
        tokio::join!(self.health.run(), publish);
    }
}
