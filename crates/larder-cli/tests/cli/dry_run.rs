//! `larder ensure --dry-run` on larder's own store: what it prints, what it asks of a registry, and that nothing
//! changes.

use std::collections::BTreeMap;
use std::path::Path;

use larder_testkit::fault_registry::{FaultRegistry, FaultRegistryAuth};
use serde_json::{Value, json};

use crate::world::{CliOutput, larder};

const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

/// A home with a store, and a registry with two images that share a layer.
struct DryRunFixture {
    home: tempfile::TempDir,
    registry: FaultRegistry,
}

impl DryRunFixture {
    fn new() -> DryRunFixture {
        let (home, registry) = (tempfile::tempdir().unwrap(), FaultRegistry::start());
        // Empty archives of different lengths.
        let layer = |blocks: usize| vec![0; blocks * 1024];
        registry.put_image("team/app", "1", TAR, &[layer(1), layer(2)], &[]);
        registry.put_image("team/app", "2", TAR, &[layer(1), layer(4)], &[]);
        DryRunFixture { home, registry }
    }

    fn larder(&self, arguments: &[&str]) -> CliOutput {
        let mut command = larder(self.home.path());
        CliOutput::of(command.args(["--root", "store"]).args(arguments).output().unwrap())
    }

    fn dry_run(&self, arguments: &[&str], code: i32) -> Value {
        self.larder(&[&["ensure", "--dry-run", "-o", "json"], arguments].concat()).expect(code).json()
    }

    fn image(&self, tag: &str) -> String {
        self.registry.image(&format!("team/app:{tag}"))
    }

    fn log_in(&self, password: &str) {
        let login = json!({"auths": {self.registry.address(): {"username": "bob", "password": password}}});
        fs_err::create_dir_all(self.home.path().join(".docker")).unwrap();
        fs_err::write(self.home.path().join(".docker/config.json"), login.to_string()).unwrap();
    }

    /// Leases, pull records, the history and the rules, and the images. The use of images is noted by all that lists
    /// them.
    fn state(&self) -> (BTreeMap<String, Vec<u8>>, String) {
        let mut files = BTreeMap::new();
        read_files(&self.home.path().join("store/collect"), &mut files);
        files.retain(|path, _| !path.ends_with("collect/records.json"));
        let leases = self.larder(&["lease"]).expect(0).stdout.lines().count();
        (files, format!("{leases} {}", self.larder(&["images", "-q"]).expect(0).stdout))
    }
}

fn read_files(dir: &Path, files: &mut BTreeMap<String, Vec<u8>>) {
    for entry in fs_err::read_dir(dir).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_dir() {
            read_files(&entry.path(), files);
        } else if entry.file_type().unwrap().is_file() {
            files.insert(entry.path().display().to_string(), fs_err::read(entry.path()).unwrap());
        }
    }
}

#[test]
fn without_a_store_everything_would_be_pulled_and_no_store_is_created() {
    let world = DryRunFixture::new();
    let plan = world.dry_run(&[&world.image("1")], 0);
    let row = &plan["images"][0];
    assert_eq!((&row["result"], &row["credentials"]), (&json!("Pull"), &json!([])), "{plan:#}");
    let sizes = ["compressedBytes", "presentBytes", "downloadBytes"].map(|key| row[key].as_u64().unwrap());
    assert_eq!(sizes, [3 * 1024, 0, 3 * 1024], "{plan:#}");
    assert!(!world.home.path().join("store").exists());
    world.dry_run(&["--policy", "Never", &world.image("1")], 1);
    assert!(!world.home.path().join("store").exists());
}

