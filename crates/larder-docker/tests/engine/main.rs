//! A real Docker Engine on loopback, with private state.

#![allow(clippy::unwrap_used, reason = "a scenario that cannot be set up has failed")]

mod bad_input;
mod clocks;
mod collecting;
mod containerd_store;
mod events;
mod fake;
mod world;

use larder_testkit::backend_suite::check;
use larder_testkit_peers::fixtures::DockerFixture;

use crate::world::{EngineFixture, block_on};

#[test]
fn an_engine_keeps_the_contract_of_a_backend() {
    let Some(world) = EngineFixture::new() else { return };
    let fixture = DockerFixture::new(&world.engine, &world.registry).unwrap();
    block_on(check(&fixture));
}
