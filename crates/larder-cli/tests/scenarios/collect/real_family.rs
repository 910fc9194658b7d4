//! The same with real images: `LARDER_FAMILY=DIR` names an OCI layout with forty of them on common bases, of about
//! half a gigabyte in all. What was done is printed, for `docs/benchmarks.md`.

use std::path::PathBuf;

use super::{Disk, Round, number, removals};

fn family() -> Option<PathBuf> {
    let folder = std::env::var_os("LARDER_FAMILY").map(PathBuf::from);
    if folder.is_none() {
        eprintln!("==== ONLY MADE-UP IMAGES: LARDER_FAMILY=DIR names an OCI layout with a real family ====");
    }
    folder
}

fn tell(what: &str, round: &Round) {
    let removals = |report| removals(report).len();
    println!(
        "{what}: wanted {}, planned {} removals of {}, removed {} that promised {}, freed {}, then {} of {} were free",
        number(&round.planned, "neededBytes"),
        removals(&round.planned),
        number(&round.planned, "promisedBytes"),
        removals(&round.done),
        number(&round.done, "promisedBytes"),
        round.after - round.before,
        round.after,
        round.all,
    );
    for removal in round.done["removals"].as_array().unwrap() {
        println!(
            "  {} promised {} freed {} inodes {} {}",
            removal["names"][0],
            removal["promisedBytes"],
            removal["freedBytes"],
            removal["promisedInodes"],
            removal["freedInodes"],
        );
    }
}

#[test]
fn a_real_family_in_the_store_goes_as_the_dry_run_said() {
    let Some(family) = family() else { return };
    let Some(disk) = Disk::new(910) else { return };
    let load = ["load", &family.to_string_lossy(), "--name", "registry.example/family"];
    disk.larder(&load).expect(0);
    disk.end_leases();
    assert!(disk.used_percent() > 65.0, "{}", disk.used_percent());
    let larder = |arguments: &[&str]| disk.larder(arguments);
    let round = Round::run(&disk, larder);
    tell("store, exact", &round);
    assert_eq!(removals(&round.planned), removals(&round.done));
    round.ends_at_the_low_mark();
    round.tells_what_came_free(larder);
}
