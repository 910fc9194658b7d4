//! A backend that stops and restarts, interrupted pulls, and metrics.

use std::path::Path;

use larder::backend::{Backend as _, ImageSpec, ProgressReporter};
use larder_testkit_peers::RegistryOptions;
use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{HoldingProxy, ImageBuilder};

use crate::served::{CriDaemon, client_of};
use crate::world::{LarderProcess, RuntimeFixture, larder_in};

#[test]
fn a_runtime_that_is_down_at_the_start_and_dies_later_is_picked_up_each_time() {
    let Some(mut world) = RuntimeFixture::plain() else { return };
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let image = world.registry.image("shop/web:1");
    world.containerd_mut().stop();
    let daemon = CriDaemon::with(&world, &["--metrics-address", ""]);
    for times in 1..=2 {
        wait_until("it is not ready", || !daemon.is_ready());
        daemon.wait_for_log("reason=BackendDown", times);
        assert!(daemon.get("/healthz").starts_with("HTTP/1.1 200"), "the daemon itself is well");
        assert!(daemon.get("/readyz").contains("the backend is unavailable: "));
        assert!(daemon.metric("larder_backend_up") < 0.5);
        let error = daemon.pull(&image).unwrap_err().to_string();
        assert!(error.contains("containerd.sock"), "it names the socket: {error}");

        world.containerd_mut().start_again().unwrap();
        wait_until("it is ready", || daemon.is_ready());
        daemon.wait_for_log("reason=BackendUp", times);
        assert!(daemon.metric("larder_backend_up") > 0.5);
        daemon.pull(&image).unwrap();
        daemon.remove(&image);
        if times == 1 {
            // A runtime that starts after larder is waited for.
            assert_eq!(daemon.logged("image garbage collection failed"), 0);
            world.containerd_mut().stop();
        }
    }
    let printed = world.larder(&["--daemon", &daemon.socket.to_string_lossy(), "events"]).expect(0);
    assert_eq!(
        (printed.lines_with(&["BackendDown"]), printed.lines_with(&["BackendUp"])),
        (2, 2),
        "{printed:?}"
    );
    daemon.stop().expect(0);
}

#[test]
fn commands_of_a_daemon_report_that_its_runtime_has_just_died() {
    for mut world in RuntimeFixture::of_each_runtime(RegistryOptions::default()) {
        ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        let image = world.registry.image("shop/web:1");
        let daemon = CriDaemon::of(&world);
        wait_until("it is ready", || daemon.is_ready());
        daemon.pull(&image).unwrap();
        for arguments in [
            &["ensure", &image][..],
            &["ensure", "--policy", "Always", &image],
            &["pull", &image],
            &["images"],
            &["inspect", &image],
            &["rm", &image],
            &["df"],
            &["gc", "--all-unused", "--dry-run"],
            &["explain", &image],
            &["runtime"],
            &["status"],
        ] {
            world.stop_backend();
            let run = world.larder(arguments);
            assert_eq!(run.code, 3, "{arguments:?}: {run:?}");
            let hints = run.stderr.contains("hint: ") || arguments == ["status"];
            assert!(hints, "{arguments:?}: {run:?}");
            world.start_backend_again();
            wait_until("it is ready", || world.larder(&["status"]).code == 0);
        }
        daemon.stop().expect(0);
    }
}

/// A daemon in the middle of a pull through a gate, and the pull.
fn amid_a_pull(
    world: &RuntimeFixture,
    gate: &HoldingProxy,
    arguments: &[&str],
) -> (CriDaemon, tokio::task::JoinHandle<Result<larder::reference::ImageId, larder::backend::BackendError>>) {
    ImageBuilder::small(1, 500_000).push(&world.registry, "shop/web:1").unwrap();
    let daemon = CriDaemon::with(world, arguments);
    gate.hold_blobs_after(1000);
    let (client, image) = (client_of(daemon.socket.clone()), gate.image("shop/web:1"));
    let pull = daemon.runtime.spawn(async move {
        client.pull(&ImageSpec::named(image), None, None, &ProgressReporter::unwatched()).await
    });
    gate.wait_until_held(1);
    (daemon, pull)
}

#[test]
fn a_stopping_daemon_ends_pulls_at_once_and_the_next_one_continues_them() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let gate = world.gate();
        let (daemon, pull) = amid_a_pull(&world, &gate, &[]);
        daemon.running.terminate();
        let refused = daemon.runtime.block_on(pull).unwrap().unwrap_err().to_string();
        assert!(refused.contains("larder is shutting down: the next pull"), "{refused}");
        let run = daemon.running.finish().expect(0);
        assert!(!run.stderr.contains("cancel"), "{run:?}");
        assert!(run.stderr.lines().last().is_some_and(|line| line.contains("stopped after ")), "{run:?}");
        gate.open();
        let image = gate.image("shop/web:1");
        world.larder(&["pull", "-q", &image]).expect(0);
        assert_eq!(world.images(), [image]);
    }
}

