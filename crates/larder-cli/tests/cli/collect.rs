//! Collection: what is refused, what is printed, and that broken state removes nothing.

use larder_cri::proto;
use larder_store::store::{Store, StoreConfig};
use serde_json::json;

use crate::world::{CliFixture, CliOutput};

const NAMES: [&str; 2] = ["r.example/shop/web:1", "r.example/shop/api:1"];

/// A runtime with two images, last used long ago.
fn world() -> CliFixture {
    let world = CliFixture::offering(&NAMES);
    world.larder(&["pull", NAMES[0], NAMES[1]]).expect(0);
    world.end_leases();
    world
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
        let run = world.larder(&["gc", flags[0], flags[1]]).expect(2);
        assert!(run.stderr.contains("ThresholdPercent") && run.stderr.contains("hint:"), "{run:?}");
    }
    world.larder(&["gc", "--free", "much"]).expect(2);
    world.larder(&["gc"]).expect(3);
    let run = world.larder(&["keep", "sha256:zz"]).expect(2);
    assert!(run.stderr.contains("sha256:zz: not a digest; use sha256:"), "{run:?}");
}

#[test]
fn all_unused_removes_images_without_a_keep_rule_and_records_them() {
    let world = world();
    assert!(world.larder(&["keep", "r.example/shop/wbe:*"]).expect(0).stderr.contains(NAMES[0]), "nearest");
    world.larder(&["unkeep", "1"]).expect(0);
    let added = world.larder(&["keep", "r.example/shop/web:*", "-o", "json"]).expect(0).json();
    assert_eq!((&added["select"], &added["from"]), (&json!({"name": "r.example/shop/web:*"}), &json!(null)));
    let all = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0", "-o", "json"];
    let planned = world.larder(&[&all[..], &["--dry-run"]].concat()).expect(0).json();
    let done = world.larder(&all).expect(0).json();
    for report in [&planned, &done] {
        assert_eq!(report["removals"].as_array().unwrap().len(), 1, "{report}");
        assert_eq!(report["removals"][0]["names"], json!([NAMES[1]]));
    }
    assert_eq!(
        done["images"].as_array().unwrap().iter().filter(|image| image["reason"] == "Kept").count(),
        1
    );
    let history = world.larder(&["gc", "log", "-o", "json"]).expect(0).json();
    assert_eq!(history[0]["names"], json!([NAMES[1]]));
    assert_eq!(history[0]["trigger"], "allUnused");
    let rules = world.larder(&["keep", "-o", "json"]).expect(0).json();
    assert_eq!(rules[0]["select"], json!({"name": "r.example/shop/web:*"}));
}

