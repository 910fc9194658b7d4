//! The service behind a real socket, on a fake backend.

mod cri;
mod memory;
mod status;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use larder::events::EventReason;
use larder::retention::{LeasePurpose, RemovalGate};
use larder_api::v1::collect_request::Goal;
use larder_api::v1::control_client::ControlClient;
use larder_api::v1::ensure_update::Update;
use larder_api::v1::events_response::Item;
use larder_cri::channel::CriChannel;
use larder_testkit::fake_backend::{BackendOp, FakeBackend, ScriptedPull, error, image};
use tokio::io::AsyncReadExt as _;
use tokio::net::{UnixListener, UnixStream};
use tokio::time;
use tonic::Code;

use super::*;
use crate::client::{Client, ControlCalls, ControlServerAddress};
use crate::node::{NodeDependencies, NodeFilesystems, testing};
use crate::serve::http_handler::HttpHandler;
use crate::serve::router::Router;

/// A daemon that serves a fake backend until dropped.
struct TestDaemon {
    backend: FakeBackend,
    node: Arc<Node>,
    stop: watch::Sender<bool>,
    dir: tempfile::TempDir,
    connections: Connections,
    serving: tokio::task::JoinSet<()>,
}

impl TestDaemon {
    fn new() -> TestDaemon {
        TestDaemon::by(ServingProcess::Daemon(DaemonAddresses::default()))
    }

    fn by(process: ServingProcess) -> TestDaemon {
        TestDaemon::on(process, |backend, dir| testing::parts(backend, dir, None, |_| ()))
    }

    fn on(
        process: ServingProcess,
        parts: impl FnOnce(&FakeBackend, &Path) -> NodeDependencies,
    ) -> TestDaemon {
        let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
        let node = Arc::new(Node::build(parts(&backend, dir.path())));
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let (stop, stopped) = watch::channel(false);
        let connections = Connections::default();
        let plain = HttpHandler::new(Arc::clone(&node), connections.clone());
        let (shared, of) = (connections.clone(), process.clone());
        let control = ControlApi::new(Arc::clone(&node), of, shared, stopped.clone());
        let (mut serving, shared) = (tokio::task::JoinSet::new(), connections.clone());
        let router = Router::new(&node, plain, service(control));
        serving.spawn(async move {
            match process {
                ServingProcess::Daemon(_) => shared.serve(listener, Some(()), router, stopped).await,
                ServingProcess::Command => shared.serve_joined(listener, router, stopped, || ()).await,
            }
        });
        TestDaemon { backend, node, stop, dir, connections, serving }
    }

    fn client(&self) -> ControlClient<CriChannel> {
        match Client::of(ControlServerAddress::Daemon(self.dir.path().join("s")), None).calls() {
            ControlCalls::Socket(client) => client,
            ControlCalls::InProcess(_) => unreachable!("the daemon has a socket"),
        }
    }

    /// Waits until so many pulls run.
    async fn pulling(&self, count: usize) {
        while self.backend.held_pulls().len() != count || self.node.pulls.manager().pulls().len() != count {
            tokio::task::yield_now().await;
        }
    }
}

fn wants(images: &[&str]) -> api::EnsureRequest {
    let wanted = |image: &&str| api::WantedImage { image: (*image).to_owned(), ..Default::default() };
    api::EnsureRequest { images: images.iter().map(wanted).collect(), ..Default::default() }
}

/// All updates of one call: reasons of events, and the result of each image by index.
async fn updates(client: &mut ControlClient<CriChannel>, request: api::EnsureRequest) -> Vec<String> {
    let updates = client.ensure(request).await.unwrap().into_inner();
    let words = updates.map(|update| match update.unwrap().update.unwrap() {
        Update::Event(event) => event.reason,
        Update::Progress(_) => "progress".to_owned(),
        Update::Ensured(ensured) => format!("{} ensured", ensured.index),
        Update::Failed(failed) => format!("{} {}", failed.index, failed.reason),
    });
    words.collect().await
}

