//! larder's own store, with a real registry and no runtime at all.

mod artifact_lists;
mod artifacts;
mod digest_algorithms;
mod export_failures;
mod exports;
mod mounts;
mod platforms;

use std::path::PathBuf;
use std::process::Command;

use larder_testkit_peers::registry::{PASSWORD, USER};
use larder_testkit_peers::{
    ImageBuilder, Package, RegistryAccess, RegistryOptions, RegistryProcess, require,
};
use serde_json::json;
use tempfile::TempDir;

use crate::world::{LarderOutput, LarderProcess, larder_in, pod};

/// A registry, and a machine without a container runtime.
struct MachineWithoutRuntime {
    registry: RegistryProcess,
    home: TempDir,
}

impl MachineWithoutRuntime {
    fn new() -> Option<MachineWithoutRuntime> {
        MachineWithoutRuntime::with(RegistryOptions::default())
    }

    fn with(options: RegistryOptions) -> Option<MachineWithoutRuntime> {
        if !require(&[Package::DockerRegistry, Package::Skopeo]).is_available() {
            return None;
        }
        let registry = RegistryProcess::start(options).unwrap();
        Some(MachineWithoutRuntime { registry, home: tempfile::tempdir().unwrap() })
    }

    fn root(&self) -> PathBuf {
        self.home.path().join("store")
    }

    fn larder(&self, arguments: &[&str]) -> LarderOutput {
        let mut command = larder_in(self.home.path());
        command.arg("--root").arg(self.root()).args(arguments);
        LarderProcess::start(command).finish()
    }

    fn layers(&self) -> PathBuf {
        self.root().join("layers")
    }

    /// All layers that have a file of this name.
    fn unpacked(&self, end: &str) -> Vec<PathBuf> {
        let name = end.rsplit('/').next().unwrap_or(end).as_bytes();
        let has_it =
            |layer: &PathBuf| fs_err::read(layer).unwrap().windows(name.len()).any(|part| part == name);
        let layers = fs_err::read_dir(self.layers()).unwrap().map(|layer| layer.unwrap().path());
        layers.filter(has_it).collect()
    }
}

/// Whether mounts can be tested; says so loudly if not.
pub(crate) fn may_mount() -> bool {
    if rustix::process::geteuid().is_root() {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "CI must not skip tests of mounts");
    eprintln!("==== SKIPPED, NOT TESTED: mounting needs root ====");
    false
}

#[test]
fn every_command_works_without_a_runtime() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    let web = ImageBuilder::small(1, 300_000).push(&machine.registry, "shop/web:1").unwrap();
    let name = machine.registry.image("shop/web:1");
    let manifest = machine.home.path().join("pod.yaml");
    fs_err::write(&manifest, pod("web", "IfNotPresent", &[&name])).unwrap();
    let manifest = manifest.to_string_lossy().into_owned();

    let run = machine.larder(&["ensure", "-f", &manifest]).expect(0);
    assert_eq!(run.lines_with(&["Normal", "Pulled", "Successfully pulled image"]), 1, "{run:?}");
    machine.registry.forget_requests();
    let run = machine.larder(&["ensure", "-f", &manifest]).expect(0);
    assert_eq!(run.lines_with(&["already present on machine"]), 1, "{run:?}");
    assert_eq!(machine.registry.requests().len(), 0, "nothing was asked for");
    machine.larder(&["ensure", "--policy", "Always", &name]).expect(0);
    let blobs = machine.registry.requests().iter().filter(|request| request.path.contains("/blobs/")).count();
    assert_eq!(blobs, 0, "the config is here as well");

    assert_eq!(machine.larder(&["images", "-q"]).expect(0).stdout.trim(), web.image_id);
    assert!(machine.larder(&["inspect", &name]).expect(0).json().to_string().contains(&web.manifest_digest));
    machine.larder(&["df"]).expect(0);
    machine.larder(&["runtime"]).expect(0);
    machine.larder(&["ensure", &machine.registry.image("no/such:1")]).expect(1);

    machine.larder(&["rm", &name]).expect(0);
    assert_eq!(machine.larder(&["images", "-q"]).expect(0).stdout, "");
    assert!(machine.unpacked("srv/data").is_empty());
    let trash = fs_err::read_dir(machine.root().join("trash")).unwrap().count();
    assert_eq!(trash, 0, "the room is free when the command is done");
}

