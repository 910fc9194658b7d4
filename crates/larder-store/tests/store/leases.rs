//! Leases.

use std::time::Duration;

use larder_store::store::{LeaseKind, LeaseRecord, LeaseResources, RemoveOptions, StoreError};

use crate::help::*;

fn lease(id: &str, leased: LeaseResources, seconds: u64) -> LeaseRecord {
    LeaseRecord { id: id.into(), kind: LeaseKind::Ensured, leased, ends_at: 1_800_000_000 + seconds }
}

#[test]
fn a_lease_lasts_until_its_time_also_across_restarts() {
    let scratch = TempStore::new();
    scratch.store.lease(&lease("a", LeaseResources::default(), 60)).unwrap();
    scratch.store.lease(&lease("b", LeaseResources::default(), 10)).unwrap();
    scratch.store.lease(&lease("b", LeaseResources::default(), 20)).unwrap();
    let scratch = scratch.reopen();
    let ids = |after: u64| -> Vec<String> {
        let leases = scratch.store.leases(noon() + Duration::from_secs(after)).unwrap();
        leases.into_iter().map(|lease| lease.id).collect()
    };
    assert_eq!(ids(0), ["a", "b"]);
    assert_eq!(ids(20), ["a"]);
    scratch.store.end_lease("a").unwrap();
    scratch.store.end_lease("a").expect("ending twice is no error");
    assert!(ids(0) == ["b"]);
    scratch.store.sweep(noon() + Duration::from_secs(20)).unwrap();
    assert!(ids(0).is_empty());
}

#[test]
fn collection_is_refused_a_leased_image_and_a_person_is_not() {
    let scratch = TempStore::new();
    let record = commit(&scratch.store, "app", &["a"]);
    let leased = LeaseResources { images: vec![record.id.clone()], ..LeaseResources::default() };
    scratch.store.lease(&lease("ensured/pod", leased, 60)).unwrap();
    let sparing = |after| RemoveOptions {
        spare_leased_at: Some(noon() + Duration::from_secs(after)),
        ..RemoveOptions::default()
    };
    let error = scratch.store.remove("app", sparing(59)).expect_err("leased");
    assert!(matches!(&error, StoreError::Leased { leases, .. } if leases == &["ensured/pod"]), "{error}");
    assert!(scratch.store.image("app").unwrap().is_some());
    assert!(scratch.store.remove("app", sparing(60)).unwrap().is_some(), "it has ended");
    commit(&scratch.store, "app", &["a"]);
    assert!(scratch.store.remove("app", RemoveOptions::default()).unwrap().is_some());
}

#[test]
fn a_commit_adds_its_lease_and_ends_that_of_the_pull() {
    let scratch = TempStore::new();
    scratch.store.lease(&lease("pull/1", LeaseResources::default(), 60)).unwrap();
    let mut commit = image(&["app"], &[layer(&scratch.store, "a")]);
    let leased = LeaseResources { images: vec![commit.config.0.clone()], ..LeaseResources::default() };
    commit.lease = Some(lease("ensured/1", leased, 60));
    commit.end_lease = Some("pull/1".into());
    scratch.store.commit(&commit, noon()).unwrap();
    let ids: Vec<String> = scratch.store.leases(noon()).unwrap().into_iter().map(|lease| lease.id).collect();
    assert_eq!(ids, ["ensured/1"]);
}

#[test]
fn layers_can_be_kept_without_an_image_as_long_as_a_lease_names_them() {
    let scratch = TempStore::new();
    let kept = layer(&scratch.store, "a");
    let leased = LeaseResources { layers: vec![key("a")], ..LeaseResources::default() };
    scratch.store.commit_layers(&[kept], Some(&lease("pull/1", leased, 60))).unwrap();
    let scratch = scratch.reopen();
    scratch.store.sweep(noon()).unwrap();
    assert!(scratch.store.layer(&key("a")).unwrap().is_some(), "a restart changes nothing");
    scratch.store.sweep(noon() + Duration::from_secs(60)).unwrap();
    assert!(scratch.store.layer(&key("a")).unwrap().is_none());
    assert!(entries(&scratch.root().join("layers")).is_empty());
}