#[tokio::test]
async fn a_panic_is_an_error_of_the_request_that_caused_it() {
    let served = TestDaemon::new();
    let mut client = served.client();
    let request = || api::ImagesRequest::default();
    served.backend.panic_next(BackendOp::List);
    let failed = client.images(request()).await.unwrap_err();
    assert_eq!(failed.code(), Code::Internal, "{failed}");
    assert!(failed.message().starts_with("internal error: a defect in larder"), "{failed}");
    client.images(request()).await.expect("the next request on the connection is answered");
}

#[tokio::test]
async fn each_image_of_a_call_has_its_events_and_one_end() {
    let served = TestDaemon::new();
    served.backend.on_pull_of("a:1", ScriptedPull::ok("sha256:1", 100));
    served.backend.on_pull_of("b:1", ScriptedPull::fails("no route"));
    let mut client = served.client();
    let mut all = updates(&mut client, wants(&["a:1", "b:1", "Bad"])).await;
    all.sort();
    assert_eq!(
        all,
        [
            "0 ensured",
            "1 ErrImagePull",
            "2 InvalidImageName",
            "Failed",
            "InspectFailed",
            "Pulled",
            "Pulling",
            "Pulling"
        ]
    );
    assert_eq!(updates(&mut client, wants(&["a:1"])).await, ["Pulled", "0 ensured"], "and none of others");
    let known = served.node.observability.journal().snapshot().into_iter().map(|event| event.message);
    let failures: Vec<_> = known.filter(|message| message.starts_with("Error: ")).collect();
    assert_eq!(failures.len(), 2, "as kubelet says after each: {failures:?}");
    assert!(failures.contains(&"Error: ErrImagePull".to_owned()), "{failures:?}");
    let known = served.node.observability.journal().snapshot();
    let failed = known.iter().filter(|event| event.reason == EventReason::Failed).count();
    let format = crate::node::metrics::ExpositionFormat::Text;
    let page = crate::node::metrics::exposition(
        &served.node,
        &served.connections,
        &NodeFilesystems::default(),
        format,
    )
    .unwrap();
    let counted = format!("larder_events_total{{event_type=\"Warning\",reason=\"Failed\"}} {failed}\n");
    assert!(failed == 3 && page.contains(&counted), "{failed}: {page}");
}

/// A process that is killed right after its answer leaves the lease of the ensure.
#[tokio::test]
async fn an_ensure_answers_after_its_lease_is_on_disk() {
    let served = TestDaemon::new();
    served.backend.add_image("a:1", image("sha256:1", 100));
    assert_eq!(updates(&mut served.client(), wants(&["a:1"])).await, ["Pulled", "0 ensured"]);
    // At once: the server runs on this thread, and writes on another one.
    let written = fs_err::read_to_string(served.dir.path().join("leases.json")).unwrap();
    assert!(written.contains("sha256:1"), "{written}");
}

#[tokio::test]
async fn a_failure_holds_back_the_same_run_and_no_other() {
    let served = TestDaemon::new();
    let mut client = served.client();
    for run in ["one", "two"] {
        served.backend.on_pull_of("a:1", ScriptedPull::fails("no route"));
        let request = api::EnsureRequest { run: run.into(), ..wants(&["a:1"]) };
        assert_eq!(updates(&mut client, request.clone()).await.last().unwrap(), "0 ErrImagePull");
        assert_eq!(updates(&mut client, request).await.last().unwrap(), "0 ImagePullBackOff");
    }
}

