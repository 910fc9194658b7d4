//! Health of the backend: checked periodically, with an event on each change.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use larder::backend::{Backend, BackendError, RuntimeInfo};
use larder::events::{Event, EventReason, EventSink, EventType};
use larder::pod::ObjectRef;
use tokio::sync::watch;
use tokio::time;

/// How often a backend that answers is asked again.
const PERIOD: Duration = Duration::from_secs(5);
/// How soon one that does not is asked again: at first, and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));
/// How long it may take.
const WITHIN: Duration = Duration::from_secs(10);

/// What is known of the backend.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum BackendHealth {
    /// It was not asked yet.
    #[default]
    Unknown,
    /// It answered.
    Up(Arc<RuntimeInfo>),
    /// It does not answer, since when and why.
    Down { since: SystemTime, why: String },
}

impl BackendHealth {
    /// Whether pulls have a chance.
    pub(crate) fn is_up(&self) -> bool {
        matches!(self, BackendHealth::Up(_))
    }

    /// The same; one that was down before is so since then.
    fn since_before(self, before: &BackendHealth) -> BackendHealth {
        match (self, before) {
            (BackendHealth::Down { why, .. }, BackendHealth::Down { since, .. }) => {
                BackendHealth::Down { since: *since, why }
            }
            (found, _) => found,
        }
    }
}

/// Looks after one backend until dropped.
pub(crate) async fn watch_backend(
    backend: &dyn Backend,
    health: &watch::Sender<BackendHealth>,
    node: &ObjectRef,
    events: &dyn EventSink,
) {
    let mut retry = RETRY.0;
    loop {
        let wait = if check_now(backend, health, node, events).await {
            retry = RETRY.0;
            PERIOD
        } else {
            let wait = retry;
            retry = (retry * 2).min(RETRY.1);
            wait
        };
        time::sleep(wait).await;
    }
}

/// Checks once, emits an event on a change, and returns whether the backend responds. Concurrent checks emit one event.
pub(crate) async fn check_now(
    backend: &dyn Backend,
    health: &watch::Sender<BackendHealth>,
    node: &ObjectRef,
    events: &dyn EventSink,
) -> bool {
    let found = look(backend).await;
    let is_up = found.is_up();
    let mut change = None;
    health.send_if_modified(|known| {
        change = news(known, &found);
        let found = found.since_before(known);
        let changed = *known != found;
        *known = found;
        changed
    });
    if let Some((event_type, reason, message)) = change {
        events.record(Event { time: SystemTime::now(), event_type, reason, object: node.clone(), message });
    }
    is_up
}

async fn look(backend: &dyn Backend) -> BackendHealth {
    let why = match time::timeout(WITHIN, backend.info()).await {
        Ok(Ok(info)) => match info.conditions.iter().find(|condition| condition.kind == "RuntimeReady") {
            Some(condition) if !condition.ok => format!("{}: {}", condition.reason, condition.message),
            _ => return BackendHealth::Up(Arc::new(info)),
        },
        Ok(Err(error)) => words(&error),
        Err(_) => format!("no answer within {}", larder::go_format::duration(WITHIN)),
    };
    BackendHealth::Down { since: SystemTime::now(), why }
}

fn words(error: &BackendError) -> String {
    match error.hint() {
        Some(hint) => format!("{error} ({hint})"),
        None => error.to_string(),
    }
}

/// The changes that are events: the backend became unavailable, or available again.
fn news(before: &BackendHealth, now: &BackendHealth) -> Option<(EventType, EventReason, String)> {
    match (before, now) {
        (BackendHealth::Unknown | BackendHealth::Up(_), BackendHealth::Down { why, .. }) => Some((
            EventType::Warning,
            EventReason::BackendDown,
            format!("The image backend is unavailable: {why}"),
        )),
        (BackendHealth::Down { .. }, BackendHealth::Up(info)) => {
            let message = format!("The image backend is available again: {} {}", info.name, info.version);
            Some((EventType::Normal, EventReason::BackendUp, message))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use larder::events::RingSink;
    use larder_testkit::fake_backend::{BackendOp, FakeBackend, error};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_change_of_health_emits_one_event() {
        let (backend, events) = (FakeBackend::new(), RingSink::new(10));
        for _ in 0..4 {
            backend.fail_next(BackendOp::Info, error("gone"));
        }
        let health = watch::Sender::default();
        let mut watched = health.subscribe();
        let node = ObjectRef::node("n");
        tokio::select! {
            () = watch_backend(&backend, &health, &node, &events) => {}
            () = async {
                assert!(watched.wait_for(|health| matches!(health, BackendHealth::Down { .. })).await.is_ok());
                assert!(watched.wait_for(BackendHealth::is_up).await.is_ok());
                time::sleep(PERIOD * 10).await;
            } => {}
        }
        let reasons: Vec<_> = events.snapshot().into_iter().map(|event| event.reason).collect();
        assert_eq!(reasons, [EventReason::BackendDown, EventReason::BackendUp]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_backend_is_noticed_within_five_seconds_or_by_a_request() {
        let (backend, events, node) = (FakeBackend::new(), RingSink::new(10), ObjectRef::node("n"));
        let health = watch::Sender::default();
        let mut watched = health.subscribe();
        tokio::select! {
            () = watch_backend(&backend, &health, &node, &events) => {}
            () = async {
                assert!(watched.wait_for(BackendHealth::is_up).await.is_ok());
                backend.set_down(Some(error("gone")));
                assert!(!check_now(&backend, &health, &node, &events).await);
                assert!(!health.borrow().is_up());
                backend.set_down(None);
                assert!(watched.wait_for(BackendHealth::is_up).await.is_ok());
                backend.set_down(Some(error("gone")));
                let down = watched.wait_for(|health| !health.is_up());
                assert!(time::timeout(Duration::from_millis(5100), down).await.is_ok());
            } => {}
        }
        let down = events.snapshot().into_iter().filter(|event| event.reason == EventReason::BackendDown);
        assert_eq!(down.count(), 2);
    }
}
