//! Images that `larder serve` pins over CRI: kubelet's GC and `crictl rmi --prune` remove unpinned images only, and
//! `crictl rmi` with a name removes any that is not mounted.

use larder_cri::proto;
use larder_testkit_peers::{ImageBuilder, RegistryOptions};
use tonic::{Code, Status};

use crate::served::CriDaemon;
use crate::store::may_mount;
use crate::world::RuntimeFixture;

fn named(image: &str) -> proto::ImageSpec {
    proto::ImageSpec { image: image.into(), ..proto::ImageSpec::default() }
}

/// Sends the call of `crictl rmi NAME`.
fn remove(daemon: &CriDaemon, image: &str) -> Result<(), Status> {
    let mut images = daemon.wire().images();
    let request = proto::RemoveImageRequest { image: Some(named(image)) };
    daemon.runtime.block_on(images.remove_image(request)).map(drop)
}

/// Removes images that no container uses, as `crictl rmi --prune` and kubelet's GC do. Returns the first names of
/// those that are left, sorted.
fn prune(daemon: &CriDaemon) -> Vec<String> {
    let list = || {
        let mut images = daemon.wire().images();
        let listed = images.list_images(proto::ListImagesRequest::default());
        daemon.runtime.block_on(listed).unwrap().into_inner().images
    };
    for image in list().into_iter().filter(|image| !image.pinned) {
        remove(daemon, &image.id).unwrap();
    }
    let mut left: Vec<String> = list().into_iter().flat_map(|image| image.repo_tags).collect();
    left.sort();
    left
}

/// Whether `ImageStatus` reports the image as pinned.
fn is_pinned(daemon: &CriDaemon, image: &str) -> bool {
    let request = |verbose| proto::ImageStatusRequest { image: Some(named(image)), verbose };
    let mut images = daemon.wire().images();
    let [plain, verbose] = [false, true].map(|verbose| {
        daemon.runtime.block_on(images.image_status(request(verbose))).unwrap().into_inner().image.unwrap()
    });
    assert_eq!(plain, verbose, "both answers describe the same image");
    plain.pinned
}

/// Pushes images with these names, and returns the names to pull them by.
fn push<const N: usize>(world: &RuntimeFixture, names: [&str; N]) -> [String; N] {
    let mut seed = 0;
    names.map(|name| {
        seed += 1;
        ImageBuilder::small(seed, 50_000).push(&world.registry, name).unwrap();
        world.registry.image(name)
    })
}

#[test]
fn kept_images_survive_a_prune_and_leased_ones_do_not() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let [kept, ensured, pulled] = push(&world, ["shop/kept:1", "shop/ensured:1", "shop/pulled:1"]);
        let daemon = CriDaemon::of(&world);
        daemon.pull(&kept).unwrap();
        daemon.pull(&pulled).unwrap();
        world.larder(&["pull", &ensured]).expect(0);
        assert!(!is_pinned(&daemon, &kept), "a lease of PullImage pins nothing");
        world.larder(&["keep", "*/shop/kept:*"]).expect(0);
        assert!(is_pinned(&daemon, &kept));
        for leased in [&ensured, &pulled] {
            assert!(!is_pinned(&daemon, leased));
        }
        assert_eq!(prune(&daemon), [kept.as_str()]);

        remove(&daemon, &kept).expect("a removal by name obliges");
        let why = "although it was kept by rule 1 (name */shop/kept:*)";
        let events = world.larder(&["events"]).expect(0).stdout;
        assert!(events.lines().any(|line| line.contains(&kept) && line.contains(why)), "{events}");
        let log = world.larder(&["gc", "log", "-o", "json"]).expect(0).stdout;
        assert!(log.contains(why), "{log}");
        daemon.pull(&kept).unwrap();
        world.larder(&["unkeep", "1"]).expect(0);
        assert_eq!(prune(&daemon), [""; 0]);
    }
}

