//! A layer wanted by several pulls is fetched once.

use larder_store::store::{ClaimOutcome, LayerClaim, LayerWait, Store};

use crate::help::*;

fn fetch(store: &Store, layer: &str) -> LayerClaim {
    match store.claim(&blob(&facts(layer)), &diff_id(layer), &digest("chain")).unwrap() {
        ClaimOutcome::Fetch(claim) => claim,
        other => panic!("{other:?}"),
    }
}

fn wait(store: &Store, layer: &str) -> LayerWait {
    match store.claim(&blob(&facts(layer)), &diff_id(layer), &digest("chain")).unwrap() {
        ClaimOutcome::Wait(waiting) => waiting,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_waiting_pull_gets_the_layer_of_another_pull() {
    let scratch = TempStore::new();
    let claim = fetch(&scratch.store, "a");
    let waiting = [wait(&scratch.store, "a"), wait(&scratch.store, "a")];
    let other = fetch(&scratch.store, "b");
    let layer = layer(&scratch.store, "a");
    claim.done(&layer);
    drop(layer);
    for waiting in waiting {
        assert_eq!(waiting.ended().await.expect("the layer").key(), &key("a"));
    }
    drop(other);
}

#[tokio::test]
async fn a_layer_that_was_fetched_is_present_before_any_commit() {
    let scratch = TempStore::new();
    let claim = fetch(&scratch.store, "a");
    let layer = layer(&scratch.store, "a");
    claim.done(&layer);
    let claimed = scratch.store.claim(&blob(&facts("a")), &diff_id("a"), &digest("chain")).unwrap();
    assert!(matches!(claimed, ClaimOutcome::Present(_)), "{claimed:?}");
    drop(layer);
    let ClaimOutcome::Present(layer) = claimed else { unreachable!() };
    assert!(layer.path().exists(), "the second pull keeps it");
    drop(layer);
    drop(fetch(&scratch.store, "a"));
}

#[tokio::test]
async fn when_the_fetch_is_given_up_the_next_one_takes_it_over() {
    let scratch = TempStore::new();
    let claim = fetch(&scratch.store, "a");
    let waiting = wait(&scratch.store, "a");
    drop(claim);
    assert!(waiting.ended().await.is_none());
    drop(fetch(&scratch.store, "a"));
}

#[tokio::test]
async fn a_layer_that_depends_on_those_below_serves_only_there() {
    let scratch = TempStore::new();
    let claim = fetch(&scratch.store, "a");
    let other_chain =
        match scratch.store.claim(&blob(&facts("a")), &diff_id("a"), &digest("other chain")).unwrap() {
            ClaimOutcome::Wait(waiting) => waiting,
            other => panic!("{other:?}"),
        };
    let chain = larder_store::store::LayerKey::from(&digest("chain"));
    let layer = layer_of(&scratch.store, &chain, facts("a"), &[]);
    claim.done(&layer);
    assert!(other_chain.ended().await.is_none(), "its key is another chain's");
    assert!(matches!(
        scratch.store.claim(&blob(&facts("a")), &diff_id("a"), &digest("chain")).unwrap(),
        ClaimOutcome::Present(_)
    ));
    assert!(matches!(
        scratch.store.claim(&blob(&facts("a")), &diff_id("a"), &digest("other chain")).unwrap(),
        ClaimOutcome::Fetch(_)
    ));
}

#[test]
fn the_same_layer_finished_twice_is_there_once() {
    let scratch = TempStore::new();
    let (one, two) = (scratch.store.begin_layer().unwrap(), scratch.store.begin_layer().unwrap());
    let [one, two] =
        [one, two].map(|staging| stage(&*real(), staging, &key("a"), facts("a"), &erofs(&[])).unwrap());
    drop(one);
    assert!(two.path().exists());
    assert!(entries(&scratch.root().join("staging")).is_empty());
    drop(two);
    assert!(entries(&scratch.root().join("layers")).is_empty());
}
