//! Collection in a real Docker Engine.

use std::path::Path;
use std::process::Command;

use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit_peers::{
    Dockerd, DockerdOptions, ImageBuilder, Package, RegistryOptions, RegistryProcess, require,
};

use super::{MeasuredGc, MountedDisk, family, gc, killed_rounds_change_nothing, layer, number, removals};
use crate::world::{LarderOutput, LarderProcess, RuntimeFixture, end_leases, larder_in};

/// An engine whose root is on the disk, and a registry.
pub(super) fn peers(disk: &MountedDisk) -> (Dockerd, RegistryProcess) {
    let registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
    let engine =
        Dockerd::start_with(DockerdOptions { root_below: Some(disk.path()), ..DockerdOptions::default() })
            .unwrap();
    (engine, registry)
}

pub(super) fn available() -> bool {
    require(&[Package::DockerIo, Package::DockerRegistry, Package::Skopeo]).is_available()
}

/// larder on this engine, without any configuration.
fn larder_on(engine: &Dockerd, home: &Path, arguments: &[&str]) -> Command {
    let mut command = larder_in(home);
    command.env("DOCKER_HOST", engine.host()).args(["--backend", "docker", "--state"]);
    command.arg(home.join("state")).args(arguments);
    command
}

pub(super) fn on(engine: &Dockerd, home: &Path, arguments: &[&str]) -> LarderOutput {
    LarderProcess::start(larder_on(engine, home, arguments)).finish()
}

#[test]
fn one_round_reaches_the_low_mark_on_docker_and_touches_nothing_of_a_stopped_container() {
    if !available() {
        return;
    }
    let Some(disk) = MountedDisk::new(128) else { return };
    let home = disk.home();
    let (mut engine, registry) = peers(&disk);
    let names: Vec<String> = family(6 << 20, 3 << 19)
        .enumerate()
        .map(|(number, (_, image))| {
            let name = format!("family/app-{number:02}:1");
            image.push(&registry, &name).unwrap();
            registry.image(&name)
        })
        .collect();
    for name in &names {
        on(&engine, home, &["pull", "-q", name]).expect(0);
    }
    end_leases(&home.join("state"));
    // The image that came first would go first.
    let container = engine.create_container(&names[0], "stopped").unwrap();
    assert!(disk.used_percent() > 65.0, "{}", disk.used_percent());
    let planned = on(&engine, home, &gc(&["--dry-run"])).expect(0).json();
    engine.stop();
    engine.start_again().unwrap();
    let again = on(&engine, home, &gc(&["--dry-run"])).expect(0).json();
    assert_eq!(removals(&planned), removals(&again), "a restart does not change the order");

    let larder = |arguments: &[&str]| on(&engine, home, arguments);
    let round = MeasuredGc::run(&disk, larder);
    assert_eq!(removals(&round.planned), removals(&round.done));
    round.ends_at_the_low_mark();
    round.prints_freed_bytes(larder);
    let (mut promised, mut freed) = (0, 0);
    for removal in round.done["removals"].as_array().unwrap() {
        assert_eq!(removal["estimated"], false);
        (promised, freed) =
            (promised + number(removal, "promisedBytes"), freed + number(removal, "freedBytes"));
    }
    assert!(promised.abs_diff(freed) * 100 <= freed, "{promised} promised, {freed} freed");
    let left = engine.image_names().unwrap();
    assert!(left.contains(&names[0]), "a stopped container uses it: {left:?}");
    assert!(!left.contains(&names[1]), "the next oldest went: {left:?}");
    engine.remove_container(&container).unwrap();
}

#[test]
fn a_killed_round_changes_neither_ages_nor_order_on_docker() {
    if !available() {
        return;
    }
    let Some(disk) = MountedDisk::new(192) else { return };
    let home = disk.home();
    let (engine, registry) = peers(&disk);
    let load = || {
        for number in 0..12 {
            let name = format!("app-{number}:1");
            ImageBuilder::new().layer(layer(number, 1 << 20)).push(&registry, &name).unwrap();
            on(&engine, home, &["pull", "-q", &registry.image(&name)]).expect(0);
        }
        end_leases(&home.join("state"));
    };
    killed_rounds_change_nothing(&home.join("state/history.jsonl"), load, |arguments| {
        larder_on(&engine, home, arguments)
    });
}

