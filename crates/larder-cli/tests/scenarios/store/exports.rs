//! Images that leave the store: as archives that other tools take, as files, and as a disk.

use std::path::Path;
use std::process::{Command, Stdio};

use larder::reference::Digest;
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit_peers::{ImageBuilder, LayerFiles, Package, require};
use serde_json::{Value, json};

use super::{MachineWithoutRuntime, may_mount};
use crate::world::{LarderOutput, LarderProcess, larder_in};

impl MachineWithoutRuntime {
    pub(super) fn path(&self, name: &str) -> String {
        self.home.path().join(name).display().to_string()
    }

    /// Pushes an index, as most public images have one, of manifests with these tags, each for an architecture if one
    /// is given.
    pub(super) fn push_index(&self, repository: &str, tag: &str, manifests: &[(&str, Option<&str>)]) {
        let url = |tag: &str| format!("http://{}/v2/{repository}/manifests/{tag}", self.registry.address());
        let (manifest, index) =
            ["manifest", "index"].map(|kind| format!("application/vnd.oci.image.{kind}.v1+json")).into();
        let entries = manifests.iter().map(|(tag, architecture)| {
            let raw = run("curl", &["-sf", "-H", &format!("Accept: {manifest}"), &url(tag)]);
            let digest = Digest::sha256(&raw);
            let mut entry = json!({ "mediaType": manifest, "digest": digest.as_str(), "size": raw.len() });
            if let Some(architecture) = architecture {
                entry["platform"] = json!({ "os": "linux", "architecture": architecture });
            }
            entry
        });
        let entries: Vec<Value> = entries.collect();
        let document = json!({ "schemaVersion": 2, "mediaType": index, "manifests": entries }).to_string();
        let kind = format!("Content-Type: {index}");
        run("curl", &["-sf", "-X", "PUT", "-H", &kind, "-d", &document, &url(tag)]);
    }
}

/// Two layers with what makes an archive hard to write again: long names, links, devices, whiteouts, odd padding.
pub(super) fn tricky() -> ImageBuilder {
    let long = format!("srv/{}/{}", "d".repeat(90), "f".repeat(200));
    let lower = TarBuilder::new()
        .with(TarBuilderEntry::dir("srv"))
        .with(TarBuilderEntry::file(long, "long").pax("SCHILY.xattr.user.note", "kept"))
        .with(TarBuilderEntry::file("srv/data", vec![7; 10_000]).mode(0o4755).owner(1000, 70_000))
        .with(TarBuilderEntry::file("srv/first", "two names").mode(0o4750))
        .with(TarBuilderEntry::hard_link("srv/again", "srv/first"))
        .with(TarBuilderEntry::symlink("srv/out", "/etc/passwd"))
        .with(TarBuilderEntry::file("srv/gone", "hidden by the upper layer").pax("mtime", "1234.5"))
        .with(TarBuilderEntry::char_device("srv/null", 1, 3))
        .finish();
    let upper = TarBuilder::new()
        .with(TarBuilderEntry::file("srv/.wh.gone", ""))
        .with(TarBuilderEntry::file("srv/data", "replaced"))
        .with(TarBuilderEntry::dir("opt/new"))
        .finish();
    ImageBuilder::new().layer(LayerFiles::archive(lower)).layer(LayerFiles::archive(upper))
}

/// Runs another program; its standard output.
pub(super) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Names, modes, owners, times, links and contents below a directory. Sizes of directories differ between filesystems.
pub(super) fn listing(dir: &Path) -> String {
    let script = "find . \\( -type d -printf '%p %M %U %G %T@\\n' \\) -o -printf '%p %M %U %G %T@ %n %s %l\\n' | sort; \
                  find . -type f | sort | xargs sha256sum";
    let output = Command::new("sh").args(["-c", script]).current_dir(dir).output().unwrap();
    assert!(output.status.success() && output.stdout.len() > 100, "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_saved_image_has_its_layers_and_its_id_in_other_tools() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    if !may_mount() || !require(&[Package::Skopeo, Package::Podman]).is_available() {
        return;
    }
    let pushed = tricky().push(&machine.registry, "shop/web:1").unwrap();
    let name = machine.registry.image("shop/web:1");
    machine.larder(&["pull", &name]).expect(0);
    let file = machine.path("app.tar");
    machine.larder(&["save", "-o", &file, &name]).expect(0);

    let layout = machine.path("app.layout");
    run("skopeo", &["copy", "-q", &format!("oci-archive:{file}"), &format!("oci:{layout}:1")]);
    // The layout that skopeo wrote has compressed layers.
    let manifest = run("skopeo", &["inspect", "--raw", &format!("oci-archive:{file}")]);
    let manifest: Value = serde_json::from_str(&manifest).unwrap();
    assert_eq!(manifest["config"]["digest"], pushed.image_id.as_str());
    let config = run("skopeo", &["inspect", "--raw", "--config", &format!("oci:{layout}:1")]);
    let config: Value = serde_json::from_str(&config).unwrap();
    let layers: Vec<&Value> =
        manifest["layers"].as_array().unwrap().iter().map(|layer| &layer["digest"]).collect();
    let diff_ids: Vec<&Value> = config["rootfs"]["diff_ids"].as_array().unwrap().iter().collect();
    assert_eq!(layers, diff_ids, "skopeo has verified their content when it copied them");

    let (root, runroot) = (machine.path("podman"), machine.path("podman-run"));
    let podman = ["--root", &root, "--runroot", &runroot, "--storage-driver", "vfs"];
    let loaded = run("podman", &[&podman[..], &["load", "-q", "-i", &file]].concat());
    assert!(loaded.contains(&name), "{loaded}");
    let ids = run("podman", &[&podman[..], &["images", "--no-trunc", "-q"]].concat());
    assert_eq!(ids.trim(), pushed.image_id);

    let mut load = larder_in(machine.home.path());
    load.args(["--root", &machine.path("loaded"), "load", &file]);
    let loaded = LarderProcess::start(load).finish().expect(0);
    assert!(loaded.stdout.contains(&name), "{loaded:?}");
}

