//! Habits from docker: groups and aliases, prune, history, load from a flag or a pipe, and umount of all.

use std::path::Path;
use std::process::Command;

use larder_testkit_peers::{ImageBuilder, LayerFiles, RegistryOptions};

use crate::leases::on_a_terminal;
use crate::store::may_mount;
use crate::world::{LarderProcess, RuntimeFixture, larder_in};

#[test]
fn groups_and_aliases_do_what_the_command_does() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    world.larder(&["image", "pull", "-q", &world.registry.image("shop/web:1")]).expect(0);
    let same: [(&[&str], &[&[&str]]); 4] = [
        (&["images"], &[&["image", "ls"], &["image", "list"], &["ls"]]),
        (&["df"], &[&["system", "df"]]),
        (&["runtime"], &[&["info"], &["system", "info"]]),
        (&["--version"], &[&["version"]]),
    ];
    for (command, others) in same {
        // Other processes change the numbers of the filesystem.
        let shown = |command: &[&str]| {
            let stdout = world.larder(command).expect(0).stdout;
            stdout.split("FILESYSTEM").next().unwrap_or_default().to_owned()
        };
        let expected = shown(command);
        assert!(!expected.is_empty());
        for other in others {
            assert_eq!(shown(other), expected, "{other:?}");
        }
    }
    world.larder(&["image", "tag", &world.registry.image("shop/web:1"), "web:old"]).expect(0);
    world.larder(&["rmi", "web:old"]).expect(0);
    world.larder(&["image", "rm", &world.registry.image("shop/web:1")]).expect(0);
    assert_eq!(world.images(), [""; 0]);
}

#[test]
fn dangling_images_are_pruned_and_tagged_ones_only_on_request() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let larder = |arguments: &[&str]| world.larder(arguments);
    let web = world.registry.image("shop/web:1");
    let [old, new] = [1, 2].map(|number| {
        let id = ImageBuilder::small(number, 50_000).push(&world.registry, "shop/web:1").unwrap().image_id;
        larder(&["pull", "-q", &web]).expect(0);
        id
    });
    let run = larder(&["prune"]).expect(2);
    assert!(run.stderr.contains("remove 1 dangling image") && run.stderr.contains("--force"), "{run:?}");
    assert!(world.larder(&["images", "-q"]).expect(0).stdout.contains(&old), "the question has no answer");
    let run = larder(&["prune", "-f"]).expect(0);
    assert!(run.stdout.contains("removed 1 image"), "{run:?}");
    assert!(!world.larder(&["images", "-q"]).expect(0).stdout.contains(&old));
    assert_eq!(larder(&["gc", "log"]).expect(0).lines_with(&["dangling"]), 1);
    assert_eq!(world.images(), [web.as_str()]);
    assert!(larder(&["prune"]).expect(0).stderr.contains("nothing to remove"));
    larder(&["prune", "-a"]).expect(2);
    let run = larder(&["prune", "-a", "-f"]).expect(0);
    assert!(run.stdout.contains("removed 1 image"), "{run:?}");
    assert!(!world.larder(&["images", "-q"]).expect(0).stdout.contains(&new));
    let run = larder(&["gc", "log"]).expect(0);
    assert_eq!(run.lines_with(&[&web, "allUnused"]), 1, "{run:?}");
}

#[test]
fn collection_of_all_unused_images_asks_on_a_terminal_as_prune_does() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let web = world.registry.image("shop/web:1");
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    world.larder(&["pull", "-q", &web]).expect(0);
    let retained = world.larder(&["gc", "--all-unused"]).expect(0);
    assert!(retained.stderr.contains("--force-leases removes all"), "{retained:?}");
    world.larder(&["lease", "rm", &web]).expect(0);
    let gc = ["gc", "--all-unused", "--minimum-image-ttl-duration", "0"];
    for command in [&gc[..], &[&gc[..], &["-o", "json"]].concat(), &["prune", "-a"]] {
        let run = world.larder(command).expect(2);
        assert!(run.stderr.contains("not a terminal") && run.stderr.contains("add --force"), "{run:?}");
        assert_eq!(world.images(), [web.as_str()], "{command:?}: the question has no answer");
    }
    let questions = [&gc[..], &["prune", "-a"]].map(|command| {
        let (shown, code) = on_a_terminal(&world.command(command), "n\n");
        assert!(code == 1 && shown.contains("removed nothing"), "{command:?}: {code}: {shown}");
        shown.lines().find(|line| line.contains("[y/N]")).map(str::to_owned)
    });
    assert!(
        questions[0].as_ref().is_some_and(|text| text.contains("remove 1 unused image (")),
        "{questions:?}"
    );
    assert_eq!(questions[0], questions[1]);
    assert_eq!(world.images(), [web.as_str()]);
    let (shown, code) = on_a_terminal(&world.command(&[&gc[..], &["-f"]].concat()), "");
    assert!(code == 0 && !shown.contains("[y/N]"), "{code}: {shown}");
    assert_eq!(world.images(), [""; 0]);
    let (shown, code) = on_a_terminal(&world.command(&gc), "");
    assert!(code == 0 && !shown.contains("[y/N]"), "nothing to ask about: {code}: {shown}");

    world.larder(&["pull", "-q", &web]).expect(0);
    let (shown, code) = on_a_terminal(&world.command(&["prune", "-a"]), "y\n");
    assert!(code == 0 && shown.contains("removed 1 image"), "{code}: {shown}");
    assert_eq!(shown.matches("[y/N]").count(), 1, "{shown}");
    assert_eq!(world.images(), [""; 0]);
}

