//! Collection: what is refused, what is told, and that broken state removes nothing.

use std::process::Command;

use serde_json::json;

use crate::world::{Run, World};

const NAMES: [&str; 2] = ["r.example/shop/web:1", "r.example/shop/api:1"];

/// A runtime with two images, and a place for the state.
fn world() -> World {
    let world = World::offering(&NAMES);
    world.larder(&["pull", NAMES[0], NAMES[1]]).expect(0);
    world
}

fn larder(world: &World, arguments: &[&str]) -> Run {
    let mut command: Command = world.command(arguments);
    command.arg("--state").arg(world.home.path().join("state"));
    Run::of(command.output().unwrap())
}

#[test]
fn limits_that_contradict_are_refused_before_anything_is_asked() {
    let mut world = world();
    world.cri.stop();
    for flags in [
        ["--image-gc-high-threshold=40", "--image-gc-low-threshold=60"],
        ["--image-gc-high-threshold=101", "--image-gc-low-threshold=60"],
        ["--image-gc-high-threshold=80", "--image-gc-low-threshold=-1"],
    ] {
        let run = larder(&world, &["gc", flags[0], flags[1]]).expect(2);
        assert!(run.stderr.contains("ThresholdPercent") && run.stderr.contains("hint:"), "{run:?}");
    }
    larder(&world, &["gc", "--free", "much"]).expect(2);
    larder(&world, &["gc"]).expect(3);
}

#[test]
fn all_unused_removes_what_no_rule_keeps_and_the_journal_tells() {
    let world = world();
    assert!(larder(&world, &["keep", "r.example/shop/wbe:*"]).expect(0).stderr.contains(NAMES[0]), "nearest");
    larder(&world, &["unkeep", "1"]).expect(0);
    larder(&world, &["keep", "r.example/shop/web:*"]).expect(0);
    let all = ["gc", "--all-unused", "--minimum-image-ttl-duration=0", "-o", "json"];
    let planned = larder(&world, &[&all[..], &["--dry-run"]].concat()).expect(0).json();
    let done = larder(&world, &all).expect(0).json();
    for report in [&planned, &done] {
        assert_eq!(report["removals"].as_array().unwrap().len(), 1, "{report}");
        assert_eq!(report["removals"][0]["names"], json!([NAMES[1]]));
    }
    assert_eq!(
        done["images"].as_array().unwrap().iter().filter(|image| image["reason"] == "Kept").count(),
        1
    );
    let history = larder(&world, &["history", "-o", "json"]).expect(0).json();
    assert_eq!(history[0]["names"], json!([NAMES[1]]));
    assert_eq!(history[0]["reason"], "unused");
    let rules = larder(&world, &["keep", "-o", "json"]).expect(0).json();
    assert_eq!(rules[0]["select"], json!({"name": "r.example/shop/web:*"}));
}

#[test]
fn what_stays_although_all_may_go_is_counted_by_reason() {
    let world = world();
    larder(&world, &["keep", "r.example/shop/web:*"]).expect(0);
    let run = larder(&world, &["gc", "--all-unused"]).expect(0);
    for line in [
        "note: 1 image stays: kept by a rule",
        "note: 1 image stays: too young to go (imageMinimumGCAge)",
        "hint: larder explain IMAGE says why one stays",
    ] {
        assert!(run.stderr.lines().any(|said| said == line), "{line}: {run:?}");
    }
}

#[test]
fn an_image_whose_labels_are_not_known_is_kept_by_a_rule_about_labels() {
    let world = world();
    larder(&world, &["keep", "--label", "team=infra"]).expect(0);
    let all = ["gc", "--all-unused", "--minimum-image-ttl-duration=0", "-o", "json"];
    let run = larder(&world, &all).expect(0);
    assert_eq!(run.json()["removals"], json!([]), "the runtime tells no labels");
    assert!(run.json()["images"].to_string().contains("its labels are not known"), "{run:?}");
}

#[test]
fn broken_records_are_moved_aside_and_said_once() {
    let world = world();
    larder(&world, &["gc", "--all-unused", "--dry-run"]).expect(0);
    let records = world.home.path().join("state/records.json");
    fs_err::write(&records, "{ broken").unwrap();
    let run = larder(&world, &["gc", "--all-unused"]).expect(0);
    assert!(run.stderr.contains("records.json.broken-1"), "{run:?}");
    assert!(run.stdout.contains("Removed nothing"), "what lost its age counts as new: {run:?}");
    assert!(!larder(&world, &["gc", "--all-unused"]).expect(0).stderr.contains("broken"));
}

#[test]
fn keep_rules_that_cannot_be_read_remove_nothing() {
    let world = world();
    let keep = world.file("state/keep.json", r#"{"version":9,"rules":[]}"#);
    let run = larder(&world, &["gc", "--all-unused", "--minimum-image-ttl-duration=0"]).expect(2);
    assert!(run.stderr.contains("unkeep --all"), "{run:?}");
    assert!(keep.exists());
    assert_eq!(world.larder(&["images", "-q"]).expect(0).stdout.lines().count(), 2);
    larder(&world, &["unkeep", "--all"]).expect(0);
    larder(&world, &["gc", "--all-unused"]).expect(0);
}

#[test]
fn explain_says_why_an_image_stays_and_names_the_nearest() {
    let world = world();
    let run = larder(&world, &["explain", NAMES[0]]).expect(0);
    assert!(run.stdout.contains("first seen") && run.stdout.contains("removing it frees"), "{run:?}");
    let explained = |more: &[&str]| {
        let run = larder(&world, &[&["explain", NAMES[0], "-o", "json"], more].concat()).expect(0).json();
        [run["reason"].clone(), run["goes"].clone(), run["removable"].clone()]
    };
    assert_eq!(explained(&[]), [json!("NotNeeded"), json!(false), json!(false)]);
    assert_eq!(
        explained(&["--minimum-image-ttl-duration=0"]),
        [json!("NotNeeded"), json!(false), json!(true)]
    );
    assert!(run.stdout.contains("under pressure: it stays: first seen"), "{run:?}");
    larder(&world, &["keep", "r.example/shop/web:*"]).expect(0);
    assert_eq!(explained(&["--minimum-image-ttl-duration=0"]), [json!("Kept"), json!(false), json!(false)]);
    larder(&world, &["unkeep", "--all"]).expect(0);
    let run = larder(&world, &["explain", "r.example/shop/wbe:1"]).expect(1);
    assert!(run.stderr.contains("present and similar: r.example/shop/web:1"), "{run:?}");
    larder(&world, &["explain", "Bad:Name:"]).expect(2);
}
