//! Images for other machines, beside the node's own of the same name.

use larder::reference::Platform;
use larder_testkit_peers::{ImageBuilder, LayerFiles, Package, require};
use serde_json::Value;

use super::MachineWithoutRuntime;
use super::exports::run;
use crate::world::{LarderOutput, LarderProcess, larder_in};

/// Pushes an image with the name of its architecture in a file, under a tag of that name.
fn push(machine: &MachineWithoutRuntime, architecture: Option<&'static str>) {
    let tag = architecture.unwrap_or("own");
    let image = ImageBuilder::new().layer(LayerFiles::new().file("arch", tag));
    let image = architecture.map_or(image.clone(), |architecture| image.architecture(architecture));
    image.push(&machine.registry, &format!("shop/web:{tag}")).unwrap();
}

/// An image for this machine and for s390x under one tag, and one for s390x only. Returns their names.
fn pushed(machine: &MachineWithoutRuntime) -> [String; 2] {
    let other = "s390x";
    push(machine, None);
    push(machine, Some(other));
    let (own, foreign) = (("own", Some(&*Platform::host().architecture)), (other, Some(other)));
    machine.push_index("shop/web", "multi", &[own, foreign]);
    machine.push_index("shop/web", "only", &[foreign]);
    ["shop/web:multi", "shop/web:only"].map(|name| machine.registry.image(name))
}

fn architecture(inspected: &LarderOutput) -> String {
    let config = inspected.json()[0]["info"]["config"]["architecture"].clone();
    config.as_str().map_or_else(|| panic!("{inspected:?}"), str::to_owned)
}

#[test]
fn the_images_of_two_platforms_are_present_under_one_name() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    let [name, _] = pushed(&machine);
    let other = format!("{name}#linux/s390x");
    machine.larder(&["pull", &name]).expect(0);
    let pulled = machine.larder(&["pull", "--platform", "linux/s390x", &name]).expect(0);
    assert!(!pulled.stderr.contains("warning"), "it is what was requested: {pulled:?}");

    let listed = machine.larder(&["images", "-o", "name"]).expect(0).stdout;
    let mut listed: Vec<&str> = listed.lines().collect();
    listed.sort_unstable();
    assert_eq!(listed, [&name, &other]);
    let own = architecture(&machine.larder(&["inspect", &name]).expect(0));
    assert_ne!(own, "s390x");
    assert_eq!(
        architecture(&machine.larder(&["inspect", "--platform", "linux/s390x", &name]).expect(0)),
        "s390x"
    );
    assert_eq!(architecture(&machine.larder(&["inspect", &other]).expect(0)), "s390x");
    machine.larder(&["image", "exists", "--platform", "linux/s390x", &name]).expect(0);
    machine.larder(&["image", "exists", "--platform", "linux/arm/v6", &name]).expect(1);

    // A pod of this machine is answered for this machine, and each platform by policy.
    machine.larder(&["ensure", "--policy", "Never", &name]).expect(0);
    machine.larder(&["ensure", "--policy", "Never", "--platform", "linux/s390x", &name]).expect(0);
    machine.registry.forget_requests();
    machine.larder(&["ensure", "--policy", "IfNotPresent", "--platform", "linux/s390x", &name]).expect(0);
    assert!(machine.registry.requests().is_empty(), "it is present");
    let planned = machine.larder(&["ensure", "--dry-run", "--platform", "linux/arm64", &name]).expect(1);
    assert!(planned.stdout.contains("no match for platform"), "{planned:?}");

    let dir = machine.path("rootfs");
    machine.larder(&["export", "--platform", "linux/s390x", &name, &dir]).expect(0);
    assert_eq!(fs_err::read_to_string(format!("{dir}/arch")).unwrap(), "s390x");

    // A name of one of them stays with it.
    machine.larder(&["tag", &other, "local.example/web:1"]).expect(0);
    machine.larder(&["image", "exists", "local.example/web:1"]).expect(1);
    machine.larder(&["image", "exists", "local.example/web:1#linux/s390x"]).expect(0);
    let refused = machine.larder(&["tag", &name, "local.example/web:1#linux/s390x"]).expect(2);
    assert!(refused.stderr.contains("not one for linux/s390x"), "{refused:?}");

    machine.larder(&["rm", &name]).expect(0);
    machine.larder(&["image", "exists", &name]).expect(1);
    let missing = machine.larder(&["rm", &name]).expect(1);
    assert!(missing.stderr.contains(&other), "what is near is named: {missing:?}");
    machine.larder(&["rm", "--platform", "linux/s390x", &name]).expect(0);
    machine.larder(&["rm", "local.example/web:1#linux/s390x"]).expect(0);
    assert_eq!(machine.larder(&["images", "-q"]).expect(0).stdout, "");
}

