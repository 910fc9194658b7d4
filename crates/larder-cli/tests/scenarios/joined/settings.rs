//! Settings of commands that work through the one that has the store open.

use larder_testkit_peers::process::wait_until;

use super::{held_pull, present, push, store};
use crate::world::RuntimeFixture;

/// A file of settings, of which the first is in line 3.
fn settings_file(world: &RuntimeFixture, name: &str, settings: &str) -> String {
    world.file(name, &format!("apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n{settings}"))
}

#[test]
fn other_settings_are_refused_with_the_difference() {
    let Some(world) = store() else { return };
    let gate = world.gate();
    let image = push(&world, &gate, 1, "shop/big:1");
    let first = held_pull(&world, &gate, &[], &image);

    let text = "imageGCHighThresholdPercent: 70\nimageGCLowThresholdPercent: 60\n";
    let settings = settings_file(&world, "other.yaml", text);
    let refused = world.larder_with(&settings, &["gc"]).expect(1);
    for difference in [
        format!("imageGCHighThresholdPercent is 70 ({settings}:3), and 85 there"),
        format!("imageGCLowThresholdPercent is 60 ({settings}:4), and 80 there"),
    ] {
        assert!(refused.stderr.contains(&difference), "{refused:?}");
    }
    assert!(refused.stderr.contains("hint: rerun after the other command ends"), "{refused:?}");
    let keep = settings_file(&world, "keep.yaml", "gc:\n  keep:\n    - name: shop/*\n");
    let refused = world.larder_with(&keep, &["gc", "--all-unused", "--force"]).expect(1);
    assert!(refused.stderr.contains("gc.keep is [{\"name\":\"shop/*\"}]"), "{refused:?}");
    let flags = ["pull", "--max-parallel-image-pulls", "1", &image];
    let refused = world.larder(&flags).expect(1);
    let difference = "maxParallelImagePulls is 1 (--max-parallel-image-pulls), and 4 there";
    assert!(refused.stderr.contains(difference), "{refused:?}");

    // A command is not refused for settings that it does not depend on.
    let pulls = settings_file(&world, "pulls.yaml", "registryPullQPS: 7\n");
    world.larder_with(&pulls, &["gc", "--all-unused", "--dry-run"]).expect(0);
    world.larder_with(&settings, &["keep", "shop/*"]).expect(0);
    let refused = world.larder_with(&pulls, &["pull", &image]).expect(1);
    assert!(refused.stderr.contains("registryPullQPS is 7"), "{refused:?}");

    let status = world.larder(&["status"]).expect(3);
    for part in ["no daemon is running: process ", " pull ", &image, ") has the images open"] {
        assert!(status.stderr.contains(part), "{part}: {status:?}");
    }

    // What is the same, or concerns the joining process alone, is no difference.
    let same = settings_file(&world, "same.yaml", "imageGCHighThresholdPercent: 85\nlog:\n  level: debug\n");
    world.larder_with(&same, &["gc", "--all-unused", "--dry-run"]).expect(0);
    world.larder(&["--timeout", "20s", "images"]).expect(0);
    gate.open();
    first.finish().expect(0);
    world.larder(&flags).expect(0);
}

#[test]
fn settings_that_the_first_command_was_given_hold_for_those_that_were_given_none() {
    let Some(world) = store() else { return };
    let gate = world.gate();
    let image = push(&world, &gate, 1, "shop/big:1");
    let first = held_pull(&world, &gate, &["--max-parallel-image-pulls", "1"], &image);
    world.larder(&["images"]).expect(0);
    world.larder(&["gc", "--all-unused", "--dry-run"]).expect(0);
    gate.open();
    first.finish().expect(0);
}

#[test]
fn a_pull_that_would_ask_other_credential_programs_is_refused_with_the_difference() {
    let Some(world) = store() else { return };
    let gate = world.gate();
    let image = push(&world, &gate, 1, "shop/big:1");
    let first = held_pull(&world, &gate, &[], &image);
    let config = world.file("docker.json", r#"{"auths": {}, "credsStore": "pass"}"#);
    let pull = ["pull", "--authfile", &config, &image];
    let refused = world.larder(&pull).expect(1);
    let difference = "with other credential helpers or providers: docker-credential-pass, and none there";
    assert!(refused.stderr.contains(difference), "{refused:?}");
    world.larder(&["gc", "--all-unused", "--dry-run"]).expect(0);
    gate.open();
    first.finish().expect(0);
    world.larder(&pull).expect(0);
}

#[test]
fn one_shot_commands_honour_the_settings_of_the_daemon() {
    for world in [RuntimeFixture::plain(), store()].into_iter().flatten() {
        let (base, app) = (present(&world, 1, "base/os:1"), present(&world, 2, "shop/app:1"));
        let name = format!("{}/base/*", world.registry.address());
        let settings = settings_file(&world, "config.yaml", &format!("gc:\n  keep:\n    - name: '{name}'\n"));
        let place = format!("{settings}:5");
        let listed = world.larder_with(&settings, &["keep"]).expect(0);
        assert_eq!(listed.lines_with(&[&name, &place]), 1, "{listed:?}");
        world.end_leases();
        let used = world.larder_with(&settings, &["df", "-v"]).expect(0);
        assert_eq!(used.lines_with(&["kept by a rule", " 1 "]), 1, "{used:?}");
        let explained = world.larder_with(&settings, &["explain", &base]).expect(0);
        assert!(explained.stdout.contains(&name), "{explained:?}");
        let flags = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0"];
        world.larder_with(&settings, &flags).expect(0);
        assert_eq!(world.images(), [base.as_str()]);
        assert!(!world.images().contains(&app));

        let high = "imageGCHighThresholdPercent: 99\nimageGCLowThresholdPercent: 98\n";
        let high = settings_file(&world, "high.yaml", high);
        let planned = world.larder_with(&high, &["gc", "--dry-run"]).expect(0);
        assert_eq!(planned.lines_with(&["GC starts at 99%"]), 1, "{planned:?}");
    }
}

#[test]
fn invalid_settings_end_a_command_before_any_effect() {
    let Some(world) = store() else { return };
    let app = present(&world, 1, "shop/app:1");
    world.end_leases();
    let settings = settings_file(&world, "config.yaml", "gc:\n  keep:\n    - nam: 'shop/*'\n");
    let commands = [
        &["gc", "--all-unused", "--force"][..],
        &["df"],
        &["explain", &app],
        &["keep"],
        &["images"],
        &["status"],
    ];
    for command in commands {
        let refused = world.larder_with(&settings, command).expect(2);
        assert!(refused.stderr.contains(&format!("{settings}:5: ")), "{refused:?}");
        assert!(refused.stderr.contains("gc.keep[0].nam"), "{refused:?}");
    }
    assert_eq!(world.images(), [app]);

    let daemon = world.start_larder(&["serve", "--metrics-address", ""]);
    wait_until("the daemon says where it listens", || world.place().join("daemon").exists());
    world.larder_with(&settings, &["status"]).expect(0);
    world.larder_with(&settings, &["images"]).expect(0);
    daemon.terminate();
    daemon.finish().expect(0);
}
