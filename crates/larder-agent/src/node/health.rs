//! Health of the backend: checked periodically, with an event on each change.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use larder::backend::{Backend, BackendError, EndpointFailure, RuntimeInfo};
use larder::events::{EventReason, EventType};
use larder_cri::CriBackend;
use tokio::sync::watch;
use tokio::time;

use super::Observability;

/// How often a backend that answers is asked again.
const PERIOD: Duration = Duration::from_secs(5);
/// How soon one that does not is asked again: at first, and at most.
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
    /// It does not work, since when and why. `unusable` where calls would wait for their time limit, or must not be made.
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

/// Looks after one backend until dropped.
pub(crate) async fn watch_backend(
    backend: &CheckedBackend<'_>,
    health: &watch::Sender<BackendHealth>,
    observability: &Observability,
) {
    let mut retry = RETRY.0;
    loop {
        let wait = if check_now(backend, health, observability).await {
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
    backend: &CheckedBackend<'_>,
    health: &watch::Sender<BackendHealth>,
    observability: &Observability,
) -> bool {
    // As kubelet at its start; afterwards a broken image service shows in its calls.
    let validate = !health.borrow().is_up();
    let found = backend.look(validate).await;
    let is_up = found.is_up();
    let mut change = None;
    health.send_if_modified(|known| {
        change = health_transition_event(known, &found);
        let found = found.since_before(known);
        let changed = *known != found;
        *known = found;
        changed
    });
    if let Some((event_type, reason, message)) = change {
        observability.record(event_type, reason, message);
    }
    is_up
}

/// The backend to check, and how operators know it.
pub(crate) struct CheckedBackend<'a> {
    pub(crate) backend: &'a dyn Backend,
    /// The runtime over CRI, whose image service is validated as well.
    pub(crate) runtime: Option<&'a CriBackend>,
    /// A description of the backend.
    pub(crate) description: &'a str,
}

impl CheckedBackend<'_> {
    /// Checks whether the backend responds and, if `validate` is set, whether its image service works.
    async fn look(&self, validate: bool) -> BackendHealth {
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

    /// Why a backend that responds is down: its runtime is not ready, or its image plugin does not work. The latter call
    /// measures filesystems, which may take longer than a check: it has the time limit of a call.
    async fn problem(&self, info: &RuntimeInfo, validate: bool) -> Option<String> {
        let not_ready =
            info.conditions.iter().find(|condition| condition.kind == "RuntimeReady" && !condition.ok);
        if let Some(condition) = not_ready {
            return Some(format!("{}: {}: {}", info.endpoint, condition.reason, condition.message));
        }
        let runtime = self.runtime.filter(|_| validate)?;
        runtime.validate_image_service().await.err().map(|error| error_with_hint(&error))
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

    fn checked(backend: &FakeBackend) -> CheckedBackend<'_> {
        CheckedBackend { backend, runtime: None, description: "a fake" }
    }

    #[tokio::test]
    async fn a_runtime_without_an_image_service_is_down_and_named() {
        let fake = FakeCri::start();
        let runtime = CriBackend::new(fake.endpoint(), CriConfig::default());
        let checked = CheckedBackend {
            backend: &runtime,
            runtime: Some(&runtime),
            description: "the images of a fake",
        };
        assert!(checked.look(true).await.is_up());
        fake.refuse(Rpc::ImageFsInfo, Code::Unimplemented, "unknown service runtime.v1.ImageService");
        let BackendHealth::Down { why, unusable, .. } = checked.look(true).await else { panic!("it is up") };
        let place = format!(
            "validate service connection: validate CRI v1 image API for endpoint \"{}\"",
            fake.endpoint()
        );
        assert!(why.starts_with(&place) && !unusable, "{why}");
        fake.change(|contents| contents.version.runtime_name = "larder".into());
        let BackendHealth::Down { why, unusable, .. } = checked.look(true).await else { panic!("it is up") };
        assert!(why.contains("served by larder itself") && unusable, "{why}");
    }

    #[tokio::test]
    async fn the_image_service_is_validated_at_the_start_and_after_an_outage_only() {
        let (fake, observability) = (FakeCri::start(), testing::observability());
        let runtime = CriBackend::new(fake.endpoint(), CriConfig::default());
        let checked = CheckedBackend { backend: &runtime, runtime: Some(&runtime), description: "a fake" };
        let health = watch::Sender::default();
        let check = async || check_now(&checked, &health, &observability).await;
        fake.fail_next(Rpc::ImageFsInfo, Code::Unimplemented, "unknown service runtime.v1.ImageService");
        assert!(!check().await, "its image plugin does not work");
        assert!(check().await);
        fake.fail_next(Rpc::ImageFsInfo, Code::Unimplemented, "unknown service runtime.v1.ImageService");
        assert!(check().await, "it was validated");
    }

    #[tokio::test]
    async fn a_runtime_that_hangs_is_unusable() {
        let down = async |runtime: &CriBackend| {
            let checked = CheckedBackend { backend: runtime, runtime: None, description: "a fake" };
            match checked.look(false).await {
                BackendHealth::Down { why, unusable, .. } => (why, unusable),
                other => panic!("{other:?}"),
            }
        };
        let fake = FakeCri::start();
        let connected = CriBackend::new(fake.endpoint(), CriConfig::default());
        connected.info().await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let _stopped = std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap();
        let unconnected = CriBackend::new(Endpoint::at(dir.path().join("s")), CriConfig::default());
        fake.hang_next(Rpc::Version);
        time::pause();
        assert_eq!(down(&connected).await, ("a fake: no answer within 10s".to_owned(), true));
        let (why, unusable) = down(&unconnected).await;
        assert!(why.contains("no answer within 5s") && unusable, "{why}");
    }

    #[tokio::test(start_paused = true)]
    async fn each_change_of_health_emits_one_event() {
        let (backend, observability) = (FakeBackend::new(), testing::observability());
        for _ in 0..4 {
            backend.fail_next(BackendOp::Info, error("gone"));
        }
        let health = watch::Sender::default();
        let mut watched = health.subscribe();
        let checked = checked(&backend);
        tokio::select! {
            () = watch_backend(&checked, &health, &observability) => {}
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
        let (backend, observability) = (FakeBackend::new(), testing::observability());
        let health = watch::Sender::default();
        let mut watched = health.subscribe();
        let checked = checked(&backend);
        tokio::select! {
            () = watch_backend(&checked, &health, &observability) => {}
            () = async {
                assert!(watched.wait_for(BackendHealth::is_up).await.is_ok());
                backend.set_down(Some(error("gone")));
                assert!(!check_now(&checked, &health, &observability).await);
                assert!(!health.borrow().is_up());
                backend.set_down(None);
                assert!(watched.wait_for(BackendHealth::is_up).await.is_ok());
                backend.set_down(Some(error("gone")));
                let down = watched.wait_for(|health| !health.is_up());
                assert!(time::timeout(Duration::from_millis(5100), down).await.is_ok());
            } => {}
        }
        let down = observability
            .journal()
            .snapshot()
            .into_iter()
            .filter(|event| event.reason == EventReason::BackendDown);
        assert_eq!(down.count(), 2);
    }
}
