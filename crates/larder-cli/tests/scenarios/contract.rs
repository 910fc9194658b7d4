//! The contract of a backend, on a real containerd.

use larder::backend::{Backend, ImageSpec};
use larder_cri::{CriBackend, CriConfig, Endpoint};
use larder_testkit::backend_suite::{Fixtures, check};
use larder_testkit::peers::Image;

use crate::world::World;

#[test]
fn containerd_keeps_the_contract_of_a_backend() {
    let Some(world) = World::plain() else { return };
    let layout = Image::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    Image::small(1, 50_000).push(&world.registry, "shop/alias:1").unwrap();
    let fixtures = Fixtures {
        image: world.registry.image("shop/web:1"),
        alias: world.registry.image("shop/alias:1"),
        unknown: world.registry.image("shop/unknown:1"),
    };
    let endpoint = Endpoint::parse(&world.containerd.endpoint()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(check(
        async || {
            let backend = CriBackend::new(endpoint.clone(), CriConfig::default());
            backend.remove(&ImageSpec::named(&layout.image_id)).await.unwrap();
            backend
        },
        &fixtures,
    ));
}