#[test]
fn an_image_for_another_platform_only_is_pulled_with_a_warning_and_refused_to_pods() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    let [_, only] = pushed(&machine);
    let refused = machine.larder(&["ensure", &only]).expect(1);
    assert!(
        refused.stdout.contains("no match for platform") && !refused.stderr.contains("temporary"),
        "{refused:?}"
    );
    for hint in ["or pull it for another one: larder ", " pull --platform linux/s390x "] {
        assert!(refused.stderr.contains(hint), "a command that has the flag: {refused:?}");
    }
    let pulled = machine.larder(&["pull", &only]).expect(0);
    assert!(pulled.stderr.contains("built for linux/s390x only"), "{pulled:?}");
    assert!(!pulled.stderr.contains("(0B)"), "its size is known: {pulled:?}");
    machine.larder(&["image", "exists", &only]).expect(1);
    machine.larder(&["ensure", "--policy", "Never", &only]).expect(1);
    machine.larder(&["ensure", "--policy", "Never", "--platform", "linux/s390x", &only]).expect(0);

    // A single manifest is what its name says, unless another platform is requested.
    let single = machine.registry.image("shop/web:s390x");
    let refused = machine.larder(&["pull", "--platform", "linux/arm64", &single]).expect(1);
    assert!(refused.stderr.contains("wanted linux/arm64, offered linux/s390x"), "{refused:?}");
    machine.larder(&["pull", "--platform", "linux/s390x", &single]).expect(0);

    let shown = machine.larder(&["pull", "--platform", "linux/arm64", &only]).expect(1);
    assert!(shown.stderr.contains("offered linux/s390x"), "{shown:?}");
    for platform in ["", "s390x/", "linux/arm/v6/x", "linux arm64"] {
        let bad = machine.larder(&["pull", "--platform", platform, &only]).expect(2);
        assert!(bad.stderr.contains("invalid platform"), "{bad:?}");
    }
}

#[test]
fn an_archive_has_the_images_of_several_platforms() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    if !require(&[Package::Skopeo]).is_available() {
        return;
    }
    let [name, _] = pushed(&machine);
    machine.larder(&["pull", &name]).expect(0);
    machine.larder(&["pull", "--platform", "linux/s390x", &name]).expect(0);
    let (both, one) = (machine.path("both.tar"), machine.path("one.tar"));
    let other = format!("{name}#linux/s390x");
    machine.larder(&["save", "-o", &both, &name, &other]).expect(0);
    machine.larder(&["save", "-o", &one, "--platform", "linux/s390x", &name]).expect(0);
    for (architecture, options) in [("s390x", &["--override-arch", "s390x"][..]), ("", &[])] {
        let copied = format!("oci:{}:1", machine.path(&format!("copied-{architecture}")));
        run("skopeo", &[options, &["copy", "-q", &format!("oci-archive:{both}"), &copied]].concat());
        let config = run("skopeo", &[options, &["inspect", "--config", "--raw", &copied]].concat());
        let config: Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["architecture"] == "s390x", architecture == "s390x", "{config}");
    }

    let root = machine.path("loaded");
    let larder = |arguments: &[&str]| {
        let mut command = larder_in(machine.home.path());
        command.args(["--root", &root]).args(arguments);
        LarderProcess::start(command).finish()
    };
    let refused = larder(&["load", &one]).expect(2);
    assert!(refused.stderr.contains("--platform linux/s390x"), "{refused:?}");
    larder(&["load", "--platform", "linux/s390x", &one]).expect(0);
    larder(&["image", "exists", &name]).expect(1);
    let loaded = larder(&["load", &both]).expect(0);
    assert!(loaded.stderr.contains("for platform linux/s390x"), "{loaded:?}");
    larder(&["load", "--platform", "linux/s390x", &both]).expect(0);
    let digests = |run: LarderOutput| run.json()[0]["repoDigests"].clone();
    for name in [&name, &other] {
        let (pulled, loaded) =
            (machine.larder(&["inspect", name]).expect(0), larder(&["inspect", name]).expect(0));
        assert_eq!(digests(pulled), digests(loaded), "{name}");
    }
}
