//! Exports that end early.

use std::path::Path;
use std::process::Command;

use larder_testkit_peers::process::copy_program;
use larder_testkit_peers::{ImageBuilder, LayerFiles, LoopDisk, LoopFilesystem};

use super::MachineWithoutRuntime;
use crate::world::{LarderProcess, larder_in};

const OTHER_USER: u32 = 65534;

/// So many files that their extraction lasts longer than a signal takes.
fn many_files() -> ImageBuilder {
    let files =
        (0..20_000).fold(LayerFiles::new(), |files, at| files.file(format!("srv/{}/{at}", at % 100), "x"));
    ImageBuilder::new().layer(files)
}

#[test]
fn an_interrupted_export_without_root_leaves_nothing() {
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    many_files().push(&machine.registry, "shop/web:1").unwrap();
    let (name, home) = (machine.registry.image("shop/web:1"), machine.home.path());
    let is_root = rustix::process::geteuid().is_root();
    let larder = |arguments: &[&str]| {
        let mut command = larder_in(home);
        if is_root {
            command = Command::new("setpriv");
            let user = OTHER_USER.to_string();
            command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]).arg(home.join("larder"));
            command.env("HOME", home);
        }
        command.current_dir(home).arg("--root").arg(home.join("own")).args(arguments);
        LarderProcess::start(command)
    };
    if is_root {
        copy_program(Path::new(env!("CARGO_BIN_EXE_larder")), &home.join("larder"));
        std::os::unix::fs::chown(home, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    }
    larder(&["pull", "-q", &name]).finish().expect(0);
    let (new, empty) = (home.join("new"), home.join("empty"));
    fs_err::create_dir(&empty).unwrap();
    std::os::unix::fs::chown(&empty, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    let has_files = |dir: &Path| fs_err::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
    for target in [&new, &empty] {
        let mut export = larder(&["export", &name, "--to", &target.display().to_string()]);
        while !has_files(target) {
            assert!(!export.is_finished(), "{:?}", export.finish());
            std::thread::yield_now();
        }
        export.interrupt();
        export.finish().expect(130);
        assert!(!has_files(target), "{}", target.display());
    }
    assert!(!new.exists() && empty.exists(), "only what the export created is removed");
    larder(&["export", &name, "--to", &new.display().to_string()]).finish().expect(0);
    assert_eq!(fs_err::read_dir(new.join("srv")).unwrap().count(), 100);
    let refused = larder(&["mount", &name, &empty.display().to_string()]).finish().expect(1);
    assert!(refused.stderr.contains("mounting requires root"), "{refused:?}");
    assert!(refused.stderr.contains(&format!(" export {name} --to DIR writes")), "{refused:?}");
    assert!(!has_files(&home.join("own/extracted")), "nothing is extracted for it");
}

#[test]
fn an_export_to_a_full_disk_leaves_nothing() {
    if !LoopFilesystem::Ext4.is_available() {
        return;
    }
    let Some(machine) = MachineWithoutRuntime::new() else { return };
    ImageBuilder::small(1, 40_000_000).push(&machine.registry, "shop/web:1").unwrap();
    let name = machine.registry.image("shop/web:1");
    machine.larder(&["pull", "-q", &name]).expect(0);
    let disk = LoopDisk::new(LoopFilesystem::Ext4, 20, &[]).unwrap();
    let out = disk.path().join("out");
    fs_err::create_dir(&out).unwrap();
    let [file, dir] = ["app", "files"].map(|name| out.join(name).display().to_string());
    for arguments in [
        &["export", &name, "--to", &dir][..],
        &["export", &name, "-o", &file],
        &["export", &name, "-o", &file, "--format", "erofs"],
        &["save", &name, "-o", &file],
    ] {
        let output = machine.larder(arguments).expect(1);
        assert!(output.stderr.contains("No space left on device"), "{arguments:?}: {output:?}");
        assert_eq!(fs_err::read_dir(&out).unwrap().count(), 0, "{arguments:?}");
    }
}
