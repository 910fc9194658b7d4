//! A burst of pods that run once, each with an image of its own, on a disk that has room for some of the images.

use std::path::{Path, PathBuf};

use larder_testkit_peers::containerd::pods::pause_image;
use larder_testkit_peers::{
    Containerd, ContainerdOptions, LayerFiles, LoopDisk, LoopFilesystem, Package, RegistryOptions,
    RegistryProcess, require,
};
use tempfile::TempDir;

use crate::served::CriDaemon;
use crate::world::{LarderProcess, larder_in};

/// How many pods there are.
const PODS: usize = 12;
/// How many of their images are pulled at once.
const TOGETHER: usize = 3;
/// Size of the disk, in MiB.
const DISK: u64 = 192;
/// Size of an image: a tenth of what the filesystem has for files.
const IMAGE: usize = 16_000_000;

/// What larder is to containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LarderRole {
    /// Its snapshotter: images are in larder's own store.
    Snapshotter,
    /// Its proxy: images are in containerd.
    Proxy,
    /// Its proxy, without access to the registry.
    BlindProxy,
}

#[test]
fn a_burst_of_pods_that_run_once_succeeds_on_a_disk_with_room_for_some_of_their_images() {
    burst(LarderRole::Snapshotter, LoopFilesystem::Ext4);
}

#[test]
fn a_burst_of_pods_that_run_once_succeeds_on_xfs() {
    burst(LarderRole::Snapshotter, LoopFilesystem::Xfs);
}

#[test]
fn a_burst_of_pods_in_front_of_containerd_succeeds_on_a_disk_with_room_for_some_of_their_images() {
    burst(LarderRole::Proxy, LoopFilesystem::Ext4);
}

#[test]
fn a_burst_of_pods_in_front_of_containerd_succeeds_on_xfs() {
    burst(LarderRole::Proxy, LoopFilesystem::Xfs);
}

#[test]
fn a_burst_of_pods_in_front_of_containerd_succeeds_where_larder_cannot_ask_the_registry() {
    if !require(&Package::ALL).is_available() || !LoopFilesystem::Ext4.is_available() {
        return;
    }
    let (registry, images) = registry_with_images(noise);
    let node = SmallNode::start(LarderRole::BlindProxy, LoopFilesystem::Ext4, &registry);
    node.one_after_the_other(&images);
    assert!(node.containerd.log().contains(NO_SPACE), "containerd alone finds that space is short");
    node.daemon.stop().expect(0);
}

/// As on XFS, which gives a file that grows more than it asks for.
#[test]
fn pods_succeed_whose_images_take_more_space_than_is_estimated() {
    if !require(&Package::ALL).is_available() || !LoopFilesystem::Ext4.is_available() {
        return;
    }
    // Of the ones, next to nothing is fetched.
    let (registry, images) = registry_with_images(|pod| {
        LayerFiles::new().noise("noise", IMAGE / 8, pod).file("ones", vec![1; IMAGE - IMAGE / 8])
    });
    let node = SmallNode::start(LarderRole::Snapshotter, LoopFilesystem::Ext4, &registry);
    node.one_after_the_other(&images);
    node.daemon.stop().expect(0);
}

fn burst(role: LarderRole, filesystem: LoopFilesystem) {
    if !require(&Package::ALL).is_available() || !filesystem.is_available() {
        return;
    }
    let (registry, images) = registry_with_images(noise);
    let node = SmallNode::start(role, filesystem, &registry);
    let (alone, together) = images.split_at(images.len() - TOGETHER);
    node.one_after_the_other(alone);
    node.at_once(together);
    if role == LarderRole::Proxy {
        let asks = || registry.requests().iter().any(|request| request.user_agent.starts_with("larder"));
        assert!(asks(), "for the sizes of images");
        registry.forget_requests();
        node.pull(&together[0]);
        assert!(!asks(), "the image is present");
    }
    assert!(!node.containerd.log().contains(NO_SPACE), "{}", node.containerd.log());
    assert_eq!(node.daemon.logged("insufficient space"), 0, "{}", node.daemon.running.stderr());
    node.daemon.stop().expect(0);
}

/// A layer that takes on the disk what is fetched of it.
fn noise(pod: u64) -> LayerFiles {
    LayerFiles::new().noise("data", IMAGE, pod)
}

/// A registry with the sandbox image and one image for each pod, with a layer of its own.
fn registry_with_images(layer: fn(u64) -> LayerFiles) -> (RegistryProcess, Vec<String>) {
    let registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
    pause_image().push(&registry, PAUSE).unwrap();
    let image = |pod: usize| {
        let name = format!("shop/job-{pod}:1");
        pause_image().layer(layer(pod as u64 + 1)).push(&registry, &name).unwrap();
        registry.image(&name)
    };
    let images = (0..PODS).map(image).collect();
    (registry, images)
}

const PAUSE: &str = "infra/pause:1";