#[tokio::test]
async fn a_canceled_caller_leaves_the_queue_and_others_continue() {
    let served = TestDaemon::new();
    served.backend.hold_pulls();
    let (mut one, mut two) = (served.client(), served.client());
    let first = one.ensure(wants(&["a:1", "b:1"])).await.unwrap();
    let mut second = two.ensure(wants(&["a:1"])).await.unwrap().into_inner();
    served.pulling(2).await;
    while served.node.observability.journal().next_number() < 3 {
        tokio::task::yield_now().await;
    }
    drop((first, one));
    served.pulling(1).await;
    assert!(served.backend.finish_pull_of("a:1", ScriptedPull::ok("sha256:1", 100)));
    let mut ended = false;
    while let Some(update) = second.message().await.unwrap() {
        ended |= matches!(update.update, Some(Update::Ensured(_)));
    }
    assert!(ended);
}

#[tokio::test]
async fn a_caller_that_does_not_read_delays_no_other_caller() {
    let served = TestDaemon::new();
    let mut client = served.client();
    let many: Vec<String> = (0..5000).map(|number| format!("i{number}:1")).collect();
    for name in &many {
        served.backend.add_image(name, image(format!("sha256:{name}"), 1));
    }
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let unread = client.ensure(api::EnsureRequest { progress: true, ..wants(&many) }).await.unwrap();
    while served.node.observability.journal().next_number() < 5000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(updates(&mut served.client(), wants(&["i1:1"])).await, ["Pulled", "0 ensured"]);
    // On a busy machine there is progress to report, too.
    let is_result = |update: &Result<api::EnsureUpdate, Status>| {
        let progress = matches!(update, Ok(api::EnsureUpdate { update: Some(Update::Progress(_)) }));
        std::future::ready(!progress)
    };
    assert_eq!(unread.into_inner().filter(is_result).count().await, 10_000, "and nothing is lost");
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_not_read_delays_others_by_seconds() {
    let served = TestDaemon::new();
    for number in 0..20_000 {
        served
            .backend
            .add_image(&format!("{}:{number}", "n".repeat(200)), image(format!("sha256:{number}"), 1));
    }
    let unread = served.client().images(api::ImagesRequest::default()).await.unwrap();
    let begun = time::Instant::now();
    let mut parts = served.client().images(api::ImagesRequest::default()).await.unwrap().into_inner();
    assert_eq!(begun.elapsed().as_secs(), image_list::SLOT_WITHIN.as_secs());
    let mut listed = 0;
    while let Some(part) = parts.message().await.unwrap() {
        listed += part.images.len();
    }
    assert_eq!(listed, 20_000);
    drop(unread);
}

#[tokio::test]
async fn errors_have_a_code_a_sentence_and_a_hint() {
    let served = TestDaemon::new();
    let mut client = served.client();
    let inspect = |image: &str| api::InspectRequest { image: image.into(), exact: false };
    let absent = client.inspect(inspect("a:1")).await.unwrap_err();
    assert_eq!((absent.code(), absent.message()), (Code::NotFound, "a:1: image not found"));
    assert!(!absent.details().is_empty());
    assert_eq!(client.inspect(inspect("Bad")).await.unwrap_err().code(), Code::InvalidArgument);
    let mounts = client.mounts(api::MountsRequest {}).await.unwrap_err();
    assert_eq!(mounts.code(), Code::FailedPrecondition);
    let relative = api::UnmountRequest { target: "mnt".into(), force: false };
    assert_eq!(client.unmount(relative).await.unwrap_err().code(), Code::InvalidArgument);
    let wrong = api::KeepRequest { add: vec![api::KeepRule::default()], ..Default::default() };
    assert_eq!(client.keep(wrong).await.unwrap_err().code(), Code::InvalidArgument);
    let limits = api::CollectRequest { high_threshold_percent: Some(101), ..Default::default() };
    assert_eq!(client.plan(limits).await.unwrap_err().code(), Code::InvalidArgument);
    served.backend.set_down(Some(error("gone")));
    assert!(client.images(api::ImagesRequest::default()).await.is_err());
}

#[tokio::test]
async fn an_excessive_request_is_refused_and_the_connection_remains() {
    let served = TestDaemon::new();
    let mut client = served.client();
    let secret = |bytes: usize| api::PullSecret { document: vec![b'x'; bytes], ..Default::default() };
    let giant = api::EnsureRequest { secrets: vec![secret(17 << 20)], ..wants(&["a:1"]) };
    // The client's own limit is not what is tested.
    let refused = client.clone().max_encoding_message_size(usize::MAX).ensure(giant).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    let many = api::EnsureRequest { secrets: vec![secret(1 << 20)], ..wants(&["a:1"; 100]) };
    assert_eq!(client.ensure(many).await.unwrap_err().code(), Code::InvalidArgument);
    let names = vec!["a:1"; 10_001];
    assert_eq!(client.ensure(wants(&names)).await.unwrap_err().code(), Code::InvalidArgument);
    assert!(client.images(api::ImagesRequest::default()).await.is_ok());
}

/// A rule for images with names like this.
fn rule(name: &str) -> api::KeepRule {
    let select = api::keep_rule::Select::Name(name.to_owned());
    api::KeepRule { select: Some(select), ttl_seconds: None, budget_bytes: None }
}

#[tokio::test]
async fn rules_are_in_force_at_once_and_on_disk() {
    let served = TestDaemon::new();
    served.backend.add_image("app:1", image("sha256:1", 100));
    let mut client = served.client();
    let add = api::KeepRequest { add: vec![rule("*app*")], ..Default::default() };
    assert_eq!(client.keep(add).await.unwrap().into_inner().rules, [rule("*app*")]);
    let idle = api::KeepRequest { add: vec![rule("*other*")], ..Default::default() };
    assert_eq!(client.keep(idle).await.unwrap().into_inner().warnings.len(), 1);
    let explain = api::ExplainRequest { image: "app:1".into(), limits: None };
    let why = client.explain(explain.clone()).await.unwrap().into_inner();
    assert_eq!(why.decision.unwrap().reason(), api::DecisionReason::Kept);
    let none = api::KeepRequest { remove_all: true, ..Default::default() };
    assert!(client.keep(none).await.unwrap().into_inner().rules.is_empty());
    let why = client.explain(explain).await.unwrap().into_inner();
    assert_ne!(why.decision.unwrap().reason(), api::DecisionReason::Kept);
}

#[tokio::test]
async fn rules_of_the_settings_are_listed_with_their_place() {
    let served = TestDaemon::new();
    let settings =
        "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\ngc:\n  keep:\n    - {name: base/*}\n";
    fs_err::write(served.dir.path().join("config.yaml"), settings).unwrap();
    assert_eq!(served.node.reload().unwrap().applied, ["gc.keep"]);
    let add = api::KeepRequest { add: vec![rule("app")], ..Default::default() };
    let answer = served.client().keep(add).await.unwrap().into_inner();
    assert_eq!(answer.rules, [rule("app")]);
    let place = format!("{}:5", served.dir.path().join("config.yaml").display());
    assert_eq!(answer.configured, [api::ConfiguredRule { rule: Some(rule("base/*")), place }]);
    assert!(
        answer.warnings[0].starts_with("keep rule 2 "),
        "numbered as they are listed: {:?}",
        answer.warnings
    );
}

#[tokio::test(start_paused = true)]
async fn the_time_that_a_pod_pulls_is_measured_over_all_its_images() {
    let served = TestDaemon::new();
    for (name, seconds) in [("a:1", 20), ("b:1", 30)] {
        let pulled = ScriptedPull::ok(format!("sha256:{name}"), 1).after(Duration::from_secs(seconds));
        served.backend.on_pull_of(name, pulled);
    }
    let pod = api::PodReference { name: "web".into(), uid: "u".into(), ..api::PodReference::default() };
    let request = api::EnsureRequest { pod: Some(pod), ..wants(&["a:1", "b:1"]) };
    let seen = updates(&mut served.client(), request).await;
    assert!(seen.contains(&"1 ensured".to_owned()), "{seen:?}");
    let format = crate::node::metrics::ExpositionFormat::Text;
    let page = crate::node::metrics::exposition(
        &served.node,
        &served.connections,
        &NodeFilesystems::default(),
        format,
    )
    .unwrap();
    assert!(page.contains("larder_pod_image_pull_seconds_sum 30"), "{page}");
    assert!(page.contains("larder_pod_image_pull_seconds_count 1"), "{page}");
}

#[tokio::test(start_paused = true)]
async fn the_calls_of_a_pod_are_measured_together_and_are_one_event_that_names_their_caller() {
    // No lease is written: while a thread writes one, the paused clock moves on.
    let served = TestDaemon::on(ServingProcess::Daemon(DaemonAddresses::default()), |backend, dir| {
        testing::parts(backend, dir, None, |config| config.ensured_lease = Duration::ZERO)
    });
    for (name, seconds) in [("a:1", 20), ("b:1", 30)] {
        let pulled = ScriptedPull::ok(format!("sha256:{name}"), 1).after(Duration::from_secs(seconds));
        served.backend.on_pull_of(name, pulled);
    }
    let pod = |name: &str, uid: &str| api::PodReference {
        name: name.into(),
        namespace: "default".into(),
        uid: uid.into(),
        ..api::PodReference::default()
    };
    let request = |image: &str, pod: &api::PodReference| api::EnsureRequest {
        pod: Some(pod.clone()),
        run: format!("run of {image}"),
        ..wants(&[image])
    };
    let mut clients = [(); 4].map(|()| served.client());
    let [one, two, three, four] = &mut clients;
    // As larder's own client asks: with one call for each image.
    let (web, db) = (pod("web", "u"), pod("db", ""));
    tokio::join!(
        updates(one, request("a:1", &web)),
        updates(two, request("b:1", &web)),
        updates(three, request("a:1", &db)),
        updates(four, request("b:1", &db))
    );
    let known = served.node.observability.journal().snapshot();
    let own = format!("(pid {})", std::process::id());
    assert!(known.iter().all(|event| event.requester.ends_with(&own)), "{known:?}");
    let mut of_pods: Vec<_> =
        known.iter().filter(|event| event.reason == EventReason::ImagesPulled).collect();
    of_pods.sort_by_key(|event| event.object.name.clone());
    assert_eq!(of_pods.len(), 2, "{known:?}");
    for (event, (name, uid)) in of_pods.into_iter().zip([("db", ""), ("web", "u")]) {
        assert!(event.message.starts_with("Pulled the images of the pod in 30"), "{event:?}");
        let object = &event.object;
        assert_eq!((&*object.name, &*object.uid, &*object.field_path), (name, uid, ""));
    }
}

#[tokio::test]
async fn a_client_of_a_stopping_daemon_gets_an_error_at_once() {
    let served = TestDaemon::new();
    served.backend.hold_pulls();
    let mut early = served.client();
    let mut pulling = early.ensure(wants(&["a:1"])).await.unwrap().into_inner();
    served.pulling(1).await;
    served.stop.send_replace(true);
    let refused = served.client().images(api::ImagesRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    assert!(refused.message().contains("shutting down"), "{refused}");
    assert!(!refused.details().is_empty());
    // Calls that began before continue to their end; then the server is gone.
    served.backend.finish_pull(ScriptedPull::ok("sha256:1", 1));
    let mut last = None;
    while let Some(update) = pulling.message().await.unwrap() {
        last = update.update;
    }
    assert!(matches!(last, Some(Update::Ensured(_))), "{last:?}");
    drop((early, pulling));
    let TestDaemon { mut serving, .. } = served;
    serving.join_next().await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_command_that_is_done_waits_for_joined_calls_and_not_for_idle_connections() {
    let served = TestDaemon::by(ServingProcess::Command);
    served.backend.hold_pulls();
    let (mut idle, mut busy) = (served.client(), served.client());
    idle.join(api::JoinRequest::default()).await.unwrap();
    let mut pulling = busy.ensure(wants(&["a:1"])).await.unwrap().into_inner();
    served.pulling(1).await;
    served.stop.send_replace(true);
    time::sleep(Duration::from_secs(3)).await;
    assert_eq!(served.connections.open(), 1, "the idle one is closed");
    served.backend.finish_pull(ScriptedPull::ok("sha256:1", 1));
    let mut last = None;
    while let Some(update) = pulling.message().await.unwrap() {
        last = update.update;
    }
    assert!(matches!(last, Some(Update::Ensured(_))), "{last:?}");
    let TestDaemon { mut serving, .. } = served;
    serving.join_next().await.unwrap().unwrap();
    drop((idle, busy));
}

/// Returns the answer to a plain request on this connection.
async fn answer_of(mut stream: UnixStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

const PLAIN: &[u8] = b"GET /healthz HTTP/1.1\r\nhost: larder\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn a_connection_from_before_the_stop_is_served_after_it() {
    let served = TestDaemon::new();
    let mut silent = Vec::new();
    for number in 0..20 {
        silent.push(UnixStream::connect(served.dir.path().join("s")).await.unwrap());
        while served.connections.open() <= number {
            tokio::task::yield_now().await;
        }
    }
    served.stop.send_replace(true);
    for stream in &silent {
        assert_eq!(stream.try_write(PLAIN).unwrap(), PLAIN.len());
    }
    for stream in silent {
        let answer = answer_of(stream).await;
        assert!(answer.contains("503") && answer.ends_with("shutting down\n"), "{answer:?}");
    }
}

#[tokio::test]
async fn a_queued_client_gets_an_answer_at_the_stop() {
    let served = TestDaemon::new();
    served.backend.hold_pulls();
    let mut early = served.client();
    let pulling = early.ensure(wants(&["a:1"])).await.unwrap();
    served.connections.fill();
    let waiting = UnixStream::connect(served.dir.path().join("s")).await.unwrap();
    for _ in 0..1000 {
        tokio::task::yield_now().await; // so that it is accepted
    }
    assert_eq!(waiting.try_write(PLAIN).unwrap(), PLAIN.len());
    served.stop.send_replace(true);
    // As the end of all pulls at a stop does.
    drop((pulling, early));
    let answer = answer_of(waiting).await;
    assert!(answer.ends_with("shutting down\n"), "{answer:?}");
}

#[tokio::test]
async fn the_memory_of_all_requests_is_bounded() {
    let served = TestDaemon::new();
    served.backend.hold_pulls();
    let giant = |image: &str| api::EnsureRequest {
        secrets: vec![api::PullSecret { document: vec![b'x'; 15 << 20], ..Default::default() }],
        ..wants(&[image])
    };
    let mut running = Vec::new();
    for image in ["a:1", "b:1", "c:1"] {
        let mut client = served.client();
        running.push((client.ensure(giant(image)).await.unwrap(), client));
    }
    let refused = served.client().ensure(giant("d:1")).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(served.client().ensure(wants(&["e:1"])).await.is_ok(), "others do not notice");
    running.pop();
    let mut client = served.client();
    while client.ensure(giant("f:1")).await.is_err() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn watchers_get_new_events_and_do_not_delay_the_stop() {
    let served = TestDaemon::new();
    let mut client = served.client();
    let request = api::EventsRequest { from: 0, watch: true };
    let mut events = client.events(request).await.unwrap().into_inner();
    assert_eq!(updates(&mut served.client(), wants(&["Bad"])).await.len(), 2);
    let first = events.message().await.unwrap().unwrap().item;
    assert!(matches!(first, Some(Item::Event(event)) if event.number == Some(0)));
    let second = events.message().await.unwrap().unwrap().item;
    assert!(matches!(second, Some(Item::Event(event)) if event.message == "Error: InvalidImageName"));
    served.stop.send_replace(true);
    assert_eq!(events.message().await.unwrap(), None);
}

#[tokio::test]
async fn a_lease_keeps_an_image_from_a_round() {
    let served = TestDaemon::new();
    for name in ["a:1", "b:1"] {
        served.backend.add_image(name, image(format!("sha256:{name}"), 100));
    }
    let mut client = served.client();
    let lease = |image: &str, seconds| api::LeaseRequest { image: image.into(), seconds };
    assert!(client.lease(lease("a:1", 60)).await.unwrap().into_inner().ends.is_some());
    assert_eq!(client.lease(lease("no:1", 60)).await.unwrap_err().code(), Code::NotFound);
    let goal = Some(Goal::AllUnused(true));
    let round = client.collect(api::CollectRequest { goal, ..Default::default() }).await.unwrap();
    let removed: Vec<_> = round.into_inner().removals.into_iter().map(|removal| removal.id).collect();
    assert_eq!(removed, ["sha256:b:1"]);
    for ended in [true, false] {
        assert_eq!(client.lease(lease("a:1", 0)).await.unwrap().into_inner().ended, Some(ended));
    }
}

/// Leases the image `NAME` with the ID `sha256:NAME`, which is added, for ten minutes.
async fn lease_new_image(served: &TestDaemon, name: &str, purpose: LeasePurpose) {
    served.backend.add_image(name, image(format!("sha256:{name}"), 100));
    let check = served.node.collection.gate().begin_presence_check();
    assert!(check.lease(format!("sha256:{name}"), purpose, Duration::from_secs(600)).await);
}

#[tokio::test]
async fn only_leases_of_pulls_end_for_a_prune() {
    let served = TestDaemon::new();
    lease_new_image(&served, "pulled:1", LeasePurpose::Ensure).await;
    lease_new_image(&served, "prefetched:1", LeasePurpose::Prefetch).await;
    lease_new_image(&served, "leased:1", LeasePurpose::Request).await;
    let goal = Some(Goal::AllUnused(true));
    let ended_leases = api::EndedLeases::Pulls.into();
    let request = api::CollectRequest { goal, ended_leases, ..Default::default() };
    let round = served.client().collect(request).await.unwrap().into_inner();
    let removed: Vec<_> = round.removals.into_iter().map(|removal| removal.id).collect();
    assert_eq!(removed, ["sha256:pulled:1"]);
}

/// On a full disk, say, where only removals make room.
#[tokio::test]
async fn a_round_removes_leased_images_while_leases_cannot_be_written() {
    let served = TestDaemon::new();
    lease_new_image(&served, "pulled:1", LeasePurpose::Ensure).await;
    served.node.collection.save_leases().await.unwrap();
    let taken = served.dir.path().join("leases.json.new");
    fs_err::create_dir(&taken).unwrap();
    let goal = Some(Goal::AllUnused(true));
    let ended_leases = api::EndedLeases::Pulls.into();
    let request = api::CollectRequest { goal, ended_leases, ..Default::default() };
    let round = served.client().collect(request).await.unwrap().into_inner();
    assert_eq!((round.removals.len(), round.error), (1, None));
    fs_err::remove_dir(taken).unwrap();
    served.node.collection.save_leases().await.unwrap();
    let next = RemovalGate::with_file(served.dir.path().join("leases.json"), Duration::ZERO);
    assert_eq!(next.active_leases(), [], "the end is saved later");
}

#[tokio::test]
async fn a_request_for_a_lease_is_answered_with_the_longest_one() {
    let served = TestDaemon::new();
    lease_new_image(&served, "a:1", LeasePurpose::Ensure).await;
    for (seconds, owner) in [(60, api::LeaseOwner::Ensure), (3600, api::LeaseOwner::Request)] {
        let request = api::LeaseRequest { image: "a:1".into(), seconds };
        let leased = served.client().lease(request).await.unwrap().into_inner();
        assert_eq!(leased.owner(), owner);
        let ends: jiff::Timestamp = leased.ends.unwrap().parse().unwrap();
        let left = ends.duration_since(jiff::Timestamp::now()).as_secs();
        assert!((i64::try_from(seconds.max(600)).unwrap() - 60..3601).contains(&left), "{left}");
    }
}

#[tokio::test]
async fn a_lease_has_a_bound_whatever_a_client_asks_for() {
    let served = TestDaemon::new();
    served.backend.add_image("a:1", image("sha256:1", 100));
    let mut client = served.client();
    let refused =
        client.lease(api::LeaseRequest { image: "a:1".into(), seconds: u64::MAX }).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    let longest = crate::quantity::LONGEST.as_secs();
    let leased = client.lease(api::LeaseRequest { image: "a:1".into(), seconds: longest }).await.unwrap();
    assert_eq!(leased.into_inner().id, "sha256:1");
}

#[tokio::test]
async fn a_lease_on_an_image_of_a_runtime_outlives_the_process() {
    let served = TestDaemon::new();
    served.backend.add_image("a:1", image("sha256:1", 100));
    let leased = || served.node.collection.gate().active_leases().len();
    for seconds in [60, 0] {
        served.client().lease(api::LeaseRequest { image: "a:1".into(), seconds }).await.unwrap();
        let next = RemovalGate::with_file(served.dir.path().join("leases.json"), Duration::ZERO);
        let expected = usize::from(seconds > 0);
        assert_eq!((leased(), next.active_leases().len()), (expected, expected));
    }
}

/// Its lease would retain the image that a later process pulls.
#[tokio::test]
async fn a_removal_answers_after_the_end_of_the_lease_is_on_disk() {
    let served = TestDaemon::new();
    served.backend.add_image("a:1", image("sha256:1", 100));
    served.client().lease(api::LeaseRequest { image: "a:1".into(), seconds: 60 }).await.unwrap();
    let request = api::RemoveRequest { images: vec!["a:1".into()], ..api::RemoveRequest::default() };
    served.client().remove(request).await.unwrap();
    assert_eq!(served.backend.images().len(), 0);
    // At once: the process may be killed.
    let next = RemovalGate::with_file(served.dir.path().join("leases.json"), Duration::ZERO);
    assert_eq!(next.active_leases(), []);
}

#[tokio::test]
async fn settings_wait_for_the_restart_that_one_of_them_requires() {
    let served = TestDaemon::new();
    let reload = |settings: &str| {
        let text = format!("apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n{settings}\n");
        fs_err::write(served.dir.path().join("config.yaml"), text).unwrap();
        let reloaded = served.node.reload().unwrap();
        (reloaded.applied, reloaded.needs_restart, reloaded.held)
    };
    let events = || served.node.observability.journal().snapshot().len();
    let high = || served.node.collection.unchecked_collector().policy().high_threshold_percent;
    let before = high();
    assert_eq!(reload("listen: {mode: '0600'}"), (vec![], vec!["listen.mode"], vec![]));
    let both = "listen: {mode: '0600'}\nimageGCHighThresholdPercent: 99";
    let threshold = "imageGCHighThresholdPercent";
    assert_eq!(reload(both), (vec![], vec!["listen.mode"], vec![threshold]));
    assert_eq!((events(), high()), (0, before), "nothing is in force");
    let status = served.client().status(api::StatusRequest::default()).await.unwrap().into_inner();
    assert_eq!(status.needs_restart, ["listen.mode"]);
    assert_eq!(reload("imageGCHighThresholdPercent: 99"), (vec![threshold], vec![], vec![]));
    assert_eq!((events(), high()), (1, 99));
    assert_eq!(reload(""), (vec![threshold], vec![], vec![]));
}
