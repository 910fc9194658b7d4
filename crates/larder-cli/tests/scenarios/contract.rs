//! The contract of a backend, on a real containerd.

use larder_cri::CriConfig;
use larder_testkit::backend_suite::check;
use larder_testkit_peers::fixtures::ContainerdFixture;

use crate::world::RuntimeFixture;

#[test]
fn containerd_keeps_the_contract_of_a_backend() {
    let Some(world) = RuntimeFixture::plain() else { return };
    let fixture = ContainerdFixture::new(world.containerd(), &world.registry, CriConfig::default()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(check(&fixture));
}
