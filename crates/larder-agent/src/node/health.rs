//! Health of the backend: checked periodically, with an event on each change.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use larder::backend::{Backend, BackendError, EndpointFailure, RuntimeInfo};
use larder::events::{EventReason, EventType};
use larder::retry::retry_until;
use larder_cri::CriBackend;
use tokio::sync::watch;
use tokio::time;

use super::Observability;

/// How often a backend that answers is asked again.
const PERIOD: Duration = Duration::from_secs(5);
/// First and longest back-off of one that does not.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));
/// How long it may take.
const WITHIN: Duration = Duration::from_secs(10);

/// State of the backend.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum BackendHealth {
    /// It was not asked yet.
    #[default]
    Unknown,
    /// It answered.
    Up(Arc<RuntimeInfo>),
    /// It does not work, since when and why. `unusable` where calls would wait for their time limit, or must not be
    /// made.
    Down { since: SystemTime, why: String, unusable: bool },
}

impl BackendHealth {
    /// Whether pulls have a chance.
    pub(crate) fn is_up(&self) -> bool {
        matches!(self, BackendHealth::Up(_))
    }

    /// Returns this state; one that was down before is so since then.
    fn since_before(self, before: &BackendHealth) -> BackendHealth {
        match (self, before) {
            (BackendHealth::Down { why, unusable, .. }, BackendHealth::Down { since, .. }) => {
                BackendHealth::Down { since: *since, why, unusable }
            }
            (found, _) => found,
        }
    }
}

/// Checks a backend, and has the result of the last check.
pub(crate) struct HealthMonitor {
    backend: Arc<dyn Backend>,
    /// The runtime over CRI, whose image service is validated as well.
    runtime: Option<Arc<CriBackend>>,
    /// A description of the backend.
    description: String,
    state: watch::Sender<BackendHealth>,
    observability: Arc<Observability>,
}

impl HealthMonitor {
    pub(super) fn new(
        backend: Arc<dyn Backend>,
        runtime: Option<Arc<CriBackend>>,
        description: String,
        observability: Arc<Observability>,
    ) -> HealthMonitor {
        HealthMonitor { backend, runtime, description, state: watch::Sender::default(), observability }
    }

    /// The result of the last check.
    pub(crate) fn state(&self) -> watch::Ref<'_, BackendHealth> {
        self.state.borrow()
    }

    /// Checks the backend periodically until dropped.
    pub(super) async fn run(&self) {
        loop {
            retry_until(RETRY, || self.check()).await;
            time::sleep(PERIOD).await;
        }
    }

    /// Checks once, emits an event on a change, and returns whether the backend responds. Concurrent checks emit one
    /// event.
    pub(crate) async fn check(&self) -> bool {
        // As kubelet at its start; afterwards a broken image service shows in its calls.
        let validate = !self.state().is_up();
        let found = self.ask_backend(validate).await;
        let is_up = found.is_up();
        let mut change = None;
        self.state.send_if_modified(|known| {
            change = health_transition_event(known, &found);
            let found = found.since_before(known);
            let changed = *known != found;
            *known = found;
            changed
        });
        if let Some((event_type, reason, message)) = change {
            self.observability.record(event_type, reason, message);
        }
        is_up
    }

    /// Checks whether the backend responds and, if `validate` is set, whether its image service works.
    async fn ask_backend(&self, validate: bool) -> BackendHealth {
        let (why, unusable) = match time::timeout(WITHIN, self.backend.info()).await {
            Ok(Ok(info)) => match self.problem(&info, validate).await {
                None => return BackendHealth::Up(Arc::new(info)),
                Some(why) => (why, false),
            },
            Ok(Err(error)) => (error_with_hint(&error), is_unusable(&error)),
            Err(_) => {
                let within = larder::go_format::duration(WITHIN);
                (format!("{}: no answer within {within}", self.description), true)
            }
        };
        BackendHealth::Down { since: SystemTime::now(), why, unusable }
    }

    /// Why a backend that responds is down: its runtime is not ready, or its image plugin does not work. The latter
    /// call measures filesystems, which may take longer than a check: it has the time limit of a call.
    async fn problem(&self, info: &RuntimeInfo, validate: bool) -> Option<String> {
        let not_ready =
            info.conditions.iter().find(|condition| condition.kind == "RuntimeReady" && !condition.ok);
        if let Some(condition) = not_ready {
            return Some(format!("{}: {}: {}", info.endpoint, condition.reason, condition.message));
        }
        let runtime = self.runtime.as_ref().filter(|_| validate)?;
        runtime.validate_image_service().await.err().map(|error| error_with_hint(&error))
    }

    /// Sets the result of the last check.
    #[cfg(test)]
    pub(crate) fn set(&self, health: BackendHealth) {
        self.state.send_replace(health);
    }
}

/// Whether each call would wait for a server that does not respond, or must not be made.
fn is_unusable(error: &BackendError) -> bool {
    let BackendError::Unreachable { problem, .. } = error else { return false };
    matches!(problem, EndpointFailure::Silent { .. } | EndpointFailure::Larder)
}

/// The error and what the reader could try next, on one line.
pub(crate) fn error_with_hint(error: &BackendError) -> String {
    match error.hint() {
        Some(hint) => format!("{error} ({hint})"),
        None => error.to_string(),
    }
}

