//! Collection of real images: `LARDER_FAMILY=DIR` names an OCI layout with forty of them on common bases, of about
//! half a gigabyte in all. What was done is printed, for `docs/benchmarks.md`.

use std::path::{Path, PathBuf};
use std::process::Command;

use larder_testkit_peers::packages::find_program;
use larder_testkit_peers::{Containerd, Package, RegistryProcess, require};
use serde_json::Value;

use super::containerd::{on, peers};
use super::{MeasuredGc, MountedDisk, docker, gc, number, removals, run};
use crate::world::{LarderOutput, end_leases};

fn family() -> Option<PathBuf> {
    let dir = std::env::var_os("LARDER_FAMILY").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    if dir.is_none() {
        eprintln!("==== ONLY MADE-UP IMAGES: LARDER_FAMILY=DIR names an OCI layout with a real family ====");
    }
    dir
}

#[test]
fn a_real_family_in_the_store_is_removed_as_the_dry_run_planned() {
    let Some(family) = family() else { return };
    let Some(disk) = MountedDisk::new(910) else { return };
    let load = ["load", &family.to_string_lossy(), "--name", "registry.example/family"];
    disk.larder(&load).expect(0);
    disk.end_leases();
    assert!(disk.used_percent() > 65.0, "{}", disk.used_percent());
    let larder = |arguments: &[&str]| disk.larder(arguments);
    let round = MeasuredGc::run(&disk, larder);
    assert_eq!(removals(&round.planned), removals(&round.done));
    round.ends_at_the_low_mark();
    round.prints_freed_bytes(larder);
}

/// Rounds as kubelet does them, until one has nothing to do or nothing left to remove.
fn nominal_rounds(disk: &MountedDisk, larder: impl Fn(&[&str]) -> LarderOutput) {
    for round in 1..=40 {
        let (before, _) = disk.free();
        let run = larder(&gc(&["--kubelet"]));
        let report = run.json();
        let (after, _) = disk.free();
        let (removed, needed) = (removals(&report).len(), number(&report, "neededBytes"));
        let percent = disk.used_percent();
        eprintln!(
            "nominal round {round}: {needed} wanted, {removed} removed, {} freed, {percent:.1}%",
            after - before
        );
        if removed == 0 || percent <= 45.0 {
            return;
        }
    }
}

#[test]
fn a_real_family_in_the_store_as_kubelet_counts() {
    let Some(family) = family() else { return };
    let Some(disk) = MountedDisk::new(910) else { return };
    let load = ["load", &family.to_string_lossy(), "--name", "registry.example/family"];
    disk.larder(&load).expect(0);
    disk.end_leases();
    nominal_rounds(&disk, |arguments| disk.larder(arguments));
}

/// Names of the images of a layout, as in its index.
fn tags(layout: &Path) -> Vec<String> {
    let index: Value = serde_json::from_slice(&fs_err::read(layout.join("index.json")).unwrap()).unwrap();
    let name =
        |image: &Value| image["annotations"]["org.opencontainers.image.ref.name"].as_str().map(str::to_owned);
    index["manifests"].as_array().unwrap().iter().filter_map(name).collect()
}

/// A containerd on this disk with the whole family in it.
fn filled(family: &Path, disk: &MountedDisk) -> (Containerd, RegistryProcess) {
    let home = disk.home();
    let (containerd, registry) = peers(disk);
    on(&containerd, home, &gc(&[])).expect(0);
    for name in pushed(family, &registry) {
        on(&containerd, home, &["pull", &name]).expect(0);
    }
    end_leases(&home.join("state"));
    (containerd, registry)
}

/// The whole family in a registry, one after the other: names to pull them by.
fn pushed(family: &Path, registry: &RegistryProcess) -> impl Iterator<Item = String> {
    tags(family).into_iter().map(move |tag| {
        let name = registry.image(&format!("family/{tag}:1"));
        let (from, to) = (format!("oci:{}:{tag}", family.display()), format!("docker://{name}"));
        let mut skopeo = Command::new(find_program("skopeo").unwrap());
        run(skopeo.args(["--insecure-policy", "copy", "-q", "--dest-tls-verify=false", &from, &to]));
        name
    })
}

#[test]
fn a_real_family_in_docker_is_down_to_the_low_mark_in_one_round() {
    let Some(family) = family() else { return };
    if !docker::available() {
        return;
    }
    let Some(disk) = MountedDisk::new(910) else { return };
    let (engine, registry) = docker::peers(&disk);
    let larder = |arguments: &[&str]| docker::on(&engine, disk.home(), arguments);
    let mut names = Vec::new();
    for name in pushed(&family, &registry) {
        larder(&["pull", "-q", &name]).expect(0);
        names.push(name);
    }
    end_leases(&disk.home().join("state"));
    assert!(disk.used_percent() > 65.0, "{}", disk.used_percent());
    engine.create_container(&names[0], "stopped").unwrap();
    let round = MeasuredGc::run(&disk, larder);
    assert_eq!(removals(&round.planned), removals(&round.done));
    round.ends_at_the_low_mark();
    round.prints_freed_bytes(larder);
    assert!(engine.image_names().unwrap().contains(&names[0]), "a stopped container uses it");
}

#[test]
fn a_real_family_in_containerd_as_kubelet_counts() {
    let Some(family) = family() else { return };
    if !require(&[Package::Containerd, Package::DockerRegistry, Package::Skopeo]).is_available() {
        return;
    }
    let Some(disk) = MountedDisk::new(1600) else { return };
    let (containerd, _registry) = filled(&family, &disk);
    nominal_rounds(&disk, |arguments| on(&containerd, disk.home(), arguments));
}

#[test]
fn a_real_family_in_containerd_is_down_to_the_low_mark_in_one_round() {
    let Some(family) = family() else { return };
    if !require(&[Package::Containerd, Package::DockerRegistry, Package::Skopeo]).is_available() {
        return;
    }
    let Some(disk) = MountedDisk::new(1600) else { return };
    let (containerd, _registry) = filled(&family, &disk);
    let larder = |arguments: &[&str]| on(&containerd, disk.home(), arguments);
    assert!(disk.used_percent() > 65.0, "{}", disk.used_percent());
    let round = MeasuredGc::run(&disk, larder);
    assert_eq!(removals(&round.planned), removals(&round.done));
    round.ends_at_the_low_mark();
    round.prints_freed_bytes(larder);
}
