//! The fake follows its script.

use super::*;

async fn pull(fake: FakeBackend, name: &'static str) -> Result<ImageId, BackendError> {
    fake.pull(&ImageSpec::named(name), None, None, &ProgressReporter::unwatched()).await
}

#[tokio::test(start_paused = true)]
async fn a_held_pull_ends_when_it_is_released() {
    let fake = FakeBackend::new();
    let (script, release) = ScriptedPull::ok("sha256:a", 7).held();
    fake.on_pull(script.then_status_fails("no size"));
    let pulling = tokio::spawn(pull(fake.clone(), "a:1"));
    fake.until(|counts| counts.running == 1).await;
    assert!(fake.images().is_empty());
    release.release();
    assert_eq!(pulling.await.unwrap(), Ok("sha256:a".into()));
    assert_eq!(fake.status(&ImageSpec::named("a:1")).await, Err(error("no size")));
    assert_eq!(fake.status(&ImageSpec::named("a:1")).await.unwrap().unwrap().size, 7);
    assert_eq!(fake.calls()[0], BackendCall::Pull { image: "a:1".into(), username: None });
}

#[tokio::test(start_paused = true)]
async fn a_dropped_pull_counts_as_canceled_and_is_not_finished_later() {
    let fake = FakeBackend::new();
    fake.hold_pulls();
    let first = tokio::spawn(pull(fake.clone(), "a:1"));
    fake.until(|counts| counts.running == 1).await;
    let second = tokio::spawn(pull(fake.clone(), "b:1"));
    fake.until(|counts| counts.running == 2).await;
    first.abort();
    fake.until(|counts| counts.canceled == 1).await;
    assert_eq!(fake.held_pulls(), ["b:1"]);
    assert_eq!(fake.finish_pull(ScriptedPull::fails("denied")).as_deref(), Some("b:1"));
    assert_eq!(second.await.unwrap(), Err(error("denied")));
    let counts = fake.counts();
    assert_eq!((counts.started, counts.running, counts.most_at_once, counts.failed), (2, 0, 2, 1));
}