#[test]
fn each_image_has_its_result_and_the_layers_that_are_present() {
    let world = DryRunFixture::new();
    let (one, two, none) = (world.image("1"), world.image("2"), world.image("none"));
    world.larder(&["pull", &one]).expect(0);
    world.registry.forget_requests();
    let before = world.state();

    let plan = world.dry_run(&[&one, &two, &none], 1);
    let result = |index: usize| plan["images"][index]["result"].as_str().unwrap();
    assert_eq!([result(0), result(1), result(2)], ["Present", "Pull", "Failed"], "{plan:#}");
    let row = &plan["images"][1];
    let sizes = ["compressedBytes", "presentBytes", "downloadBytes"].map(|key| row[key].as_u64().unwrap());
    assert_eq!(sizes, [5 * 1024, 1024, 4 * 1024], "{plan:#}");
    assert!(plan["images"][2]["message"].as_str().unwrap().contains("not found"), "{plan:#}");
    let summary = json!({"present": 1, "pull": 1, "refused": 0, "failed": 1, "downloadBytes": 4 * 1024});
    assert_eq!(plan["summary"], summary);

    let always = world.dry_run(&["--policy", "Always", &one], 0);
    assert_eq!(
        (&always["images"][0]["result"], &always["summary"]["downloadBytes"]),
        (&json!("Pull"), &json!(0))
    );
    let never = world.dry_run(&["--policy", "Never", &two], 1);
    assert_eq!(never["images"][0]["result"], "Refused", "{never:#}");
    assert!(never["images"][0]["message"].as_str().unwrap().contains("pull policy of Never"), "{never:#}");

    assert_eq!(world.state(), before, "nothing changes");
    let table = world.larder(&["ensure", "--dry-run", &one, &two]).expect(0).stdout;
    assert!(table.ends_with("\n1 present, 1 to pull (4.1kB), 0 refused, 0 failed\n"), "{table}");
    assert!(table.contains("anonymous"), "{table}");
    assert!(table.contains("COMPRESSED"), "not the size that images prints: {table}");
}

#[test]
fn credentials_are_named_and_pull_records_count() {
    let world = DryRunFixture::new();
    let basic = FaultRegistryAuth::Basic { user: "bob".into(), password: "planted-right".into() };
    world.registry.require(basic);
    let (one, two) = (world.image("1"), world.image("2"));
    world.log_in("planted-right");
    world.larder(&["pull", &one]).expect(0);
    let plan = world.dry_run(&[&one, &two], 0);
    assert_eq!(plan["images"][0]["result"], "Present", "{plan:#}");
    let credential = &plan["images"][1]["credentials"][0];
    assert!(credential["source"].as_str().unwrap().ends_with(".docker/config.json"), "{plan:#}");
    assert_eq!(credential["user"], "bob");

    // Another password: the pull record does not have it, and the registry rejects it.
    world.log_in("planted-wrong");
    let before = world.state();
    let run = world.larder(&["ensure", "--dry-run", "-vv", "-o", "json", &one]).expect(1);
    assert!(!format!("{run:?}").contains("planted"), "{run:?}");
    let row = &run.json()["images"][0];
    assert_eq!((&row["result"], &row["pullRecordDenies"]), (&json!("Failed"), &json!(true)), "{row:#}");
    assert!(row["message"].as_str().unwrap().contains("401"), "{row:#}");
    let plan = world.dry_run(&["--policy", "Never", &one], 1);
    let row = &plan["images"][0];
    assert_eq!((&row["result"], &row["pullRecordDenies"]), (&json!("Refused"), &json!(true)), "{row:#}");
    world.log_in("planted-right");
    assert_eq!(world.state(), before, "no secret is added to the record");
}

#[test]
fn a_daemon_plans_as_a_command_does() {
    let world = DryRunFixture::new();
    let (one, two) = (world.image("1"), world.image("2"));
    world.larder(&["pull", &one]).expect(0);
    let alone = world.dry_run(&[&one, &two], 0);
    let socket = world.home.path().join("s");
    let mut serve = larder(world.home.path());
    let mut daemon =
        serve.args(["--root", "store", "serve", "--socket", "s", "--metrics-address", ""]).spawn().unwrap();
    larder_testkit_peers::process::wait_until("the socket", || socket.exists());
    let served = world.larder(&["--daemon", "s", "ensure", "--dry-run", "-o", "json", &one, &two]);
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert_eq!(served.expect(0).json(), alone);
}
