//! A real Docker Engine, behind whose registry stands a gate that holds pulls.

use std::sync::Arc;

use larder::backend::{Backend as _, ImageSpec};
use larder_docker::{DockerBackend, DockerConfig, EngineHost};

use super::{Fixture, Names};
use crate::peers::{Dockerd, Gate, Image, Registry, Result};

/// A Docker Engine and what it can pull.
#[derive(Debug)]
pub struct DockerFixture<'a> {
    names: Names,
    engine: &'a Dockerd,
    gate: Arc<Gate>,
}

impl<'a> DockerFixture<'a> {
    /// Pushes images to this registry, which the engine reaches through a gate. Both must outlive the fixture.
    ///
    /// # Errors
    /// If an image cannot be pushed, or the gate not be opened.
    pub fn new(engine: &'a Dockerd, registry: &Registry) -> Result<DockerFixture<'a>> {
        for name in ["contract/app:v1", "contract/app:stable"] {
            Image::small(1, 200_000).push(registry, name)?;
        }
        Image::small(2, 200_000).push(registry, "contract/other:v1")?;
        let gate = Gate::in_front_of(registry.port())?;
        let names = Names {
            image: gate.image("contract/app:v1"),
            alias: gate.image("contract/app:stable"),
            untouched: gate.image("contract/other:v1"),
            unknown: gate.image("contract/nothing:v1"),
        };
        Ok(DockerFixture { names, engine, gate: Arc::new(gate) })
    }
}

impl Fixture for DockerFixture<'_> {
    type Backend = DockerBackend;

    fn names(&self) -> &Names {
        &self.names
    }

    async fn empty(&self) -> DockerBackend {
        let host = EngineHost::Unix(self.engine.socket());
        let backend = DockerBackend::new(host, DockerConfig::default()).expect("there is no TLS");
        for name in [&self.names.image, &self.names.alias, &self.names.untouched] {
            backend.remove(&ImageSpec::named(name)).await.expect("images can be removed");
        }
        backend
    }

    async fn hold_next_pull(&self) {
        self.gate.hold_blobs_after(0);
    }

    async fn pull_held(&self) {
        let gate = Arc::clone(&self.gate);
        let waiting = tokio::task::spawn_blocking(move || gate.wait_until_held(1));
        waiting.await.expect("the pull comes to the gate");
    }

    async fn let_pulls_go(&self) {
        self.gate.open();
    }

    async fn run_container(&self, image_id: &str) -> bool {
        self.engine.create_container(image_id, "contract").expect("a container");
        true
    }

    /// Engines before 28 have no such mounts.
    fn mounts_images(&self) -> bool {
        false
    }
}
