//! CRI over a real socket: what a call leaves behind, and what is served when.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use larder::backend::{
    Backend as _, CallErrorKind, EndpointFailure, Image, ImageSpec, ProgressReporter, RemoveOptions,
};
use larder::gc::HistoryFile;
use larder::pod::SandboxConfig;
use larder::pull::StatusIntent;
use larder::retention::{Retention, RetentionError, RetentionSource};
use larder_cri::server::CriImages as _;
use larder_cri::{CriBackend, CriConfig, Endpoint, proto};
use larder_testkit::fake_backend::{BackendCall, BackendOp, FakeBackend, ScriptedPull, error, image};
use larder_testkit_peers::fake_cri::FakeCri;
use tokio::time;

use super::{DaemonAddresses, ServingProcess, TestDaemon, api};
use crate::backend::BackendHandle;
use crate::node::cri_images::NodeCriImages;
use crate::node::health::BackendHealth;
use crate::node::metrics::{ExpositionFormat, exposition};
use crate::node::pods::desired::DesiredKey;
use crate::node::{Node, NodeDependencies, NodeFilesystems, testing};
use larder::backend::BackendError;
use larder::events::EventReason;

fn caller(served: &TestDaemon) -> CriBackend {
    CriBackend::new(Endpoint::at(served.dir.path().join("s")), CriConfig::default())
}

/// Lists containers as `crictl ps -a` and `crictl rmi --prune` do.
async fn containers(served: &TestDaemon) -> Result<Vec<String>, BackendError> {
    let inventory = caller(served).container_inventory().await?;
    Ok(inventory.containers.into_iter().map(|container| container.id).collect())
}

async fn pull(client: &CriBackend, name: &str) -> Result<larder::reference::ImageId, BackendError> {
    client.pull(&ImageSpec::named(name), None, None, &ProgressReporter::unwatched()).await
}

fn events(served: &TestDaemon) -> Vec<(EventReason, String)> {
    served
        .node
        .observability
        .journal()
        .snapshot()
        .into_iter()
        .map(|event| (event.reason, event.message))
        .collect()
}

#[tokio::test]
async fn pulls_and_removals_over_cri_are_events_with_their_caller() {
    let served = TestDaemon::new();
    let client = caller(&served);
    served.backend.on_pull_of("a:1", ScriptedPull::ok("sha256:1", 100));
    served.backend.on_pull_of("b:1", ScriptedPull::fails("no route"));
    pull(&client, "a:1").await.unwrap();
    pull(&client, "b:1").await.unwrap_err();
    client.remove(&ImageSpec::named("a:1"), &RemoveOptions::default()).await.unwrap();
    client.remove(&ImageSpec::named("a:1"), &RemoveOptions::default()).await.expect("it is absent");
    let own = format!("(pid {})", std::process::id());
    let found = events(&served);
    let reasons: Vec<_> = found.iter().map(|(reason, _)| *reason).collect();
    assert_eq!(reasons, [EventReason::Pulled, EventReason::Failed, EventReason::Removed], "{found:?}");
    assert!(
        found.iter().all(|(_, message)| message.contains(&own) && message.contains("over CRI")),
        "{found:?}"
    );
    assert!(found[0].1.contains("pulled image \"a:1\"") && found[0].1.contains("100 bytes"), "{found:?}");
    assert!(found[1].1.contains("no route") && found[2].1.contains("sha256:1"), "{found:?}");

    let (history, _) = HistoryFile::new(served.node.state.history()).entries().unwrap();
    let [removed] = &history[..] else { panic!("{history:?}") };
    assert_eq!((removed.id.as_str(), removed.reason.as_str()), ("sha256:1", "request"));
    assert!(removed.why.contains(&own) && removed.why.contains("CRI"), "{}", removed.why);
    let page =
        exposition(&served.node, &served.connections, &NodeFilesystems::default(), ExpositionFormat::Text)
            .unwrap();
    assert!(
        page.contains("larder_image_pull_duration_seconds_count") && !page.contains("kubelet_"),
        "{page}"
    );
    for sample in [
        "larder_cri_calls_total{method=\"PullImage\",code=\"OK\"} 1",
        "larder_cri_calls_total{method=\"PullImage\",code=\"Unknown\"} 1",
        "larder_cri_calls_total{method=\"RemoveImage\",code=\"OK\"} 2",
        "larder_removals_total{requester=\"cri\"} 1",
        "larder_pull_failures_total{reason=\"other\"} 1",
    ] {
        assert!(page.contains(sample), "{sample} is not in\n{page}");
    }
}

