//! Names of present images: removed one by one, added, and found by their parts.

use larder_testkit_peers::{ImageBuilder, RegistryOptions};

use crate::world::RuntimeFixture;

/// A world of each backend with one image under two tags, which are returned with its ID.
fn with_two_names() -> impl Iterator<Item = (RuntimeFixture, [String; 2], String)> {
    RuntimeFixture::of_each_backend(RegistryOptions::default()).map(|world| {
        let names = ["shop/web:1", "shop/web:2"];
        let id =
            names.map(|name| ImageBuilder::small(1, 50_000).push(&world.registry, name).unwrap().image_id);
        assert_eq!(id[0], id[1]);
        let names = names.map(|name| world.registry.image(name));
        world.larder(&["pull", "-q", &names[0], &names[1]]).expect(0);
        let [id, _] = id;
        (world, names, id)
    })
}

#[test]
fn a_name_removes_itself_and_the_image_with_its_last_name() {
    for (world, [one, two], id) in with_two_names() {
        if world.has_containerd() {
            let run = world.larder(&["rm", &one]).expect(1);
            assert!(run.stderr.contains("the runtime removes an image with all its names"), "{run:?}");
            assert!(run.stderr.contains(&two) && run.stderr.contains("--force"), "{run:?}");
            assert_eq!(world.images(), [one.as_str(), &two]);
            let run = world.larder(&["rm", &one, &two]).expect(0);
            assert_eq!(run.lines_with(&["Deleted: ", &id]), 1, "{run:?}");
            assert_eq!(world.images(), [""; 0]);
            continue;
        }
        let run = world.larder(&["rm", &one]).expect(0);
        assert_eq!(run.stdout, format!("Untagged: {one}\n"));
        assert_eq!(world.images(), [two.as_str()]);
        let run = world.larder(&["rm", "-o", "json", &two]).expect(0);
        let record = &run.json()[0];
        assert_eq!(
            (&record["removed"], &record["repoTags"][0]),
            (&true.into(), &two.as_str().into()),
            "{run:?}"
        );
        assert_eq!(world.image_names(), [""; 0]);
    }
}

#[test]
fn an_id_with_several_names_needs_force_and_a_runtime_says_what_else_goes() {
    for (world, [one, two], id) in with_two_names() {
        for text in [id.as_str(), &id["sha256:".len()..][..4]] {
            let run = world.larder(&["rm", text]).expect(1);
            assert!(run.stderr.contains(&one) && run.stderr.contains(&two), "{run:?}");
            assert!(run.stderr.contains("--force"), "{run:?}");
        }
        assert_eq!(world.images(), [one.as_str(), &two]);
        let run = world.larder(&["rm", "--force", &id[..12]]).expect(0);
        assert_eq!(run.lines_with(&["Untagged: ", "shop/web:"]), 2, "{run:?}");
        assert_eq!(run.lines_with(&["Deleted: ", &id]), 1, "{run:?}");
        assert_eq!(world.image_names(), [""; 0]);
    }
}

#[test]
fn a_tag_is_another_name_that_is_taken_from_the_image_that_has_it() {
    for (world, [one, two], id) in with_two_names() {
        let target = world.registry.image("mirror/app");
        let tagged = format!("{target}:latest");
        if world.has_containerd() {
            let run = world.larder(&["tag", &one, &target]).expect(1);
            assert!(run.stderr.contains("CRI has no call") && run.stderr.contains("images tag"), "{run:?}");
            continue;
        }
        let run = world.larder(&["tag", &id[..12], &target]).expect(0);
        assert_eq!(run.stdout, format!("tagged {id} as {tagged}\n"));
        assert_eq!(world.images(), [tagged.as_str(), &one, &two]);
        world.larder(&["rm", &one, &two]).expect(0);
        assert_eq!(world.images(), [tagged.as_str()], "the image lives by its own name");

        let other = world.registry.image("shop/api:1");
        let api = ImageBuilder::small(2, 50_000).push(&world.registry, "shop/api:1").unwrap().image_id;
        world.larder(&["pull", "-q", &other]).expect(0);
        world.larder(&["tag", &other, &tagged]).expect(0);
        assert_eq!(world.larder(&["images", "-q", &tagged]).expect(0).stdout.trim(), api);
        for (source, target, problem) in [
            ("nowhere:1", "a:1", "nowhere:1: image not found"),
            (&other, "Bad:1", "must be lowercase"),
            (&other, &format!("a@{id}"), "a digest cannot be given"),
        ] {
            let run = world.larder(&["tag", source, target]);
            assert!(run.code != 0 && run.stderr.contains(problem), "{run:?}");
        }
    }
}

#[test]
fn present_images_are_found_by_parts_of_their_names_and_pulls_never_are() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    for (number, name) in (1..).zip(["shop/web:1", "shop/api:1", "mirror/api:1"]) {
        ImageBuilder::small(number, 50_000).push(&world.registry, name).unwrap();
        world.larder(&["pull", "-q", &world.registry.image(name)]).expect(0);
    }
    let web = world.registry.image("shop/web:1");
    for command in ["inspect", "explain"] {
        let run = world.larder(&[command, "web"]).expect(0);
        assert!(run.stdout.contains(&web), "{run:?}");
    }
    world.larder(&["lease", &web, "1h"]).expect(0);
    for command in ["rm", "inspect", "explain"] {
        let describes = matches!(command, "inspect" | "explain");
        let run = world.larder(&[command, "api"]).expect(if describes { 2 } else { 1 });
        for part in [
            if describes { "api: ambiguous" } else { "api: image not found" },
            &world.registry.image("shop/api:1"),
            &world.registry.image("mirror/api:1"),
        ] {
            assert!(run.stderr.contains(part), "{part}: {run:?}");
        }
        let run = world.larder(&[command, "shop/wob:1"]).expect(1);
        assert!(run.stderr.contains("image not found") && run.stderr.contains(&web), "{run:?}");
    }
    assert_eq!(world.images().len(), 3, "nothing was removed");
    world.larder(&["rm", &world.registry.image("mirror/api:1")]).expect(0);
    let api = world.registry.image("shop/api:1");
    let run = world.larder(&["rm", &api]).expect(0);
    assert_eq!(
        (run.lines_with(&["Untagged: ", &api]), run.lines_with(&["Deleted: sha256:"])),
        (1, 1),
        "{run:?}"
    );
    assert_eq!(world.images(), [web.as_str()]);

    for part in ["web", "shop/web:1", &image_digits(&world)[..3]] {
        let found = world.larder(&["images", "-q", part]).expect(0);
        assert_eq!(found.stdout.lines().count(), 1, "{part}: {found:?}");
    }
    let run = world.larder(&["images", "wob"]).expect(0);
    assert!(run.stderr.contains("similar images:") && run.stderr.contains(&web), "{run:?}");
    let policy = ["--policy", "Never"];
    let run = world.larder(&[&["ensure", "web:1"][..], &policy].concat()).expect(1);
    assert!(run.stderr.contains(&web) && run.stderr.contains("web:1 is taken as a whole name"), "{run:?}");
    assert!(run.stderr.contains("ErrImageNeverPull") || run.stdout.contains("ErrImageNeverPull"), "{run:?}");
    let run = world.larder(&["pull", "127.0.0.1:1/shop/web:1"]).expect(1);
    assert!(!run.stderr.contains("similar"), "the registry was named: {run:?}");
}

/// The ID of the only image, without its algorithm.
fn image_digits(world: &RuntimeFixture) -> String {
    world.larder(&["images", "-q"]).expect(0).stdout.trim().replace("sha256:", "")
}
