//! containerd with its snapshots in larder's store: `ctr` and CRI pull, run and remove as with containerd's own
//! snapshotter.

mod fetches;
mod hides;
mod others;
mod publishes;
mod shares;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use larder::backend::{Backend as _, ImageSpec, ProgressReporter};
use larder::reference::{Digest, DigestHasher, Platform};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::FaultRegistry;
use larder_testkit_peers::containerd::pods::pause_image;
use larder_testkit_peers::process::{WAIT_LIMIT, poll, wait_until};
use larder_testkit_peers::{self as peers, Containerd, ContainerdOptions, Package, RegistryOptions, require};
use serde_json::json;

use crate::served::{CriDaemon, client_of};
use crate::world::{LarderProcess, RuntimeFixture};

/// A containerd whose snapshotter is a daemon on larder's own store.
struct SnapshotterFixture {
    containerd: Containerd,
    daemon: Option<CriDaemon>,
    world: RuntimeFixture,
    /// Of containerd.
    namespace: &'static str,
}

const IMAGE: &str = "shop/web:1";

impl SnapshotterFixture {
    /// `None`, after a loud message, where real servers are not installed and this is not CI.
    fn new(namespace: &'static str) -> Option<SnapshotterFixture> {
        SnapshotterFixture::with(namespace, ContainerdOptions::default())
    }

    /// Starts the fixture with other options of containerd.
    fn with(namespace: &'static str, options: ContainerdOptions) -> Option<SnapshotterFixture> {
        if !require(&Package::ALL).is_available() {
            return None;
        }
        let world = RuntimeFixture::with_store(RegistryOptions::default())?;
        let snapshotter = Some(PathBuf::from(world.path("larder.sock")));
        let options = ContainerdOptions { snapshotter, ..options };
        let containerd = Containerd::start_with(options).unwrap();
        containerd.add_registry(&world.registry).unwrap();
        let mut fixture = SnapshotterFixture { containerd, daemon: None, world, namespace };
        fixture.start_larder();
        Some(fixture)
    }

    fn start_larder(&mut self) {
        let socket = format!("  socket: {}\n", self.containerd.endpoint());
        self.start_larder_with(&socket);
    }

    /// With more settings of containerd.
    fn start_larder_with(&mut self, more: &str) {
        let head = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n";
        let settings = format!("{head}containerd:\n  snapshotter: true\n{more}");
        let settings = self.world.file("config.yaml", &settings);
        let socket = self.world.path("larder.sock");
        let mut command = self.world.command(&["serve", "--socket", &socket]);
        command.env("LARDER_CONFIG", settings);
        self.daemon = Some(CriDaemon::at(socket.into(), LarderProcess::start(command)));
    }

    fn daemon(&self) -> &CriDaemon {
        self.daemon.as_ref().expect("larder runs")
    }

    /// Ends larder as a crash does.
    fn kill_larder(&mut self) {
        let daemon = self.daemon.take().expect("larder runs");
        daemon.running.kill_after(Duration::ZERO);
    }

    fn image(&self) -> String {
        self.world.registry.image(IMAGE)
    }

    fn ctr(&self, arguments: &[&str]) -> String {
        self.containerd.ctr(self.namespace, arguments).unwrap()
    }

    fn snapshots(&self) -> Vec<String> {
        let listed = self.ctr(&["snapshots", "--snapshotter", "larder", "ls"]);
        listed
            .lines()
            .skip(1)
            .map(|line| line.split_whitespace().next().unwrap_or_default().to_owned())
            .collect()
    }

    /// A container's ID. runc keeps those of a namespace in one place for all that run on this machine.
    fn id(&self, name: &str) -> String {
        format!("{name}-{}", self.world.registry.port())
    }

    /// Starts a container that runs until it is killed; returns the root of its files as this machine sees it.
    fn run(&self, name: &str) -> PathBuf {
        let name = &*self.id(name);
        self.ctr(&["run", "--detach", "--snapshotter", "larder", &self.image(), name, "/bin/true"]);
        let tasks = self.ctr(&["tasks", "ls"]);
        let line = tasks.lines().find(|line| line.starts_with(name)).expect("a task");
        Path::new("/proc").join(line.split_whitespace().nth(1).expect("a process")).join("root")
    }