#[test]
fn the_log_has_what_removals_by_name_free_beside_shared_layers() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let shared = LayerFiles::new().file("base", vec![7; 3_000_000]);
    for (name, own) in [("shop/web:1", 100_000), ("shop/api:1", 200_000)] {
        let layer = LayerFiles::new().file("own", vec![1; own]);
        ImageBuilder::new().layer(shared.clone()).layer(layer).push(&world.registry, name).unwrap();
        world.larder(&["pull", "-q", &world.registry.image(name)]).expect(0);
    }
    let [web, api] = ["shop/web:1", "shop/api:1"].map(|name| world.registry.image(name));
    world.larder(&["keep", &web]).expect(0);
    let run = world.larder(&["rm", &web, &api]).expect(0);
    assert!(run.stderr.contains(&format!("note: {web} was kept by rule 1 (name ")), "{run:?}");
    let log = world.larder(&["gc", "log", "-o", "json"]).expect(0).json();
    let bytes = |index: usize, field: &str| log[index][field].as_u64().unwrap_or_default();
    assert!((100_000..1_000_000).contains(&bytes(0, "freedBytes")), "{log}");
    assert!(bytes(1, "freedBytes") > 3_000_000, "the last of both frees what they shared: {log}");
    for index in [0, 1] {
        assert_eq!(bytes(index, "promisedBytes"), bytes(index, "freedBytes"), "{log}");
    }
    let run = world.larder(&["gc", "log"]).expect(0);
    assert!(!run.stdout.contains("about") && !run.stdout.contains("control API"), "{run:?}");
}

#[test]
fn files_are_exported_and_images_unmounted_as_podman_is_typed() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let web = world.registry.image("shop/web:1");
    world.larder(&["pull", "-q", &web]).expect(0);
    let (files, dir) = (world.path("files"), world.path("mnt"));
    world.larder(&["export", &web, &files]).expect(0);
    assert!(fs_err::read_dir(&files).unwrap().count() > 0);
    let run = world.larder(&["export", &web, "-o", &format!("{dir}/")]).expect(2);
    assert!(run.stderr.contains("is a directory") && run.stderr.contains("export IMAGE --to "), "{run:?}");
    let run = world.larder_reading(&["load"], "/dev/null").expect(2);
    assert!(
        run.stderr.starts_with("error: standard input: ") && run.stderr.contains("hint: pass an OCI"),
        "{run:?}"
    );
    if may_mount() {
        fs_err::create_dir(&dir).unwrap();
        for image in ["web", "shop/web:1"] {
            world.larder(&["image", "mount", &web, &dir]).expect(0);
            let df = world.larder(&["df", "-o", "json"]).expect(0).json();
            let unique = df["store"]["images"][0]["uniqueBytes"].as_u64().unwrap();
            let layers = df["store"]["disk"]["uniqueLayers"]["sizeBytes"].as_u64().unwrap();
            assert!(layers <= unique && layers == 0, "both tables count the mounted layer as shared: {df}");
            assert_eq!(world.larder(&["umount", image]).expect(0).stdout, format!("{dir}\n"));
        }
    }
}

