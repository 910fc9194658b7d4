//! The commands that look at images and remove them.

use std::collections::BTreeMap;
use std::process::Stdio;

use larder_cri::proto;
use larder_testkit_peers::fake_cri::Rpc;
use serde_json::json;
use tonic::Code;

use crate::world::{CliFixture, CliOutput};

const BUSYBOX: &str = "sha256:1111111111111111111111111111111111111111111111111111111111111111";
const WEB: &str = "sha256:2222222222222222222222222222222222222222222222222222222222222222";
const OLD: &str = "sha256:3333333333333333333333333333333333333333333333333333333333333333";

/// Three images, one of them used by a container.
fn world() -> CliFixture {
    let world = CliFixture::new();
    let image = |id: &str, tags: &[&str], digests: &[&str], size| proto::Image {
        id: id.into(),
        repo_tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
        repo_digests: digests.iter().map(|digest| (*digest).to_owned()).collect(),
        size,
        ..proto::Image::default()
    };
    let digest = "a".repeat(64);
    world.cri.change(|contents| {
        contents.images = vec![
            image(
                WEB,
                &["127.0.0.1:5000/library/web:1.27", "127.0.0.1:5000/library/web:stable"],
                &[&format!("127.0.0.1:5000/library/web@sha256:{digest}")],
                77_900_000,
            ),
            image(BUSYBOX, &["docker.io/library/busybox:1.36"], &[], 4_261_550),
            image(OLD, &[], &[&format!("127.0.0.1:5000/team/old@sha256:{digest}")], 742_385),
        ];
        contents.containers = vec![proto::Container {
            id: "c0ffee0000000000000000000000".into(),
            pod_sandbox_id: "s".into(),
            metadata: Some(proto::ContainerMetadata { name: "web".into(), attempt: 0 }),
            image_id: WEB.into(),
            state: proto::ContainerState::ContainerRunning.into(),
            labels: BTreeMap::from([
                ("io.kubernetes.pod.namespace".into(), "shop".into()),
                ("io.kubernetes.pod.name".into(), "web-0".into()),
            ]),
            ..proto::Container::default()
        }];
        contents.filesystems.image_filesystems = vec![proto::FilesystemUsage {
            fs_id: Some(proto::FilesystemIdentifier { mountpoint: "/nowhere/images".into() }),
            used_bytes: Some(proto::UInt64Value { value: 250_000_000 }),
            inodes_used: Some(proto::UInt64Value { value: 1234 }),
            ..proto::FilesystemUsage::default()
        }];
        contents.conditions = vec![
            proto::RuntimeCondition { r#type: "RuntimeReady".into(), status: true, ..Default::default() },
            proto::RuntimeCondition {
                r#type: "NetworkReady".into(),
                status: false,
                reason: "NetworkPluginNotReady".into(),
                message: "cni config uninitialized".into(),
            },
        ];
    });
    world
}

#[test]
fn images_are_listed_by_name_as_crictl_lists_them() {
    let world = world();
    world.larder(&["images"]).expect(0).golden("images.txt", &world);
    world.larder(&["images", "--digests", "--no-trunc"]).expect(0).golden("images-full.txt", &world);
    world.larder(&["images", "-o", "wide"]).expect(0).golden("images-wide.txt", &world);
}

#[test]
fn images_are_found_by_short_names_and_patterns() {
    let world = world();
    let ids = |pattern: &str| world.larder(&["images", "-q", pattern]).expect(0).stdout;
    assert_eq!(ids("busybox"), format!("{BUSYBOX}\n"));
    assert_eq!(ids("*/web:*"), format!("{WEB}\n"), "an image with two tags is printed once");
    assert_eq!(ids("nothing"), "");
    assert_eq!(world.larder(&["ls", "-q"]).expect(0).stdout.lines().count(), 3);
}

#[test]
fn images_as_json_have_one_entry_for_each_name() {
    let mut rows = world().larder(&["images", "-o", "json", "*:1.*"]).expect(0).json();
    assert!(rows[0]["lastUsed"].take().is_string(), "it is in use now");
    assert_eq!(
        rows,
        json!([
            {
                "repository": "127.0.0.1:5000/library/web", "tag": "1.27",
                "digest": format!("sha256:{}", "a".repeat(64)),
                "platform": null, "type": "image", "id": WEB, "sizeBytes": 77_900_000, "pinned": false,
                "created": null, "lastUsed": null, "uniqueBytes": 77_900_000, "inUse": true, "hidden": false, "damaged": false,
                "missingBytes": null,
            },
            {
                "repository": "docker.io/library/busybox", "tag": "1.36", "digest": null,
                "platform": null, "type": "image", "id": BUSYBOX, "sizeBytes": 4_261_550, "pinned": false,
                "created": null, "lastUsed": null, "uniqueBytes": 4_261_550, "inUse": false, "hidden": false, "damaged": false,
                "missingBytes": null,
            },
        ])
    );
}

#[test]
fn inspect_shows_all_and_names_what_is_not_there() {
    let world = world();
    let run = world.larder(&["inspect", WEB, "nowhere:1"]).expect(1);
    run.golden("inspect.txt", &world);
    let run = world.larder(&["inspect", "-o", "yaml", WEB]).expect(0);
    let value: serde_json::Value = serde_saphyr::from_str(&run.stdout).unwrap();
    assert_eq!(value[0]["id"], WEB);
}

#[test]
fn a_name_that_the_runtime_fails_on_hides_nothing_of_the_others() {
    let world = world();
    world.cri.hold_next(Rpc::ImageStatus).release(); // the first is found
    world.cri.fail_next(Rpc::ImageStatus, Code::Internal, "disk");
    let run = world.larder(&["inspect", WEB, "broken:1", BUSYBOX]).expect(1);
    assert!(run.stderr.contains("error: broken:1: rpc error: code = Internal desc = disk"), "{run:?}");
    let ids: Vec<_> = run.json().as_array().unwrap().iter().map(|image| image["id"].clone()).collect();
    assert_eq!(ids, [WEB, BUSYBOX]);
}

#[test]
fn a_blank_name_among_others_removes_nothing_and_the_others_are_removed() {
    let world = world();
    let run = world.larder(&["rm", "", BUSYBOX]).expect(2);
    assert!(run.stdout.ends_with(&format!("Deleted: {BUSYBOX}\n")), "{run:?}");
    assert_eq!(world.larder(&["images", "-q"]).expect(0).stdout.lines().count(), 2);
}

#[test]
fn a_pattern_without_a_match_is_reported_with_a_wider_one() {
    let world = world();
    let run = world.larder(&["images", "wbe"]).expect(0);
    let tags = ["1.27", "stable"].map(|tag| format!("127.0.0.1:5000/library/web:{tag}")).join(", ");
    assert_eq!(run.stderr, format!("note: no image matches \"wbe\"; similar images: {tags}\n"));
    assert_eq!(
        world.larder(&["images", "-q", "old"]).expect(0).stdout,
        format!("{OLD}\n"),
        "the end of a name"
    );
    let run = world.larder(&["images", "nowhere"]).expect(0);
    assert_eq!(run.stderr, "note: no image matches \"nowhere\"; try '*/nowhere*'\n");
    assert_eq!(world.larder(&["images", "-q", "*/old*"]).expect(0).stdout, format!("{OLD}\n"));
    assert_eq!(world.larder(&["images", "team/new"]).expect(0).stderr.matches("try '*team/new*'").count(), 1);
    assert_eq!(CliFixture::new().larder(&["images", "old"]).expect(0).stderr, "", "there are none at all");
}

#[test]
fn images_in_use_are_removed_only_by_force() {
    let world = world();
    world.larder(&["rm", BUSYBOX, WEB]).expect(1).golden("rm-in-use.txt", &world);
    let run = world.larder(&["rm", "--force", WEB]).expect(0);
    assert!(run.stdout.ends_with(&format!("Deleted: {WEB}\n")), "{run:?}");
    assert_eq!(world.larder(&["images", "-q"]).expect(0).stdout, format!("{OLD}\n"));
}

#[test]
fn removals_before_a_lost_runtime_are_printed_as_json() {
    let world = world();
    let run = world.larder(&["rm", "-o", "json", BUSYBOX, "nowhere:1"]).expect(1);
    let busybox = json!([{"id": BUSYBOX, "removed": true, "repoTags": ["docker.io/library/busybox:1.36"], "repoDigests": []}]);
    assert_eq!(run.json(), busybox);
    let run = world.larder(&["rm", "-o", "yaml", "nowhere:1"]).expect(1);
    assert_eq!(run.stdout, "[]\n");

    let mut world = self::world();
    let held = world.cri.hold_next(Rpc::RemoveImage);
    world.cri.hang_next(Rpc::RemoveImage);
    let child = world
        .command(&["rm", "--force", "-o", "json", BUSYBOX, WEB])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    held.release();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(world.cri.until(Rpc::RemoveImage, |calls| calls.started == 2));
    world.cri.stop();
    let run = CliOutput::of(child.wait_with_output().unwrap());
    assert_ne!(run.code, Some(0), "{run:?}");
    assert_eq!(run.json(), busybox);
}

#[test]
fn removing_an_unknown_image_is_an_error_unless_allowed() {
    let world = world();
    let run = world.larder(&["rm", "nowhere:1", BUSYBOX]).expect(1);
    assert!(run.stderr.contains("nowhere:1: image not found"), "{run:?}");
    assert!(run.stdout.contains(&format!("Deleted: {BUSYBOX}")), "the others are removed: {run:?}");
    world.larder(&["rmi", "--ignore-not-found", "nowhere:1"]).expect(0);
}

#[test]
fn two_names_of_one_image_remove_it_once() {
    let world = world();
    let names = ["127.0.0.1:5000/library/web:1.27", "127.0.0.1:5000/library/web:stable"];
    let run = world.larder(&["rm", "-f", names[0], names[1]]).expect(0);
    assert_eq!(run.stdout.matches("Deleted: ").count(), 1, "{run:?}");
}

#[test]
fn the_start_of_an_id_selects_an_image_if_no_other_has_it() {
    let world = world();
    let twin = format!("sha256:11113{}", "0".repeat(59));
    world.cri.change(|contents| {
        let mut image = contents.images[1].clone();
        (image.id, image.repo_tags) = (twin.clone(), vec!["127.0.0.1:5000/team/twin:1".into()]);
        contents.images.push(image);
    });
    world.larder(&["rm", "1111"]).expect(2).golden("rm-ambiguous.txt", &world);
    world.larder(&["rm", "11113"]).expect(0);
    let short = world.larder(&["rm", "1"]).expect(1);
    assert!(short.stderr.contains("similar images: sha256:1111"), "too short for a removal: {short:?}");
    world.larder(&["rm", "3333"]).expect(0);
    assert_eq!(world.larder(&["images", "-q"]).expect(0).stdout.lines().count(), 2);
}

#[test]
fn other_names_are_not_removed_along_with_the_one_asked_for() {
    let world = world();
    let (here, mirror) = ("docker.io/library/busybox:1.36", "mirror.example/busybox:1.36");
    world.cri.change(|contents| contents.images[1].repo_tags.push(mirror.into()));
    world.larder(&["rm", "docker.io/library/busybox:1.36"]).expect(1).golden("rm-other-names.txt", &world);
    world.larder(&["rm", mirror]).expect(1);
    world.larder(&["rm", BUSYBOX]).expect(1);
    assert_eq!(world.cri.calls(Rpc::RemoveImage).started, 0);
    world.larder(&["rm", mirror, here]).expect(0);
    assert_eq!(world.cri.calls(Rpc::RemoveImage).started, 1, "all of its names were asked for");
}

#[test]
fn force_removes_an_image_under_the_names_of_all_repositories() {
    let world = world();
    world.cri.change(|contents| contents.images[1].repo_tags.push("mirror.example/busybox:1.36".into()));
    let run = world.larder(&["rm", "--force", "busybox:1.36"]).expect(0);
    assert!(run.stdout.contains("Untagged: mirror.example/busybox:1.36"), "{run:?}");
}

#[test]
fn nothing_to_remove_is_an_error_unless_allowed() {
    let world = world();
    world.larder(&["rm", "--ignore-not-found"]).expect(0);
    world.larder(&["rm"]).expect(2);
}

#[test]
fn a_bad_name_is_the_same_bad_input_to_every_command() {
    let world = world();
    let said = |command: &str| world.larder(&[command, "Busybox:1"]).expect(2).stderr;
    assert_eq!(said("rm"), said("pull"));
    assert_eq!(said("inspect"), said("pull"));
    assert_eq!(said("ensure"), said("pull"));
    assert!(said("rm").contains("hint: did you mean busybox:1?"), "{}", said("rm"));
}

#[test]
fn df_shows_free_space_and_usage() {
    let world = world();
    world.larder(&["df"]).expect(0).golden("df.txt", &world);
    world.larder(&["df", "-o", "wide"]).expect(0).golden("df-wide.txt", &world);
    world.larder(&["df", "-o", "json"]).expect(0).golden("df.json.txt", &world);
}

#[test]
fn runtime_prints_version_and_conditions() {
    let world = world();
    world.larder(&["runtime"]).expect(0).golden("runtime.txt", &world);
    world.larder(&["runtime", "-o", "json"]).expect(0).golden("runtime.json.txt", &world);
}
