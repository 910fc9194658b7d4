//! A real containerd, behind whose registry stands a gate that holds pulls.

use std::sync::Arc;

use larder::backend::{Backend as _, ImageSpec};
use larder_cri::{CriBackend, CriConfig, Endpoint};

use super::{Fixture, Names};
use crate::peers::{Containerd, Gate, Image, Registry, Result};

/// A containerd and what it can pull. No container runs in it.
#[derive(Debug)]
pub struct ContainerdFixture {
    names: Names,
    endpoint: Endpoint,
    config: CriConfig,
    gate: Arc<Gate>,
}

impl ContainerdFixture {
    /// Pushes images to this registry, and lets this containerd reach it through a gate. Both must outlive the fixture.
    ///
    /// # Errors
    /// If an image cannot be pushed, or the gate not be opened.
    pub fn new(containerd: &Containerd, registry: &Registry, config: CriConfig) -> Result<ContainerdFixture> {
        for name in ["contract/app:v1", "contract/app:stable"] {
            Image::small(1, 200_000).push(registry, name)?;
        }
        Image::small(2, 200_000).push(registry, "contract/other:v1")?;
        let gate = Gate::in_front_of(registry.port())?;
        containerd.knows_at(&gate.address(), "http", None)?;
        let names = Names {
            image: gate.image("contract/app:v1"),
            alias: gate.image("contract/app:stable"),
            untouched: gate.image("contract/other:v1"),
            unknown: gate.image("contract/nothing:v1"),
        };
        let endpoint = Endpoint::at(containerd.socket());
        Ok(ContainerdFixture { names, endpoint, config, gate: Arc::new(gate) })
    }
}

impl Fixture for ContainerdFixture {
    type Backend = CriBackend;

    fn names(&self) -> &Names {
        &self.names
    }

    async fn empty(&self) -> CriBackend {
        let backend = CriBackend::new(self.endpoint.clone(), self.config.clone());
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

    async fn run_container(&self, _: &str) -> bool {
        false // it would need a sandbox image and a network
    }
}