#[tokio::test]
async fn a_collector_that_removes_images_over_cri_is_in_the_status() {
    let served = TestDaemon::new();
    let warnings = async || {
        let status = served.client().status(api::StatusRequest { look: false }).await.unwrap();
        status.into_inner().warnings
    };
    for name in ["a:1", "b:1"] {
        served.backend.add_image(name, image(format!("sha256:{name}"), 1));
    }
    let request = api::RemoveRequest { images: vec!["a:1".into()], ..Default::default() };
    served.client().remove(request).await.unwrap();
    assert_eq!(warnings().await, [""; 0], "a person removed it");
    caller(&served).remove(&ImageSpec::named("b:1"), &RemoveOptions::default()).await.unwrap();
    let found = warnings().await;
    let command = fs_err::read_to_string("/proc/self/comm").unwrap();
    let expected = format!("{} collects images, too: 1 removed over CRI", command.trim());
    assert!(found.len() == 1 && found[0].starts_with(&expected), "{found:?}");
}

#[tokio::test]
async fn a_removal_over_the_control_api_is_in_the_history_with_its_caller() {
    let served = TestDaemon::new();
    served.backend.add_image("a:1", image("sha256:1", 100));
    let request = api::RemoveRequest { images: vec!["a:1".into()], ..Default::default() };
    served.client().remove(request).await.unwrap();
    let (history, _) = HistoryFile::new(served.node.state.history()).entries().unwrap();
    let [removed] = &history[..] else { panic!("{history:?}") };
    assert!(removed.why.starts_with("removed by ") && !removed.why.contains("CRI"), "{}", removed.why);
    assert!(events(&served).iter().any(|(reason, _)| *reason == EventReason::Removed));
}

#[tokio::test]
async fn reads_are_served_until_a_stopping_daemon_ends_and_pulls_are_refused() {
    let served = TestDaemon::new();
    served.backend.hold_pulls();
    served.backend.add_image("a:1", image("sha256:1", 100));
    let before = caller(&served);
    before.list().await.unwrap();
    let pulling = {
        let early = caller(&served);
        tokio::spawn(async move { pull(&early, "b:1").await })
    };
    served.pulling(1).await;
    served.stop.send_replace(true);
    for client in [before, caller(&served)] {
        let name = ImageSpec::named("a:1");
        assert_eq!(client.status(&name).await.unwrap().map(|image| image.size), Some(100));
        assert_eq!(client.list().await.unwrap().len(), 1);
        client.filesystems().await.unwrap();
        let refused = pull(&client, "c:1").await.unwrap_err().to_string();
        assert!(refused.contains("shutting down"), "{refused}");
        let refused = client.remove(&name, &RemoveOptions::default()).await.unwrap_err().to_string();
        assert!(refused.contains("shutting down"), "{refused}");
    }
    served.backend.finish_pull(ScriptedPull::ok("sha256:2", 1));
    assert_eq!(pulling.await.unwrap().unwrap(), "sha256:2");
    let TestDaemon { mut serving, .. } = served;
    serving.join_next().await.unwrap().unwrap();
}

#[tokio::test]
async fn calls_fail_at_once_while_the_backend_is_known_to_hang() {
    let served = TestDaemon::new();
    let client = caller(&served);
    let why = "unix:///run/r.sock: no answer within 10s".to_owned();
    served.node.storage.health().set(BackendHealth::Down { since: SystemTime::now(), why, unusable: true });
    let refused = client.list().await.unwrap_err();
    assert!(matches!(refused, BackendError::Call { kind: CallErrorKind::Unavailable, .. }), "{refused:?}");
    assert!(refused.to_string().contains("no answer within 10s"), "{refused}");
    pull(&client, "a:1").await.unwrap_err();
    assert_eq!(served.backend.calls(), []);
    // One that refuses connections answers each call for itself.
    let why = EndpointFailure::Refused.to_string();
    served.node.storage.health().set(BackendHealth::Down { since: SystemTime::now(), why, unusable: false });
    client.list().await.unwrap();
}

