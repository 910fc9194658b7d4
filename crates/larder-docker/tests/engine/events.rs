//! Images added and used between two queries, and the gaps of an engine's events.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use larder::backend::{Backend as _, BackendError, Image as Listed};
use larder::gc::{ActivityFeed as _, ActivityKind, ImageActivity, UnixMillis};
use larder::reference::ImageId;
use larder_docker::EngineActivityFeed;
use larder_testkit_peers::ImageBuilder;
use serde_json::{Value, json};

use crate::fake::{FakeEngine, ScriptedHttpReply};
use crate::world::{EngineFixture, block_on, pull};

pub(crate) const VERSION: &str = r#"{"Version":"1","ApiVersion":"1.41","MinAPIVersion":"1.12"}"#;

pub(crate) fn now() -> UnixMillis {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    UnixMillis(i64::try_from(since.as_millis()).unwrap())
}

pub(crate) fn id(letter: &str) -> ImageId {
    format!("sha256:{}", letter.repeat(64)).into()
}

pub(crate) fn listed(letter: &str, name: &str) -> Listed {
    Listed { id: id(letter), repo_tags: vec![name.into()], ..Listed::default() }
}

pub(crate) fn of_container(action: &str, container: &str, image: &str, time: i64) -> String {
    let actor = json!({"ID": container, "Attributes": {"image": image}});
    json!({"Type": "container", "Action": action, "Actor": actor, "time": time}).to_string()
}

pub(crate) fn whole(value: &Value) -> ScriptedHttpReply {
    ScriptedHttpReply::Whole(200, value.to_string())
}