#[test]
fn images_before_a_damaged_one_are_loaded_and_reported() {
    let home = tempfile::tempdir().unwrap();
    let larder = |root: &str, arguments: &[&str]| {
        let mut command = larder_in(home.path());
        command.arg("--root").arg(home.path().join(root)).args(arguments);
        LarderProcess::start(command).finish()
    };
    let names = ["registry.example/first:image", "registry.example/second:image"];
    for name in names {
        let layout = home.path().join("layout");
        ImageBuilder::new().layer(LayerFiles::new().file("srv/name", name)).write(&layout).unwrap();
        let repository = name.trim_end_matches(":image");
        larder("store", &["load", &layout.to_string_lossy(), "--name", repository]).expect(0);
        fs_err::remove_dir_all(layout).unwrap();
    }
    let file = home.path().join("both.tar");
    let archive = file.to_string_lossy().into_owned();
    larder("store", &[&["save", "-o", &archive][..], &names].concat()).expect(0);
    let mut bytes = fs_err::read(&file).unwrap();
    let content = bytes.windows(names[1].len()).enumerate();
    let at: Vec<usize> =
        content.filter(|(_, window)| *window == names[1].as_bytes()).map(|(at, _)| at).collect();
    // The name is also that of the image, in its index; the content of a file fills a block.
    let at = at.into_iter().find(|at| bytes[at + names[1].len()] == 0).unwrap();
    bytes[at] ^= 1;
    fs_err::write(&file, bytes).unwrap();

    let loaded = larder("loaded", &["load", &archive]).expect(1);
    assert_eq!(loaded.stdout, format!("Loaded image: {}\n", names[0]));
    let problem = format!("both.tar: image {}: cannot unpack layer sha256:", names[1]);
    assert!(loaded.stderr.contains(&problem), "{loaded:?}");
    let leases = larder("loaded", &["lease", "-o", "json"]).expect(0).json();
    assert_eq!(leases.as_array().unwrap().len(), 1, "{leases}");
    let again = larder("loaded", &["load", "-o", "json", &archive]).expect(1).json();
    assert_eq!(again[0]["repoTags"][0], names[0], "{again}");
}

#[test]
fn a_loaded_image_has_the_digests_of_its_repository() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    let pushed = ImageBuilder::small(1, 50_000).push(&machine.registry, "shop/web:1").unwrap();
    machine.push_index("shop/web", "multi", &[("1", None)]);
    let name = machine.registry.image("shop/web:multi");
    machine.larder(&["pull", &name]).expect(0);
    machine.larder(&["tag", &name, "local.example/web:1"]).expect(0);
    let names = |larder: &dyn Fn(&[&str]) -> LarderOutput| {
        let id = larder(&["images", "-q"]).expect(0).stdout.trim().to_owned();
        let found = larder(&["inspect", &id]).expect(0).json();
        ["repoDigests", "repoTags"].map(|kind| found[0][kind].as_array().cloned().unwrap_or_default())
    };
    let [pulled, _] = names(&|arguments| machine.larder(arguments));
    let [by_digest] = &pulled[..] else { panic!("{pulled:?}") };
    let by_digest = by_digest.as_str().unwrap();
    assert!(!by_digest.contains(&pushed.manifest_digest), "the digest of the index");

    for (file, saved, tags) in
        [("by-tag.tar", &[&*name, "local.example/web:1"][..], 2), ("by-digest.tar", &[by_digest], 0)]
    {
        let (file, root) = (machine.path(file), machine.path(&format!("{file}.store")));
        let note = machine.larder(&[&["save", "-o", &file], saved].concat()).expect(0).stderr;
        assert!(note.contains("to other programs"), "{note}");
        let larder = |arguments: &[&str]| {
            let mut command = larder_in(machine.home.path());
            command.args(["--root", &root]).args(arguments);
            LarderProcess::start(command).finish()
        };
        larder(&["load", &file]).expect(0);
        let [digests, found] = names(&larder);
        assert_eq!(digests, pulled, "{file}: no digest is invented, none is lost");
        assert_eq!(found.len(), tags, "{file}: {found:?}");
        machine.registry.forget_requests();
        larder(&["ensure", "--policy", "Never", by_digest]).expect(0);
        assert_eq!(machine.registry.requests().len(), 0, "nothing was asked for");
    }
}