#[tokio::test]
async fn a_pull_for_a_pod_is_an_event_of_the_pod_and_a_failed_removal_is_one_of_the_node() {
    let served = TestDaemon::new();
    let client = caller(&served);
    served.backend.on_pull_of("a:1", ScriptedPull::ok("sha256:1", 100));
    let sandbox = SandboxConfig { name: "web".into(), namespace: "shop".into(), ..SandboxConfig::default() };
    let progress = ProgressReporter::unwatched();
    client.pull(&ImageSpec::named("a:1"), None, Some(&sandbox), &progress).await.unwrap();
    served.backend.fail_next(BackendOp::Remove, error("disk on fire"));
    client.remove(&ImageSpec::named("a:1"), &RemoveOptions::default()).await.unwrap_err();
    let [pulled, failed] = &served.node.observability.journal().snapshot()[..] else { panic!("two events") };
    assert_eq!((pulled.object.namespace.as_str(), pulled.object.name.as_str()), ("shop", "web"));
    assert_eq!((failed.reason, failed.object.name.as_str()), (EventReason::RemovalFailed, "node"));
    let own = format!("(pid {})", std::process::id());
    assert!(failed.message.contains(&own) && failed.message.contains("disk on fire"), "{}", failed.message);
    let (history, _) = HistoryFile::new(served.node.state.history()).entries().unwrap();
    assert!(history.is_empty(), "{history:?}");
}

#[tokio::test]
async fn an_image_is_first_seen_at_its_pull_over_cri_or_for_an_ensure() {
    let served = TestDaemon::new();
    for (name, id) in [("a:1", "sha256:1"), ("b:1", "sha256:2")] {
        served.backend.on_pull_of(name, ScriptedPull::ok(id, 100));
    }
    served.backend.add_image("present:1", image("sha256:3", 100));
    pull(&caller(&served), "a:1").await.unwrap();
    super::updates(&mut served.client(), super::wants(&["b:1", "present:1"])).await;
    let records = served.node.collection.collector().unwrap().records();
    let is_seen = |id: &str| records.get(&id.into(), "").is_some();
    assert_eq!(["sha256:1", "sha256:2", "sha256:3"].map(is_seen), [true, true, false]);
}

#[tokio::test(start_paused = true)]
async fn a_round_waits_for_the_collector_that_removes_images_over_cri() {
    let served = TestDaemon::new();
    served.backend.add_image("a:1", image("sha256:1", 100));
    caller(&served).remove(&ImageSpec::named("a:1"), &RemoveOptions::default()).await.unwrap();
    let (start, mut status) = (time::Instant::now(), served.node.collection.status());
    tokio::select! {
        () = served.node.collection.run() => unreachable!("it runs until dropped"),
        ended = status.wait_for(|status| status.rounds > 0) => drop(ended.unwrap()),
    }
    assert!(start.elapsed() >= Duration::from_secs(4), "{:?}", start.elapsed());
}

#[tokio::test]
async fn containers_are_those_of_the_runtime_and_unknown_while_it_hangs() {
    let runtime = FakeCri::start();
    let container = proto::Container { id: "c1".into(), ..proto::Container::default() };
    runtime.change(|contents| contents.containers = vec![container]);
    let served = TestDaemon::on(ServingProcess::Daemon(DaemonAddresses::default()), |backend, dir| {
        let handle =
            BackendHandle::Runtime(Arc::new(CriBackend::new(runtime.endpoint(), CriConfig::default())));
        let parts = testing::parts(backend, dir, None, |_| ());
        NodeDependencies { storage: parts.storage.with_handle(handle), ..parts }
    });
    assert_eq!(containers(&served).await.unwrap(), ["c1"]);
    let why = "no answer within 10s".to_owned();
    served.node.storage.health().set(BackendHealth::Down { since: SystemTime::now(), why, unusable: true });
    let refused = containers(&served).await.unwrap_err().to_string();
    assert!(refused.contains("no answer within 10s"), "{refused}");
}