#[test]
fn df_agrees_with_du() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    for (seed, name) in [(1, "shop/web:1"), (2, "shop/api:1")] {
        ImageBuilder::small(seed, 3_000_000).push(&machine.registry, name).unwrap();
        machine.larder(&["pull", &machine.registry.image(name)]).expect(0);
    }
    let report = machine.larder(&["df", "-o", "json"]).expect(0).json();
    let said = report["filesystem"]["imagesBytes"].as_f64().unwrap();
    let du = Command::new("du").args(["-s", "-B1"]).arg(machine.root()).output().unwrap();
    let du: f64 = String::from_utf8(du.stdout).unwrap().split_whitespace().next().unwrap().parse().unwrap();
    assert!((said - du).abs() <= du / 100.0, "df: {said}, du: {du}");
    let sum = report["store"]["disk"]["total"]["sizeBytes"].as_f64().unwrap();
    assert!((sum - du).abs() <= du / 100.0, "df's parts: {sum}, du: {du}");
    let short = machine.larder(&["df"]).expect(0).stdout;
    let lines: Vec<&str> = short.lines().take(5).collect();
    assert!(lines[0].ends_with("RECLAIMABLE") && lines[1].starts_with("images "), "{short}");
    let text = machine.larder(&["df", "-v"]).expect(0);
    assert_eq!(text.lines_with(&["shop/web:1"]), 1, "{text:?}");
    assert_eq!(text.stdout.lines().filter(|line| line.starts_with("total ")).count(), 1, "{text:?}");
}

#[test]
fn a_damaged_file_is_found_and_only_its_layer_is_fetched_again() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    for (seed, name) in [(1, "shop/web:1"), (2, "shop/api:1")] {
        ImageBuilder::small(seed, 200_000).push(&machine.registry, name).unwrap();
        machine.larder(&["pull", &machine.registry.image(name)]).expect(0);
    }
    machine.larder(&["fsck"]).expect(0);
    let damaged = machine.unpacked("srv/data").swap_remove(0);
    let before = fs_err::read(&damaged).unwrap();
    let mut bytes = before.clone();
    bytes[1000] ^= 1;
    fs_err::write(&damaged, &bytes).unwrap();

    let run = machine.larder(&["fsck"]).expect(1);
    assert_eq!(run.lines_with(&["damaged layer", "content differs"]), 1, "{run:?}");
    machine.registry.forget_requests();
    machine.larder(&["fsck", "--repair"]).expect(0);
    assert_eq!(fs_err::read(&damaged).unwrap(), before);
    let requests = machine.registry.requests();
    let layers =
        requests.iter().filter(|request| request.method == "GET" && request.path.contains("/blobs/"));
    assert!(layers.count() <= 2, "one layer, and a config: {requests:?}");
    machine.larder(&["fsck"]).expect(0);

    // One that is gone: each check says what is missing, and of which image.
    fs_err::remove_file(&damaged).unwrap();
    machine.larder(&["images"]).expect(0);
    for _ in 0..2 {
        let run = machine.larder(&["fsck"]).expect(1);
        assert_eq!(run.lines_with(&["incomplete image", "shop/", "layer", "is missing"]), 1, "{run:?}");
    }
}

