//! The commands that look at images and remove them, on the real thing.

use larder_testkit_peers::{ImageBuilder, RegistryOptions};

use crate::served::CriDaemon;
use crate::world::RuntimeFixture;

#[test]
fn images_are_listed_inspected_measured_and_removed() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let web = ImageBuilder::small(1, 300_000).user("1000").push(&world.registry, "shop/web:1").unwrap();
        let api = ImageBuilder::small(2, 50_000).push(&world.registry, "shop/api:v2").unwrap();
        let (web_name, api_name) = (world.registry.image("shop/web:1"), world.registry.image("shop/api:v2"));

        let run = world.larder(&["images", "-q"]).expect(0);
        assert_eq!(run.stdout, "", "nothing is there yet");

        let run = world.larder(&["pull", "-q", &web_name, &api_name]).expect(0);
        assert_eq!(run.stdout.lines().collect::<Vec<_>>(), [web.image_id.as_str(), api.image_id.as_str()]);

        let run = world.larder(&["images"]).expect(0);
        let repository = world.registry.image("shop/web");
        assert_eq!(run.lines_with(&[&repository, " 1 ", "kB"]), 1, "{run:?}");
        assert_eq!(run.stdout.lines().count(), 3, "a heading and two images: {run:?}");
        let run = world.larder(&["images", "-q", "*/shop/a*"]).expect(0);
        assert_eq!(run.stdout.trim(), api.image_id);

        for name in [web_name.as_str(), &web.image_id] {
            let run = world.larder(&["inspect", name]).expect(0);
            let text = run.json().to_string();
            for part in [&web.image_id, &web.manifest_digest, &web_name] {
                assert!(text.contains(part.as_str()), "{part} in {text}");
            }
        }
        world.larder(&["inspect", "unknown/image:1"]).expect(1);

        let run = world.larder(&["df", "-o", "json"]).expect(0);
        assert!(run.stdout.contains(&*world.place().to_string_lossy()), "where images live: {run:?}");
        world.larder(&["df"]).expect(0);

        world.larder(&["rm", &web_name]).expect(0);
        assert_eq!(world.images(), [api_name.as_str()]);
        let run = world.larder(&["rm", &web_name]).expect(1);
        assert!(run.stderr.contains(&web_name), "{run:?}");
        world.larder(&["rm", "--ignore-not-found", &web_name, &api.image_id]).expect(0);
        assert_eq!(world.images(), [""; 0]);
    }
}

#[test]
fn the_runtime_is_named_with_its_version_and_where_it_was_reached() {
    let Some(world) = RuntimeFixture::plain() else { return };
    let run = world.larder(&["runtime"]).expect(0);
    for part in ["containerd", "1.", "v1", world.containerd().endpoint().as_str()] {
        assert!(run.stdout.contains(part), "{part}: {run:?}");
    }
    let run = world.larder(&["runtime", "-o", "json"]).expect(0);
    assert!(run.json().to_string().contains("containerd"));
}

#[test]
fn an_image_for_another_platform_is_pulled_with_a_warning_everywhere() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let push = |seed, name: &str| {
        let image = ImageBuilder::small(seed, 10_000).architecture("s390x");
        image.push(&world.registry, name).unwrap();
        world.registry.image(name)
    };
    let warning = |image: &str| format!("Image \"{image}\": built for linux/s390x, not for linux/");
    let pulled = push(1, "shop/pulled:1");
    let run = world.larder(&["pull", &pulled]).expect(0);
    assert!(run.stderr.contains(&warning(&pulled)), "{run:?}");
    let inspected: serde_json::Value =
        serde_json::from_str(&world.larder(&["inspect", &pulled]).expect(0).stdout).unwrap();
    let warned = inspected[0]["info"]["warnings"][0].as_str().unwrap();
    assert!(warned.starts_with("built for linux/s390x, not for linux/"), "{inspected}");
    let ensured = push(2, "shop/ensured:1");
    let run = world.larder(&["ensure", &ensured, "-o", "json"]).expect(0);
    let printed: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    let events = printed["events"].as_array().unwrap();
    let warns = |event: &&serde_json::Value| {
        event["reason"] == "ImageWarning"
            && event["message"].as_str().unwrap().starts_with(&warning(&ensured))
    };
    assert_eq!(events.iter().filter(warns).count(), 1, "{run:?}");
    let daemon = CriDaemon::of(&world);
    let asked = push(3, "shop/asked:1");
    daemon.pull(&asked).unwrap();
    let events = world.larder(&["events"]).expect(0).stdout;
    assert!(events.contains(&warning(&asked)), "{events}");
}
