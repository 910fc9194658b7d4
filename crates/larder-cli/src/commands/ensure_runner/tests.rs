//! Many ensures at once, and again, under simulated time.

use std::sync::Arc;

use larder::backend::Image;
use larder::pod::{ObjectRef, Pod};
use larder::pull::PullPolicy;
use larder_agent::config::{self, Config, SettingsSources};
use larder_agent::environment::DefaultPaths;
use larder_agent::node::Node;
use larder_agent::serve::CommandServer;
use larder_testkit::fake_backend::{FakeBackend, ScriptedPull, image};
use parking_lot::Mutex;

use super::*;

/// Keeps the messages of events.
#[derive(Default)]
struct MessageSink(Mutex<Vec<String>>);

impl EventSink for MessageSink {
    fn record(&self, event: Event) {
        self.0.lock().push(format!("{}: {}", event.reason, event.message));
    }
}

impl MessageSink {
    fn all(&self) -> Vec<String> {
        self.0.lock().clone()
    }
}

fn request(image: &str) -> EnsureRequest {
    let pod = Pod { uid: "u".into(), namespace: "default".into(), name: "web".into(), ..Pod::default() };
    EnsureRequest {
        target: Some(ObjectRef::new(&pod, "")),
        ..EnsureRequest::new(image, PullPolicy::Always, pod)
    }
}

async fn run(backend: FakeBackend, images: &[&str], retry_for: Duration) -> (Vec<EnsureResult>, Vec<String>) {
    let messages = Arc::new(MessageSink::default());
    let (pulls, _dir) = pulls(backend, Arc::clone(&messages) as Arc<dyn EventSink>);
    let requests: Vec<_> = images.iter().map(|image| request(image)).collect();
    let (progress, out) = (ProgressLines::new(false), silent());
    let no_interrupt = std::future::pending();
    let shown = ProgressOutput { progress: &progress, out: &out };
    let ended = ensure_all(&pulls, &requests, retry_for, &*messages, shown, no_interrupt).await;
    (ended.results, messages.all())
}

fn silent() -> Printer {
    Printer::to(Box::new(std::io::sink()), Box::new(std::io::sink()))
}

/// Ensures on a node of this process with that backend.
fn pulls(backend: FakeBackend, events: Arc<dyn EventSink>) -> (EnsureCalls, tempfile::TempDir) {
    pulls_with(backend, events, |_| ())
}

/// Returns a runner with other settings.
pub(super) fn pulls_with(
    backend: FakeBackend,
    events: Arc<dyn EventSink>,
    change: impl FnOnce(&mut Config),
) -> (EnsureCalls, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let sources = SettingsSources { places: DefaultPaths::of(true, |_| None), layers: Vec::new() };
    let mut config = config::load(&sources).unwrap();
    // Time is simulated, and the threads of pull records and leases are not.
    config.verification = None;
    config.ensured_lease = Duration::ZERO;
    change(&mut config);
    let node = Node::on_backend(Arc::new(backend), dir.path(), sources, config).ok().unwrap();
    (EnsureCalls::new(CommandServer::start(node).client(), None, events, true), dir)
}

fn small() -> Image {
    image("sha256:1", 100)
}

#[tokio::test(start_paused = true)]
async fn without_a_time_to_retry_each_image_is_tried_once() {
    let backend = FakeBackend::new();
    backend.on_pull_of("a:1", ScriptedPull::fails("no route"));
    backend.on_pull_of("b:1", ScriptedPull::ok("sha256:1", 100));
    let (results, messages) = run(backend, &["a:1", "b:1"], Duration::ZERO).await;
    assert!(matches!(&results[0], EnsureResult::Failed(error) if error.reason == EnsureReason::ErrImagePull));
    assert!(matches!(&results[1], EnsureResult::Ensured(_)));
    assert!(messages.contains(&"Failed: Failed to pull image \"a:1\": no route".to_owned()), "{messages:?}");
    assert!(messages.contains(&"Failed: Error: ErrImagePull".to_owned()), "{messages:?}");
    assert!(!messages.iter().any(|message| message.contains("Back-off")), "{messages:?}");
}

#[tokio::test(start_paused = true)]
async fn a_retry_shows_the_back_off_and_starts_at_its_end() {
    let backend = FakeBackend::new();
    backend.on_pull_of("a:1", ScriptedPull::fails("no route"));
    backend.on_pull_of("a:1", ScriptedPull::with_outcome(Ok(small())));
    let start = Instant::now();
    let (results, messages) = run(backend, &["a:1"], Duration::from_secs(60)).await;
    assert!(matches!(&results[0], EnsureResult::Ensured(_)), "{results:?}");
    assert_eq!(start.elapsed().as_secs(), 10, "kubelet's first back-off");
    assert_eq!(
        messages[..6],
        [
            "Pulling: Pulling image \"a:1\"",
            "Failed: Failed to pull image \"a:1\": no route",
            "Failed: Error: ErrImagePull",
            "BackOff: Back-off pulling image \"a:1\"",
            "Failed: Error: ImagePullBackOff",
            "Pulling: Pulling image \"a:1\"",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn retries_end_at_their_time_limit_with_the_last_error() {
    let backend = FakeBackend::new();
    for _ in 0..5 {
        backend.on_pull_of("a:1", ScriptedPull::fails("no route"));
    }
    let start = Instant::now();
    let (results, _) = run(backend, &["a:1"], Duration::from_secs(35)).await;
    let EnsureResult::Failed(error) = &results[0] else { panic!("{results:?}") };
    assert_eq!(error.message, "Back-off pulling image \"a:1\": ErrImagePull: no route");
    assert!(start.elapsed() <= Duration::from_secs(35));
}

#[tokio::test(start_paused = true)]
async fn an_interrupt_leaves_the_rest_unfinished() {
    let backend = FakeBackend::new();
    backend.on_pull_of("a:1", ScriptedPull::ok("sha256:1", 100).after(Duration::from_secs(100)));
    backend.on_pull_of("b:1", ScriptedPull::ok("sha256:1", 100));
    let (pulls, _dir) = pulls(backend, Arc::new(MessageSink::default()));
    let requests = [request("a:1"), request("b:1")];
    let (messages, progress, out) = (MessageSink::default(), ProgressLines::new(false), silent());
    let interrupt = time::sleep(Duration::from_secs(5));
    let shown = ProgressOutput { progress: &progress, out: &out };
    let EnsureResults { results, lost } =
        ensure_all(&pulls, &requests, Duration::ZERO, &messages, shown, interrupt).await;
    assert_eq!(lost, None);
    assert_eq!(results[0], EnsureResult::Unfinished);
    assert!(matches!(results[1], EnsureResult::Ensured(_)));
}

#[test]
fn unfinished_images_are_named_once_and_not_by_the_hundred() {
    let page = crate::printer::tests::TestWriter::default();
    let out = Printer::to(Box::new(std::io::sink()), Box::new(page.clone()));
    print_unfinished(["a:1", "b:1", "a:1"], &out);
    assert!(
        page.text()
            .starts_with("error: interrupted; not finished: a:1, b:1\nhint: rerun the command to resume")
    );
    let many: Vec<_> = (10..23).map(|number| format!("i:{number}")).collect();
    print_unfinished(many.iter().map(String::as_str), &out);
    assert!(page.text().contains("i:18, i:19, and 3 more\n"), "{}", page.text());
}