/// The changes that are events: the backend became unavailable, or available again.
fn health_transition_event(
    before: &BackendHealth,
    now: &BackendHealth,
) -> Option<(EventType, EventReason, String)> {
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
    use larder_cri::{CriConfig, Endpoint};
    use larder_testkit::fake_backend::{BackendOp, FakeBackend, error};
    use larder_testkit_peers::fake_cri::{FakeCri, Rpc};
    use tonic::Code;

    use super::super::testing;
    use super::*;

    /// A monitor of a backend, and the events that it emits.
    fn monitor(
        backend: Arc<dyn Backend>,
        runtime: Option<Arc<CriBackend>>,
    ) -> (HealthMonitor, Arc<Observability>) {
        let observability = Arc::new(testing::observability());
        (HealthMonitor::new(backend, runtime, "a fake".to_owned(), Arc::clone(&observability)), observability)
    }

    fn runtime(endpoint: Endpoint) -> Arc<CriBackend> {
        Arc::new(CriBackend::new(endpoint, CriConfig::default()))
    }

    #[tokio::test]
    async fn a_runtime_without_an_image_service_is_down_and_named() {
        let fake = FakeCri::start();
        let runtime = runtime(fake.endpoint());
        let (monitor, _) = monitor(runtime.clone(), Some(runtime));
        assert!(monitor.ask_backend(true).await.is_up());
        fake.refuse(Rpc::ImageFsInfo, Code::Unimplemented, "unknown service runtime.v1.ImageService");
        let BackendHealth::Down { why, unusable, .. } = monitor.ask_backend(true).await else {
            panic!("it is up")
        };
        let place = format!(
            "validate service connection: validate CRI v1 image API for endpoint \"{}\"",
            fake.endpoint()
        );
        assert!(why.starts_with(&place) && !unusable, "{why}");
        fake.change(|contents| contents.version.runtime_name = "larder".into());
        let BackendHealth::Down { why, unusable, .. } = monitor.ask_backend(true).await else {
            panic!("it is up")
        };
        assert!(why.contains("served by larder itself") && unusable, "{why}");
    }

    #[tokio::test]
    async fn the_image_service_is_validated_at_the_start_and_after_an_outage_only() {
        let fake = FakeCri::start();
        let runtime = runtime(fake.endpoint());
        let (monitor, _) = monitor(runtime.clone(), Some(runtime));
        fake.fail_next(Rpc::ImageFsInfo, Code::Unimplemented, "unknown service runtime.v1.ImageService");
        assert!(!monitor.check().await, "its image plugin does not work");
        assert!(monitor.check().await);
        fake.fail_next(Rpc::ImageFsInfo, Code::Unimplemented, "unknown service runtime.v1.ImageService");
        assert!(monitor.check().await, "it was validated");
    }

    #[tokio::test]
    async fn a_runtime_that_hangs_is_unusable() {
        let down = async |runtime: &Arc<CriBackend>| {
            let (monitor, _) = monitor(runtime.clone(), None);
            match monitor.ask_backend(false).await {
                BackendHealth::Down { why, unusable, .. } => (why, unusable),
                other => panic!("{other:?}"),
            }
        };
        let fake = FakeCri::start();
        let connected = runtime(fake.endpoint());
        connected.info().await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let _stopped = std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap();
        let unconnected = runtime(Endpoint::at(dir.path().join("s")));
        fake.hang_next(Rpc::Version);
        time::pause();
        assert_eq!(down(&connected).await, ("a fake: no answer within 10s".to_owned(), true));
        let (why, unusable) = down(&unconnected).await;
        assert!(why.contains("no answer within 5s") && unusable, "{why}");
    }

    #[tokio::test(start_paused = true)]
    async fn each_change_of_health_emits_one_event() {
        let backend = FakeBackend::new();
        for _ in 0..4 {
            backend.fail_next(BackendOp::Info, error("gone"));
        }
        let (monitor, observability) = monitor(Arc::new(backend), None);
        let mut watched = monitor.state.subscribe();
        tokio::select! {
            () = monitor.run() => {}
            () = async {
                assert!(watched.wait_for(|health| matches!(health, BackendHealth::Down { .. })).await.is_ok());
                assert!(watched.wait_for(BackendHealth::is_up).await.is_ok());
                time::sleep(PERIOD * 10).await;
            } => {}
        }
        let reasons: Vec<_> =
            observability.journal().snapshot().into_iter().map(|event| event.reason).collect();
        assert_eq!(reasons, [EventReason::BackendDown, EventReason::BackendUp]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_backend_is_noticed_within_five_seconds_or_by_a_request() {
        let backend = FakeBackend::new();
        let (monitor, observability) = monitor(Arc::new(backend.clone()), None);
        let mut watched = monitor.state.subscribe();
        tokio::select! {
            () = monitor.run() => {}
            () = async {
                assert!(watched.wait_for(BackendHealth::is_up).await.is_ok());
                backend.set_down(Some(error("gone")));
                assert!(!monitor.check().await);
                assert!(!monitor.state().is_up());
                backend.set_down(None);
                assert!(watched.wait_for(BackendHealth::is_up).await.is_ok());
                backend.set_down(Some(error("gone")));
                let down = watched.wait_for(|health| !health.is_up());
                assert!(time::timeout(Duration::from_millis(5100), down).await.is_ok());
            } => {}
        }
        let events = observability.journal().snapshot();
        let down = events.into_iter().filter(|event| event.reason == EventReason::BackendDown);
        assert_eq!(down.count(), 2);
    }
}