pub(crate) fn missing() -> ScriptedHttpReply {
    ScriptedHttpReply::Whole(404, r#"{"message":"no such thing"}"#.into())
}

/// Images that came under the same name, one after the other; the name is the last one's.
fn same_name_twice(world: &EngineFixture, between: impl FnOnce(&str)) -> (String, [ImageId; 2]) {
    let backend = world.backend();
    let name = world.push("web:2", &ImageBuilder::small(1, 10_000));
    let old = block_on(pull(&backend, &name)).unwrap();
    between(&name);
    world.push("web:2", &ImageBuilder::small(2, 10_000));
    let new = block_on(pull(&backend, &name)).unwrap();
    assert_ne!(old, new);
    (name, [old, new])
}

#[test]
fn an_image_does_not_inherit_the_pull_of_an_earlier_one_of_its_name() {
    let Some(world) = EngineFixture::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut between = UnixMillis(0);
    let (_, [_, new]) = same_name_twice(&world, |_| between = now());
    let first_seen = world.look(dir.path()).get(&new, "").unwrap().first_seen;
    assert!(first_seen >= between, "{first_seen:?} is before the pull, after {between:?}");
}

#[test]
fn a_container_of_an_earlier_image_of_the_name_is_no_use_of_the_later_one() {
    let Some(world) = EngineFixture::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut container = String::new();
    let (_, [_, new]) = same_name_twice(&world, |name| {
        container = world.engine.create_container(name, "old").unwrap();
    });
    world.engine.remove_container(&container).unwrap();
    assert_eq!(world.look(dir.path()).get(&new, "").unwrap().last_used, None);
}

#[test]
fn a_follower_knows_the_image_of_a_container_after_its_name_moves() {
    let Some(world) = EngineFixture::new() else { return };
    let (backend, feed) = (world.backend(), world.backend().feed());
    let mut container = String::new();
    let (_, [old, new]) = same_name_twice(&world, |name| {
        container = world.engine.create_container(name, "old").unwrap();
    });
    let work = async {
        until_following(&feed).await;
        let ending = now();
        world.engine.remove_container(&container).unwrap();
        let images = backend.list().await.unwrap();
        loop {
            let reported = feed.take_activity(&images).await.unwrap();
            let used = |id: &ImageId| {
                reported.iter().any(|activity| {
                    activity.image == *id && activity.what == ActivityKind::Used && activity.at >= ending
                })
            };
            assert!(!used(&new), "{reported:?}");
            if used(&old) {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    block_on(async {
        tokio::select! {
            () = feed.follow() => unreachable!("it never ends"),
            done = tokio::time::timeout(Duration::from_secs(60), work) => done.unwrap(),
        }
    });
}

/// Until then a query asks the engine itself.
pub(crate) async fn until_following(feed: &EngineActivityFeed) {
    while !format!("{feed:?}").contains("following: true") {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn a_use_counts_however_the_image_was_called() {
    let Some(world) = EngineFixture::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let backend = world.backend();
    for (number, kind) in ["short id", "tag and digest", "start of an id"].into_iter().enumerate() {
        let name = world.push(&format!("app-{number}:1"), &ImageBuilder::small(number as u64, 10_000));
        let id = block_on(pull(&backend, &name)).unwrap();
        let digests = block_on(crate::world::status(&backend, &name)).unwrap().repo_digests;
        let (_, digest) = digests[0].split_once('@').unwrap();
        let called = match number {
            0 => id.as_str()["sha256:".len()..][..12].to_owned(),
            1 => format!("{name}@{digest}"),
            _ => id.as_str()[.."sha256:".len() + 9].to_owned(),
        };
        let container = world.engine.create_container(&called, "short").unwrap();
        world.engine.remove_container(&container).unwrap();
        let records = world.look(dir.path());
        assert!(records.get(&id, "").unwrap().last_used.is_some(), "{kind}: {called}");
    }
}

#[test]
fn an_image_without_events_is_as_old_as_its_file_in_the_engine() {
    let Some(mut world) = EngineFixture::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let name = world.push("app:1", &ImageBuilder::small(1, 10_000));
    let before = now();
    let id = block_on(pull(&world.backend(), &name)).unwrap();
    let came = now();
    world.engine.stop();
    world.engine.start_again().unwrap();
    let events = world.engine.get("/events?since=0&until=1").unwrap();
    assert_eq!(events, Value::Null, "the engine has forgotten it");
    let first_seen = world.look(dir.path()).get(&id, "").unwrap().first_seen;
    assert!(before <= first_seen && first_seen <= came, "{before:?} {first_seen:?} {came:?}");
}

#[tokio::test]
async fn received_events_survive_an_abandoned_scan() {
    let hung = AtomicBool::new(false);
    let engine = FakeEngine::replying(move |_, path| match path.trim_start_matches("/v1.41") {
        "/version" => ScriptedHttpReply::Whole(200, VERSION.into()),
        path if path.starts_with("/events") => {
            let first = path.contains("since=0.000000000");
            ScriptedHttpReply::Whole(
                200,
                if first { of_container("create", "c", "web:2", 50) } else { String::new() },
            )
        }
        "/containers/c/json" => whole(&json!({"Image": id("a")})),
        path if path == format!("/images/{}/json", id("a")) => {
            if hung.swap(true, Ordering::SeqCst) {
                whole(&json!({"Id": id("a")}))
            } else {
                ScriptedHttpReply::Never
            }
        }
        _ => missing(),
    });
    let feed = engine.backend().feed();
    let images = [listed("a", "web:2")];
    tokio::select! {
        reported = feed.take_activity(&images) => panic!("no answer: {reported:?}"),
        () = engine.until_asked(|call| call.contains("/images/")) => {}
    }
    let reported = feed.take_activity(&images).await.unwrap();
    assert_eq!(
        reported,
        [ImageActivity { image: id("a"), at: UnixMillis(50_000), what: ActivityKind::Used }]
    );
}

/// An engine that remembers one event, sends another once a follower runs, and knows two containers.
fn followed(live: String) -> FakeEngine {
    FakeEngine::replying(move |_, path| match path.trim_start_matches("/v1.41") {
        "/version" => ScriptedHttpReply::Whole(200, VERSION.into()),
        path if path.starts_with("/events") && path.contains("until=") => {
            let first = path.contains("since=0.000000000");
            ScriptedHttpReply::Whole(
                200,
                if first { of_container("create", "c", "web:2", 50) } else { String::new() },
            )
        }
        path if path.starts_with("/events") => ScriptedHttpReply::Open(live.clone()),
        "/containers/json?all=1" => whole(&json!([{"Id": "c", "ImageID": id("a")}])),
        "/containers/c/json" => whole(&json!({"Image": id("a")})),
        "/containers/d/json" => whole(&json!({"Image": id("b")})),
        _ => missing(),
    })
}

#[tokio::test]
async fn a_new_follower_has_the_earlier_events() {
    let engine = followed(String::new());
    let feed = engine.backend().feed();
    let looking = async {
        until_following(&feed).await;
        feed.take_activity(&[listed("a", "web:2")]).await.unwrap()
    };
    tokio::select! {
        () = feed.follow() => unreachable!("it never ends"),
        reported = looking => assert_eq!(reported, [ImageActivity { image: id("a"), at: UnixMillis(50_000), what: ActivityKind::Used }]),
    }
}

#[tokio::test]
async fn a_use_that_is_read_but_not_yet_processed_is_returned_by_a_query() {
    let (hung, began) = (AtomicBool::new(false), AtomicBool::new(false));
    let event = of_container("start", "c", "web:2", 50);
    let engine = FakeEngine::replying(move |_, path| match path.trim_start_matches("/v1.41") {
        "/version" => ScriptedHttpReply::Whole(200, VERSION.into()),
        path if path.starts_with("/events") && path.contains("until=") => ScriptedHttpReply::Whole(
            200,
            if began.load(Ordering::SeqCst) { event.clone() } else { String::new() },
        ),
        path if path.starts_with("/events") => {
            began.store(true, Ordering::SeqCst);
            ScriptedHttpReply::Open(event.clone())
        }
        "/containers/json?all=1" => whole(&json!([])),
        "/containers/c/json" if !hung.swap(true, Ordering::SeqCst) => ScriptedHttpReply::Never,
        "/containers/c/json" => whole(&json!({"Image": id("a")})),
        _ => missing(),
    });
    let feed = engine.backend().feed();
    let looking = async {
        engine.until_asked(|call| call.contains("/containers/c/")).await;
        feed.take_activity(&[listed("a", "web:2")]).await.unwrap()
    };
    tokio::select! {
        () = feed.follow() => unreachable!("it never ends"),
        reported = looking => assert_eq!(reported, [ImageActivity { image: id("a"), at: UnixMillis(50_000), what: ActivityKind::Used }]),
    }
}

#[tokio::test]
async fn a_repeated_end_of_a_container_counts_for_its_own_image() {
    let end = of_container("destroy", "c", "web:2", 50);
    // The last event reaches only the follower: once it is processed, so are all before it.
    let live = format!("{end}{}", of_container("start", "d", "x:1", 60));
    let engine = FakeEngine::replying(move |_, path| match path.trim_start_matches("/v1.41") {
        "/version" => ScriptedHttpReply::Whole(200, VERSION.into()),
        path if path.starts_with("/events") && path.contains("until=") => {
            ScriptedHttpReply::Whole(200, end.clone())
        }
        path if path.starts_with("/events") => ScriptedHttpReply::Open(live.clone()),
        "/containers/json?all=1" => whole(&json!([{"Id": "c", "ImageID": id("a")}])),
        "/containers/d/json" => whole(&json!({"Image": id("c")})),
        _ => missing(),
    });
    let feed = engine.backend().feed();
    // The name belongs to another image now.
    let images = [listed("a", "web:1"), listed("b", "web:2"), listed("c", "x:1")];
    let looking = async {
        until_following(&feed).await;
        let mut all = Vec::new();
        while !all.iter().any(|activity: &ImageActivity| activity.image == id("c")) {
            all.extend(feed.take_activity(&images).await.unwrap());
            tokio::task::yield_now().await;
        }
        all.extend(feed.take_activity(&images).await.unwrap());
        all
    };
    tokio::select! {
        () = feed.follow() => unreachable!("it never ends"),
        reported = looking => {
            assert!(reported.iter().any(|activity| activity.image == id("a")), "{reported:?}");
            assert!(!reported.iter().any(|activity| activity.image == id("b")), "{reported:?}");
        }
    }
}

#[tokio::test]
async fn images_of_a_burst_are_queried_once() {
    let mut burst: String = (0..2_000).map(|n| of_container("start", "c", "web:2", 1_000 + n)).collect();
    burst.push_str(&of_container("start", "d", "6985", 4_000));
    let engine = followed(burst);
    let feed = engine.backend().feed();
    let images = [listed("a", "web:2"), listed("b", "x:1")];
    let looking = async {
        until_following(&feed).await;
        let mut last = UnixMillis(0);
        loop {
            for activity in feed.take_activity(&images).await.unwrap() {
                if activity.image == id("b") {
                    return last;
                }
                last = last.max(activity.at);
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = feed.follow() => unreachable!("it never ends"),
        last = looking => assert_eq!(last, UnixMillis(2_999_000)),
    }
    let asked = engine.asked();
    let times = |part: &str| asked.iter().filter(|call| call.contains(part)).count();
    assert_eq!((times("/containers/c/json"), times("/containers/d/json")), (0, 1), "the list contained one");
    assert_eq!((times("/images/web:2/"), times("/images/6985/")), (0, 0), "the containers know");
}

#[tokio::test]
async fn an_engine_that_was_updated_behind_its_socket_is_spoken_to_in_its_own_version() {
    let updated = AtomicBool::new(false);
    let engine = FakeEngine::start(move |_, path| match path {
        "/version" if updated.load(Ordering::SeqCst) => {
            (200, r#"{"Version":"29","ApiVersion":"1.52","MinAPIVersion":"1.44"}"#.into())
        }
        "/version" => (200, VERSION.into()),
        "/v1.41/images/json" if !updated.swap(true, Ordering::SeqCst) => (200, "[]".into()),
        "/v1.51/images/json" => (200, "[]".into()),
        _ => {
            let reported = "client version 1.41 is too old. Minimum supported API version is 1.44";
            (400, json!({"message": reported}).to_string())
        }
    });
    let backend = engine.backend();
    for look in ["before", "at once", "from then on"] {
        assert_eq!(backend.list().await, Ok(vec![]), "{look}");
    }
    let versions = engine.asked().iter().filter(|call| call.ends_with("/version")).count();
    assert_eq!(versions, 2);
    // Repeated refusals are final.
    let stubborn = FakeEngine::start(|_, path| match path {
        "/version" => (200, VERSION.into()),
        _ => (400, r#"{"message":"client version 1.41 is too old"}"#.into()),
    });
    let backend = stubborn.backend();
    backend.info().await.unwrap();
    let refused = backend.list().await.unwrap_err();
    assert!(matches!(refused, BackendError::Call { .. }), "{refused:?}");
}

#[test]
fn a_real_engine_refuses_other_versions_in_these_words() {
    let Some(world) = EngineFixture::new() else { return };
    let refused = world.engine.get("/v1.90/info").unwrap_err().to_string();
    assert!(
        refused.contains("400 Bad Request")
            && refused.contains(r#"{"message":"client version 1.90 is too new"#)
    );
}
