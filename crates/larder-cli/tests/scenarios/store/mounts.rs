//! Images of the store that are mounted.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use larder_testkit_peers::ImageBuilder;

use super::{MachineWithoutRuntime, may_mount};

#[test]
fn a_mounted_image_is_in_use_until_it_is_unmounted() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    if !may_mount() {
        return;
    }
    ImageBuilder::small(1, 50_000).push(&machine.registry, "shop/web:1").unwrap();
    let name = machine.registry.image("shop/web:1");
    machine.larder(&["pull", &name]).expect(0);
    let dir = machine.home.path().join("mnt");
    fs_err::create_dir(&dir).unwrap();
    let target = dir.to_string_lossy().into_owned();

    let digits = &machine.larder(&["images", "-q"]).expect(0).stdout["sha256:".len()..][..3];
    for part in ["web:1", digits] {
        let run = machine.larder(&["mount", part, &target]).expect(1);
        let is_named = run.stderr.contains("image not found") && run.stderr.contains("similar images: ");
        assert!(is_named && run.stderr.contains(&name) && !run.stderr.contains("pull"), "{run:?}");
    }
    machine.larder(&["mount", "--writable", &name, &target]).expect(0);
    assert_eq!(fs_err::metadata(dir.join("srv/data")).unwrap().len(), 50_000);
    fs_err::write(dir.join("srv/new"), "written").unwrap();
    assert_eq!(machine.larder(&["mounts"]).expect(0).lines_with(&[&target, "read-write"]), 1);
    let run = machine.larder(&["rm", &name]).expect(1);
    let hint = format!("larder --root {} umount {target} first; or use --force", machine.root().display());
    assert!(run.stderr.contains(&hint), "{run:?}");
    machine.larder(&["umount", &target]).expect(0);
    assert!(!dir.join("srv").exists());
    assert!(machine.unpacked("srv/new").is_empty(), "the layer itself was not written to");
    machine.larder(&["rm", &name]).expect(0);
    machine.larder(&["umount", &target]).expect(1);
}

#[test]
fn a_mount_of_another_namespace_is_forgotten_once_nothing_has_it() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    if !may_mount() {
        return;
    }
    ImageBuilder::small(1, 50_000).push(&machine.registry, "shop/web:1").unwrap();
    let name = machine.registry.image("shop/web:1");
    machine.larder(&["pull", &name]).expect(0);
    let dir = machine.home.path().join("mnt");
    fs_err::create_dir(&dir).unwrap();
    let target = dir.to_string_lossy().into_owned();
    for writable in [false, true] {
        let flag = if writable { "--writable" } else { "--timeout=5s" };
        let mut command = Command::new("unshare");
        let line = "\"$@\" && echo mounted && read line";
        command.args(["-m", "--propagation", "private", "sh", "-c", line, "sh"]);
        command.arg(env!("CARGO_BIN_EXE_larder")).arg("--root").arg(machine.root());
        let mut holder = command
            .args(["mount", flag, &name, &target])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "mounted"));

        let run = machine.larder(&["umount", &target]).expect(1);
        assert!(
            run.stderr.contains(&format!("process {}", holder.id())) && run.stderr.contains("nsenter"),
            "{run:?}"
        );
        machine.larder(&["umount", "--force", &target]).expect(1);
        machine.larder(&["rm", &name]).expect(1);
        drop(holder.stdin.take());
        holder.wait().unwrap();
        let run = machine.larder(&["umount", &target]);
        if run.code != 0 {
            // A process of this machine does not let root look at it.
            assert!(run.stderr.contains("--force"), "{run:?}");
            machine.larder(&["umount", "--force", &target]).expect(0);
        }
        assert_eq!(machine.larder(&["mounts"]).expect(0).stdout.lines().count(), 1, "the heading");
    }
    machine.larder(&["rm", &name]).expect(0);
}

#[test]
fn an_image_removed_by_force_remains_mounted_until_it_is_unmounted() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    if !may_mount() {
        return;
    }
    ImageBuilder::small(1, 50_000).push(&machine.registry, "shop/web:1").unwrap();
    let name = machine.registry.image("shop/web:1");
    machine.larder(&["pull", &name]).expect(0);
    let dir = machine.home.path().join("mnt");
    fs_err::create_dir(&dir).unwrap();
    let target = dir.to_string_lossy().into_owned();
    machine.larder(&["mount", &name, &target]).expect(0);

    let run = machine.larder(&["rm", "--force", &name]).expect(0);
    assert!(
        run.stderr.contains("still mounted at") && run.stderr.contains("removed when it is unmounted"),
        "{run:?}"
    );
    assert_eq!(machine.larder(&["images", "-q"]).expect(0).stdout, "");
    machine.larder(&["fsck"]).expect(0);
    assert_eq!(fs_err::read(dir.join("srv/data")).unwrap().len(), 50_000, "the mount keeps its files");
    machine.larder(&["umount", &target]).expect(0);
    assert!(machine.unpacked("srv/data").is_empty());
    machine.larder(&["fsck"]).expect(0);
}
