//! Collection in a real containerd.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{
    Containerd, ContainerdOptions, ImageBuilder, Package, RegistryOptions, RegistryProcess, require,
};
use serde_json::Value;
use tokio::time::Instant;

use super::{
    MeasuredGc, MountedDisk, ages, agree, family, gc, killed_rounds_change_nothing, layer, number, removals,
};
use crate::world::{LarderOutput, LarderProcess, end_leases, larder_in};

/// A containerd whose root and state are on the disk, and a registry that it knows.
pub(super) fn peers(disk: &MountedDisk) -> (Containerd, RegistryProcess) {
    let registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
    let options = ContainerdOptions { below: Some(disk.path()), ..ContainerdOptions::default() };
    let containerd = Containerd::start_with(options).unwrap();
    containerd.add_registry(&registry).unwrap();
    (containerd, registry)
}

/// larder on this containerd, whose disk has no room for the default reserve.
pub(super) fn larder_on(containerd: &Containerd, home: &Path, arguments: &[&str]) -> Command {
    let mut command = larder_in(home);
    let settings = home.join("larder.yaml");
    let text = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n\
                store: {reserveBytes: 1MiB, reserveInodes: 10}\n";
    fs_err::write(&settings, text).unwrap();
    command.env("LARDER_CONFIG", settings);
    command.args(["--backend", &containerd.endpoint(), "--state"]).arg(home.join("state")).args(arguments);
    command
}

/// Runs larder on this containerd to its end.
pub(super) fn on(containerd: &Containerd, home: &Path, arguments: &[&str]) -> LarderOutput {
    LarderProcess::start(larder_on(containerd, home, arguments)).finish()
}

#[test]
fn one_round_reaches_the_low_mark_on_containerd() {
    if !require(&[Package::Containerd, Package::DockerRegistry, Package::Skopeo]).is_available() {
        return;
    }
    let Some(disk) = MountedDisk::new(192) else { return };
    let home = disk.home();
    let (mut containerd, registry) = peers(&disk);
    let names: Vec<String> = family(6 << 20, 3 << 19)
        .enumerate()
        .map(|(number, (_, image))| {
            let name = format!("family/app-{number:02}:1");
            image.push(&registry, &name).unwrap();
            registry.image(&name)
        })
        .collect();
    // Collection begins before the images come, so that what is wanted is written down.
    on(&containerd, home, &gc(&[])).expect(0);
    for name in &names {
        on(&containerd, home, &["pull", name]).expect(0);
    }
    end_leases(&home.join("state"));
    assert!(disk.used_percent() > 65.0, "{}", disk.used_percent());
    let planned = on(&containerd, home, &gc(&["--dry-run"])).expect(0).json();
    containerd.stop();
    containerd.start_again().unwrap();
    let again = on(&containerd, home, &gc(&["--dry-run"])).expect(0).json();
    assert_eq!(ages(&planned), ages(&again), "a restart changes neither order nor ages");

    let larder = |arguments: &[&str]| on(&containerd, home, arguments);
    let round = MeasuredGc::run(&disk, larder);
    assert_eq!(removals(&round.planned), removals(&round.done));
    round.ends_at_the_low_mark();
    round.prints_freed_bytes(larder);
    for removal in round.done["removals"].as_array().unwrap() {
        agree("one removal", number(removal, "promisedBytes"), number(removal, "freedBytes"));
        assert_eq!(removal["estimated"], false);
    }
}

#[test]
fn a_killed_round_changes_neither_ages_nor_order_on_containerd() {
    if !require(&[Package::Containerd, Package::DockerRegistry, Package::Skopeo]).is_available() {
        return;
    }
    let Some(disk) = MountedDisk::new(192) else { return };
    let home = disk.home();
    let (containerd, registry) = peers(&disk);
    on(&containerd, home, &gc(&[])).expect(0);
    let load = || {
        for number in 0..12 {
            let name = format!("app-{number}:1");
            ImageBuilder::new().layer(layer(number, 1 << 20)).push(&registry, &name).unwrap();
            on(&containerd, home, &["pull", &registry.image(&name)]).expect(0);
        }
        end_leases(&home.join("state"));
    };
    killed_rounds_change_nothing(&home.join("state/history.jsonl"), load, |arguments| {
        larder_on(&containerd, home, arguments)
    });
}

/// The removal of an image in a report.
fn removal_of<'a>(report: &'a Value, name: &str) -> Option<&'a Value> {
    let mut removals = report["removals"].as_array().unwrap().iter();
    removals.find(|removal| removal["names"].as_array().unwrap().iter().any(|known| known == name))
}

