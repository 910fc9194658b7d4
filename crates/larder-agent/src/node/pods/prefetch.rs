//! The prefetch list: images that are pulled before a pod needs them. A prefetch starts when no pull is in flight, and
//! has the lowest priority in the pull queue.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future;
use jiff::{SignedDuration, ToSpan as _, Zoned};
use larder::gc::Collector;
use larder::pod::{ObjectRef, Pod};
use larder::pull::{EnsureError, EnsureReason, EnsureRequest, ImageManager, Priority, PullPolicy};
use larder::retention::LeasePurpose;
use larder::retention::RemovalGate;
use tokio::time;

use super::desired::{DesiredKey, DesiredUses, FirstScan, hold_present, note_if_pulled};
use crate::config::{PrefetchItem, PrefetchRetention, PrefetchSchedule};

/// How often it is looked whether others are pulling.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How soon a failed prefetch is tried again.
const RETRY: SignedDuration = SignedDuration::from_secs(60);
/// How long to wait before the clock is read again, since it may have been set.
const LONGEST: SignedDuration = SignedDuration::from_secs(600);

/// Who wants what is prefetched.
const OWNER: &str = "the prefetch list";

/// Context of prefetching.
#[derive(Clone)]
pub(in crate::node) struct PrefetchContext {
    pub(in crate::node) manager: Arc<ImageManager>,
    pub(in crate::node) gate: Arc<RemovalGate>,
    pub(in crate::node) held: DesiredUses,
    pub(in crate::node) collector: Option<Arc<Collector>>,
    /// The node, which events are about.
    pub(in crate::node) node: ObjectRef,
}

/// Looks after these images until dropped, and no longer holds what an earlier list held. They take turns: none is
/// urgent. `first` is let go once those to keep have been looked for.
pub(in crate::node) async fn run_prefetch(
    list: Vec<PrefetchItem>,
    context: PrefetchContext,
    first: Option<FirstScan>,
) {
    let kept = || list.iter().filter(|entry| entry.hold == PrefetchRetention::Keep);
    context.held.retain(OWNER, &kept().map(key).collect::<Vec<_>>());
    future::join_all(kept().map(|entry| hold(entry, &context))).await;
    drop(first);
    let now = Zoned::now();
    let mut due: Vec<Option<Zoned>> = list.iter().map(|entry| later(&now, entry.jitter, random())).collect();
    let mut has_failed = vec![false; list.len()];
    loop {
        let next = due.iter().enumerate().filter_map(|(index, at)| Some((index, at.as_ref()?)));
        let Some((index, at)) = next.min_by(|a, b| a.1.cmp(b.1)) else {
            return std::future::pending().await;
        };
        let left = at.duration_since(&Zoned::now());
        if left.is_positive() {
            time::sleep(left.min(LONGEST).unsigned_abs()).await;
            continue;
        }
        let entry = &list[index];
        until_quiet(&context.manager).await;
        let outcome = one(entry, &context, has_failed[index]).await;
        has_failed[index] = outcome.is_err();
        due[index] = next_due(entry, &outcome, &Zoned::now(), random());
    }
}

/// Waits until no pull is in flight.
async fn until_quiet(manager: &ImageManager) {
    while !manager.pulls().is_empty() {
        time::sleep(CHECK_INTERVAL).await;
    }
}

async fn one(entry: &PrefetchItem, context: &PrefetchContext, is_retry: bool) -> Result<(), EnsureError> {
    let pod = Pod { uid: format!("prefetch/{}", entry.image), name: "prefetch".into(), ..Pod::default() };
    // What a tag stands for may have changed since the last time.
    let request = EnsureRequest {
        target: Some(context.node.clone()),
        priority: Priority::Prefetch,
        ahead_of_kubelet: true,
        is_retry,
        ..EnsureRequest::new(&entry.image, PullPolicy::Always, pod)
    };
    let ensured = match context.manager.ensure(&request).await {
        Ok(ensured) => ensured,
        Err(error) => {
            // An image that could not be refreshed is retained all the same.
            if entry.hold == PrefetchRetention::Keep {
                hold(entry, context).await;
            }
            return Err(error);
        }
    };
    note_if_pulled(context.collector.as_deref(), &ensured);
    match entry.hold {
        PrefetchRetention::Keep => context.held.keep(key(entry), ensured.image_ref),
        PrefetchRetention::Lease(time) => {
            _ = context
                .gate
                .begin_presence_check()
                .lease(&ensured.image_ref, LeasePurpose::Prefetch, time)
                .await;
            if let Err(error) = context.gate.save_leases().await {
                tracing::warn!("GC of a later process may remove prefetched images: {error}");
            }
        }
        PrefetchRetention::Nothing => {}
    }
    Ok(())
}

