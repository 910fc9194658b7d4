//! A pull with a secret that is cut off by a kill, at moments all along its way: afterwards nobody may use the image who has
//! not shown that they may.

use std::time::Duration;

use larder_testkit::peers::registry::{PASSWORD, USER};
use larder_testkit::peers::{Auth, Image, RegistryOptions};
use serde_json::json;
use tokio::time::Instant;

use crate::world::{World, pod_with_secrets};

/// How many moments.
const MOMENTS: u32 = 12;

#[test]
fn whenever_a_pull_is_killed_its_image_is_only_for_who_shows_a_credential() {
    let options = RegistryOptions { auth: Auth::Basic, ..RegistryOptions::default() };
    for world in World::of_each_backend(options) {
        Image::small(1, 500_000).push(&world.registry, "shop/web:1").unwrap();
        let (image, host) = (world.registry.image("shop/web:1"), world.registry.address());
        let config = json!({"auths": {host.as_str(): {"username": USER, "password": PASSWORD}}});
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"},
            "type": "kubernetes.io/dockerconfigjson",
            "stringData": {".dockerconfigjson": config.to_string()},
        });
        let pod = |name: &str, secrets: &[&str]| pod_with_secrets(name, "IfNotPresent", &[&image], secrets);
        let with = world.file("with.yaml", &format!("{}{secret}", pod("with", &["s"])));
        let without = world.file("without.yaml", &pod("without", &[]));
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
            killed += u32::from(running.kill_after(delay.max(Duration::from_millis(1))));
            present += u32::from(!world.images().is_empty());
            let run = ensure(&without).expect(1);
            assert!(!run.stdout.contains("can be accessed"), "killed after {delay:?}: {run:?}");
            ensure(&with).expect(0);
            ensure(&without).expect(1);
        }
        eprintln!("{killed} kills within {length:?}; the image was there after {present}");
        assert!(killed > MOMENTS / 2 && present > 0, "{killed} kills, {present} times an image");
    }
}
