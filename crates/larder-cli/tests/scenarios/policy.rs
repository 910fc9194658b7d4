//! Pull policy and presence, names with digests, and images that do not exist.

use larder_testkit_peers::{ImageBuilder, RegistryOptions};

use crate::world::{RuntimeFixture, pod};

/// Expected requests of an ensure, as seen from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedTraffic {
    /// Fetches the image.
    Fetch,
    /// Asks the registry, finds nothing new, fetches nothing.
    Ask,
    /// Does not touch the registry, and succeeds.
    Nothing,
    /// Does not touch the registry, and fails.
    Refuse,
}

#[test]
fn each_policy_treats_absent_and_present_images_as_kubelet_does() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let web = ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        let newest = ImageBuilder::small(2, 50_000).push(&world.registry, "shop/web:latest").unwrap();
        // larder's store asks for the config, a kilobyte, with the manifest; what counts is the layers.
        let configs = [web.image_id, newest.image_id];
        let (tagged, latest) = (world.registry.image("shop/web:1"), world.registry.image("shop/web"));

        let cases = [
            ("Always", &tagged, false, ExpectedTraffic::Fetch, "Successfully pulled image"),
            ("Always", &tagged, true, ExpectedTraffic::Ask, "Successfully pulled image"),
            ("IfNotPresent", &tagged, false, ExpectedTraffic::Fetch, "Successfully pulled image"),
            ("IfNotPresent", &tagged, true, ExpectedTraffic::Nothing, "already present on machine"),
            ("Never", &tagged, false, ExpectedTraffic::Refuse, "is not present with pull policy of Never"),
            ("Never", &tagged, true, ExpectedTraffic::Nothing, "already present on machine"),
            // No policy: it follows from the tag, and no tag is the tag latest.
            ("", &tagged, true, ExpectedTraffic::Nothing, "already present on machine"),
            ("", &latest, true, ExpectedTraffic::Ask, "Successfully pulled image"),
        ];
        for (policy, image, present, does, says) in cases {
            let case = format!("{policy} {image} present={present}");
            world.remove_images();
            if present {
                world.larder(&["pull", image]).expect(0);
            }
            world.registry.forget_requests();

            let manifest = world.file("pod.yaml", &pod("web", policy, &[image]));
            let run = world.larder(&["ensure", "-f", &manifest]);

            assert_eq!(run.code, i32::from(does == ExpectedTraffic::Refuse), "{case}: {run:?}");
            assert!(run.stdout.contains(says), "{case}: {run:?}");
            let requests = world.registry.requests();
            let is_layer = |path: &str| !configs.iter().any(|config| path.contains(config.as_str()));
            let fetched =
                requests.iter().filter(|request| request.is_blob_fetch() && is_layer(&request.path));
            let fetched = fetched.count();
            let seen = match (requests.len(), fetched) {
                (0, _) if run.code == 0 => ExpectedTraffic::Nothing,
                (0, _) => ExpectedTraffic::Refuse,
                (_, 0) => ExpectedTraffic::Ask,
                _ => ExpectedTraffic::Fetch,
            };
            assert_eq!(seen, does, "{case}: {requests:?}");
            assert_eq!(world.images().is_empty(), does == ExpectedTraffic::Refuse, "{case}");
        }

        // The command line's policy wins over the manifest's.
        let manifest = world.file("pod.yaml", &pod("web", "Always", &[&tagged]));
        world.larder(&["pull", &tagged]).expect(0);
        world.registry.forget_requests();
        world.larder(&["ensure", "--policy", "Never", "-f", &manifest]).expect(0);
        assert_eq!(world.registry.requests(), []);
    }
}

#[test]
fn an_image_named_by_digest_is_pulled_once_and_found_by_it() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let pushed = ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        let by_digest = world.registry.image(&format!("shop/web@{}", pushed.manifest_digest));

        let run = world.larder(&["ensure", &by_digest]).expect(0);
        assert!(run.stdout.contains("Successfully pulled image"), "{run:?}");
        assert_eq!(world.image_names(), [by_digest.as_str()]);
        world.registry.forget_requests();
        world.larder(&["ensure", &by_digest]).expect(0);
        assert_eq!(world.registry.requests(), [], "the digest is present: nothing can be newer");

        let wrong = world.registry.image(&format!("shop/web@sha256:{}", "0".repeat(64)));
        let run = world.larder(&["ensure", &wrong]).expect(1);
        assert!(run.stdout.contains("not found"), "{run:?}");
    }
}

#[test]
fn an_unknown_image_fails_by_name_and_the_others_are_still_made_present() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        let (known, no_tag, no_repository) = (
            world.registry.image("shop/web:1"),
            world.registry.image("shop/web:2"),
            world.registry.image("unknown/image:1"),
        );

        let run = world.larder(&["ensure", &no_tag, &known, &no_repository, "upper/CASE"]).expect(2);
        assert_eq!(world.images(), [known]);
        for unknown in [&no_tag, &no_repository] {
            assert_eq!(run.lines_with(&["Failed to pull image", unknown, "not found"]), 1, "{run:?}");
        }
        assert!(format!("{}{}", run.stdout, run.stderr).contains("upper/CASE"), "{run:?}");
    }
}