    fn stop(&self, name: &str) {
        let name = &*self.id(name);
        self.ctr(&["tasks", "kill", "--signal", "SIGKILL", name]);
        wait_until("the task is removed", || {
            self.containerd.ctr(self.namespace, &["tasks", "rm", name]).is_ok()
        });
        self.ctr(&["containers", "rm", name]);
    }

    /// Counts the entries of a directory of the store.
    fn in_store(&self, name: &str) -> usize {
        fs_err::read_dir(self.world.place().join(name)).map_or(0, Iterator::count)
    }

    /// Waits until containerd has removed all snapshots, and these directories of the store are empty: larder removes a
    /// snapshot first and its files afterwards.
    fn wait_until_removed(&self, directories: &[&str]) {
        wait_until(&format!("containerd has removed all snapshots, and {directories:?} are empty"), || {
            self.snapshots().is_empty() && directories.iter().all(|name| self.in_store(name) == 0)
        });
    }
}

impl Drop for SnapshotterFixture {
    fn drop(&mut self) {
        // What runs in a container outlives containerd.
        for name in ["first", "second"] {
            let _ = self.containerd.ctr(self.namespace, &["tasks", "rm", "--force", &self.id(name)]);
        }
    }
}

#[test]
fn containers_run_from_snapshots_that_containerd_unpacks_and_outlive_larder() {
    let Some(mut fixture) = SnapshotterFixture::new("default") else { return };
    let image = pause_image().layer(peers::LayerFiles::new().noise("srv/data", 300_000, 1));
    image.push(&fixture.world.registry, IMAGE).unwrap();
    fixture.ctr(&["images", "pull", "--plain-http", "--snapshotter", "larder", &fixture.image()]);
    assert_eq!(fixture.snapshots().len(), 2, "one of each layer");

    let root = fixture.run("first");
    assert_eq!(fs_err::read(root.join("srv/data")).unwrap().len(), 300_000);
    fs_err::write(root.join("srv/new"), vec![7; 200_000]).unwrap();
    let usage = fixture.ctr(&["snapshots", "--snapshotter", "larder", "usage", "-b", &fixture.id("first")]);
    let bytes: u64 = usage.split_whitespace().find_map(|word| word.parse().ok()).expect("bytes");
    assert!((200_000..300_000).contains(&bytes), "only what the container wrote: {usage}");

    fixture.kill_larder();
    assert_eq!(fs_err::read(root.join("srv/data")).unwrap().len(), 300_000);
    let refused = fixture.containerd.ctr("default", &["snapshots", "--snapshotter", "larder", "ls"]);
    assert!(refused.is_err(), "larder is down");
    fixture.start_larder();
    wait_until("containerd has connected again", || {
        fixture.containerd.ctr("default", &["snapshots", "--snapshotter", "larder", "ls"]).is_ok()
    });
    assert_eq!(fixture.snapshots().len(), 3);
    let second = fixture.run("second");
    assert!(!second.join("srv/new").exists());
    assert_eq!(fs_err::read(root.join("srv/new")).unwrap().len(), 200_000);

    fixture.stop("first");
    fixture.stop("second");
    fixture.ctr(&["images", "rm", "--sync", &fixture.image()]);
    fixture.wait_until_removed(&["snapshots"]);
    let daemon = fixture.daemon.take().expect("larder runs");
    let ended = daemon.stop();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
}

