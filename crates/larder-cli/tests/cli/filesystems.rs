//! A runtime that keeps images and writable layers of containers on separate filesystems, as with
//! `KubeletSeparateDiskGC`.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use larder::image_service::local_disk;
use larder_cri::proto;
use larder_testkit_peers::process::wait_until;
use serde_json::Value;

use crate::world::{CliFixture, CliOutput};

/// A daemon that ends with the test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn usage(mountpoint: &Path) -> proto::FilesystemUsage {
    let mountpoint = mountpoint.to_str().unwrap().to_owned();
    proto::FilesystemUsage { fs_id: Some(proto::FilesystemIdentifier { mountpoint }), ..Default::default() }
}

fn capacity(mountpoint: &Path) -> u64 {
    local_disk(mountpoint).unwrap().unwrap().capacity
}

/// Reports of a daemon with this runtime: its status as a table and as JSON, its metrics, and a dry run of GC.
fn reported_by_daemon(world: &CliFixture) -> (String, Value, String, CliOutput) {
    let socket = world.home.path().join("larder.sock");
    let mut serve = world.command(&["serve", "--socket", socket.to_str().unwrap()]);
    let _daemon = Daemon(serve.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    wait_until("the daemon answers", || world.larder(&["status"]).code == Some(0));
    let table = world.larder(&["status"]).expect(0).stdout;
    let json = world.larder(&["status", "-o", "json"]).expect(0).json();
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: larder\r\nConnection: close\r\n\r\n").unwrap();
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).unwrap();
    // Its exit code depends on how full the disk of this machine is.
    (table, json, metrics, world.larder(&["gc", "--dry-run", "-o", "json"]))
}

#[test]
fn separate_filesystems_are_reported_each_and_gc_acts_on_that_of_images() {
    let home = tempfile::tempdir().unwrap();
    // Another filesystem, on each Linux.
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    for (images, containers) in [(home.path(), memory.path()), (memory.path(), home.path())] {
        let world = CliFixture::new();
        world.cri.change(|contents| {
            contents.filesystems.image_filesystems = vec![usage(images)];
            contents.filesystems.container_filesystems = vec![usage(containers)];
        });
        let (table, json, metrics, gc) = reported_by_daemon(&world);
        let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("Disk ")).collect();
        assert_eq!(rows.len(), 2, "{table}");
        assert!(rows[0].contains(" image filesystem: ") && rows[0].contains("GC starts at 85%"), "{table}");
        let containers_row = format!(" containers in {}: ", containers.display());
        assert!(rows[1].contains(&containers_row) && rows[1].ends_with(", not freed by GC"), "{table}");
        assert_eq!(json["disk"]["sizeBytes"], capacity(images), "{json}");
        let others = json["otherFilesystems"].as_array().unwrap();
        assert_eq!(others.len(), 1, "{json}");
        assert_eq!(others[0]["mountpoint"], containers.to_str().unwrap());
        assert_eq!(
            (&others[0]["content"], &others[0]["sizeBytes"]),
            (&"containers".into(), &capacity(containers).into())
        );
        let size = format!(
            "larder_other_filesystem_size_bytes{{content=\"containers\",mountpoint=\"{}\"}} {}\n",
            containers.display(),
            capacity(containers)
        );
        assert!(metrics.contains(&size), "{metrics}");
        assert!(
            metrics.contains(&format!("larder_filesystem_size_bytes {}\n", capacity(images))),
            "{metrics}"
        );
        assert_eq!(gc.json()["before"]["sizeBytes"], capacity(images), "{}", gc.stdout);
    }
}

#[test]
fn one_filesystem_for_images_and_containers_is_reported_once() {
    let (world, home) = (CliFixture::new(), tempfile::tempdir().unwrap());
    let [images, containers] = ["overlay-images", "overlay-containers"].map(|name| home.path().join(name));
    for directory in [&images, &containers] {
        fs_err::create_dir(directory).unwrap();
    }
    world.cri.change(|contents| {
        contents.filesystems.image_filesystems = vec![usage(&images)];
        contents.filesystems.container_filesystems = vec![usage(&containers)];
    });
    let (table, json, metrics, _) = reported_by_daemon(&world);
    assert_eq!(table.lines().filter(|line| line.starts_with("Disk ")).count(), 1, "{table}");
    assert_eq!(json["otherFilesystems"], serde_json::json!([]));
    assert!(!metrics.contains("larder_other_filesystem"), "{metrics}");
}