#[test]
fn log_filters_choose_targets_and_invalid_ones_are_refused() {
    let world = world();
    let all = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0", "-v"];
    let run =
        CliOutput::of(world.command(&all).env("LARDER_LOG", "larder::gc=loud").output().unwrap()).expect(2);
    assert_eq!(
        run.stderr.lines().next(),
        Some(r#"error: LARDER_LOG="larder::gc=loud": "larder::gc=loud" has no known level"#)
    );
    assert!(run.stderr.contains("hint: write LEVEL or TARGET=LEVEL"), "{run:?}");
    let run =
        CliOutput::of(world.command(&all).env("LARDER_LOG", "larder::gc=info").output().unwrap()).expect(0);
    let lines: Vec<&str> = run.stderr.lines().filter(|line| line.starts_with("info: ")).collect();
    assert_eq!(lines.len(), NAMES.len(), "{run:?}");
    assert!(lines.iter().all(|line| line.starts_with("info: removed image image=sha256:")), "{lines:?}");
    assert!(lines.iter().all(|line| !line.contains("gc_round")), "spans are for logs: {lines:?}");
}

#[test]
fn each_removed_name_of_an_image_is_reported() {
    let world = CliFixture::new();
    let (api, keepme) = ("r.example/shop/api:2", "r.example/shop/keepme:1");
    let (base, web) = ("r.example/shop/base:1", "r.example/shop/web:1");
    for (name, id) in [(api, 1), (keepme, 1), (base, 2), (web, 2)] {
        let id = format!("sha256:{id:064x}");
        world.cri.offer(name, proto::Image { id, size: 4_261_550, ..proto::Image::default() });
        world.larder(&["pull", name]).expect(0);
    }
    world.end_leases();
    world.larder(&["keep", web]).expect(0);
    let (short, wide) = (format!("{api} (+1 name)"), format!("{api}, {keepme}"));
    let all = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0"];
    let has = |run: &CliOutput, text: &str| run.stdout.lines().any(|line| line.starts_with(text));
    let run = world.larder(&[&all[..], &["--dry-run"]].concat()).expect(0);
    assert!(has(&run, &short), "{run:?}");
    assert!(has(&run, &format!("{web} (+1 name)")), "the name that the rule means: {run:?}");
    let run = world.larder(&[&all[..], &["--dry-run", "-o", "wide"]].concat()).expect(0);
    assert!(has(&run, &wide) && has(&run, &format!("{web}, {base}")), "{run:?}");
    for (asked, other) in [(web, base), (base, web), (keepme, api)] {
        let printed = world.larder(&["explain", asked]).expect(0).stdout;
        let lines: Vec<_> = printed.lines().take(2).collect();
        assert_eq!(lines, [asked, &format!("  also named: {other}")]);
    }
    let run = world.larder(&all).expect(0);
    assert!(has(&run, &short), "{run:?}");
    assert!(world.larder(&["gc", "log"]).expect(0).stdout.contains(&short));
    assert!(world.larder(&["gc", "log", "-o", "wide"]).expect(0).stdout.contains(&wide));
}

#[test]
fn a_dry_run_without_removals_prints_that_and_the_minimum_age() {
    let world = world();
    let dry = ["gc", "--all-unused", "--dry-run"];
    let hint = "gc --all-unused --minimum-image-ttl-duration 0 ignores the minimum age";
    let run = world.larder(&dry).expect(0);
    assert!(run.stdout.contains("\nwould remove nothing\n"), "{run:?}");
    assert!(run.stderr.contains(&format!("hint: larder {hint}")), "{run:?}");
    let endpoint = world.cri.endpoint().to_string();
    let run = world.larder(&[&["--backend", &endpoint], &dry[..]].concat()).expect(0);
    assert!(run.stderr.contains(&format!("hint: larder --backend {endpoint} {hint}")), "{run:?}");
    let run = world.larder(&["--backend", &endpoint, "inspect", "r.example/none:1"]).expect(1);
    assert!(run.stderr.contains(&format!("hint: larder --backend {endpoint} images lists")), "{run:?}");
    world.larder(&["keep", NAMES[0]]).expect(0);
    let run = world.larder(&dry).expect(0);
    assert!(run.stderr.contains(hint), "the other one is retained by its age: {run:?}");
}

#[cfg(feature = "docker")]
#[test]
fn a_context_of_docker_that_leads_nowhere_is_named() {
    let home = tempfile::tempdir().unwrap();
    let id = "28a3a5e81d1e89f0efc70b63bf717b921373fc7fac70bc1b7e4d466799c0c6b0"; // sha256 of its name
    let dir = home.path().join(".docker/contexts/meta").join(id);
    fs_err::create_dir_all(&dir).unwrap();
    let meta = json!({"Name": "dead", "Endpoints": {"docker": {"Host": "unix:///nowhere/docker.sock"}}});
    fs_err::write(dir.join("meta.json"), meta.to_string()).unwrap();
    let mut command = crate::world::larder(home.path());
    command.env("DOCKER_CONTEXT", "dead").args(["--backend", "docker", "images"]);
    let run = CliOutput::of(command.output().unwrap()).expect(3);
    assert!(run.stderr.contains("socket not found"), "{run:?}");
    assert!(run.stderr.contains("hint: the socket is set by DOCKER_CONTEXT=dead"), "{run:?}");
}

#[test]
fn an_image_that_a_command_ensured_is_retained_by_the_next_gc() {
    let world = CliFixture::offering(&NAMES);
    world.larder(&["ensure", NAMES[0]]).expect(0);
    world.larder(&["pull", NAMES[1]]).expect(0);
    let all = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0", "-o", "json"];
    for more in [&["--dry-run"][..], &[]] {
        let report = world.larder(&[&all[..], more].concat()).expect(0).json();
        assert_eq!(report["removals"], json!([]), "{report}");
        for image in report["images"].as_array().unwrap() {
            let why = image["why"].as_str().unwrap();
            assert!(why.starts_with("leased (expires in "), "{report}");
        }
    }
    let run = world.larder(&["explain", NAMES[0]]).expect(0);
    assert!(run.stdout.contains("  next GC:    retain: leased (expires in "), "{run:?}");
    world.end_leases();
    let report = world.larder(&all).expect(0).json();
    assert_eq!(report["removals"].as_array().unwrap().len(), 2, "{report}");
}

#[test]
fn leases_that_cannot_be_read_are_not_taken_for_none() {
    let world = world();
    let file = world.file("state/leases.json", "{");
    let run = world.larder(&["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0"]).expect(1);
    assert!(run.stderr.contains("removed nothing") && run.stderr.contains("leases.json"), "{run:?}");
    let run = world.larder(&["ensure", NAMES[0]]).expect(0);
    assert!(run.stderr.contains("GC may remove ensured images before they are used"), "{run:?}");
    fs_err::remove_file(file).unwrap();
    world.larder(&["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0"]).expect(0);
    assert_eq!(world.larder(&["images", "-q"]).expect(0).stdout.lines().count(), 0);
}

#[test]
fn images_retained_by_all_unused_are_counted_by_reason() {
    let world = world();
    world.larder(&["keep", "r.example/shop/web:*"]).expect(0);
    let prints = |lines: &[&str]| {
        let run = world.larder(&["gc", "--all-unused"]).expect(0);
        for line in lines {
            assert!(run.stderr.lines().any(|said| said == *line), "{line}: {run:?}");
        }
    };
    prints(&[
        "note: 1 image retained: kept by a rule",
        "note: 1 image retained: younger than the minimum age (imageMinimumGCAge)",
        "hint: larder gc --all-unused --minimum-image-ttl-duration 0 ignores the minimum age",
        "hint: larder explain IMAGE shows the reason",
    ]);
    world.larder(&["ensure", NAMES[1]]).expect(0);
    prints(&[
        "note: 1 image retained: leased",
        "hint: larder lease rm IMAGE ends the leases on an image; larder gc --all-unused --force-leases removes all",
    ]);
}

#[test]
fn an_image_with_unknown_labels_is_kept_by_a_label_rule() {
    let world = world();
    world.larder(&["keep", "--label", "team=infra"]).expect(0);
    let all = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0", "-o", "json"];
    let run = world.larder(&all).expect(0);
    assert_eq!(run.json()["removals"], json!([]), "the runtime returns no labels");
    assert!(run.json()["images"].to_string().contains("labels unknown"), "{run:?}");
}

#[test]
fn broken_records_are_moved_aside_and_said_once() {
    let world = world();
    world.larder(&["gc", "--all-unused", "--dry-run"]).expect(0);
    let records = world.home.path().join("state/records.json");
    fs_err::write(&records, "{ broken").unwrap();
    let run = world.larder(&["gc", "--all-unused", "--force"]).expect(0);
    assert!(run.stderr.contains("records.json.broken-1"), "{run:?}");
    assert!(run.stdout.contains("removed nothing"), "an image without its age counts as new: {run:?}");
    assert!(!world.larder(&["gc", "--all-unused", "--force"]).expect(0).stderr.contains("broken"));
}

#[test]
fn keep_rules_that_cannot_be_read_remove_nothing() {
    let world = world();
    let keep = world.file("state/keep.json", r#"{"version":9,"rules":[]}"#);
    let run = world.larder(&["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0"]).expect(2);
    assert!(run.stderr.contains("unkeep --all"), "{run:?}");
    assert!(keep.exists());
    assert_eq!(world.larder(&["images", "-q"]).expect(0).stdout.lines().count(), 2);
    world.larder(&["unkeep", "--all"]).expect(0);
    world.larder(&["gc", "--all-unused", "--force"]).expect(0);
}

#[test]
fn explain_prints_why_an_image_is_retained_and_suggests_similar_names() {
    let world = world();
    let run = world.larder(&["explain", NAMES[0]]).expect(0);
    assert!(run.stdout.contains("first seen") && run.stdout.contains("removal frees: "), "{run:?}");
    let explained = |more: &[&str]| {
        let run = world.larder(&[&["explain", NAMES[0], "-o", "json"], more].concat()).expect(0).json();
        [run["reason"].clone(), run["remove"].clone(), run["removable"].clone()]
    };
    assert_eq!(explained(&[]), [json!("NotNeeded"), json!(false), json!(false)]);
    assert_eq!(
        explained(&["--minimum-image-ttl-duration=0"]),
        [json!("NotNeeded"), json!(false), json!(true)]
    );
    assert!(run.stdout.contains("under pressure: retained: first seen"), "{run:?}");
    world.larder(&["keep", "r.example/shop/web:*"]).expect(0);
    assert_eq!(explained(&["--minimum-image-ttl-duration=0"]), [json!("Kept"), json!(false), json!(false)]);
    world.larder(&["unkeep", "--all"]).expect(0);
    let run = world.larder(&["explain", "r.example/shop/wbe:1"]).expect(1);
    assert!(run.stderr.contains("similar images: r.example/shop/web:1"), "{run:?}");
    world.larder(&["explain", "Bad:Name:"]).expect(2);
}

#[test]
fn an_insufficient_round_is_reported_once_in_the_same_units() {
    let world = CliFixture::new();
    let root = world.home.path().join("store");
    drop(Store::open(&root, StoreConfig::default()).unwrap());
    let (root, marks) =
        (root.to_string_lossy(), ["--image-gc-high-threshold=0", "--image-gc-low-threshold=0"]);
    let run = world.larder(&[&["--root", &root, "gc"], &marks[..]].concat()).expect(1);
    assert!(run.stderr.starts_with("error: not enough reclaimable space: freed 0B of "), "{run:?}");
    assert!(!run.stderr.contains("warning") && !run.stderr.contains("GiB"), "{run:?}");
}