#[test]
fn an_image_that_is_pulled_through_larder_runs_in_containerd_without_a_layer_there() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    let layer = |seed| peers::LayerFiles::new().noise(format!("srv/data{seed}"), 200_000, seed);
    let layout = pause_image().layer(layer(1)).layer(layer(2)).push(&fixture.world.registry, IMAGE).unwrap();
    fixture.world.registry.forget_requests();
    let id = fixture.daemon().pull(&fixture.image()).unwrap();
    assert_eq!(id.as_str(), layout.image_id);

    // containerd's CRI has it as soon as the pull is answered.
    let spec = ImageSpec::named(fixture.image());
    let cri = client_of(fixture.containerd.socket());
    let found = fixture.daemon().runtime.block_on(cri.status(&spec)).unwrap().expect("an image");
    assert_eq!(found.id.as_str(), layout.image_id);
    assert_eq!(found.repo_tags, [fixture.image()]);
    let content = fixture.ctr(&["content", "ls", "-q"]);
    let mut content: Vec<&str> = content.split_whitespace().collect();
    content.sort_unstable();
    let mut documents = vec![layout.image_id.as_str(), layout.manifest_digest.as_str()];
    documents.sort_unstable();
    assert_eq!(content, documents, "no layer");
    assert_eq!(fixture.snapshots().len(), 3, "one of each layer");

    let root = fixture.run("first");
    assert_eq!(fs_err::read(root.join("srv/data1")).unwrap().len(), 200_000);
    fs_err::write(root.join("srv/new"), "new").unwrap();
    let requests = fixture.world.registry.requests();
    let fetches: Vec<_> = requests.iter().filter(|request| request.is_blob_fetch()).collect();
    assert_eq!(fetches.len(), layout.blobs.len(), "each blob once: {fetches:?}");

    fixture.kill_larder();
    fixture.start_larder();
    wait_until("containerd has connected again", || {
        fixture.containerd.ctr("k8s.io", &["snapshots", "--snapshotter", "larder", "ls"]).is_ok()
    });
    let socket = fixture.world.path("larder.sock");
    let collected = fixture.world.larder(&["--daemon", &socket, "gc", "--all-unused", "--force"]);
    assert_eq!(collected.code, 0, "{}", collected.stderr);
    let refused = fixture.world.larder(&["--daemon", &socket, "rm", &fixture.image()]);
    let reason = format!("in use by container {} of containerd namespace k8s.io", fixture.id("first"));
    assert!(refused.code == 1 && refused.stderr.contains(&reason), "{}", refused.stderr);
    assert!(fixture.daemon().status(&fixture.image()).is_some(), "in use: {}", collected.stdout);
    assert_eq!(fs_err::read(root.join("srv/data2")).unwrap().len(), 200_000);
    let second = fixture.run("second");
    assert!(!second.join("srv/new").exists());

    fixture.stop("first");
    fixture.stop("second");
    fixture.daemon().remove(&fixture.image());
    assert_eq!(fixture.ctr(&["images", "ls", "-q"]).trim(), "");
    fixture.wait_until_removed(&["snapshots", "layers", "lowers"]);
    let ended = fixture.daemon.take().expect("larder runs").stop();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
}

#[test]
fn an_archive_that_is_loaded_is_an_image_of_containerd() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    let dir = PathBuf::from(fixture.world.path("layout"));
    let layout = pause_image().write(&dir).unwrap();
    let (socket, dir) = (fixture.world.path("larder.sock"), dir.to_string_lossy());
    let load = ["--daemon", &socket, "load", &dir, "--name", "registry.example/shop/web:1"];
    let loaded = fixture.world.larder(&load);
    assert_eq!(loaded.code, 0, "{}", loaded.stderr);

    let cri = client_of(fixture.containerd.socket());
    let spec = ImageSpec::named("registry.example/shop/web:1");
    let found = fixture.daemon().runtime.block_on(cri.status(&spec)).unwrap().expect("an image");
    assert_eq!(found.id.as_str(), layout.image_id);
    assert_eq!(fixture.snapshots().len(), 1, "one of each layer");
    let ended = fixture.daemon.take().expect("larder runs").stop();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
}

#[test]
fn an_image_for_another_platform_is_no_image_of_containerd_and_of_no_pod() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    let other = pause_image().architecture("s390x").push(&fixture.world.registry, IMAGE).unwrap();
    let (name, socket) = (fixture.image(), fixture.world.path("larder.sock"));
    let pulled = fixture.world.larder(&["--daemon", &socket, "pull", "--platform", "linux/s390x", &name]);
    assert_eq!(pulled.code, 0, "{}", pulled.stderr);
    assert!(fixture.daemon().status(&name).is_none());
    let found = fixture.daemon().status(&other.image_id).expect("kubelet can remove it");
    assert_eq!(found.repo_tags.len() + found.repo_digests.len(), 0, "{found:?}");
    assert!(fixture.daemon().pull(&format!("{name}#linux/s390x")).is_err(), "no name of CRI");
    assert_eq!(fixture.ctr(&["images", "ls", "-q"]).trim(), "");

    // A pod's pull of the same image, which its name alone means, brings it there.
    fixture.daemon().pull(&name).unwrap();
    assert!(fixture.ctr(&["images", "ls", "-q"]).contains(&name));
    let removed = fixture.world.larder(&["--daemon", &socket, "rm", &name]);
    assert_eq!(removed.code, 0, "{}", removed.stderr);
    assert_eq!(fixture.ctr(&["images", "ls", "-q"]).trim(), "");
    assert!(fixture.daemon().status(&other.image_id).is_some(), "it has its other name");
    let ended = fixture.daemon.take().expect("larder runs").stop();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
}

