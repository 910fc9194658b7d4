//! Layers of the store that containerd retains when larder removes their image.

use larder_testkit_peers as peers;
use larder_testkit_peers::images::ImageBuilder;
use larder_testkit_peers::process::wait_until;
use serde_json::Value;

use super::SnapshotterFixture;

const LAYER_SIZE: usize = 1 << 20;

pub(super) fn removal_of<'a>(report: &'a Value, name: &str) -> &'a Value {
    let mut removals = report["removals"].as_array().unwrap().iter();
    let has_name = |removal: &&Value| removal["names"].as_array().unwrap().iter().any(|known| known == name);
    removals.find(has_name).unwrap_or_else(|| panic!("{name} in {report}"))
}

pub(super) fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} in {value}"))
}

#[test]
fn what_containerd_retains_is_not_promised() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    fixture.kill_larder();
    let socket = format!("  socket: {}\npull:\n  ensuredLease: 0s\n", fixture.containerd.endpoint());
    fixture.start_larder_with(&socket);
    let mut known: Vec<String> = Vec::new();
    let mut pull = |name: &str, seed| {
        let layer = peers::LayerFiles::new().noise("data", LAYER_SIZE, seed);
        ImageBuilder::new().layer(layer).push(&fixture.world.registry, name).unwrap();
        let name = fixture.world.registry.image(name);
        fixture.daemon().pull(&name).unwrap();
        let all = fixture.snapshots();
        let chain = all.iter().find(|chain| !known.contains(chain)).expect("a snapshot").clone();
        known = all;
        (name, chain)
    };
    let (leased, chain) = pull("leased:1", 1);
    fixture.ctr(&["leases", "create", "--expires", "0", "--id", "build", "containerd.io/gc.flat=true"]);
    fixture.containerd.add_to_lease("k8s.io", "build", "snapshots/larder", &chain).unwrap();
    let (tagged, _) = pull("tagged:1", 2);
    fixture.ctr(&["images", "tag", &tagged, "other.example/tagged:1"]);
    let (elsewhere, chain) = pull("elsewhere:1", 3);
    fixture.containerd.ctr("other", &["leases", "create", "--expires", "0", "--id", "all"]).unwrap();
    fixture.containerd.add_to_lease("other", "all", "snapshots/larder", &chain).unwrap();
    let unpacked = fixture.containerd.prepare_layer("other", "larder", "", &chain);
    assert!(unpacked.is_err(), "the store has it, and it was pulled anonymously");
    let (unused, _) = pull("unused:1", 4);

    let socket = fixture.world.path("larder.sock");
    let all = [
        "--daemon",
        &socket,
        "gc",
        "--all-unused",
        "--force",
        "--minimum-image-ttl-duration=0",
        "-o",
        "json",
    ];
    let planned = fixture.world.larder(&[&all[..], &["--dry-run"]].concat()).expect(0).json();
    let done = fixture.world.larder(&all).expect(0).json();
    let layer = LAYER_SIZE as u64;
    for (name, expected) in [(&leased, 0), (&tagged, 0), (&elsewhere, 0), (&unused, layer)] {
        let removal = removal_of(&done, name);
        let (promised, freed) = (number(removal, "promisedBytes"), number(removal, "freedBytes"));
        assert_eq!(promised, freed, "{removal}");
        assert!(promised.abs_diff(expected) < 100_000, "{name}: {promised}");
        assert_eq!(number(removal_of(&planned, name), "promisedBytes"), promised, "{name}");
    }
    assert_eq!(fixture.in_store("layers"), 3, "what containerd retains");

    fixture.ctr(&["images", "rm", "other.example/tagged:1"]);
    fixture.containerd.ctr("other", &["leases", "rm", "--sync", "all"]).unwrap();
    fixture.ctr(&["leases", "rm", "--sync", "build"]);
    wait_until("containerd has removed all snapshots", || fixture.in_store("layers") == 0);
}