#[test]
fn a_repair_that_fetches_nothing_takes_nothing_away() {
    let Some(mut machine) = MachineWithoutRuntime::with(RegistryOptions {
        auth: RegistryAccess::Basic,
        ..RegistryOptions::default()
    }) else {
        return;
    };
    let name = machine.registry.image("shop/web:1");
    ImageBuilder::small(1, 200_000).push(&machine.registry, "shop/web:1").unwrap();
    let auths = json!({"auths": {machine.registry.address(): {"username": USER, "password": PASSWORD}}});
    let authfile = machine.home.path().join("auth.json");
    fs_err::write(&authfile, auths.to_string()).unwrap();
    let authfile = authfile.to_string_lossy().into_owned();
    machine.larder(&["pull", "--authfile", &authfile, &name]).expect(0);
    let damaged = machine.unpacked("srv/data").swap_remove(0);
    let before = fs_err::read(&damaged).unwrap();
    fs_err::write(&damaged, "damaged").unwrap();

    // Without credentials, and without a registry.
    for without in ["credentials", "registry"] {
        let run = machine.larder(&["fsck", "--repair"]).expect(1);
        assert!(run.stderr.contains("cannot pull") && run.stderr.contains("hint: "), "{without}: {run:?}");
        assert_eq!(fs_err::read_to_string(&damaged).unwrap(), "damaged", "{without}");
        assert!(run.stdout.contains("(marked as damaged; the next pull or load"), "{without}: {run:?}");
        assert_ne!(machine.larder(&["images", "-q"]).expect(0).stdout, "", "{without}");
        let ensured = machine.larder(&["ensure", &name]).expect(1);
        assert!(!ensured.stdout.contains("Present"), "a damaged image is pulled again: {ensured:?}");
        machine.registry.stop();
    }
    machine.registry.start_again().unwrap();
    machine.larder(&["fsck", "--authfile", &authfile]).expect(2);
    machine.larder(&["fsck", "--repair", "--authfile", &authfile]).expect(0);
    assert_eq!(fs_err::read(&damaged).unwrap(), before);
    machine.larder(&["fsck"]).expect(0);
}

#[test]
fn a_repair_fetches_the_local_image_although_its_tag_has_moved() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    let here = ImageBuilder::small(1, 200_000).push(&machine.registry, "shop/web:1").unwrap();
    let name = machine.registry.image("shop/web:1");
    machine.larder(&["pull", &name]).expect(0);
    let moved = ImageBuilder::small(2, 200_000).push(&machine.registry, "shop/web:1").unwrap();
    assert_ne!(here.image_id, moved.image_id);
    let damaged = machine.unpacked("srv/data").swap_remove(0);
    let before = fs_err::read(&damaged).unwrap();
    fs_err::write(&damaged, "damaged").unwrap();

    let run = machine.larder(&["fsck", "--repair"]).expect(0);
    assert_eq!(run.lines_with(&[&name, ": repaired"]), 1, "{run:?}");
    assert_eq!(fs_err::read(&damaged).unwrap(), before);
    assert_eq!(machine.larder(&["images", "-q"]).expect(0).stdout.trim(), here.image_id);
    let image = machine.larder(&["inspect", &name]).expect(0).json().to_string();
    assert!(image.contains(&here.image_id), "the tag stands for the same image: {image}");
}

#[test]
fn a_repair_that_cannot_fetch_reports_the_failure() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    ImageBuilder::small(1, 200_000).push(&machine.registry, "shop/web:1").unwrap();
    let from = format!("docker://{}", machine.registry.image("shop/web:1"));
    let archive = machine.home.path().join("web.tar").to_string_lossy().into_owned();
    let status = Command::new("skopeo")
        .args(["--insecure-policy", "copy", "--quiet", "--src-tls-verify=false", &from])
        .arg(format!("docker-archive:{archive}:{}", machine.registry.image("shop/web:1")))
        .status();
    assert!(status.unwrap().success());
    machine.larder(&["load", &archive]).expect(0);
    let damaged = machine.unpacked("srv/data").swap_remove(0);
    fs_err::write(&damaged, "damaged").unwrap();
    machine.registry.forget_requests();

    let run = machine.larder(&["fsck", "--repair"]).expect(1);
    assert!(!run.stdout.contains(": repaired\n") && run.stderr.contains(" load FILE"), "{run:?}");
    assert_eq!(machine.registry.requests().len(), 0, "the tag is not resolved");
    machine.larder(&["load", &archive]).expect(0);
    machine.larder(&["fsck"]).expect(0);
}

