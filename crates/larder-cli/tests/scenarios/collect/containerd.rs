//! Collection in a real containerd.

use std::path::Path;
use std::process::Command;

use larder_testkit_peers::{
    Containerd, ContainerdOptions, ImageBuilder, Package, RegistryOptions, RegistryProcess, require,
};

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

/// larder on this containerd.
fn larder_on(containerd: &Containerd, home: &Path, arguments: &[&str]) -> Command {
    let mut command = larder_in(home);
    command.args(["--backend", &containerd.endpoint(), "--state"]).arg(home.join("state")).args(arguments);
    command
}

/// The same, run to its end.
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
    for number in 0..12 {
        let name = format!("app-{number}:1");
        ImageBuilder::new().layer(layer(number, 1 << 20)).push(&registry, &name).unwrap();
        on(&containerd, home, &["pull", &registry.image(&name)]).expect(0);
    }
    end_leases(&home.join("state"));
    killed_rounds_change_nothing(&home.join("state/history.jsonl"), |arguments| {
        larder_on(&containerd, home, arguments)
    });
}