#[test]
fn an_artifact_is_an_image_of_containerd_whose_snapshots_have_its_files() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    let registry = FaultRegistry::start();
    let blob = |media_type: &str, content: &[u8], title: &str| {
        let (digest, title) =
            (registry.put_blob(content), json!({ "org.opencontainers.image.title": title }));
        json!({ "mediaType": media_type, "digest": digest, "size": content.len(), "annotations": title })
    };
    let manifest_type = "application/vnd.oci.image.manifest.v1+json";
    let document = json!({
        "schemaVersion": 2, "mediaType": manifest_type, "artifactType": "application/vnd.example.weights",
        "config": blob("application/vnd.oci.empty.v1+json", b"{}", ""),
        "layers": [blob("application/octet-stream", &[7; 100_000], "weights.bin"), blob("text/plain", b"a", "readme")],
    });
    let digest = registry.put_manifest("models/small", "v1", manifest_type, document.to_string());
    let name = registry.image("models/small:v1");
    let id = fixture.daemon().pull(&name).unwrap();

    let cri = client_of(fixture.containerd.socket());
    for name in [name.clone(), registry.image(&format!("models/small@{digest}"))] {
        let found = fixture.daemon().runtime.block_on(cri.status(&ImageSpec::named(&name))).unwrap();
        assert_eq!(found.map(|image| image.id.to_string()), Some(id.to_string()), "{name}");
    }
    let content = fixture.ctr(&["content", "ls", "-q"]);
    assert!(!content.contains(&digest), "its own manifest is none that containerd could read: {content}");
    let config = fixture.ctr(&["content", "get", id.as_str()]);
    assert!(config.contains("is an artifact: mount it as a volume"), "the event of its container: {config}");
    let mut snapshots = fixture.snapshots();
    assert_eq!(snapshots.len(), 2, "one of each file: {snapshots:?}");
    snapshots.retain(|snapshot| !config.contains(snapshot)); // the lowest has the name of its layer
    let (dir, key) = (fixture.world.path("files"), fixture.id("view"));
    fs_err::create_dir(&dir).unwrap();
    let snapshots_of_larder = ["snapshots", "--snapshotter", "larder"];
    let ctr = |arguments: &[&str]| fixture.ctr(&[&snapshots_of_larder, arguments].concat());
    // containerd collects a view that nothing refers to, when it comes by.
    let mut attempts = std::iter::repeat_with(|| {
        ctr(&["view", &key, &snapshots[0]]);
        let label = [&snapshots_of_larder[..], &["label", &key, "containerd.io/gc.root=test"]].concat();
        fixture.containerd.ctr(fixture.namespace, &label).is_ok() && ctr(&["ls"]).contains(&key)
    });
    assert!(attempts.by_ref().take(5).any(|is_kept| is_kept), "it is collected each time");
    let mount = ctr(&["mounts", &dir, &key]);
    assert!(Command::new("sh").args(["-c", &mount]).status().unwrap().success(), "{mount}");
    let read = |file: &str| fs_err::read(Path::new(&dir).join(file));
    let files = (read("weights.bin"), read("readme"));
    assert!(Command::new("umount").arg(&dir).status().unwrap().success());
    ctr(&["rm", &key]);
    assert_eq!((files.0.unwrap(), files.1.unwrap()), (vec![7; 100_000], b"a".to_vec()));

    fixture.daemon().remove(&name);
    assert_eq!(fixture.ctr(&["images", "ls", "-q"]).trim(), "");
    let ended = fixture.daemon.take().expect("larder runs").stop();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
}