#[test]
fn archives_and_layouts_are_loaded_and_known_layers_skipped() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    let web = ImageBuilder::small(1, 100_000).push(&machine.registry, "shop/web:1").unwrap();
    let from = format!("docker://{}", machine.registry.image("shop/web:1"));
    let at = |name: &str| machine.home.path().join(name).to_string_lossy().into_owned();
    for to in [
        format!("docker-archive:{}:registry.example/shop/web:docker", at("docker.tar")),
        format!("oci-archive:{}:registry.example/shop/web:oci", at("oci.tar")),
        format!("oci:{}:latest", at("layout")),
    ] {
        let skopeo = Command::new("skopeo")
            .args(["--insecure-policy", "copy", "--quiet", "--src-tls-verify=false", &from, &to])
            .status();
        assert!(skopeo.unwrap().success(), "{to}");
    }
    let run = machine.larder(&["load", &at("docker.tar")]).expect(0);
    assert_eq!(run.stdout.trim(), "Loaded image: registry.example/shop/web:docker");
    assert_eq!(machine.larder(&["images", "-q"]).expect(0).stdout.trim(), web.image_id);
    machine.larder(&["load", &at("oci.tar")]).expect(0);
    machine.larder(&["load", &at("layout"), "--name", "registry.example/shop/web"]).expect(0);
    assert_eq!(machine.larder(&["images", "registry.example/shop/web"]).expect(0).stdout.lines().count(), 4);
    assert_eq!(machine.unpacked("srv/data").len(), 1, "one layer, whatever it came in");
    machine.larder(&["fsck"]).expect(0);

    let again = machine.larder(&["load", &at("docker.tar")]).expect(0);
    assert_eq!(again.stdout.trim(), "Loaded image: registry.example/shop/web:docker", "not its other names");

    fs_err::write(machine.home.path().join("bad.tar"), "not an archive").unwrap();
    let run = machine.larder(&["load", &at("bad.tar"), &at("missing.tar")]).expect(2);
    assert!(run.stderr.contains("bad.tar") && run.stderr.contains("missing.tar"), "{run:?}");
    assert!(run.stderr.contains("not an image archive\n"), "{run:?}");

    // A layer with other bytes, and an archive that was cut.
    let largest = |file: &PathBuf| fs_err::metadata(file).unwrap().len();
    let blobs = fs_err::read_dir(machine.home.path().join("layout/blobs/sha256")).unwrap();
    let layer = blobs.map(|blob| blob.unwrap().path()).max_by_key(largest).unwrap();
    let mut bytes = fs_err::read(&layer).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    fs_err::write(&layer, bytes).unwrap();
    // Where the layers are not known yet.
    let Some(other) = MachineWithoutRuntime::new() else { return };
    let run = other.larder(&["load", &at("layout"), "--name", "r.example/x"]).expect(2);
    assert!(run.stderr.contains("hint: the file is damaged: "), "no registry has part in it: {run:?}");
    let packed = Command::new("gzip").arg("-c").arg(at("oci.tar")).output().unwrap().stdout;
    fs_err::write(at("cut.tgz"), &packed[..packed.len() / 2]).unwrap();
    let run = other.larder(&["load", &at("cut.tgz")]).expect(2);
    assert!(run.stderr.contains("hint: create the archive again"), "{run:?}");
}

#[test]
fn a_failed_sweep_is_reported_and_does_not_fail_the_removal() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    if !may_mount() {
        return;
    }
    ImageBuilder::small(1, 50_000).push(&machine.registry, "shop/web:1").unwrap();
    let name = machine.registry.image("shop/web:1");
    machine.larder(&["pull", &name]).expect(0);
    // Nothing can be moved away that something is mounted on.
    let left = machine.root().join("ingest").join(format!("sha256-{}", "a".repeat(64)));
    fs_err::create_dir(&left).unwrap();
    let run = |program: &str, arguments: &[&str]| {
        assert!(Command::new(program).args(arguments).arg(&left).status().unwrap().success(), "{program}");
    };
    run("mount", &["-t", "tmpfs", "none"]);
    run("touch", &["-d", "2001-01-01"]);
    let removal = machine.larder(&["rm", &name]);
    run("umount", &[]);

    let removal = removal.expect(0);
    let printed = removal.stderr.lines().find(|line| line.starts_with("warning: cannot delete leftovers"));
    let printed = printed.unwrap_or_else(|| panic!("{removal:?}"));
    assert!(
        printed.contains(&*machine.root().to_string_lossy()) && printed.ends_with("the next removal retries"),
        "{printed}"
    );
    assert_eq!(removal.lines_with(&["Deleted: "]), 1, "{removal:?}");
}

