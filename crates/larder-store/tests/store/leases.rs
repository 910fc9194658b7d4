//! Leases.

use std::time::Duration;

use larder::gc::{ClockReading, UnixMillis};
use larder_store::store::{LeaseRecord, LeaseResources};

use crate::help::*;

fn lease(id: &str, leased: LeaseResources, seconds: u64) -> LeaseRecord {
    LeaseRecord::granted(id, leased, Duration::from_secs(seconds), &noon().into())
}

#[test]
fn a_lease_lasts_until_its_time_also_across_restarts() {
    let scratch = TempStore::new();
    scratch.store.lease(&lease("a", LeaseResources::default(), 60)).unwrap();
    scratch.store.lease(&lease("b", LeaseResources::default(), 10)).unwrap();
    scratch.store.lease(&lease("b", LeaseResources::default(), 20)).unwrap();
    let scratch = scratch.reopen();
    let ids = |after: u64| -> Vec<String> {
        let leases = scratch.store.leases(&(noon() + Duration::from_secs(after)).into()).unwrap();
        leases.into_iter().map(|lease| lease.id).collect()
    };
    assert_eq!(ids(0), ["a", "b"]);
    assert_eq!(ids(20), ["a"]);
    scratch.store.end_lease("a").unwrap();
    scratch.store.end_lease("a").expect("ending twice is no error");
    assert!(ids(0) == ["b"]);
    scratch.store.sweep(&(noon() + Duration::from_secs(20)).into()).unwrap();
    assert!(ids(0).is_empty());
}

const HOUR: i64 = 3600;

/// The clocks in one boot, in seconds.
fn reading(wall: i64, since_boot: i64, boot: &str) -> ClockReading {
    ClockReading { wall: UnixMillis(wall * 1000), since_boot: Some(since_boot * 1000), boot: boot.to_owned() }
}

fn granted(hours: u64, now: &ClockReading) -> LeaseRecord {
    let time = Duration::from_secs(hours * 3600);
    LeaseRecord::granted("l", LeaseResources::default(), time, now)
}

#[test]
fn a_step_of_the_wall_clock_neither_ends_nor_extends_a_lease() {
    let scratch = TempStore::new();
    let start = 1_800_000_000;
    for step in [72 * HOUR, -72 * HOUR, 10 * 365 * 24 * HOUR, -start] {
        scratch.store.lease(&granted(48, &reading(start, 100, "a"))).unwrap();
        let at = |hours: i64| reading(start + hours * HOUR + step, 100 + hours * HOUR, "a");
        let left =
            |hours| scratch.store.leases(&at(hours)).unwrap().first().map(|lease| lease.left(&at(hours)));
        assert_eq!(left(1), Some(Duration::from_secs(47 * 3600)), "{step}");
        assert_eq!(left(48), None, "{step}");
        scratch.store.sweep(&at(47)).unwrap();
        assert_eq!(left(47), Some(Duration::from_secs(3600)), "a sweep ends no other lease: {step}");
        scratch.store.sweep(&at(48)).unwrap();
        assert_eq!(left(1), None, "{step}");
    }
}

#[test]
fn a_lease_taken_with_a_wrong_clock_ends_at_most_its_time_after_the_next_boot() {
    let start = 1_800_000_000;
    let ahead = granted(48, &reading(start + 10 * 365 * 24 * HOUR, 100, "a"));
    let in_next_boot = |hours: i64| ahead.left(&reading(start + hours * HOUR, hours * HOUR, "b"));
    assert_eq!(in_next_boot(1), Duration::from_secs(47 * 3600));
    assert_eq!(in_next_boot(48), Duration::ZERO);
    let behind = granted(48, &reading(0, 100, "a"));
    let left = behind.left(&reading(start, 0, "b"));
    assert_eq!(left, Duration::from_secs(24 * 3600), "a machine is assumed to be off for at most a day");
}

#[test]
fn a_commit_ends_the_lease_of_the_pull() {
    let scratch = TempStore::new();
    scratch.store.lease(&lease("pull/1", LeaseResources::default(), 60)).unwrap();
    let mut commit = image(&["app"], &[layer(&scratch.store, "a")]);
    commit.end_lease = Some("pull/1".into());
    scratch.store.commit(&commit, noon()).unwrap();
    assert_eq!(scratch.store.leases(&noon().into()).unwrap(), []);
}

#[test]
fn layers_can_be_kept_without_an_image_as_long_as_a_lease_names_them() {
    let scratch = TempStore::new();
    let kept = layer(&scratch.store, "a");
    let leased = LeaseResources { layers: vec![key("a")], ..LeaseResources::default() };
    scratch.store.commit_layers(&[kept], Some(&lease("pull/1", leased, 60))).unwrap();
    let scratch = scratch.reopen();
    scratch.store.sweep(&noon().into()).unwrap();
    assert!(scratch.store.layer(&key("a")).unwrap().is_some(), "a restart changes nothing");
    scratch.store.sweep(&(noon() + Duration::from_secs(60)).into()).unwrap();
    assert!(scratch.store.layer(&key("a")).unwrap().is_none());
    assert!(entries(&scratch.root().join("layers")).is_empty());
}
