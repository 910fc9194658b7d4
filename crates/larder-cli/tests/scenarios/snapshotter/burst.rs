//! A burst of pods that run once, each with an image of its own, on a disk that has room for some of the images.

use std::path::PathBuf;

use larder_testkit_peers::containerd::pods::pause_image;
use larder_testkit_peers::{
    Containerd, ContainerdOptions, LayerFiles, LoopDisk, LoopFilesystem, Package, RegistryOptions,
    RegistryProcess, require,
};

use crate::served::CriDaemon;
use crate::world::{LarderProcess, larder_in};

/// How many pods there are.
const PODS: usize = 12;
/// Size of the disk, in MiB.
const DISK: u64 = 192;
/// Size of an image: a tenth of what the filesystem has for files.
const IMAGE: usize = 16_000_000;

#[test]
fn a_burst_of_pods_that_run_once_succeeds_on_a_disk_with_room_for_some_of_their_images() {
    if !require(&Package::ALL).is_available() {
        return;
    }
    let registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
    pause_image().push(&registry, "infra/pause:1").unwrap();
    let images: Vec<String> = (0..PODS)
        .map(|pod| {
            let name = format!("shop/job-{pod}:1");
            let data = LayerFiles::new().noise("data", IMAGE, pod as u64 + 1);
            pause_image().layer(data).push(&registry, &name).unwrap();
            registry.image(&name)
        })
        .collect();
    for filesystem in [LoopFilesystem::Ext4, LoopFilesystem::Xfs] {
        if filesystem.is_available() {
            burst(filesystem, &registry, &images);
        }
    }
}

fn burst(filesystem: LoopFilesystem, registry: &RegistryProcess, images: &[String]) {
    // The smallest XFS has 300 MiB.
    let megabytes = if filesystem == LoopFilesystem::Xfs { 300 } else { DISK };
    let disk = LoopDisk::new(filesystem, megabytes, &[]).unwrap();
    let home = tempfile::tempdir().unwrap();
    let socket: PathBuf = home.path().join("larder.sock");
    let pause = registry.image("infra/pause:1");
    let options = ContainerdOptions {
        snapshotter: Some(socket.clone()),
        sandbox_image: Some(pause.clone()),
        ..ContainerdOptions::default()
    };
    let containerd = Containerd::start_with(options).unwrap();
    containerd.add_registry(registry).unwrap();
    let settings = format!(
        "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n\
         containerd:\n  snapshotter: true\n  socket: {}\n\
         store: {{reserveBytes: 1MiB, reserveInodes: 10}}\nruntime: {{sandboxImages: [\"*/pause:*\"]}}\n",
        containerd.endpoint()
    );
    fs_err::write(home.path().join("larder.yaml"), settings).unwrap();
    let mut command = larder_in(home.path());
    command.env("LARDER_CONFIG", home.path().join("larder.yaml"));
    command.arg("--root").arg(disk.path().join("store")).arg("serve").arg("--socket").arg(&socket);
    let daemon = CriDaemon::at(socket, LarderProcess::start(command));
    let failed = |error: &dyn std::fmt::Display| -> String {
        format!("{filesystem:?}: {error}\n{}\n{}", daemon.running.stderr(), containerd.log())
    };
    daemon.pull(&pause).unwrap();
    // The rest of a larger filesystem is not for images.
    let stats = rustix::fs::statvfs(disk.path()).unwrap();
    let free = usize::try_from(stats.f_bavail * stats.f_frsize).unwrap();
    fs_err::write(disk.path().join("filler"), vec![1; free.saturating_sub(10 * IMAGE)]).unwrap();

    daemon.pull(&images[0]).unwrap();
    let running = containerd.run_pod("runs").unwrap_or_else(|error| panic!("{}", failed(&error)));
    running.run("c", &images[0], &[]).unwrap_or_else(|error| panic!("{}", failed(&error)));
    for (number, image) in images.iter().enumerate().skip(1) {
        daemon.pull(image).unwrap_or_else(|error| panic!("{}", failed(&error)));
        let pod = containerd.run_pod(&format!("job-{number}"));
        let pod = pod.unwrap_or_else(|error| panic!("{}", failed(&error)));
        pod.run_and_stop(&format!("job-{number}"), image, &[])
            .unwrap_or_else(|error| panic!("{}", failed(&error)));
    }
    let left: Vec<_> = daemon.list().into_iter().flat_map(|image| image.repo_tags).collect();
    assert!(left.contains(&pause) && left.contains(&images[0]), "what runs stays: {left:?}");
    assert!(left.len() < PODS + 1, "room was made: {left:?}");
    assert_eq!(daemon.logged("insufficient space"), 0, "{}", daemon.running.stderr());
    drop(running);
    daemon.stop().expect(0);
}
