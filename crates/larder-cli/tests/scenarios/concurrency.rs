//! Several pulls at once, and pulls that are given up in their middle.

use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{ImageBuilder, RegistryOptions};

use crate::world::{RuntimeFixture, pod};

/// Number of requests for the tag. containerd resolves it with HEAD and fetches by digest, larder's store fetches at
/// once.
fn lookups(world: &RuntimeFixture) -> usize {
    world.pull_requests().iter().filter(|request| request.path.ends_with("/manifests/1")).count()
}

#[test]
fn two_pods_that_want_one_image_cause_one_pull() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let gate = world.gate();
        let pushed = ImageBuilder::small(1, 200_000).push(&world.registry, "shop/web:1").unwrap();
        let image = gate.image("shop/web:1");
        let pods = pod("one", "Always", &[&image]) + &pod("two", "Always", &[&image]);
        let manifest = world.file("pods.yaml", &pods);
        world.registry.forget_requests();

        gate.hold_blobs_after(0);
        let mut running = world.start_larder(&["ensure", "-f", &manifest]);
        for name in ["one", "two"] {
            running.wait_for_output(&format!("pod/{name}"));
        }
        gate.wait_until_held(1);
        gate.open();
        let run = running.finish().expect(0);

        assert_eq!(run.lines_with(&["Pulling image", &image]), 2, "each pod has its events: {run:?}");
        assert_eq!(run.lines_with(&["Successfully pulled image", &image]), 2, "{run:?}");
        let requests = world.pull_requests();
        assert_eq!(lookups(&world), 1, "the tag was looked up once: {requests:?}");
        assert_eq!(requests.iter().filter(|request| request.is_manifest_fetch()).count(), 1, "{requests:?}");
        for blob in &pushed.blobs {
            let fetched =
                requests.iter().filter(|request| request.is_blob_fetch() && request.path.contains(blob));
            assert_eq!(fetched.count(), 1, "{blob}: {requests:?}");
        }

        // The same with kubelet's own way shows that the registry would have seen a second pull.
        let before = lookups(&world);
        world.larder(&["ensure", "--kubelet", "-f", &manifest]).expect(0);
        assert_eq!(lookups(&world) - before, 2);
    }
}

#[test]
fn twenty_images_are_pulled_at_most_three_at_once() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let gate = world.gate();
        let images: Vec<String> = (0..20).map(|number| format!("shop/app-{number:02}:1")).collect();
        for (image, seed) in images.iter().zip(1..) {
            ImageBuilder::small(seed, 20_000).push(&world.registry, image).unwrap();
        }
        let named: Vec<String> = images.iter().map(|image| gate.image(image)).collect();
        let named: Vec<&str> = named.iter().map(String::as_str).collect();

        // Layers only: configs are small, and the store fetches no more than two documents of a registry at a time.
        gate.hold_blobs_after(4_000);
        let flags = ["ensure", "--max-parallel-image-pulls", "3", "--registry-qps", "0"];
        let running = world.start_larder(&[&flags, named.as_slice()].concat());
        // Every pull that runs gets to the gate and waits there, so the gate sees how many run at once. One is let go
        // each time that all which may run are seen.
        loop {
            wait_until("all that may run are at the gate", || {
                let left = 20 - running.stdout().matches("Successfully pulled image").count();
                left == 0 || gate.held_repositories().len() >= left.min(3)
            });
            if gate.held_repositories().is_empty() {
                break;
            }
            gate.release_first_repository();
        }
        let run = running.finish().expect(0);

        assert_eq!(run.lines_with(&["Successfully pulled image"]), 20, "{run:?}");
        assert_eq!(world.images().len(), 20);
        assert_eq!(gate.most_repositories_held(), 3);
    }
}

#[test]
fn ctrl_c_in_the_middle_leaves_nothing_half_visible_and_the_next_run_completes() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let gate = world.gate();
        ImageBuilder::small(1, 3_000_000).push(&world.registry, "shop/big:1").unwrap();
        ImageBuilder::small(2, 20_000).push(&world.registry, "shop/small:1").unwrap();
        let (big, small) = (gate.image("shop/big:1"), gate.image("shop/small:1"));
        world.larder(&["ensure", &small]).expect(0);

        gate.hold_blobs_after(100_000);
        let running = world.start_larder(&["ensure", &big]);
        gate.wait_until_held(1);
        running.interrupt();
        let run = running.finish().expect(130);
        assert_eq!(run.lines_with(&["Successfully pulled"]), 0, "{run:?}");
        assert_eq!(world.images(), [small.as_str()], "a pull that did not end shows no name");
        let listed = world.larder(&["images", "-o", "json"]).expect(0);
        assert!(!listed.stdout.contains("shop/big"), "{listed:?}");

        gate.open();
        world.larder(&["ensure", &big]).expect(0);
        assert_eq!(world.images(), [big, small]);
    }
}
