//! Registries and runtimes that are down, hang, are something else, and come back.

use std::os::unix::net::UnixListener;
use std::time::Duration;

use larder_testkit_peers::process::poll;
use larder_testkit_peers::{ImageBuilder, RegistryOptions};

use crate::world::{LarderProcess, RuntimeFixture, larder_in, pod};

#[test]
fn a_recovered_registry_is_retried_after_the_back_off() {
    for mut world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        let image = world.registry.image("shop/web:1");
        let manifest = world.file("pod.yaml", &pod("web", "Always", &[&image]));
        world.registry.stop();

        let run = world.larder(&["ensure", "-f", &manifest]).expect(1);
        assert_eq!(run.lines_with(&["Failed to pull image", &image, "onnection refused"]), 1, "{run:?}");
        assert_eq!(
            run.lines_with(&["Error: ErrImagePull"]) + run.lines_with(&["Error: RegistryUnavailable"]),
            1,
            "{run:?}"
        );

        let mut running = world.start_larder(&["ensure", "--retry-for", "60s", "-f", &manifest]);
        running.wait_for_output("Back-off pulling image");
        world.registry.start_again().unwrap();
        let run = running.finish().expect(0);
        assert_eq!(run.lines_with(&["Failed to pull image", &image]), 1, "the back-off was kept: {run:?}");
        assert_eq!(run.lines_with(&["Successfully pulled image", &image]), 1, "{run:?}");
        assert_eq!(world.images(), [image]);
    }
}

#[test]
fn a_pull_that_is_cut_in_its_middle_fails_and_the_next_run_completes() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let gate = world.gate();
        ImageBuilder::small(1, 3_000_000).push(&world.registry, "shop/big:1").unwrap();
        let image = gate.image("shop/big:1");

        gate.hold_blobs_after(100_000);
        let mut running = world.start_larder(&["ensure", &image]);
        gate.wait_until_held(1);
        // containerd requests the rest of a truncated blob several times. It receives nothing more.
        gate.hold_blobs_after(0);
        let given_up = poll(Duration::from_secs(60), || {
            gate.cut();
            running.is_finished().then_some(())
        });
        assert!(given_up.is_some(), "the runtime did not give up: {:?}", gate.seen());
        let run = running.finish().expect(1);
        assert_eq!(run.lines_with(&["Failed to pull image", &image]), 1, "{run:?}");
        assert_eq!(world.images(), [""; 0]);

        gate.open();
        world.larder(&["ensure", &image]).expect(0);
        assert_eq!(world.images(), [image]);
    }
}

#[test]
fn a_runtime_that_stops_is_reported_and_has_its_images_after_its_restart() {
    for world in RuntimeFixture::of_each_runtime(RegistryOptions::default()) {
        stops_and_restarts(world);
    }
}

fn stops_and_restarts(mut world: RuntimeFixture) {
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let image = world.registry.image("shop/web:1");
    world.larder(&["ensure", &image]).expect(0);

    world.stop_backend();
    let socket = world.socket();
    for command in [vec!["ensure", &image], vec!["images"], vec!["df"], vec!["runtime"], vec!["rm", &image]] {
        let run = world.larder(&command).expect(3);
        assert!(run.stderr.contains(&socket), "{command:?} names the socket: {run:?}");
        assert_eq!(run.stdout, "", "{command:?}");
    }

    world.start_backend_again();
    world.registry.forget_requests();
    let run = world.larder(&["ensure", &image]).expect(0);
    assert!(run.stdout.contains("already present on machine"), "{run:?}");
    assert_eq!(world.registry.requests(), []);
}

#[test]
fn a_runtime_that_stops_in_the_middle_of_a_pull_ends_the_run_in_time() {
    for world in RuntimeFixture::of_each_runtime(RegistryOptions::default()) {
        stops_in_the_middle_of_a_pull(world);
    }
}

fn stops_in_the_middle_of_a_pull(mut world: RuntimeFixture) {
    let gate = world.gate();
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let image = gate.image("shop/web:1");

    gate.hold_blobs_after(0);
    let running = world.start_larder(&["ensure", &image]);
    gate.wait_until_held(1);
    world.stop_backend();
    let run = running.finish().expect(3);
    assert_eq!(run.lines_with(&["Failed to pull image", &image]), 1, "{run:?}");
    let socket = world.socket();
    assert!(run.stderr.contains(&socket), "the socket is named: {run:?}");

    gate.open();
    world.start_backend_again();
    world.larder(&["ensure", &image]).expect(0);
    assert_eq!(world.images(), [image]);
}

#[test]
fn a_server_that_is_no_runtime_is_reported_in_one_line_and_in_bounded_time() {
    let home = tempfile::tempdir().unwrap();
    let silent = home.path().join("silent.sock");
    let listener = UnixListener::bind(&silent).unwrap();
    let refused = home.path().join("refused.sock");
    drop(UnixListener::bind(&refused).unwrap());
    let file = home.path().join("file");
    fs_err::write(&file, "").unwrap();

    let cases = [
        (home.path().join("missing.sock"), "socket not found"),
        (refused, "connection refused"),
        (file, "not a socket"),
        (silent, "no answer within"),
    ];
    for (path, problem) in cases {
        let mut command = larder_in(home.path());
        command.args(["--timeout", "1s", "--backend"]).arg(&path).args(["ensure", "busybox:1"]);
        let run = LarderProcess::start(command).finish().expect(3);
        let printed = run.stderr.lines().filter(|line| line.contains(problem)).count();
        assert_eq!(printed, 1, "{}: {run:?}", path.display());
        assert!(run.stderr.contains(&*path.to_string_lossy()), "{run:?}");
    }
    drop(listener);
}