#[test]
fn df_agrees_with_du_of_the_layer_store() {
    if !available() {
        return;
    }
    let Some(disk) = MountedDisk::new(192) else { return };
    let home = disk.home();
    let (engine, registry) = peers(&disk);
    for (number, (_, image)) in family(6 << 20, 3 << 19).take(8).enumerate() {
        let name = format!("family/app-{number:02}:1");
        image.push(&registry, &name).unwrap();
        on(&engine, home, &["pull", "-q", &registry.image(&name)]).expect(0);
    }
    engine.create_container(&registry.image("family/app-00:1"), "stopped").unwrap();
    let report = on(&engine, home, &["df", "-o", "json"]).expect(0).json();
    let docker = &report["docker"];
    let store = engine.root().join("overlay2");
    assert_eq!(docker["layerStore"].as_str(), store.to_str());
    let du = Command::new("du").args(["-s", "-B1"]).arg(&store).output().unwrap();
    let said: u64 = String::from_utf8(du.stdout).unwrap().split_whitespace().next().unwrap().parse().unwrap();
    let parts = number(&docker["images"], "sizeBytes") + number(&docker["containers"], "sizeBytes");
    assert!(parts.abs_diff(said) * 100 <= said * 2, "{parts} of images and containers, du {said}: {docker}");
    assert_eq!(number(docker, "layerStoreBytes"), said);
    // Two bases and eight applications, once each; docker images would count 8 * 7.5 MiB.
    assert_eq!(number(&docker["systemDf"], "layersBytes"), 2 * (6 << 20) + 8 * (3 << 19));
    let printed = on(&engine, home, &["df", "-v"]).expect(0).stdout;
    assert!(
        printed.contains("SYSTEM DF") && printed.contains("docker images counts it for each image"),
        "{printed}"
    );
}

#[test]
fn images_without_a_name_are_removed_first_and_keep_rules_apply() {
    let Some(world) = RuntimeFixture::with_docker(RegistryOptions::default()) else { return };
    let mut ids = Vec::new();
    for (number, name) in ["web:1", "base:1", "tool:1", "old:1"].into_iter().enumerate() {
        let image = ImageBuilder::new().layer(layer(number as u64, 100_000));
        image.push(&world.registry, &format!("shop/{name}")).unwrap();
        let run = world.larder(&["pull", "-q", &world.registry.image(&format!("shop/{name}"))]).expect(0);
        ids.push(run.stdout.trim().to_owned());
    }
    // An image without a name, as a build under the same name leaves it.
    let archive = |text: &str| TarBuilder::new().with(TarBuilderEntry::file("file", text)).finish();
    for text in ["first", "second"] {
        world.docker().import(&archive(text), "built", "latest").unwrap();
    }
    let all = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0", "-o", "json"];
    let fresh = world.larder(&[&all[..], &["--dry-run"]].concat()).expect(0).json();
    let goes: Vec<String> = removals(&fresh).into_iter().map(|(id, _)| id).collect();
    assert_eq!(goes.len(), 2, "what was built may go: {fresh}");
    assert!(!goes.iter().any(|id| ids.contains(id)), "what was just pulled may not: {fresh}");
    world.end_leases();
    world.larder(&["keep", "*/shop/base:*"]).expect(0);
    world.larder(&["keep", "*/shop/tool:*", "--ttl", "24h"]).expect(0);
    let plan = world.larder(&[&all[..], &["--dry-run"]].concat()).expect(0).json();
    let order: Vec<String> = removals(&plan).into_iter().map(|(id, _)| id).collect();
    assert!(!ids.contains(&order[0]), "the one without a name is first: {plan}");
    assert_eq!(order.len(), 4, "web, old, and what was built twice: {plan}");
    world.larder(&all).expect(0);
    let left = world.images();
    let kept = ["shop/base:1", "shop/tool:1"].map(|name| world.registry.image(name));
    assert_eq!(left, kept);
}