#[test]
fn layers_by_sha512_are_snapshots_of_containerd_and_its_documents_are_by_sha256() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    let registry = FaultRegistry::start();
    let sha512 = |bytes: &[u8]| {
        let mut hasher = DigestHasher::like(&Digest::parse(&format!("sha512:{}", "0".repeat(128))).unwrap());
        hasher.update(bytes);
        hasher.finish()
    };
    let blob = |media_type: &str, bytes: &[u8], digest: &Digest| {
        registry.put_blob_as(digest.as_str(), bytes);
        json!({ "mediaType": media_type, "digest": digest.as_str(), "size": bytes.len() })
    };
    let layer = TarBuilder::new().with(TarBuilderEntry::file("file", "content")).finish();
    let config = json!({ "architecture": Platform::host().architecture, "os": "linux",
        "rootfs": { "type": "layers", "diff_ids": [sha512(&layer).as_str()] } })
    .to_string();
    let manifest_type = "application/vnd.oci.image.manifest.v1+json";
    let image = |tag: &str, config_digest: &Digest| {
        let manifest = json!({ "schemaVersion": 2, "mediaType": manifest_type,
            "config": blob("application/vnd.oci.image.config.v1+json", config.as_bytes(), config_digest),
            "layers": [blob("application/vnd.oci.image.layer.v1.tar", &layer, &sha512(&layer))] });
        registry.put_manifest("app", tag, manifest_type, manifest.to_string());
        registry.image(&format!("app:{tag}"))
    };
    let name = image("1", &Digest::sha256(&config));
    let id = fixture.daemon().pull(&name).unwrap();
    let cri = client_of(fixture.containerd.socket());
    let found = fixture.daemon().runtime.block_on(cri.status(&ImageSpec::named(&name))).unwrap();
    assert_eq!(found.map(|image| image.id.to_string()), Some(id.to_string()));
    assert_eq!(fixture.snapshots().len(), 1);

    let refused = fixture.daemon().pull(&image("2", &sha512(config.as_bytes()))).unwrap_err().to_string();
    assert!(
        refused.contains("containerd keeps manifests and configs by SHA-256 only, not sha512:"),
        "{refused}"
    );
    let ended = fixture.daemon.take().expect("larder runs").stop();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
}

#[test]
fn a_pull_by_containerd_fetches_no_layer_that_the_store_has() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    fixture.kill_larder();
    fixture.start_larder_with("");
    let layout = pause_image()
        .layer(peers::LayerFiles::new().noise("srv/data", 200_000, 1))
        .push(&fixture.world.registry, IMAGE)
        .unwrap();
    fixture.daemon().pull(&fixture.image()).unwrap();
    assert!(
        fixture.snapshots().is_empty(),
        "layers of the store are not listed: containerd would remove them"
    );

    fixture.world.registry.forget_requests();
    let cri = client_of(fixture.containerd.socket());
    let (spec, progress) = (ImageSpec::named(fixture.image()), ProgressReporter::unwatched());
    let pull = || fixture.daemon().runtime.block_on(cri.pull(&spec, None, None, &progress));
    // containerd's connection was that to the daemon that was killed.
    let pulled = poll(WAIT_LIMIT, || pull().ok()).expect("a pull");
    assert_eq!(pulled.as_str(), layout.image_id);
    let requests = fixture.world.registry.requests();
    let fetched: Vec<_> = requests.iter().filter(|request| request.is_blob_fetch()).collect();
    assert!(
        fetched.iter().all(|request| request.path.ends_with(&layout.image_id)),
        "the config only: {fetched:?}"
    );
    assert_eq!(fixture.snapshots().len(), 2);
    let root = fixture.run("first");
    assert_eq!(fs_err::read(root.join("srv/data")).unwrap().len(), 200_000);

    // Another namespace has not proved that its pull may have them.
    fixture.namespace = "default";
    fixture.world.registry.forget_requests();
    fixture.ctr(&["images", "pull", "--plain-http", "--snapshotter", "larder", &fixture.image()]);
    let requests = fixture.world.registry.requests();
    let is_layer = |path: &str| !path.ends_with(&layout.image_id);
    let fetched = requests.iter().filter(|request| request.is_blob_fetch() && is_layer(&request.path));
    assert_eq!((fetched.count(), fixture.snapshots().len()), (2, 2), "{requests:?}");
    fixture.ctr(&["images", "rm", "--sync", &fixture.image()]);
    wait_until("containerd has removed its own snapshots", || fixture.snapshots().is_empty());
    assert_eq!(fs_err::read(root.join("srv/data")).unwrap().len(), 200_000);
    fixture.namespace = "k8s.io";
    fixture.stop("first");

    // A daemon publishes what the store has: containerd's CRI finds it without a pull.
    for name in fixture.ctr(&["images", "ls", "-q"]).lines() {
        fixture.ctr(&["images", "rm", "--sync", name]);
    }
    assert_eq!(fixture.daemon().runtime.block_on(cri.status(&spec)).unwrap(), None);
    fixture.kill_larder();
    fixture.start_larder();
    wait_until("the image is published", || {
        fixture.daemon().runtime.block_on(cri.status(&spec)).unwrap().is_some()
    });
    fixture.run("second");
    fixture.stop("second");
    fixture.daemon().remove(&fixture.image());
    fixture.wait_until_removed(&["lowers"]);
}