/// Drops a call once the backend has its request.
async fn abandon<T>(call: impl Future<Output = T>, begun: impl Future) {
    tokio::select! {
        _ = call => panic!("it has ended"),
        _ = begun => {}
    }
}

async fn removal_begun(served: &TestDaemon) {
    let is_removal = |call: &BackendCall| matches!(call, BackendCall::Remove { .. });
    while !served.backend.calls().iter().any(is_removal) {
        time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn requests_that_their_caller_abandons_are_recorded() {
    let served = TestDaemon::new();
    let client = caller(&served);
    served.backend.hold_pulls();
    served.backend.add_image("b:1", image("sha256:2", 100));
    served.backend.hold_removals();
    abandon(client.remove(&ImageSpec::named("b:1"), &RemoveOptions::default()), removal_begun(&served)).await;
    abandon(pull(&client, "a:1"), served.backend.until(|counts| counts.running == 1)).await;
    let own = format!("(pid {})", std::process::id());
    let recorded = async |number| {
        let recorded = async {
            while served.node.observability.journal().next_number() < number {
                time::sleep(Duration::from_millis(10)).await;
            }
        };
        time::timeout(Duration::from_secs(10), recorded).await.expect("it is recorded");
    };
    // The connection carries the end of the first call before that of the second.
    recorded(1).await;
    served.backend.release_removals();
    recorded(2).await;
    let found = events(&served);
    let (_, abandoned) = found.iter().find(|(reason, _)| *reason == EventReason::Failed).unwrap();
    assert!(abandoned.contains("abandoned the pull of image \"a:1\" over CRI"), "{found:?}");
    assert!(abandoned.contains(&own), "{found:?}");
    assert!(found.iter().any(|(reason, _)| *reason == EventReason::Removed), "{found:?}");
    let history =
        async || HistoryFile::new(served.node.state.history()).entries().map(|(entries, _)| entries.len());
    let written = async {
        while history().await.unwrap_or_default() == 0 {
            time::sleep(Duration::from_millis(10)).await;
        }
    };
    time::timeout(Duration::from_secs(10), written).await.expect("the removal is in the history");
}

#[tokio::test]
async fn failed_removals_over_the_control_api_are_events_with_their_caller() {
    let served = TestDaemon::new();
    served.backend.add_image("pinned:1", Image { pinned: true, ..image("sha256:1", 1) });
    served.backend.add_image("a:1", image("sha256:2", 1));
    served.backend.fail_next(BackendOp::Remove, error("busy"));
    let request = api::RemoveRequest { images: vec!["pinned:1".into(), "a:1".into()], ..Default::default() };
    served.client().remove(request).await.unwrap();
    let found = served.node.observability.journal().snapshot();
    let own = format!("(pid {})", std::process::id());
    assert_eq!(found.len(), 2, "{found:?}");
    for (event, cause) in found.iter().zip(["pinned by the runtime", "busy"]) {
        assert_eq!(event.reason, EventReason::RemovalFailed);
        assert!(event.message.contains(cause) && event.message.contains("over the control API"), "{event:?}");
        assert!(event.requester.ends_with(&own), "{event:?}");
    }
}

#[tokio::test]
async fn images_that_a_set_pins_are_removed_by_force_only() {
    let served = TestDaemon::new();
    let names = ["r.example/a:1", "r.example/a:2"].map(str::to_owned);
    served.backend.add_image(&names[0], Image { repo_tags: names.to_vec(), ..image("sha256:1", 1) });
    let key = DesiredKey {
        owner: "ImageSet web".into(),
        part: String::new(),
        image: names[0].as_str().into(),
        policy: "IfNotPresent".into(),
        is_pinned: true,
    };
    served.node.workloads.uses().keep(key, "sha256:1".into());
    let remove = async |images: &[String], force| {
        let request = api::RemoveRequest { images: images.to_vec(), force, ..Default::default() };
        served.client().remove(request).await.unwrap().into_inner().results.remove(0).result.unwrap()
    };
    for images in [&names[..1], &names[..], &["sha256:1".to_owned()]] {
        let api::removed::Result::Refused(refused) = remove(images, false).await else { panic!("removed") };
        assert!(refused.message.ends_with(": pinned by ImageSet web"), "{refused:?}");
        assert_eq!(refused.hints.len(), 2, "{refused:?}");
    }
    assert_eq!(served.backend.images().len(), 1);
    assert!(!matches!(remove(&names, true).await, api::removed::Result::Refused(_)));
    assert!(served.backend.images().is_empty());
}

#[tokio::test]
async fn a_pinned_image_is_removed_over_cri_and_the_event_names_its_pin() {
    let served = TestDaemon::new();
    served.backend.add_image("r.example/a:1", image("sha256:1", 1));
    let key = DesiredKey {
        owner: "ImageSet web".into(),
        part: String::new(),
        image: "r.example/a:1".into(),
        policy: "IfNotPresent".into(),
        is_pinned: true,
    };
    served.node.workloads.uses().keep(key, "sha256:1".into());
    let removal = caller(&served).remove(&ImageSpec::named("r.example/a:1"), &RemoveOptions::default()).await;
    removal.expect("it obliges");
    let events = served.node.observability.journal().snapshot();
    let removed = events.iter().find(|event| event.reason == EventReason::Removed).expect("an event");
    assert!(removed.message.contains("over CRI, although it was pinned by ImageSet web"), "{removed:?}");
}

#[tokio::test]
async fn a_removal_over_the_control_api_whose_caller_gives_up_is_in_the_history() {
    let served = TestDaemon::new();
    served.backend.add_image("a:1", image("sha256:1", 1));
    served.backend.hold_removals();
    let request = api::RemoveRequest { images: vec!["a:1".into()], ..Default::default() };
    let mut client = served.client();
    abandon(client.remove(request), removal_begun(&served)).await;
    // The connection carries the end of the first call before the second.
    client.status(api::StatusRequest::default()).await.unwrap();
    served.backend.release_removals();
    let history = HistoryFile::new(served.node.state.history());
    let recorded = async {
        loop {
            let entries = history.entries().map(|(entries, _)| entries).unwrap_or_default();
            if let [removed] = &entries[..] {
                break removed.why.clone();
            }
            time::sleep(Duration::from_millis(10)).await;
        }
    };
    let why = time::timeout(Duration::from_secs(10), recorded).await.expect("the removal is in the history");
    assert!(why.contains(&format!("(pid {})", std::process::id())), "{why}");
}

/// A source of retention that fails, or never answers.
struct BrokenSource {
    hangs: bool,
}

#[async_trait]
impl RetentionSource for BrokenSource {
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError> {
        if self.hangs { std::future::pending().await } else { Err(RetentionError::other("broken")) }
    }
}

#[tokio::test(start_paused = true)]
async fn while_a_source_of_retention_fails_or_hangs_all_images_are_pinned_in_time() {
    for hangs in [false, true] {
        let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
        backend.add_image("a:1", image("sha256:1", 100));
        let mut parts = testing::parts(&backend, dir.path(), None, |_| ());
        parts.collector = parts.collector.retention_source(Arc::new(BrokenSource { hangs }));
        let images = NodeCriImages::of(&Node::build(parts));
        let (spec, start) = (ImageSpec::named("a:1"), time::Instant::now());
        let listed = images.list().await.unwrap();
        let found = images.status(&spec, StatusIntent::Show).await.unwrap().unwrap();
        assert!(listed[0].pinned && found.pinned, "hangs: {hangs}");
        images.remove(&spec).await.expect("a removal by name obliges");
        assert_eq!(backend.images(), [], "hangs: {hangs}");
        assert!(start.elapsed() <= Duration::from_secs(7), "{:?}", start.elapsed());
    }
}