/// Holds what is here.
async fn hold(entry: &PrefetchItem, context: &PrefetchContext) {
    hold_present(context.manager.backend(), &entry.image, |id| {
        context.held.keep(key(entry), id.clone());
    })
    .await;
}

/// Whose wish a prefetched image is.
fn key(entry: &PrefetchItem) -> DesiredKey {
    DesiredKey {
        owner: OWNER.into(),
        part: String::new(),
        image: entry.image.clone(),
        policy: PullPolicy::Always.to_string(),
        is_pinned: true,
    }
}

/// When an image is due again, after it ended like this; `None` is never. `random` is from 0 up to 1.
fn next_due(
    entry: &PrefetchItem,
    outcome: &Result<(), EnsureError>,
    now: &Zoned,
    random: f64,
) -> Option<Zoned> {
    let next = match (outcome, entry.when) {
        (Err(error), _) if error.reason == EnsureReason::InvalidImageName => return None,
        (Err(_), _) => return now.checked_add(RETRY).ok(),
        (Ok(()), PrefetchSchedule::Start) => return None,
        (Ok(()), PrefetchSchedule::Every(period)) => {
            now.checked_add(SignedDuration::try_from(period).ok()?).ok()?
        }
        (Ok(()), PrefetchSchedule::Daily { hour, minute }) => {
            let at = |day: &Zoned| {
                let (hour, minute) = (i8::try_from(hour).ok()?, i8::try_from(minute).ok()?);
                day.with().hour(hour).minute(minute).second(0).subsec_nanosecond(0).build().ok()
            };
            match at(now) {
                Some(today) if today > *now => today,
                _ => at(&now.checked_add(1.day()).ok()?)?,
            }
        }
    };
    later(&next, entry.jitter, random)
}

fn later(at: &Zoned, jitter: Duration, random: f64) -> Option<Zoned> {
    at.checked_add(SignedDuration::try_from(jitter.mul_f64(random)).ok()?).ok()
}

