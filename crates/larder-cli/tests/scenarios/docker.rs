//! Docker: how larder connects to the engine, and what the daemon learns from its events.

use std::path::Path;
use std::process::Command;

use larder_testkit_peers::packages::find_program;
use larder_testkit_peers::process::{copy_program, wait_until};
use larder_testkit_peers::tls::certificates;
use larder_testkit_peers::{Dockerd, DockerdOptions, ImageBuilder, Package, RegistryOptions, require};
use serde_json::Value;

use crate::served::CriDaemon;
use crate::world::{LarderProcess, RuntimeFixture, larder_in};

#[test]
fn a_user_without_access_to_the_socket_gets_a_hint() {
    if !require(&[Package::DockerIo]).is_available() || find_program("setpriv").is_none() {
        return;
    }
    let engine = Dockerd::start().unwrap();
    let home = tempfile::tempdir().unwrap();
    // The socket can be reached, and not opened.
    let dir = engine.socket().parent().unwrap().to_owned();
    let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    fs_err::set_permissions(&dir, mode(0o755)).unwrap();
    fs_err::set_permissions(engine.socket(), mode(0o660)).unwrap();
    fs_err::set_permissions(home.path(), mode(0o777)).unwrap();
    // The unprivileged user may be unable to read the build directory, but can run a copy.
    let copy = home.path().join("larder");
    copy_program(Path::new(env!("CARGO_BIN_EXE_larder")), &copy);
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&copy);
    command.env("HOME", home.path()).env("DOCKER_HOST", engine.host());
    command.args(["--backend", "docker", "images"]);
    let run = LarderProcess::start(command).finish().expect(3);
    assert!(run.stderr.contains("permission denied"), "{run:?}");
    assert!(run.stderr.contains("sudo usermod -aG docker $USER"), "{run:?}");
}

#[test]
fn an_engine_behind_tls_is_trusted_only_by_the_authority_of_docker_cert_path() {
    if !require(&[Package::DockerIo, Package::Openssl]).is_available() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let made = |name: &str| {
        let path = dir.path().join(name);
        fs_err::create_dir(&path).unwrap();
        let made = certificates(&path).unwrap();
        for (file, name) in [(&made.ca, "ca.pem"), (&made.certificate, "cert.pem"), (&made.key, "key.pem")] {
            fs_err::copy(file, path.join(name)).unwrap();
        }
        made
    };
    let (right, _) = (made("right"), made("wrong"));
    let engine =
        Dockerd::start_with(DockerdOptions { tls: Some(right), ..DockerdOptions::default() }).unwrap();
    let runtime = |authority: &str| {
        let mut command = larder_in(dir.path());
        let address = format!("tcp://{}", engine.tcp_address().unwrap());
        command.env("DOCKER_HOST", address).env("DOCKER_TLS_VERIFY", "1");
        command.env("DOCKER_CERT_PATH", dir.path().join(authority));
        command.args(["--backend", "docker", "runtime", "-o", "json"]);
        LarderProcess::start(command).finish()
    };
    let printed = runtime("right").expect(0).json();
    assert_eq!(printed["name"], "docker");
    let endpoint = printed["endpoint"].as_str().unwrap();
    assert!(endpoint.starts_with("tcp://127.0.0.1:"), "{printed}");
    let images = printed["imageFilesystems"][0].as_str().unwrap();
    assert!(images.starts_with("/tcp://127.0.0.1:"), "it may be elsewhere: {printed}");
    let refused = runtime("wrong").expect(3);
    assert!(refused.stderr.contains("TLS: invalid peer certificate"), "{refused:?}");
    for own in ["cert.pem", "key.pem"] {
        fs_err::remove_file(dir.path().join("right").join(own)).unwrap();
    }
    let anonymous = runtime("right").expect(3);
    assert!(anonymous.stderr.contains("TLS: received fatal alert"), "{anonymous:?}");
    assert!(anonymous.stderr.contains("set DOCKER_CERT_PATH to a directory"), "{anonymous:?}");
    let missing = runtime("nowhere").expect(2);
    assert!(missing.stderr.contains("ca.pem") && missing.stderr.contains("DOCKER_CERT_PATH"), "{missing:?}");
}

#[test]
fn a_daemon_hears_of_containers_between_its_rounds_and_remembers_them_over_restarts_of_both() {
    let Some(mut world) = RuntimeFixture::with_docker(RegistryOptions::default()) else { return };
    let [used, unused] = ["used:1", "unused:1"].map(|name| {
        ImageBuilder::small(name.len() as u64, 50_000).push(&world.registry, name).unwrap();
        world.registry.image(name)
    });
    for name in [&used, &unused] {
        world.larder(&["pull", "-q", name]).expect(0);
    }
    world.end_leases();
    let last_used = |world: &RuntimeFixture, daemon: &CriDaemon, name: &str| -> Value {
        let at =
            ["--daemon", &daemon.socket.to_string_lossy(), "gc", "--all-unused", "--dry-run", "-o", "json"];
        let report = world.larder(&at).expect(0).json();
        let images = report["images"].as_array().unwrap();
        let image = images.iter().find(|image| image["names"][0] == name).unwrap();
        image["lastUsed"].clone()
    };
    let daemon = CriDaemon::of(&world);
    let [pulled_used, pulled_unused] = [&used, &unused].map(|name| last_used(&world, &daemon, name));
    // More than the engine keeps, so that only a permanent listener has the first.
    let container = world.docker().create_container(&used, "short").unwrap();
    let refused = world.larder(&["rm", &used]).expect(1);
    assert!(refused.stderr.ends_with("hint: remove the container short first\n"), "{refused:?}");
    world.docker().remove_container(&container).unwrap();
    let id = world.larder(&["images", "-q", &unused]).expect(0).stdout.trim().to_owned();
    for number in 0..300 {
        world.docker().tag(&id, "noise", &number.to_string()).unwrap();
    }
    wait_until("the use is on record", || last_used(&world, &daemon, &used) != pulled_used);
    let before = last_used(&world, &daemon, &used);
    assert_eq!(last_used(&world, &daemon, &unused), pulled_unused);
    daemon.stop().expect(0);

    world.stop_backend();
    world.start_backend_again();
    let daemon = CriDaemon::of(&world);
    assert_eq!(last_used(&world, &daemon, &used), before);
    daemon.stop().expect(0);
}
