//! Events of an engine whose clock is not ours, or was set back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use larder::backend::Image as Listed;
use larder::gc::{ActivityFeed as _, ActivityKind, ImageActivity, UnixMillis};
use larder_docker::EngineActivityFeed;
use serde_json::json;

use crate::events::{VERSION, id, listed, missing, now, of_container, until_following, whole};
use crate::fake::{FakeEngine, ScriptedHttpReply};

/// A time of the query of a path, in seconds.
fn seconds(path: &str, name: &str) -> Option<f64> {
    let (_, query) = path.split_once('?')?;
    query.split('&').find_map(|part| part.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

/// An engine that counts events up to the requested time as past, and refuses later start times. The
/// first time it reports a use an hour from now, as before a clock was set back; then of another a minute ago.
fn with_a_clock_that_was_set_back() -> (FakeEngine, [UnixMillis; 2]) {
    let now = now().0 / 1000;
    let (later, earlier) = (now + 3600, now - 60);
    let reported = AtomicBool::new(false);
    let engine = FakeEngine::replying(move |_, path| match path.trim_start_matches("/v1.41") {
        "/version" => ScriptedHttpReply::Whole(200, VERSION.into()),
        path if path.starts_with("/events") => {
            let since = seconds(path, "since").unwrap();
            let until = seconds(path, "until");
            if until.is_some_and(|until| since > until) {
                return ScriptedHttpReply::Whole(400, r#"{"message":"since cannot be after until"}"#.into());
            }
            let at = if reported.swap(true, Ordering::SeqCst) { earlier } else { later };
            let event = of_container("start", "c", "web:2", at);
            let event = if since <= f64::from(u32::try_from(at).unwrap()) { event } else { String::new() };
            if until.is_some() {
                ScriptedHttpReply::Whole(200, event)
            } else {
                ScriptedHttpReply::Open(event)
            }
        }
        "/containers/json?all=1" => whole(&json!([])),
        "/containers/c/json" => whole(&json!({"Image": id("a")})),
        _ => missing(),
    });
    (engine, [later, earlier].map(|at| UnixMillis(at * 1000)))
}

#[tokio::test]
async fn uses_are_reported_after_a_clock_was_set_back() {
    let (engine, times) = with_a_clock_that_was_set_back();
    let feed = engine.backend().feed();
    for at in times {
        let activity = feed.take_activity(&[listed("a", "web:2")]).await.unwrap();
        assert_eq!(activity, [ImageActivity { image: id("a"), at, what: ActivityKind::Used }]);
    }
}

#[tokio::test]
async fn the_engine_is_followed_also_after_a_clock_was_set_back() {
    let (engine, [later, earlier]) = with_a_clock_that_was_set_back();
    let feed = engine.backend().feed();
    let images = [listed("a", "web:2")];
    assert_eq!(feed.take_activity(&images).await.unwrap()[0].at, later);
    let is_followed =
        || engine.asked().iter().any(|call| call.contains("/events") && !call.contains("until="));
    // What the engine remembers may be reported before the feed follows it.
    let reported_and_followed = async {
        until_reported(&feed, &images, earlier).await;
        while !is_followed() {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = feed.follow() => unreachable!("it never ends"),
        () = reported_and_followed => {}
    }
}

#[tokio::test]
async fn an_engine_without_past_events_is_followed() {
    let engine = FakeEngine::replying(|_, path| match path.trim_start_matches("/v1.41") {
        "/version" => ScriptedHttpReply::Whole(200, VERSION.into()),
        path if path.starts_with("/events") && path.contains("until=") => {
            ScriptedHttpReply::Whole(500, r#"{"message":"not now"}"#.into())
        }
        path if path.starts_with("/events") => {
            ScriptedHttpReply::Open(of_container("start", "c", "web:2", 50))
        }
        "/containers/json?all=1" => whole(&json!([])),
        "/containers/c/json" => whole(&json!({"Image": id("a")})),
        _ => missing(),
    });
    let feed = engine.backend().feed();
    let looking = async {
        until_following(&feed).await;
        until_reported(&feed, &[listed("a", "web:2")], UnixMillis(50_000)).await;
    };
    tokio::select! {
        () = feed.follow() => unreachable!("it never ends"),
        activity = tokio::time::timeout(Duration::from_secs(60), looking) => activity.unwrap(),
    }
}

async fn until_reported(feed: &EngineActivityFeed, images: &[Listed], at: UnixMillis) {
    while !feed.take_activity(images).await.unwrap().iter().any(|activity| activity.at == at) {
        tokio::task::yield_now().await;
    }
}