const NO_SPACE: &str = "no space left on device";

/// containerd and larder, with their images on a small disk.
struct SmallNode {
    pause: String,
    daemon: CriDaemon,
    containerd: Containerd,
    disk: LoopDisk,
    _home: TempDir,
}

impl SmallNode {
    fn start(role: LarderRole, filesystem: LoopFilesystem, registry: &RegistryProcess) -> SmallNode {
        // The smallest XFS has 300 MiB.
        let megabytes = if filesystem == LoopFilesystem::Xfs { 300 } else { DISK };
        let disk = LoopDisk::new(filesystem, megabytes, &[]).unwrap();
        let home = tempfile::tempdir().unwrap();
        let socket: PathBuf = home.path().join("larder.sock");
        let pause = registry.image(PAUSE);
        let options =
            ContainerdOptions { sandbox_image: Some(pause.clone()), ..ContainerdOptions::default() };
        let containerd = Containerd::start_with(match role {
            LarderRole::Snapshotter => ContainerdOptions { snapshotter: Some(socket.clone()), ..options },
            LarderRole::Proxy | LarderRole::BlindProxy => {
                ContainerdOptions { below: Some(disk.path().clone()), ..options }
            }
        });
        let containerd = containerd.unwrap();
        containerd.add_registry(registry).unwrap();
        let daemon = serve(role, &containerd, home.path(), &disk.path().join("store"), socket);
        let node = SmallNode { pause, daemon, containerd, disk, _home: home };
        node.pull(&node.pause);
        // The rest of a larger filesystem is not for images.
        let stats = rustix::fs::statvfs(node.disk.path()).unwrap();
        let free = usize::try_from(stats.f_bavail * stats.f_frsize).unwrap();
        fs_err::write(node.disk.path().join("filler"), vec![1; free.saturating_sub(10 * IMAGE)]).unwrap();
        node
    }

    /// One pod after the other, beside one that runs all the time.
    fn one_after_the_other(&self, images: &[String]) {
        self.pull(&images[0]);
        let running = self.containerd.run_pod("runs").unwrap_or_else(|error| self.fail(&error));
        running.run("c", &images[0], &[]).unwrap_or_else(|error| self.fail(&error));
        for image in &images[1..] {
            self.pull(image);
            self.run_once(image);
        }
        let left: Vec<_> = self.daemon.list().into_iter().flat_map(|image| image.repo_tags).collect();
        assert!(left.contains(&self.pause) && left.contains(&images[0]), "what runs stays: {left:?}");
        assert!(left.len() < images.len() + 1, "room was made: {left:?}");
        drop(running);
    }

    /// Pods whose images are pulled at the same time.
    fn at_once(&self, images: &[String]) {
        std::thread::scope(|scope| {
            for image in images {
                scope.spawn(|| self.pull(image));
            }
        });
        for image in images {
            self.run_once(image);
        }
    }

    fn run_once(&self, image: &str) {
        let pod = self.containerd.run_pod("job").unwrap_or_else(|error| self.fail(&error));
        pod.run_and_stop("job", image, &[]).unwrap_or_else(|error| self.fail(&error));
    }

    fn pull(&self, image: &str) {
        self.daemon.pull(image).unwrap_or_else(|error| self.fail(&error));
    }

    fn fail<T>(&self, error: &dyn std::fmt::Display) -> T {
        panic!("{error}\n{}\n{}", self.daemon.running.stderr(), self.containerd.log())
    }
}

fn serve(role: LarderRole, containerd: &Containerd, home: &Path, store: &Path, socket: PathBuf) -> CriDaemon {
    let endpoint = containerd.endpoint();
    let runtime = match role {
        LarderRole::Snapshotter => format!("containerd: {{snapshotter: true, socket: \"{endpoint}\"}}\n"),
        LarderRole::Proxy => format!("backend: \"{endpoint}\"\n"),
        LarderRole::BlindProxy => {
            let hosts = "server = \"http://127.0.0.1:1\"\n";
            let certs = home.join("certs.d");
            fs_err::create_dir_all(certs.join("_default")).unwrap();
            fs_err::write(certs.join("_default/hosts.toml"), hosts).unwrap();
            format!("backend: \"{endpoint}\"\nregistry: {{certsDirs: [\"{}\"]}}\n", certs.display())
        }
    };
    let settings = format!(
        "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n{runtime}\
         store: {{reserveBytes: 1MiB, reserveInodes: 10}}\nruntime: {{sandboxImages: [\"*/pause:*\"]}}\n"
    );
    fs_err::write(home.join("larder.yaml"), settings).unwrap();
    let mut command = larder_in(home);
    command.env("LARDER_CONFIG", home.join("larder.yaml"));
    if role == LarderRole::Snapshotter {
        command.arg("--root").arg(store);
    }
    command.arg("serve").arg("--socket").arg(&socket);
    CriDaemon::at(socket, LarderProcess::start(command))
}