#[test]
fn the_history_of_an_image_is_that_of_its_config() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let image = ImageBuilder::small(1, 50_000).step("COPY data /srv").step("USER 1000");
        image.push(&world.registry, "shop/web:1").unwrap();
        let web = world.registry.image("shop/web:1");
        world.larder(&["pull", "-q", &web]).expect(0);
        if world.has_docker() {
            let run = world.larder(&["history", &web]).expect(1);
            assert!(run.stderr.contains(&format!("docker history {web}")), "{run:?}");
            continue;
        }
        let run = world.larder(&["history", "shop/web"]).expect(0);
        assert_eq!(run.lines_with(&["COPY data /srv"]), 1, "{run:?}");
        let steps = world.larder(&["history", "-o", "json", &web]).expect(0).json();
        assert_eq!((&steps[0]["createdBy"], &steps[1]["emptyLayer"]), (&"USER 1000".into(), &false.into()));
        let has_size = steps[1]["sizeBytes"].as_u64().is_some_and(|bytes| bytes > 50_000);
        assert_eq!(has_size, world.endpoint().is_none(), "{steps}");
    }
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let run = world.larder(&["history"]).expect(2);
    assert!(run.stderr.contains("gc log"), "{run:?}");
    world.larder(&["history", "nowhere:1"]).expect(1);
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/bare:1").unwrap();
    world.larder(&["pull", "-q", &world.registry.image("shop/bare:1")]).expect(0);
    let run = world.larder(&["history", "bare"]).expect(0);
    assert_eq!(run.stderr, "note: the config of bare has no history\n");
}

#[test]
fn archives_are_loaded_from_a_flag_and_from_a_pipe() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let (layout, archive) = (world.path("layout"), world.path("app.tar"));
    let id = ImageBuilder::small(1, 50_000).write(Path::new(&layout)).unwrap().image_id;
    let packed = Command::new("tar").args(["-C", &layout, "-cf", &archive, "."]).status().unwrap();
    assert!(packed.success());
    let listed = || world.larder(&["images", "-q"]).expect(0).stdout;
    let arguments = ["load", "--name", "registry.example/app"];
    for load in [&["-i", &archive][..], &["--input", &layout], &[]] {
        let arguments = [&arguments[..], load].concat();
        let run = if load.is_empty() {
            world.larder_reading(&arguments, &archive)
        } else {
            world.larder(&arguments)
        };
        run.expect(0);
        assert_eq!(listed().trim(), id, "{load:?}");
        world.larder(&["rm", "-f", &id]).expect(0);
    }
}

#[test]
fn scripts_ask_for_an_image_its_names_and_a_place_to_mount_it() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let web = world.registry.image("shop/web:1");
    let root = world.path("named-by-variable");
    let larder = |arguments: &[&str]| {
        let mut command = larder_in(Path::new(&world.path("")));
        command.env("LARDER_ROOT", &root).env("LARDER_BACKEND", "cri").args(arguments);
        LarderProcess::start(command).finish()
    };
    larder(&["pull", "-q", &web]).expect(0);
    assert!(Path::new(&root).join("layers").is_dir());
    let settings = larder(&["config"]).expect(0).stdout;
    assert_eq!(settings.matches("# LARDER_ROOT").count(), 2, "root and backend: {settings}");
    for (image, code) in [(&*web, 0), ("web", 1), ("shop/web:1", 1), ("no/such:1", 1), ("Not A Name", 2)] {
        let exists = larder(&["image", "exists", image]).expect(code);
        assert!(exists.stdout.is_empty() && exists.stderr.is_empty() == (code < 2), "{exists:?}");
    }
    assert_eq!(larder(&["images", "-o", "name"]).expect(0).stdout, format!("{web}\n"));
    assert_eq!(larder(&["image", "ls", "--format", "name"]).expect(0).stdout, format!("{web}\n"));
    let elsewhere = larder(&["--backend", "unix:///nowhere.sock", "images"]).expect(3);
    assert!(
        elsewhere.stderr.contains("/nowhere.sock"),
        "a flag counts more than the variable: {elsewhere:?}"
    );
    if may_mount() {
        let dir = larder(&["mount", &web]).expect(0).stdout.trim().to_owned();
        assert!(fs_err::read_dir(&dir).unwrap().count() > 0, "{dir}");
        assert_eq!(larder(&["mount"]).expect(0).lines_with(&[&dir, &web]), 1);
        larder(&["umount", &dir]).expect(0);
        assert!(!Path::new(&dir).exists(), "it was larder's");
        let failed = larder(&["mount", "no/such:1"]).expect(1);
        assert!(failed.stderr.contains("no/such:1"), "{failed:?}");
    }
}

#[test]
fn all_mounts_are_unmounted_at_once() {
    if !may_mount() {
        return;
    }
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    world.larder(&["pull", "-q", &world.registry.image("shop/web:1")]).expect(0);
    for target in ["one", "two"].map(|name| world.path(name)) {
        fs_err::create_dir(&target).unwrap();
        world.larder(&["mount", &world.registry.image("shop/web:1"), &target]).expect(0);
    }
    let run = world.larder(&["umount", "--all"]).expect(0);
    assert_eq!(run.stdout.lines().count(), 2, "{run:?}");
    assert_eq!(world.larder(&["mounts"]).expect(0).stdout.lines().count(), 1, "a heading");
    assert_eq!(world.larder(&["umount", "--all"]).expect(0).stdout, "");
}
