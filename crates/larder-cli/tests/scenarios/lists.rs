//! Lists of images: filters, orders, formats and trees, in larder's own store without a registry.

use std::path::PathBuf;

use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{ImageBuilder, LayerFiles};
use serde_json::Value;
use tempfile::TempDir;

use crate::world::{LarderOutput, LarderProcess, larder_in};

/// A store with images that share layers: a base, two images on top of it, and one of its own.
pub(crate) struct LoadedStore {
    pub(crate) home: TempDir,
}

impl LoadedStore {
    pub(crate) fn new() -> LoadedStore {
        let store = LoadedStore { home: tempfile::tempdir().unwrap() };
        let base = || ImageBuilder::new().layer(LayerFiles::new().noise("base", 400_000, 1));
        let web = |seed| base().layer(LayerFiles::new().noise("web", 200_000, seed)).label("team", "shop");
        store.load("base:1", &base().created("2023-01-01T00:00:00Z"));
        store.load("web:1", &web(2).created("2024-01-01T00:00:00Z"));
        store.load("web:2", &web(3).created("2025-01-01T00:00:00Z"));
        store.load("tool:1", &ImageBuilder::small(4, 900_000).created("2022-01-01T00:00:00Z"));
        store
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.home.path().join("store")
    }

    pub(crate) fn load(&self, name: &str, image: &ImageBuilder) {
        let dir = self.home.path().join(name.replace(':', "-"));
        image.write(&dir).unwrap();
        let dir = dir.to_string_lossy().into_owned();
        self.larder(&["load", &dir, "--name", &format!("r.example/{name}")]).expect(0);
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = larder_in(self.home.path());
        command.arg("--root").arg(self.root()).args(arguments);
        command
    }

    pub(crate) fn larder(&self, arguments: &[&str]) -> LarderOutput {
        LarderProcess::start(self.command(arguments)).finish()
    }

    /// Names without registry, in the order in which they are listed.
    fn names(&self, arguments: &[&str]) -> Vec<String> {
        let all: Vec<&str> = ["images", "-o", "json"].iter().chain(arguments).copied().collect();
        let rows = self.larder(&all).expect(0).json();
        let name = |row: &Value| {
            let repository = row["repository"].as_str().unwrap().trim_start_matches("r.example/");
            format!("{repository}:{}", row["tag"].as_str().unwrap_or("<none>"))
        };
        rows.as_array().unwrap().iter().map(name).collect()
    }
}

#[test]
fn images_are_filtered_and_sorted() {
    let store = LoadedStore::new();
    let all = ["base:1", "tool:1", "web:1", "web:2"];
    for (arguments, expected) in [
        (&[][..], &all[..]),
        (&["-a"], &all),
        (&["--filter", "reference=*/web"], &["web:1", "web:2"]),
        (&["--filter", "before=r.example/web:1"], &["base:1", "tool:1"]),
        (&["-f", "since=r.example/web:1"], &["web:2"]),
        (&["--filter", "label=team"], &["web:1", "web:2"]),
        (&["--filter", "label=team=infra"], &[]),
        (&["--filter", "dangling=true"], &[]),
        (&["--filter", "in-use=false"], &all),
        (&["--filter", "in-use=true"], &[]),
        (&["--sort", "created"], &["web:2", "web:1", "base:1", "tool:1"]),
        (&["--sort", "unique", "--filter", "reference=*:1"], &["tool:1", "web:1", "base:1"]),
    ] {
        assert_eq!(store.names(arguments), expected, "{arguments:?}");
    }
    let id = store.larder(&["images", "-q", "*/tool"]).expect(0).stdout.trim().to_owned();
    let sorted = store.larder(&["images", "-aq", "--sort", "created"]).expect(0).stdout;
    assert_eq!(sorted.lines().last(), Some(id.as_str()), "-q heeds --sort");
    let refused = store.larder(&["images", "--filter", "until=24h"]).expect(2);
    assert!(refused.stderr.contains("before=IMAGE, since=IMAGE or label=KEY[=VALUE]"), "{refused:?}");
    let refused = store.larder(&["images", "--filter", "before=nowhere:1"]).expect(1);
    assert!(refused.stderr.contains("--filter: nowhere:1: image not found"), "{refused:?}");
}

