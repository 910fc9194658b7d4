//! Collection in larder's own store.

use larder_testkit_peers::ImageBuilder;

use super::{
    MeasuredGc, MountedDisk, agree, family, gc, killed_rounds_change_nothing, layer, number, removals,
};
use crate::world::larder_in;

#[test]
fn one_round_reaches_the_low_mark_as_the_dry_run_said() {
    let Some(disk) = MountedDisk::new(256) else { return };
    for (name, image) in family(6 << 20, 3 << 19) {
        disk.load(&name, &image);
    }
    disk.fill_to(68);
    let run = disk.larder(&gc(&[])).expect(1);
    assert!(run.stderr.contains("40 images leased"), "{run:?}");
    disk.end_leases();
    assert!(disk.used_percent() > 65.0, "{}", disk.used_percent());
    let larder = |arguments: &[&str]| disk.larder(arguments);
    let round = MeasuredGc::run(&disk, larder);
    assert_eq!(round.planned["images"].as_array().unwrap().len(), 40);
    assert_eq!(removals(&round.planned), removals(&round.done));
    round.ends_at_the_low_mark();
    round.prints_freed_bytes(larder);
    agree("the promise", number(&round.done, "promisedBytes"), round.after - round.before);
    assert_eq!(disk.larder(&gc(&[])).expect(0).json()["removals"].as_array().unwrap().len(), 0);
    disk.larder(&["fsck"]).expect(0);
}

#[test]
fn the_freed_bytes_of_stacked_images_are_exact() {
    let Some(disk) = MountedDisk::of_environment(192) else { return };
    let stack =
        |height: u64| (0..height).fold(ImageBuilder::new(), |image, seed| image.layer(layer(seed, 4 << 20)));
    for height in 1..=3 {
        disk.load(&format!("registry.example/stack-{height}"), &stack(height));
    }
    disk.end_leases();
    let free = |size: &str| {
        let run =
            disk.larder(&["gc", "--dry-run", "-o", "json", "--free", size, "--minimum-image-ttl-duration=0"]);
        removals(&run.expect(0).json())
    };
    assert_eq!(free("3MiB").len(), 1, "only the tallest has a layer of its own");
    assert_eq!(free("10MiB").len(), 3, "the lowest layer goes with the last of the three");
    let df = disk.larder(&["df", "-o", "json"]).expect(0).json();
    assert_eq!(df["store"]["estimated"], disk.estimates_sizes());
    assert_eq!(disk.larder(&["df", "-v"]).expect(0).stdout.contains("  about 4"), disk.estimates_sizes());
    disk.empty_trash();
    let (before, _) = disk.free();
    let done =
        disk.larder(&["gc", "--free=10MiB", "--minimum-image-ttl-duration=0", "-o", "json"]).expect(0).json();
    let (after, _) = disk.free();
    disk.agree("the promise", number(&done, "promisedBytes"), after - before);
    for removal in done["removals"].as_array().unwrap() {
        assert_eq!(removal["estimated"], disk.estimates_sizes(), "{removal}");
    }
    assert!(after - before >= 10 << 20);
}

#[test]
fn whatever_layers_images_share_each_removal_frees_what_was_promised() {
    for seed in 1..=3_u64 {
        let Some(disk) = MountedDisk::of_environment(192) else { return };
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        for number in 0..10 {
            let some: Vec<u64> = (0..8).filter(|_| next(3) == 0).collect();
            let image = some.iter().fold(ImageBuilder::new(), |image, &seed| {
                image.layer(layer(seed, (2 << 20) + usize::try_from(seed).unwrap() * 300_000))
            });
            disk.load(&format!("registry.example/random-{number}"), &image.user(format!("{number}")));
        }
        disk.end_leases();
        for kept in 0..2 {
            disk.larder(&["keep", &format!("registry.example/random-{kept}:*")]).expect(0);
        }
        let all = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0", "-o", "json"];
        let planned = disk.larder(&[&all[..], &["--dry-run"]].concat()).expect(0).json();
        disk.empty_trash();
        let (before, _) = disk.free();
        let done = disk.larder(&all).expect(0).json();
        let (after, _) = disk.free();
        assert_eq!(removals(&planned), removals(&done), "seed {seed}");
        assert_eq!(removals(&done).len(), 8, "seed {seed}");
        disk.agree(&format!("seed {seed}, in all"), number(&done, "promisedBytes"), after - before);
        for removal in done["removals"].as_array().unwrap() {
            disk.agree(
                &format!("seed {seed}"),
                number(removal, "promisedBytes"),
                number(removal, "freedBytes"),
            );
        }
        disk.larder(&["fsck"]).expect(0);
    }
}

#[test]
fn a_killed_round_changes_neither_ages_nor_order() {
    let Some(disk) = MountedDisk::of_environment(192) else { return };
    let load = || {
        for number in 0..12 {
            disk.load(
                &format!("registry.example/app-{number}"),
                &ImageBuilder::new().layer(layer(number, 1 << 20)),
            );
        }
        disk.end_leases();
    };
    let journal = disk.path().join("store/collect/history.jsonl");
    killed_rounds_change_nothing(&journal, load, |arguments| {
        let mut command = larder_in(disk.home());
        command.arg("--root").arg(disk.path().join("store")).args(arguments);
        command
    });
    disk.larder(&["fsck"]).expect(0);
}
