//! A pull with a secret that is cut off at moments all along its way, by a kill, by Ctrl-C, or because the daemon's client
//! goes away: afterwards nobody may use the image who has not shown that they may.

use std::time::Duration;

use larder_testkit::peers::process::pause;
use larder_testkit::peers::registry::{PASSWORD, USER};
use larder_testkit::peers::{Auth, Image, RegistryOptions};
use serde_json::json;
use tokio::time::Instant;

use crate::served::Daemon;
use crate::world::{Running, World, pod_with_secrets};

/// How many moments.
const MOMENTS: u32 = 12;

/// Manifests of two pods that want an image: with the right secret, and without any.
fn pods(world: &World, image: &str) -> [String; 2] {
    let config = json!({"auths": {world.registry.address(): {"username": USER, "password": PASSWORD}}});
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"},
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": config.to_string()},
    });
    let pod = |name: &str, secrets: &[&str]| pod_with_secrets(name, "IfNotPresent", &[image], secrets);
    let with = format!("{}{secret}", pod("with", &["s"]));
    [world.file("with.yaml", &with), world.file("without.yaml", &pod("without", &[]))]
}

fn options() -> RegistryOptions {
    RegistryOptions { auth: Auth::Basic, ..RegistryOptions::default() }
}

/// Lets it run for this time, and then presses Ctrl-C; says whether that ended it.
fn interrupt_after(running: Running, time: Duration) -> bool {
    pause(time);
    running.interrupt();
    running.finish().code != 0
}

/// Cuts off pulls of a process of their own.
fn whenever_a_pull_is_cut_off_by(cut_off: fn(Running, Duration) -> bool) {
    for world in World::of_each_backend(options()) {
        Image::small(1, 500_000).push(&world.registry, "shop/web:1").unwrap();
        let [with, without] = pods(&world, &world.registry.image("shop/web:1"));
        let state = world.path("state");
        let ensure = |file: &str| world.larder(&["--state", &state, "ensure", "-f", file]);
        let forget = || {
            world.remove_images();
            let _ = fs_err::remove_dir_all(&state);
        };

        let began = Instant::now();
        ensure(&with).expect(0);
        let length = began.elapsed();
        let (mut killed, mut present) = (0, 0);
        // Some of them after the usual length: a machine has its slower moments.
        for moment in 0..=MOMENTS + 2 {
            forget();
            let delay = length * moment / MOMENTS;
            let running = world.start_larder(&["--state", &state, "ensure", "-f", &with]);
            killed += u32::from(cut_off(running, delay.max(Duration::from_millis(1))));
            present += u32::from(!world.images().is_empty());
            let run = ensure(&without).expect(1);
            assert!(!run.stdout.contains("can be accessed"), "cut off after {delay:?}: {run:?}");
            ensure(&with).expect(0);
            ensure(&without).expect(1);
        }
        eprintln!("{killed} cut off within {length:?}; the image was there after {present}");
        assert!(killed > MOMENTS / 2 && present > 0, "{killed} cut off, {present} times an image");
    }
}

#[test]
fn whenever_a_pull_is_killed_its_image_is_only_for_who_shows_a_credential() {
    whenever_a_pull_is_cut_off_by(Running::kill_after);
}

#[test]
fn whenever_a_pull_is_interrupted_its_image_is_only_for_who_shows_a_credential() {
    whenever_a_pull_is_cut_off_by(interrupt_after);
}

#[test]
fn whenever_a_client_of_the_daemon_leaves_its_image_is_only_for_who_shows_a_credential() {
    for world in World::of_each_backend(options()) {
        let daemon = Daemon::of(&world);
        let (mut left, mut present, mut length) = (0, 0, Duration::ZERO);
        for moment in 0..=MOMENTS + 2 {
            // Each of its own, as a record of another round would refuse as well.
            let name = format!("shop/web:{moment}");
            Image::small(u64::from(moment) + 1, 500_000).push(&world.registry, &name).unwrap();
            let [with, without] = pods(&world, &world.registry.image(&name));
            let began = Instant::now();
            let running = world.start_larder(&["ensure", "-f", &with]);
            if moment == 0 {
                running.finish().expect(0);
                length = began.elapsed();
                continue;
            }
            let delay = length * moment / MOMENTS;
            left += u32::from(running.kill_after(delay));
            let refused = |when: &str| {
                let run = world.larder(&["ensure", "-f", &without]).expect(1);
                assert!(!run.stdout.contains("can be accessed"), "{when}, left after {delay:?}: {run:?}");
            };
            refused("at once");
            // What the backend was at when the client left ends meanwhile, or not.
            pause(length);
            refused("later");
            let named = world.registry.image(&name);
            present += u32::from(daemon.list().iter().any(|image| image.repo_tags.contains(&named)));
            world.larder(&["ensure", "-f", &with]).expect(0);
            refused("after a pull");
        }
        eprintln!("{left} clients left within {length:?}; the image was there after {present}");
        assert!(left > MOMENTS / 2, "{left} left");
        daemon.stop().expect(0);
    }
}