/// Why a report retains an image.
fn why_retained(report: &Value, name: &str) -> String {
    let mut images = report["images"].as_array().unwrap().iter();
    let image = images.find(|image| image["names"].as_array().unwrap().iter().any(|known| known == name));
    image.unwrap_or_else(|| panic!("{name} in {report}")).to_string()
}

/// Bytes of the only layer of an image, as an archive and unpacked.
const LAYER_SIZE: usize = 6 << 20;

#[test]
fn what_others_use_in_containerd_is_neither_promised_nor_removed() {
    if !require(&[Package::Containerd, Package::DockerRegistry, Package::Skopeo]).is_available() {
        return;
    }
    let Some(disk) = MountedDisk::new(256) else { return };
    let home = disk.home();
    let (containerd, registry) = peers(&disk);
    on(&containerd, home, &gc(&[])).expect(0);
    let mut seed = 0;
    let mut pull = |name: &str| {
        seed += 1;
        let layout = ImageBuilder::new().layer(layer(seed, LAYER_SIZE)).push(&registry, name).unwrap();
        let name = registry.image(name);
        on(&containerd, home, &["pull", &name]).expect(0);
        (name, layout)
    };
    let ctr = |namespace: &str, arguments: &[&str]| containerd.ctr(namespace, arguments).unwrap();

    // As BuildKit does: a flat lease of a snapshot.
    let (built, _) = pull("built:1");
    let snapshots = ctr("k8s.io", &["snapshots", "ls"]);
    let chain = snapshots.lines().find(|line| line.contains("Committed")).expect("the only snapshot");
    let chain = chain.split_whitespace().next().unwrap();
    ctr("k8s.io", &["leases", "create", "--expires", "0", "--id", "build", "containerd.io/gc.flat=true"]);
    containerd.add_to_lease("k8s.io", "build", "snapshots/overlayfs", chain).unwrap();
    // With everything that its manifest references; and a lease that expires, later than it gets its resource:
    // containerd removes expired leases at any time.
    let life = Duration::from_secs(4);
    for (image, expires) in [("leased:1", Duration::ZERO), ("expired:1", life)] {
        let (_, layout) = pull(image);
        let lease = image.trim_end_matches(":1");
        ctr("k8s.io", &["leases", "create", "--expires", &format!("{}s", expires.as_secs()), "--id", lease]);
        containerd.add_to_lease("k8s.io", lease, "content", &layout.manifest_digest).unwrap();
    }
    let leased_at = Instant::now();
    let (elsewhere, _) = pull("elsewhere:1");
    ctr("other", &["images", "pull", "--plain-http", &elsewhere]);
    let (unused, _) = pull("unused:1");
    let (used, _) = pull("used:1");
    ctr("k8s.io", &["containers", "create", &used, "demo"]);
    end_leases(&home.join("state"));
    wait_until("the second lease has expired", || leased_at.elapsed() > life);

    let all = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0", "-o", "json"];
    let planned = on(&containerd, home, &[&all[..], &["--dry-run"]].concat()).expect(0).json();
    let why = why_retained(&planned, &used);
    assert!(why.contains("in use by container demo of containerd namespace k8s.io\""), "{why}");
    let (free, _) = disk.free();
    let done = on(&containerd, home, &all).expect(0).json();
    let freed = disk.free().0 - free;
    let promised = number(&planned, "promisedBytes");
    eprintln!("{promised} promised, {freed} freed");
    agree("all removals", promised, freed);
    let layer = LAYER_SIZE as u64;
    let (leased, expired) = (registry.image("leased:1"), registry.image("expired:1"));
    let expected = [
        (&built, layer), // its archive
        (&leased, 0),
        (&expired, 2 * layer),
        (&elsewhere, layer), // its snapshot
        (&unused, 2 * layer),
    ];
    for (name, expected) in expected {
        let removal = removal_of(&done, name).unwrap_or_else(|| panic!("{name} in {done}"));
        agree(name, number(removal, "promisedBytes"), expected);
        agree(name, number(removal, "promisedBytes"), number(removal, "freedBytes"));
        assert_eq!(removal["estimated"], false, "{name}");
    }
    assert!(removal_of(&done, &used).is_none());
    let refused = on(&containerd, home, &["rm", &used]).expect(1);
    let expected = format!("{used}: in use by container demo of containerd namespace k8s.io");
    assert!(refused.stderr.contains(&expected), "{refused:?}");
    let usage = on(&containerd, home, &["df", "-o", "json"]).expect(0).json();
    assert_eq!(number(&usage["images"]["inUse"], "count"), 1, "{usage}");
    assert!(ctr("k8s.io", &["images", "ls", "-q"]).contains(&used));
}