#[test]
fn an_image_that_containerd_does_not_have_is_absent_and_not_removed_without_the_daemon() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    pause_image().push(&fixture.world.registry, IMAGE).unwrap();
    fixture.kill_larder();
    fixture.start_larder_with("  socket: unix:///nonexistent/containerd.sock\n");
    let error = fixture.daemon().pull(&fixture.image()).expect_err("containerd is not there");
    assert!(error.to_string().contains("/nonexistent/containerd.sock"), "{error}");
    assert_eq!(fixture.daemon().status(&fixture.image()), None, "kubelet pulls it again");
    let listed = fixture.daemon().runtime.block_on(fixture.daemon().client.list());
    let unknown = listed.expect_err("an image that is left out would be lost for kubelet").to_string();
    assert!(unknown.contains("/nonexistent/containerd.sock"), "{unknown}");
    let socket = fixture.world.path("larder.sock");
    let images = fixture.world.larder(&["--daemon", &socket, "images", "-q"]);
    assert_eq!(images.stdout.lines().count(), 1, "the store has it: {}", images.stderr);

    fixture.kill_larder();
    let settings = fixture.world.path("config.yaml");
    for command in [
        &["gc", "--all-unused", "--force"][..],
        &["rm", &fixture.image()],
        &["rm", "--force", &fixture.image()],
    ] {
        let refused = fixture.world.larder_with(&settings, command);
        assert!(refused.code == 1 && refused.stderr.contains("only the daemon removes them"), "{refused:?}");
    }
    fixture.start_larder();
    let status = || fixture.daemon().status(&fixture.image());
    assert!(poll(WAIT_LIMIT, status).is_some(), "it is published when it is asked for");
    let cri = client_of(fixture.containerd.socket());
    let found = fixture.daemon().runtime.block_on(cri.list()).unwrap();
    assert_eq!(found.len(), 1);

    // A forced removal withdraws it, whatever containerd has lost.
    fixture.world.larder(&["--daemon", &socket, "tag", &fixture.image(), "registry.example/mine:1"]);
    fixture.ctr(&["images", "rm", "--sync", found[0].id.as_str()]);
    let forced = fixture.world.larder(&["--daemon", &socket, "rm", "--force", found[0].id.as_str()]);
    assert_eq!(forced.code, 0, "{}", forced.stderr);
    assert_eq!(fixture.ctr(&["images", "ls", "-q"]).trim(), "", "withdrawn first");
}

#[test]
fn larder_is_killed_while_containers_start_and_loses_and_leaks_no_snapshot() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    pause_image().push(&fixture.world.registry, IMAGE).unwrap();
    fixture.daemon().pull(&fixture.image()).unwrap();
    let root = fixture.run("first");
    let second = fixture.id("second");
    for wait in [0, 5, 10, 20, 40, 80, 160] {
        std::thread::scope(|scope| {
            let containerd = &fixture.containerd;
            let image = fixture.world.registry.image(IMAGE);
            let second = &second;
            let run = move || {
                let run = ["run", "--detach", "--snapshotter", "larder", &image, second, "/bin/true"];
                let _ = containerd.ctr("k8s.io", &run); // it may be refused
            };
            let running = scope.spawn(run);
            let daemon = fixture.daemon.take().expect("larder runs");
            daemon.running.kill_after(Duration::from_millis(wait));
            running.join().unwrap();
        });
        fixture.start_larder();
        wait_until("containerd has connected again", || {
            fixture.containerd.ctr("k8s.io", &["snapshots", "--snapshotter", "larder", "ls"]).is_ok()
        });
        for command in [&["tasks", "rm", "--force", &second][..], &["containers", "rm", &second]] {
            let _ = fixture.containerd.ctr("k8s.io", command);
        }
        let _ = fixture.containerd.ctr("k8s.io", &["snapshots", "--snapshotter", "larder", "rm", &second]);
        fixture.run("second");
        fixture.stop("second");
        assert!(root.join("bin/true").exists(), "the first container runs");
    }
    fixture.stop("first");
    fixture.daemon().remove(&fixture.image());
    fixture.wait_until_removed(&["snapshots", "layers", "lowers"]);
}