/// A number from 0 up to 1, so that not all nodes ask at once.
fn random() -> f64 {
    let [high, low, ..] = RandomState::new().hash_one(0).to_be_bytes();
    f64::from(u16::from_be_bytes([high, low])) / 65536.0
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use jiff::tz::TimeZone;
    use larder::retention::RetentionSource as _;
    use larder_testkit::fake_backend::{FakeBackend, ScriptedPull, image};

    use super::*;

    fn entry(when: PrefetchSchedule, hold: PrefetchRetention) -> PrefetchItem {
        PrefetchItem { image: "a:1".into(), when, jitter: Duration::from_secs(60), hold }
    }

    #[test]
    fn an_image_is_due_again_at_the_interval_of_its_entry() {
        let utc = |text: &str| text.parse::<Timestamp>().unwrap().to_zoned(TimeZone::UTC);
        let now = utc("2026-11-21T12:00:30Z");
        let failed = || -> Result<(), EnsureError> {
            Err(EnsureError {
                reason: EnsureReason::ErrImagePull,
                message: String::new(),
                retry_in: None,
                failure: None,
                access_denied: false,
                credentials_withheld: false,
            })
        };
        let bad =
            || failed().map_err(|error| EnsureError { reason: EnsureReason::InvalidImageName, ..error });
        let daily = |hour, minute| PrefetchSchedule::Daily { hour, minute };
        let cases = [
            (PrefetchSchedule::Start, Ok(()), 0.0, None),
            (PrefetchSchedule::Start, failed(), 0.5, Some("2026-11-21T12:01:30Z")),
            (PrefetchSchedule::Start, bad(), 0.0, None),
            (PrefetchSchedule::Every(Duration::from_secs(3600)), Ok(()), 0.5, Some("2026-11-21T13:01:00Z")),
            (daily(12, 1), Ok(()), 0.0, Some("2026-11-21T12:01:00Z")),
            (daily(12, 0), Ok(()), 0.5, Some("2026-11-22T12:00:30Z")),
        ];
        for (when, outcome, random, due) in cases {
            assert_eq!(
                next_due(&entry(when, PrefetchRetention::Keep), &outcome, &now, random),
                due.map(utc),
                "{when:?} {outcome:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_prefetch_waits_for_pods_and_holds_what_it_brought_while_it_is_on_the_list() {
        let backend = FakeBackend::new();
        backend.on_pull_of("pod:1", ScriptedPull::ok("sha256:p", 1).after(Duration::from_secs(30)));
        backend.offer("a:1", image("sha256:a", 1));
        let context = PrefetchContext {
            manager: Arc::new(ImageManager::new(Arc::new(backend.clone()))),
            gate: Arc::new(RemovalGate::default()),
            held: DesiredUses::default(),
            collector: None,
            node: ObjectRef::node("n"),
        };
        let held = context.held.clone();
        let list = vec![PrefetchItem {
            jitter: Duration::ZERO,
            ..entry(PrefetchSchedule::Start, PrefetchRetention::Keep)
        }];
        let pod = EnsureRequest::new("pod:1", PullPolicy::Always, Pod::default());
        let manager = context.manager.clone();
        tokio::select! {
            biased;
            () = async {
                let _ = tokio::join!(manager.ensure(&pod), async {
                    time::sleep(Duration::from_secs(29)).await;
                    assert!(held.retentions().await.unwrap().is_empty(), "a pod is pulling");
                });
                time::sleep(Duration::from_secs(5)).await;
                assert_eq!(held.retentions().await.unwrap().len(), 1);
            } => {}
            () = run_prefetch(list, context.clone(), None) => unreachable!("the node runs until dropped"),
        }
        assert_eq!(held.retentions().await.unwrap().len(), 1, "until another list says otherwise");
        tokio::select! {
            biased;
            () = run_prefetch(Vec::new(), context, None) => unreachable!("the node runs until dropped"),
            () = time::sleep(Duration::from_secs(1)) => {}
        }
        assert!(held.retentions().await.unwrap().is_empty(), "released");
    }

    #[tokio::test(start_paused = true)]
    async fn the_lease_of_a_prefetched_image_outlives_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let file = || RemovalGate::with_file(dir.path().join("leases.json"), Duration::from_secs(60));
        let backend = FakeBackend::new();
        backend.offer("a:1", image("sha256:a", 1));
        let context = PrefetchContext {
            manager: Arc::new(ImageManager::new(Arc::new(backend.clone()))),
            gate: Arc::new(file()),
            held: DesiredUses::default(),
            collector: None,
            node: ObjectRef::node("n"),
        };
        let lease = PrefetchRetention::Lease(Duration::from_secs(300));
        let list = vec![PrefetchItem { jitter: Duration::ZERO, ..entry(PrefetchSchedule::Start, lease) }];
        tokio::select! {
            biased;
            () = run_prefetch(list, context, None) => unreachable!("the node runs until dropped"),
            () = time::sleep(Duration::from_secs(5)) => {}
        }
        let leases = file().active_leases();
        let [(image, lease)] = &leases[..] else { panic!("{leases:?}") };
        assert_eq!((image.as_str(), lease.purpose), ("sha256:a", LeasePurpose::Prefetch));
        assert!(lease.left > Duration::from_secs(200), "not cut to that of an ensure: {lease:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_present_image_is_in_use_before_it_is_due_and_when_a_refresh_fails() {
        let backend = FakeBackend::new();
        backend.add_image("a:1", image("sha256:a", 1));
        backend.add_image("b:1", image("sha256:b", 1));
        let context = PrefetchContext {
            manager: Arc::new(ImageManager::new(Arc::new(backend.clone()))),
            gate: Arc::new(RemovalGate::default()),
            held: DesiredUses::default(),
            collector: None,
            node: ObjectRef::node("n"),
        };
        let held = context.held.clone();
        let never_due = PrefetchItem {
            image: "b:1".into(),
            jitter: Duration::from_secs(1 << 30),
            ..entry(PrefetchSchedule::Start, PrefetchRetention::Keep)
        };
        let list = vec![
            PrefetchItem {
                jitter: Duration::ZERO,
                ..entry(PrefetchSchedule::Start, PrefetchRetention::Keep)
            },
            never_due,
        ];
        let first = held.begin_first_scan();
        tokio::select! {
            biased;
            () = run_prefetch(list, context, Some(first)) => unreachable!("the node runs until dropped"),
            () = async {
                assert_eq!(held.retentions().await.unwrap().len(), 2);
                backend.until(|counts| counts.failed > 0).await;
                assert_eq!(held.retentions().await.unwrap().len(), 2);
            } => {}
        }
    }
}