#[test]
fn only_the_caller_of_a_removal_waits_for_the_deletion() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    ImageBuilder::small(1, 50_000).push(&machine.registry, "shop/web:1").unwrap();
    let name = machine.registry.image("shop/web:1");
    machine.larder(&["pull", &name]).expect(0);
    let trash = machine.root().join("trash");
    let removed = trash.join("000001");
    fs_err::create_dir(&removed).unwrap();
    let mut files = 0;
    // So many that they are not gone by the way, while a command looks for a moment.
    let mut fill = || {
        for _ in fs_err::read_dir(&removed).unwrap().count()..60_000 {
            fs_err::write(removed.join(files.to_string()), "").unwrap();
            files += 1;
        }
    };
    for looks in ["images", "df", "mounts", "runtime"] {
        fill();
        machine.larder(&[looks]).expect(0);
        assert!(removed.exists(), "larder {looks} waited for the trash");
    }
    fill();
    machine.larder(&["rm", "no/such:1"]).expect(1);
    assert!(removed.exists(), "a removal that removes nothing waited for the trash");
    machine.larder(&["rm", &name]).expect(0);
    assert_eq!(fs_err::read_dir(&trash).unwrap().count(), 0, "a removal leaves nothing to delete");
}

#[test]
fn a_mirror_is_requested_and_a_misspelt_key_is_reported_once() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    for (seed, name) in [(1, "shop/web:1"), (2, "shop/api:1")] {
        ImageBuilder::small(seed, 50_000).push(&machine.registry, name).unwrap();
    }
    let certs = machine.home.path().join("certs.d");
    fs_err::create_dir_all(certs.join("registry.example")).unwrap();
    let mirror = format!("http://{}", machine.registry.address());
    let file = format!("[host.\"{mirror}\"]\ncapabilties = [\"pull\"]\n");
    fs_err::write(certs.join("registry.example/hosts.toml"), file).unwrap();
    let certs = certs.to_string_lossy().into_owned();
    let names = ["registry.example/shop/web:1", "registry.example/shop/api:1"];
    let run = machine.larder(&["--certs-d", &certs, "pull", names[0], names[1]]).expect(0);
    assert_eq!(run.stderr.matches("unknown key").count(), 1, "{run:?}");
    assert!(run.stderr.contains("hosts.toml: line 2: ") && run.stderr.contains("did you mean capabilities?"));

    let run = machine.larder(&["--certs-d", "/nowhere", "pull", names[0]]).expect(2);
    assert!(run.stderr.contains("--certs-d /nowhere") && run.stderr.contains("hint: "), "{run:?}");
    let mut command = larder_in(machine.home.path());
    command.args(["--backend", "/no.sock", "--certs-d", &certs, "images"]);
    let run = LarderProcess::start(command).finish().expect(2);
    assert!(run.stderr.contains("has no effect on a runtime"), "{run:?}");
}

#[test]
fn bad_places_are_named() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    let dir = machine.home.path().join("not-a-store");
    fs_err::create_dir(&dir).unwrap();
    fs_err::write(dir.join("file"), "").unwrap();
    let mut command = larder_in(machine.home.path());
    command.arg("--root").arg(&dir).arg("images");
    let run = LarderProcess::start(command).finish().expect(3);
    assert!(run.stderr.contains("not an image store") && run.stderr.contains("--root DIR"), "{run:?}");
    ImageBuilder::small(1, 1000).push(&machine.registry, "shop/web:1").unwrap();
    let name = machine.registry.image("shop/web:1");
    machine.larder(&["pull", &name]).expect(0);
    let run = machine.larder(&["mount", &name, "/nowhere"]).expect(1);
    assert!(run.stderr.contains("/nowhere"), "{run:?}");
}