#[test]
fn images_have_their_age_last_use_and_unique_bytes() {
    let store = LoadedStore::new();
    let run = store.larder(&["images"]).expect(0);
    let head: Vec<_> = run.stdout.lines().next().unwrap().split("   ").map(str::trim).collect();
    let heads: Vec<_> = head.into_iter().filter(|head| !head.is_empty()).collect();
    assert_eq!(heads, ["IMAGE", "TAG", "IMAGE ID", "CREATED", "LAST USED", "SIZE", "UNIQUE"]);
    let line = run.stdout.lines().find(|line| line.contains("/tool")).unwrap();
    assert!(line.contains(" years ago "), "{line}");
    let rows = store.larder(&["images", "--format", "json"]).expect(0).json();
    let row = |name: &str| {
        let rows = rows.as_array().unwrap().iter();
        rows.clone().find(|row| row["repository"] == format!("r.example/{name}")).unwrap().clone()
    };
    let bytes = |name: &str| row(name)["uniqueBytes"].as_u64().unwrap();
    assert!(bytes("base") < 100_000, "its layer is shared: {rows}");
    assert!((200_000..400_000).contains(&bytes("web")), "{rows}");
    assert!(bytes("tool") >= 900_000, "{rows}");
    assert_eq!(row("web")["created"], "2024-01-01T00:00:00Z");
    assert_eq!(row("web")["inUse"], false);
}

#[test]
fn shared_layers_are_shown_as_trees() {
    let store = LoadedStore::new();
    let tree = store.larder(&["images", "--tree"]).expect(0).stdout;
    let names: Vec<_> = tree.lines().map(|line| line.split("  ").next().unwrap()).collect();
    assert_eq!(
        names,
        [
            "IMAGE",
            "r.example/base:1",
            "\u{251c}\u{2500} r.example/web:1",
            "\u{2514}\u{2500} r.example/web:2",
            "r.example/tool:1",
        ],
        "{tree}"
    );
    let layers = store.larder(&["inspect", "--layers", "r.example/web:1"]).expect(0).stdout;
    let lines: Vec<_> = layers.lines().collect();
    assert!(lines[0].starts_with("r.example/web:1   "), "{layers}");
    assert!(lines[2].starts_with("\u{251c}\u{2500} "), "{layers}");
    assert!(lines[2].contains("r.example/base:1, r.example/web:2"), "{layers}");
    assert!(lines[3].starts_with("\u{2514}\u{2500} ") && lines[3].contains("only this image"), "{layers}");
    let data = store.larder(&["inspect", "--layers", "-o", "json", "r.example/web:1"]).expect(0).json();
    assert_eq!(data[0]["layers"].as_array().unwrap().len(), 2);
    assert_eq!(data[0]["layers"][1]["sharedWith"], serde_json::json!([]));
    store.load("empty:1", &ImageBuilder::new());
    let empty = store.larder(&["inspect", "--layers", "r.example/empty:1"]).expect(0).stdout;
    assert_eq!(empty.lines().nth(1), Some("   no layers"), "{empty}");
    let data = store.larder(&["inspect", "--layers", "-o", "json", "r.example/empty:1"]).expect(0).json();
    assert_eq!(data[0]["layers"], serde_json::json!([]));
}

#[test]
fn a_status_is_watched_until_an_interrupt() {
    let store = LoadedStore::new();
    let daemon = LarderProcess::start(store.command(&["serve"]));
    wait_until("the daemon listens", || store.root().join("larder.sock").exists());
    let mut watched = LarderProcess::start(store.command(&["status", "-w", "-o", "json"]));
    watched.wait_for_output("\"pid\"");
    wait_until("a second status", || watched.stdout().lines().count() >= 2);
    watched.interrupt();
    let run = watched.finish().expect(130);
    let line: Value = serde_json::from_str(run.stdout.lines().next().unwrap()).unwrap();
    assert_eq!(line["pid"].as_u64(), Some(daemon.pid().into()));
    daemon.interrupt();
    daemon.finish();
}