#[test]
fn exported_files_are_those_of_the_mounted_image() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    if !may_mount() || !require(&[Package::ErofsUtils]).is_available() {
        return;
    }
    tricky().push(&machine.registry, "shop/web:1").unwrap();
    let name = machine.registry.image("shop/web:1");
    let mount = machine.path("mount");
    fs_err::create_dir(&mount).unwrap();
    let larder = |arguments: &[&str]| machine.larder(arguments).expect(0);
    larder(&["pull", &name]);
    larder(&["mount", &name, &mount]);
    let expected = listing(Path::new(&mount));
    larder(&["umount", &mount]);

    let dir = machine.path("dir");
    larder(&["export", &name, "--to", &dir, "--suid", "--dev"]);
    assert_eq!(listing(Path::new(&dir)), expected);

    let dir = machine.path("safe");
    let notes = larder(&["export", &name, "--to", &dir]).stderr;
    assert!(notes.contains("(--dev): 1") && notes.contains("(--suid): 1"), "{notes}");
    let dangerous = run("find", &[&dir, "-perm", "/6000", "-not", "-type", "d", "-o", "-type", "b,c"]);
    assert_eq!(dangerous, "");

    let (tar, dir) = (machine.path("files.tar"), machine.path("tar.dir"));
    larder(&["export", &name, "-o", &tar]);
    fs_err::create_dir(&dir).unwrap();
    run("tar", &["-xpf", &tar, "-C", &dir, "--numeric-owner"]);
    assert_eq!(listing(Path::new(&dir)), expected);

    let disk = machine.path("disk.erofs");
    larder(&["export", &name, "-o", &disk, "--format", "erofs"]);
    run("fsck.erofs", &[&disk]);
    run("mount", &["-t", "erofs", "-o", "loop,ro", &disk, &mount]);
    let found = listing(Path::new(&mount));
    run("umount", &[&mount]);
    assert_eq!(found, expected);
    let again = machine.path("again.erofs");
    larder(&["export", &name, "-o", &again, "--format", "erofs"]);
    let [disk, again] = [disk, again].map(|disk| fs_err::read(disk).unwrap());
    assert!(disk == again, "equal images make equal disks");
}

#[test]
fn what_cannot_be_exported_is_named_and_leaves_nothing() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    let larder = |arguments: &[&str]| machine.larder(arguments);
    ImageBuilder::small(1, 50_000).push(&machine.registry, "shop/web:1").unwrap();
    let name = machine.registry.image("shop/web:1");
    larder(&["pull", &name]).expect(0);
    let out = machine.home.path().join("out");
    fs_err::create_dir(&out).unwrap();
    let file = out.join("app.tar").display().to_string();
    fs_err::write(&file, "old").unwrap();
    let left = || fs_err::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();

    for (arguments, code, part) in [
        (&["save", "no/such:1", "-o", &file][..], 1, "no/such:1: image not found"),
        (&["export", &name, "-o", &file, "--format", "zip"], 2, "possible values: tar, erofs, oci"),
        (&["save", &name, "-o", &machine.path("no/such/dir.tar")], 1, "cannot create: No such file"),
        (&["save", &name, "-o", &machine.path("out")], 2, "is a directory"),
        (&["save", &name, "-o", "/dev/full"], 1, "No space left on device"),
        (&["export", &name, "-o", "/dev/null", "--format", "erofs"], 2, "needs a file"),
        (&["export", &name, "-o", &file, "--suid"], 2, "--suid and --dev are for --to"),
        (&["export", &name, "--to", &machine.path("out")], 2, "directory is not empty"),
        (&["export", &name, "--to", &machine.path("no/such")], 1, "No such file"),
    ] {
        let output = larder(arguments).expect(code);
        assert!(output.stderr.contains(part), "{arguments:?}: {output:?}");
    }
    assert_eq!(left(), ["app.tar"]);
    assert_eq!(fs_err::read_to_string(&file).unwrap(), "old");

    let layers = machine.layers();
    let layer = fs_err::read_dir(&layers).unwrap().next().unwrap().unwrap().path();
    let mut damaged = fs_err::read(&layer).unwrap();
    let data = damaged.windows(100).position(|bytes| bytes.iter().all(|byte| *byte != 0)).unwrap();
    damaged[data + 50] ^= 1;
    fs_err::write(&layer, &damaged).unwrap();
    let output = larder(&["save", &name, "-o", &file]).expect(1);
    for part in ["is damaged: layer sha256:", " pull ", " replaces what is damaged"] {
        assert!(output.stderr.contains(part), "{part}: {output:?}");
    }
    assert_eq!(fs_err::read_to_string(&file).unwrap(), "old", "the damaged export is discarded");
    assert_eq!(left(), ["app.tar"]);
}
