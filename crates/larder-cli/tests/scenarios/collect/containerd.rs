//! Collection in a real containerd.

use std::path::Path;

use larder_testkit::peers::{Containerd, ContainerdOptions, Package, Registry, RegistryOptions, require};

use super::{Disk, Round, ages, family, gc, removals};
use crate::world::{Run, Running, larder_in};

/// larder on a containerd whose root and state are on the disk.
pub(super) fn on(containerd: &Containerd, home: &Path, arguments: &[&str]) -> Run {
    let mut command = larder_in(home);
    command.args(["--backend", &containerd.endpoint(), "--state"]).arg(home.join("state")).args(arguments);
    Running::start(command).finish()
}

#[test]
fn one_round_reaches_the_low_mark_on_containerd() {
    if !require(&[Package::Containerd, Package::DockerRegistry, Package::Skopeo]).is_available() {
        return;
    }
    let Some(disk) = Disk::new(192) else { return };
    let home = disk.folder.path();
    let registry = Registry::start(RegistryOptions::default()).unwrap();
    let options = ContainerdOptions { below: Some(disk.path()), ..ContainerdOptions::default() };
    let mut containerd = Containerd::start_with(options).unwrap();
    containerd.knows(&registry).unwrap();
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
    assert!(disk.used_percent() > 65.0, "{}", disk.used_percent());
    let planned = on(&containerd, home, &gc(&["--dry-run"])).expect(0).json();
    containerd.stop();
    containerd.start_again().unwrap();
    let again = on(&containerd, home, &gc(&["--dry-run"])).expect(0).json();
    assert_eq!(ages(&planned), ages(&again), "a restart changes neither order nor ages");

    let larder = |arguments: &[&str]| on(&containerd, home, arguments);
    let round = Round::run(&disk, larder);
    let (planned, done) = (removals(&round.planned), removals(&round.done));
    eprintln!("planned {} removals, did {}", planned.len(), done.len());
    round.ends_at_the_low_mark();
    round.tells_what_came_free(larder);
    // Containerd does not tell what layers take: how many must go is a guess, in which order is not.
    let ids = |removals: &[(String, u64)]| removals.iter().map(|(id, _)| id.clone()).collect::<Vec<_>>();
    let both = planned.len().min(done.len());
    assert_eq!(ids(&planned[..both]), ids(&done[..both]));
}