#[test]
fn a_name_becomes_a_keep_rule_and_a_part_of_one_is_warned_about() {
    let store = LoadedStore::new();
    let added = store.larder(&["keep", "r.example/tool:1"]).expect(0);
    assert_eq!(added.stdout, "added keep rule: name r.example/tool:1\n");
    assert_eq!(added.stderr, "", "it matches an image");
    for list in [&["keep"][..], &["keep", "ls"], &["keep", "list"]] {
        assert_eq!(store.larder(list).expect(0).lines_with(&["name r.example/tool:1"]), 1, "{list:?}");
    }
    let several = store.larder(&["keep", "web"]).expect(0);
    assert!(several.stderr.contains("name web) matches no image"), "{several:?}");
    assert!(several.stderr.contains("similar images: r.example/web:"), "{several:?}");
    let unknown = store.larder(&["keep", "tol"]).expect(0);
    assert!(unknown.stderr.contains("similar images: r.example/tool:1"), "{unknown:?}");
    let pattern = store.larder(&["keep", "*/web:*"]).expect(0);
    assert_eq!((pattern.stdout.as_str(), pattern.stderr.as_str()), ("added keep rule: name */web:*\n", ""));
    let removed = store.larder(&["keep", "rm", "r.example/tool:1"]).expect(0);
    assert!(removed.stderr.contains("the rules after it have new numbers"), "{removed:?}");
    let last = store.larder(&["keep", "rm", "*/web:*"]).expect(0);
    assert_eq!(last.stderr, "", "no rule is after it");
    store.larder(&["keep", "rm", "--all"]).expect(0);
    assert_eq!(store.larder(&["keep", "-o", "json"]).expect(0).json(), serde_json::json!([]));
}

#[test]
fn an_image_has_one_size_in_all_commands() {
    let store = LoadedStore::new();
    let of_list = store.larder(&["images", "-o", "json", "*/web:1"]).expect(0).json();
    let of_explain = store.larder(&["explain", "-o", "json", "web:1"]).expect(0).json();
    let usage = store.larder(&["df", "-o", "json"]).expect(0).json();
    let images = usage["store"]["images"].as_array().unwrap();
    let of_usage = images.iter().find(|image| image["repoTags"][0] == "r.example/web:1").unwrap();
    assert_eq!(of_list[0]["sizeBytes"], of_usage["sizeBytes"], "{of_list} {usage}");
    assert_eq!(of_explain["sizeBytes"], of_usage["sizeBytes"], "{of_explain}");
}

#[test]
fn an_image_younger_than_the_minimum_age_is_not_reclaimable() {
    let store = LoadedStore::new();
    let usage = || store.larder(&["df", "-o", "json"]).expect(0).json();
    for name in ["base:1", "web:1", "web:2", "tool:1"] {
        store.larder(&["lease", "rm", &format!("r.example/{name}")]).expect(0);
    }
    let found = usage();
    assert_eq!(found["reclaimableBytes"], 0, "{found}");
    assert!(store.larder(&["df", "-v"]).expect(0).stdout.contains("images younger than the minimum age"));
    let missed = store.larder(&["gc", "--free", "1GB", "--dry-run"]).expect(1);
    assert!(missed.stderr.contains("gc --free 1GB --minimum-image-ttl-duration 0 ignores"), "{missed:?}");
    let all = store.larder(&["gc", "--all-unused", "--dry-run"]).expect(0);
    assert!(all.stderr.contains("gc --all-unused --minimum-image-ttl-duration 0 ignores"), "{all:?}");
}

#[test]
fn what_is_no_image_is_reported_in_a_users_words() {
    let store = LoadedStore::new();
    let path = |name: &str| store.home.path().join(name).to_string_lossy().into_owned();
    fs_err::create_dir(path("dir")).unwrap();
    fs_err::write(path("dir/README"), "no image").unwrap();
    fs_err::write(path("file"), "no archive at all\n".repeat(100)).unwrap();
    fs_err::write(path("bad.yaml"), "kind: Pod\nspec: {containers: [\n").unwrap();
    for (arguments, error, hint) in [
        (["load", &path("none")], "none: no such file or directory\n", "hint: pass an archive, a directory"),
        (["load", &path("dir")], "no images found: not an OCI layout, and not", "hint: pass an OCI layout"),
        (["load", &path("file")], "file: not an image archive\n", "hint: pass an OCI layout"),
        (["ensure", &format!("-f{}", path("bad.yaml"))], "not valid YAML", "hint: check indentation, "),
    ] {
        let run = store.larder(&arguments).expect(2);
        assert!(run.stderr.contains(error) && run.stderr.contains(hint), "{arguments:?}: {run:?}");
    }
}
