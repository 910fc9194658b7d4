//! Podman's service, which speaks Docker's API.

use std::process::{Child, Command, Stdio};

use larder_testkit_peers::packages::find_program;
use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{Package, require};

use crate::world::{LarderProcess, larder_in};

/// Ends the service with the test.
struct PodmanService(Child);

impl Drop for PodmanService {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn images_of_podman_are_listed_explained_and_removed() {
    if !require(&[Package::Podman]).is_available() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| home.path().join(name);
    let podman = |arguments: &[&str]| {
        let mut command = Command::new(find_program("podman").unwrap());
        command.arg("--root").arg(at("root")).arg("--runroot").arg(at("runroot"));
        command.args(["--storage-driver", "vfs", "--events-backend", "file"]).args(arguments);
        command.current_dir(home.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let mut archive = tar::Builder::new(fs_err::File::create(at("layer.tar")).unwrap());
    let mut header = tar::Header::new_ustar();
    header.set_size(5);
    header.set_mode(0o644);
    archive.append_data(&mut header, "file", &b"hello"[..]).unwrap();
    archive.into_inner().unwrap();
    assert!(podman(&["import", "layer.tar", "localhost/hello:1"]).status().unwrap().success());
    let socket = at("podman.sock");
    let address = format!("unix://{}", socket.display());
    let service = PodmanService(podman(&["system", "service", "--time=0", &address]).spawn().unwrap());
    wait_until("the service listens", || socket.exists());

    let larder = |arguments: &[&str]| {
        let mut command = larder_in(home.path());
        command.env("CONTAINER_HOST", &address).arg("--state").arg(at("state"));
        LarderProcess::start({
            command.args(["--backend", "podman"]).args(arguments);
            command
        })
        .finish()
    };
    let image = larder(&["images", "-o", "json"]).expect(0).json()[0].clone();
    assert_eq!(image["repository"], "localhost/hello");
    assert!(image["created"].is_string() && image["uniqueBytes"].is_u64(), "{image}");
    assert_eq!(larder(&["runtime", "-o", "json"]).expect(0).json()["name"], "podman");
    assert!(larder(&["explain", "localhost/hello:1"]).expect(0).stdout.contains("removal frees:"));
    larder(&["rm", "localhost/hello:1"]).expect(0);
    assert_eq!(larder(&["images", "-q"]).expect(0).stdout, "");
    drop(service);
    let unreachable = larder(&["images"]).expect(3);
    assert!(unreachable.stderr.contains("podman.sock"), "{unreachable:?}");
}