#[test]
fn rules_of_every_kind_pin_what_gc_retains_by_them() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let [old, new, other] = push(&world, ["shop/web:1", "shop/web:2", "shop/other:1"]);
        let settings = world.file(
            "settings.yaml",
            "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\ngc:\n  keep:\n  - newest: 1\n    repository: '*/shop/web'\n",
        );
        let daemon = CriDaemon::with(&world, &["--config", &settings]);
        for name in [&old, &other, &new] {
            daemon.pull(name).unwrap();
            // An observation: what is newest is decided by when an image was first seen.
            world.larder(&["explain", name]).expect(0);
        }
        assert_eq!([&old, &new, &other].map(|name| is_pinned(&daemon, name)), [false, true, false]);
        assert_eq!(prune(&daemon), [new.as_str()]);
    }
}

#[test]
fn a_mounted_image_is_pinned_until_its_mount_ends() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    if !may_mount() {
        return;
    }
    let [mounted, pulled] = push(&world, ["shop/mounted:1", "shop/pulled:1"]);
    let daemon = CriDaemon::of(&world);
    daemon.pull(&mounted).unwrap();
    daemon.pull(&pulled).unwrap();
    let target = world.path("mnt");
    fs_err::create_dir(&target).unwrap();
    world.larder(&["mount", &mounted, &target]).expect(0);
    assert!(is_pinned(&daemon, &mounted));
    assert_eq!(prune(&daemon), [mounted.as_str()]);
    let refused = remove(&daemon, &mounted).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains(&target), "names the mount: {refused}");
    world.larder(&["umount", &target]).expect(0);
    assert_eq!(prune(&daemon), [""; 0]);
}

#[test]
fn set_id_bits_and_devices_have_no_effect_unless_requested() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    if !may_mount() {
        return;
    }
    let [image] = push(&world, ["shop/web:1"]);
    world.larder(&["pull", &image]).expect(0);
    let target = world.path("mnt");
    fs_err::create_dir(&target).unwrap();
    for flags in [&[][..], &["--suid"], &["--dev"]] {
        world.larder(&[&["mount", &image, &target], flags].concat()).expect(0);
        let mounts = fs_err::read_to_string("/proc/self/mounts").unwrap();
        let line = mounts.lines().find(|line| line.contains(&target)).unwrap();
        let options: Vec<&str> = line.split(' ').nth(3).unwrap().split(',').collect();
        for (option, flag) in [("nosuid", "--suid"), ("nodev", "--dev")] {
            assert_eq!(options.contains(&option), !flags.contains(&flag), "{flags:?}: {line}");
        }
        world.larder(&["umount", &target]).expect(0);
    }
}

/// The setting is about what CRI shows: the store refuses to remove a mounted image in any case.
#[test]
fn a_mounted_image_that_is_not_pinned_is_still_not_removed() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    if !may_mount() {
        return;
    }
    let [mounted] = push(&world, ["shop/mounted:1"]);
    let settings = world.file(
        "settings.yaml",
        "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\ncri: {pinMounted: false}\n",
    );
    let daemon = CriDaemon::with(&world, &["--config", &settings]);
    daemon.pull(&mounted).unwrap();
    let target = world.path("mnt");
    fs_err::create_dir(&target).unwrap();
    world.larder(&["mount", &mounted, &target]).expect(0);
    assert!(!is_pinned(&daemon, &mounted));
    let refused = remove(&daemon, &mounted).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains(&target), "names the mount: {refused}");
    world.larder(&["umount", &target]).expect(0);
    remove(&daemon, &mounted).unwrap();
}

#[test]
fn settings_choose_what_is_pinned() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let [kept, leased, pulled] = push(&world, ["shop/kept:1", "shop/leased:1", "shop/pulled:1"]);
    let settings = world.file(
        "settings.yaml",
        "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\ncri: {pinKept: false, pinLeased: true}\n",
    );
    let daemon = CriDaemon::with(&world, &["--config", &settings]);
    for name in [&kept, &leased, &pulled] {
        daemon.pull(name).unwrap();
    }
    world.larder(&["keep", "*/shop/kept:*"]).expect(0);
    world.larder(&["lease", &leased, "1h"]).expect(0);
    assert_eq!(prune(&daemon), [leased.as_str()], "the lease of PullImage pins nothing");
    world.larder(&["lease", &leased, "0"]).expect(0);
    assert_eq!(prune(&daemon), [""; 0]);
}
