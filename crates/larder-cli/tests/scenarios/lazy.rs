//! The daemon is killed while a container reads a layer that is not complete.

mod kills;

use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::chunked_layer::{ChunkedFormat, ChunkedLayer};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault, digest};
use larder_testkit_peers::process::poll;
use rustix::process::Signal;
use serde_json::json;

use super::store::may_mount;
use crate::world::{LarderOutput, LarderProcess, larder_in};

const WAIT_LIMIT: Duration = Duration::from_secs(30);
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

fn put_image(registry: &FaultRegistry, layer: &ChunkedLayer, tag: &str) -> String {
    let config = json!({"architecture": "amd64", "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [digest(&layer.archive)]}});
    let config = config.to_string();
    let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST,
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "size": config.len(),
            "digest": registry.put_blob(config)},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar+zstd", "size": layer.blob.len(),
            "digest": registry.put_blob(layer.blob.clone()), "annotations": layer.annotations}]});
    registry.put_manifest("lazy/app", tag, MANIFEST, manifest.to_string());
    registry.image(&format!("lazy/app:{tag}"))
}

fn start(home: &Path, arguments: &[&str]) -> LarderProcess {
    let mut command = larder_in(home);
    command.arg("--root").arg(home.join("store")).args(arguments);
    LarderProcess::start(command)
}

fn larder(home: &Path, arguments: &[&str]) -> LarderOutput {
    start(home, arguments).finish()
}

fn start_daemon(home: &Path) -> LarderProcess {
    let [config, socket] = ["config.yaml", "larder.sock"].map(|name| home.join(name).display().to_string());
    start(home, &["serve", "--config", &config, "--socket", &socket, "--metrics-address", ""])
}

fn serve(home: &Path) -> LarderProcess {
    let daemon = start_daemon(home);
    poll(WAIT_LIMIT, || (larder(home, &["status"]).code == 0).then_some(())).expect("it serves");
    daemon
}

fn write_config(home: &Path) {
    let config = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n\
                  pull:\n  lazy:\n    images:\n    - name: \"*\"\n    minimumSize: 1KB\n";
    fs_err::write(home.join("config.yaml"), config).unwrap();
}

/// Whether layers can be read before they are complete.
fn is_ready(home: &Path) -> bool {
    let status = larder(home, &["status"]).expect(0).stdout;
    let is_ready = status.lines().any(|line| line.starts_with("Lazy pulls") && line.ends_with("ready"));
    if !is_ready {
        eprintln!("==== SKIPPED, NOT TESTED: layers cannot be read before they are complete: {status} ====");
    }
    is_ready
}

#[test]
fn readers_wait_for_a_killed_daemon_and_get_the_right_bytes() {
    if !may_mount() {
        return;
    }
    let content: Vec<u8> =
        (0..400_000_u32).flat_map(|number| number.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let archive = TarBuilder::new().with(TarBuilderEntry::file("data", content.clone())).finish();
    let layer = ChunkedLayer::new(&archive, ChunkedFormat::ZstdChunked, 64 << 10);
    let registry = FaultRegistry::start();
    let image = put_image(&registry, &layer, "1");
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    write_config(home);
    let daemon = serve(home);
    if !is_ready(home) {
        return;
    }
    // All but the table of contents does not come.
    let ranges = FaultTrigger::path(digest(&layer.blob)).ranged().nth(2..=usize::MAX);
    registry.fault(ranges, ResponseFault::StallAfter(0));
    let pulled = larder(home, &["pull", &image]).expect(0);
    assert!((pulled.stdout + &pulled.stderr).contains("startable: "), "it returns before all is here");
    let inspected = larder(home, &["inspect", &image]).expect(0).stdout;
    assert!(inspected.contains("\"missingBytes\": "), "`complete` asks for it: {inspected}");
    let target = home.join("mnt");
    fs_err::create_dir(&target).unwrap();
    larder(home, &["mount", &image, &target.display().to_string()]).expect(0);
    let mut reader = Command::new("cat").arg(target.join("data")).stdout(Stdio::piped()).spawn().unwrap();
    let waits = || larder(home, &["status"]).expect(0).stdout.contains("1 waiting read").then_some(());
    poll(WAIT_LIMIT, waits).expect("the read waits");
    let host = image.split('/').next().unwrap();
    for arguments in [&["status"][..], &["explain", &image]] {
        let shown = larder(home, arguments).expect(0).stdout;
        assert!(shown.contains(&format!("the rest follows from {host}")), "{arguments:?}: {shown}");
    }
    let status = larder(home, &["status"]).expect(0).stdout;
    assert!(status.contains(&format!("{image} (layer ")), "a layer is named by its image: {status}");
    let archive = home.join("app.tar").display().to_string();
    let refused = larder(home, &["save", &image, "-o", &archive]).expect(1).stderr;
    let [why, next] = [format!("{image} is incomplete"), format!("complete {image} fetches the rest")];
    assert!(refused.contains(&why) && refused.contains(&next), "{refused}");
    daemon.signal(Signal::KILL);
    drop(daemon);
    assert!(reader.try_wait().unwrap().is_none(), "a killed daemon lets no read go on");
    let shown = larder(home, &["explain", &image]).expect(0).stdout;
    let next = ["no daemon fetches it now; larder ", &format!(" complete {image} fetches it")];
    assert!(next.iter().all(|part| shown.contains(part)), "{shown}");
    registry.clear_faults();

    let daemon = serve(home);
    let mut read = Vec::new();
    reader.stdout.take().unwrap().read_to_end(&mut read).unwrap();
    assert!(reader.wait().unwrap().success() && read == content);
    let completed = larder(home, &["complete", &image]).expect(0);
    let completed = completed.stdout + &completed.stderr;
    assert!(completed.contains(&format!("pulled {image} (")), "the name that was given: {completed}");
    assert!(!larder(home, &["images"]).expect(0).stdout.contains("HERE"));
    larder(home, &["umount", &target.display().to_string()]).expect(0);
    let holder = home.join("store/group.sock");
    assert!(holder.exists());
    daemon.signal(Signal::TERM);
    daemon.finish().expect(0);
    assert!(!holder.exists(), "nothing needs to be kept");
    larder(home, &["fsck"]).expect(0);
}

#[test]
fn the_status_says_why_nothing_guards_reads_where_it_could() {
    if !may_mount() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    write_config(home);
    let daemon = serve(home);
    if !is_ready(home) {
        return;
    }
    daemon.signal(Signal::TERM);
    daemon.finish().expect(0);
    // No process can hold the group there.
    fs_err::create_dir_all(home.join("store/group.sock/taken")).unwrap();
    let daemon = serve(home);
    let status = larder(home, &["status"]).expect(0).stdout;
    let line = status.lines().find(|line| line.starts_with("Lazy pulls")).unwrap_or_default();
    assert!(line.contains("not possible: ") && line.contains("group.sock"), "{status}");
    assert!(line.contains("; next attempt in "), "{status}");
    fs_err::remove_dir_all(home.join("store/group.sock")).unwrap();
    let is_guarded = || {
        let status = larder(home, &["status"]).expect(0).stdout;
        status.lines().any(|line| line.starts_with("Lazy pulls") && line.ends_with("ready")).then_some(())
    };
    poll(WAIT_LIMIT, is_guarded).expect("it is tried again");
    drop(daemon);
}
