//! The real servers themselves: what scenario tests rely on when they use them.

use std::path::Path;
use std::process::{Command, Output};
use std::thread;

use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::registry::{PASSWORD, USER};
use larder_testkit_peers::{
    Availability, Containerd, Dockerd, HoldingProxy, ImageBuilder, LayerFiles, Package, RegistryAccess,
    RegistryOptions, RegistryProcess, TlsMode, require,
};

/// Fetches an image into a directory as an ordinary client does.
fn fetch(image: &str, into: &Path, more: &[&str]) -> Output {
    Command::new("skopeo")
        .args(["--insecure-policy", "copy", "--quiet"])
        .args(more)
        .arg(format!("docker://{image}"))
        .arg(format!("dir:{}", into.display()))
        .output()
        .expect("skopeo starts")
}

const PLAIN: &[&str] = &["--src-tls-verify=false"];

#[test]
fn containerd_serves_again_after_a_stop_and_leaves_nothing_behind() {
    if let Availability::Skip(_) = require(&[Package::Containerd, Package::Runc]) {
        return;
    }
    let mut containerd = Containerd::start().unwrap();
    let socket = containerd.socket();
    let first = containerd.pid().unwrap();
    containerd.stop();
    assert_eq!(containerd.pid(), None);
    assert!(!Path::new(&format!("/proc/{first}")).exists(), "it was waited for");
    containerd.start_again().unwrap();
    let second = containerd.pid().unwrap();
    assert_ne!(first, second);
    drop(containerd);
    assert!(!Path::new(&format!("/proc/{second}")).exists());
    assert!(!socket.parent().unwrap().exists(), "its directory is gone");
}

#[test]
fn dockerd_serves_again_after_a_stop_and_leaves_nothing_behind() {
    if let Availability::Skip(_) = require(&[Package::DockerIo]) {
        return;
    }
    let mut engine = Dockerd::start().unwrap();
    let (socket, root) = (engine.socket(), engine.root().to_owned());
    let dir = socket.parent().unwrap().to_owned();
    let archive = TarBuilder::new().with(TarBuilderEntry::file("file", "x")).finish();
    engine.import(&archive, "app", "1").unwrap();
    engine.stop();
    assert!(processes_that_name(&dir).is_empty(), "its containerd has ended, too");
    engine.start_again().unwrap();
    assert_eq!(engine.image_names().unwrap(), ["app:1"]);
    assert!(processes_that_name(&dir).len() > 1, "a containerd of its own");
    drop(engine);
    assert!(processes_that_name(&dir).is_empty());
    assert!(!dir.exists() && !root.exists(), "its directories are gone");
}

/// Command lines of processes that mention a directory.
fn processes_that_name(dir: &Path) -> Vec<String> {
    let entries = fs_err::read_dir("/proc").into_iter().flatten().flatten();
    let lines = entries.filter_map(|entry| fs_err::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).into_owned());
    lines.filter(|line| line.contains(&*dir.to_string_lossy())).collect()
}

#[test]
fn a_registry_keeps_images_across_a_restart_and_logs_user_and_path() {
    if let Availability::Skip(_) = require(&[Package::DockerRegistry, Package::Skopeo]) {
        return;
    }
    let mut registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
    let image = ImageBuilder::small(1, 10_000).layer(LayerFiles::new().file("etc/motd", "hello\n"));
    let pushed = image.push(&registry, "shop/web:1").unwrap();
    registry.forget_requests();
    assert_eq!(registry.requests(), []);

    registry.stop();
    let dir = tempfile::tempdir().unwrap();
    assert!(!fetch(&registry.image("shop/web:1"), dir.path(), PLAIN).status.success());
    registry.start_again().unwrap();
    assert!(fetch(&registry.image("shop/web:1"), dir.path(), PLAIN).status.success());

    let requests = registry.requests();
    assert_eq!(requests.iter().filter(|request| request.is_manifest_fetch()).count(), 1);
    for blob in &pushed.blobs {
        let fetched =
            requests.iter().filter(|request| request.is_blob_fetch() && request.path.contains(blob));
        assert_eq!(fetched.count(), 1, "{blob} in {requests:?}");
    }
}

#[test]
fn a_registry_with_tls_and_a_password_refuses_those_who_lack_either() {
    let needed = [Package::DockerRegistry, Package::Skopeo, Package::Openssl];
    if let Availability::Skip(_) = require(&needed) {
        return;
    }
    let options = RegistryOptions {
        auth: RegistryAccess::Basic,
        tls: TlsMode::PrivateCa,
        ..RegistryOptions::default()
    };
    let registry = RegistryProcess::start(options).unwrap();
    ImageBuilder::small(2, 100).push(&registry, "shop/web:1").unwrap();

    let dir = tempfile::tempdir().unwrap();
    let trusted = format!("--src-cert-dir={}", registry.ca().unwrap().parent().unwrap().display());
    let (good, bad) = (format!("--src-creds={USER}:{PASSWORD}"), format!("--src-creds={USER}:wrong"));
    let cases = [
        (vec![trusted.as_str(), good.as_str()], None),
        (vec![trusted.as_str(), bad.as_str()], Some("unauthorized")),
        (vec![good.as_str()], Some("x509")),
    ];
    for (options, refusal) in cases {
        let output = fetch(&registry.image("shop/web:1"), dir.path(), &options);
        let said = String::from_utf8_lossy(&output.stderr);
        match refusal {
            None => assert!(output.status.success(), "{said}"),
            Some(word) => assert!(!output.status.success() && said.contains(word), "{options:?}: {said}"),
        }
    }
}

#[test]
fn a_gate_holds_blobs_until_it_is_opened_and_cuts_them() {
    if let Availability::Skip(_) = require(&[Package::DockerRegistry, Package::Skopeo]) {
        return;
    }
    let registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
    for name in ["a", "b"] {
        ImageBuilder::small(3, 200_000).push(&registry, &format!("{name}:1")).unwrap();
    }
    let gate = HoldingProxy::for_registry(registry.port()).unwrap();
    gate.hold_blobs_after(1000);

    let dir = tempfile::tempdir().unwrap();
    let (into_a, into_b) = (dir.path().join("a"), dir.path().join("b"));
    let (image_a, image_b) = (gate.image("a:1"), gate.image("b:1"));
    thread::scope(|scope| {
        let a = scope.spawn(|| fetch(&image_a, &into_a, PLAIN));
        gate.wait_until_held(1);
        let b = scope.spawn(|| fetch(&image_b, &into_b, PLAIN));
        gate.wait_until_held(2);
        assert_eq!(gate.held_repositories(), ["a", "b"]);
        assert!(!a.is_finished() && !b.is_finished());

        gate.release_first_repository(); // a's first blob; its next one is held again
        wait_until("only b is held, or the rest of a", || {
            gate.count("GET", "/v2/a/blobs/") == 2 || a.is_finished()
        });
        gate.open();
        assert!(a.join().unwrap().status.success());
        assert!(b.join().unwrap().status.success());
    });
    assert_eq!(gate.most_repositories_held(), 2);

    gate.hold_blobs_after(0);
    thread::scope(|scope| {
        let fetching =
            scope.spawn(|| fetch(&image_a, &dir.path().join("cut"), &[PLAIN, &["--retry-times=0"]].concat()));
        gate.wait_until_held(1);
        gate.cut();
        // The client may ask again; the gate then lets nothing through either, until it gives up.
        wait_until("the client gave up", || {
            gate.cut();
            fetching.is_finished()
        });
        assert!(!fetching.join().unwrap().status.success());
    });
}