#[test]
fn late_calls_are_named_and_ended_after_the_grace_period() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let config = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\ndrain: {gracePeriod: 3s}\n";
    let config = world.file("config.yaml", config);
    let daemon = CriDaemon::with(&world, &["--config", &config]);
    let command = |arguments: &[&str]| {
        let mut command = larder_in(Path::new(&world.path("")));
        command.arg("--daemon").arg(&daemon.socket).args(arguments);
        command
    };
    let larder = |arguments: &[&str]| LarderProcess::start(command(arguments)).finish();
    let (archive, _never_written) = std::io::pipe().unwrap();
    let load = LarderProcess::reading(command(&["load", "-"]), archive.into());
    wait_until("the daemon loads", || {
        larder(&["status", "-o", "json"]).expect(0).json()["calls"].to_string().contains("Control/Load")
    });
    daemon.running.terminate();
    daemon.wait_for_log("stopping: pulls end now, other in-flight calls may continue for 3s", 1);
    let refused = larder(&["images"]).expect(3);
    assert!(refused.stderr.contains("larder is shutting down"), "{refused:?}");
    let page = daemon.get("/readyz");
    assert!(page.starts_with("HTTP/1.1 503") && page.contains("shutting down"), "{page}");
    assert_eq!(daemon.list(), [], "reads are answered");
    let run = daemon.running.finish().expect(0);
    let is_named = |line: &str| line.contains("canceled call after ") && line.contains("Control/Load");
    assert!(run.stderr.lines().any(is_named), "{run:?}");
    load.finish().expect(3);
}

/// Checks that the page has all metrics of registries that the documentation lists, with their label.
fn assert_registry_metrics(page: &str) {
    let rows = include_str!("../../../../../docs/metrics.md").lines();
    let rows: Vec<_> = rows.filter_map(|row| row.strip_prefix("| `larder_registry_")).collect();
    assert!(rows.len() >= 6, "{rows:?}");
    for row in rows {
        let cells: Vec<_> = row.split(" | ").collect();
        let (name, kind, label) = (cells[0].trim_end_matches('`'), cells[1], cells[2].trim_matches('`'));
        let family = name.trim_end_matches("_total");
        let types = [name, family].map(|name| format!("# TYPE larder_registry_{name} {kind}\n"));
        assert!(types.iter().any(|line| page.contains(line)), "{row}\n{page}");
        assert!(page.contains(&format!("larder_registry_{name}{{{label}=\"")), "{row}\n{page}");
    }
}

#[test]
fn a_pull_moves_the_metrics_of_registry_and_disk() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        ImageBuilder::small(1, 5_000_000).push(&world.registry, "shop/web:1").unwrap();
        let daemon = CriDaemon::of(&world);
        let names = ["larder_registry_requests_total", "larder_registry_received_bytes_total"];
        let free = ["larder_filesystem_available_bytes", "larder_filesystem_inodes_free"];
        let before = free.map(|name| daemon.metric(name));
        assert!(names.map(|name| daemon.metric(name)).iter().all(|&value| value < 0.5));
        daemon.pull(&world.registry.image("shop/web:1")).unwrap();
        assert!(daemon.metric("larder_pulled_image_bytes_total") > 4_000_000.0);
        assert!(daemon.metric("larder_image_pull_duration_seconds_count") > 0.5);
        let lazy = [
            "incomplete_layers",
            "oldest_age_seconds",
            "filled_bytes",
            "total_bytes",
            "waiting_reads",
            "read_wait_seconds",
            "failed_reads",
            "requests",
            "received_bytes",
            "suspects",
        ];
        let reads = ["unverified_layers", "verified_bytes", "damaged_pieces", "repaired_pieces"];
        let of_store = lazy.map(|name| format!("larder_lazy_{name}")).into_iter();
        for name in of_store.chain(reads.map(|name| format!("larder_store_{name}"))) {
            assert_eq!(daemon.metrics().contains(&name), daemon.metrics().contains(names[0]), "{name}");
        }
        // A runtime speaks to registries itself, and its disk is its own.
        if world.endpoint().is_none() {
            assert!(daemon.metric(names[0]) > 2.5, "a manifest, a config and a layer");
            assert!(daemon.metric(names[1]) > 5_000_000.0);
            assert_registry_metrics(&daemon.get("/metrics"));
            assert!(daemon.metric("larder_filesystem_size_bytes") > before[0]);
            // Others write to this disk, too.
            let moves = || (0..2).all(|at| (daemon.metric(free[at]) - before[at]).abs() > 0.5);
            wait_until("free bytes and inodes have moved", moves);
        }
        daemon.stop().expect(0);
    }
}
