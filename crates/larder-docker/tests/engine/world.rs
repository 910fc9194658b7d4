//! An engine, a registry, and a runtime to ask from.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;

use larder::backend::{Backend as _, BackendError, Image as Present, ImageSpec, ProgressReporter};
use larder::gc::{Collector, GcGoal, ImageUsageRecords, UsageRecordFileStore};
use larder::reference::ImageId;
use larder_docker::{DockerBackend, EngineConfig, EngineHost};
use larder_testkit_peers::{Dockerd, ImageBuilder, Package, RegistryOptions, RegistryProcess, require};

/// An empty engine, and a registry that it reaches.
pub(crate) struct EngineFixture {
    pub(crate) engine: Dockerd,
    pub(crate) registry: RegistryProcess,
}

impl EngineFixture {
    /// `None`, after a loud message, where real servers are not installed and this is not CI.
    pub(crate) fn new() -> Option<EngineFixture> {
        if !require(&[Package::DockerIo, Package::DockerRegistry, Package::Skopeo]).is_available() {
            return None;
        }
        let registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
        Some(EngineFixture { engine: Dockerd::start().unwrap(), registry })
    }

    pub(crate) fn backend(&self) -> Arc<DockerBackend> {
        let host = EngineHost::Unix(self.engine.socket());
        Arc::new(DockerBackend::new(host, EngineConfig::default()).unwrap())
    }

    /// Returns the use of images as another larder sees it after one query, with its records in this directory.
    pub(crate) fn look(&self, dir: &Path) -> Arc<ImageUsageRecords> {
        let backend = self.backend();
        let collector = Collector::builder(backend.clone())
            .layers(backend.layers())
            .feed(Arc::new(backend.feed()))
            .records(Arc::new(UsageRecordFileStore::new(dir.join("records.json"))))
            .build();
        block_on(async {
            collector.round(GcGoal::Detect, &collector.policy()).await.into_result().unwrap();
            collector.records()
        })
    }

    /// Pushes an image, and returns the name to pull it by.
    pub(crate) fn push(&self, name: &str, image: &ImageBuilder) -> String {
        image.push(&self.registry, name).unwrap();
        self.registry.image(name)
    }
}

pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

pub(crate) async fn pull(backend: &DockerBackend, name: &str) -> Result<ImageId, BackendError> {
    backend.pull(&ImageSpec::named(name), None, None, &ProgressReporter::unwatched()).await
}

pub(crate) async fn status(backend: &DockerBackend, name: &str) -> Option<Present> {
    backend.status(&ImageSpec::named(name)).await.unwrap()
}
