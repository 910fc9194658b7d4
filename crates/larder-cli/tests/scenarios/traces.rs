//! Traces of the real daemon, as a collector gets them.

use std::path::{Path, PathBuf};

use larder::credentials::{Credential, Secret};
use larder_cri::proto::{self, ImageSpec, PullImageRequest};
use larder_testkit::free_address;
use larder_testkit_peers::fake_cri::{FakeCri, Rpc};
use larder_testkit_peers::otlp_receiver::{OtlpReceiver, ReceivedSpan, Trace};
use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::registry::{PASSWORD, USER};
use larder_testkit_peers::tls::certificates;
use larder_testkit_peers::{ImageBuilder, LayerFiles, RegistryAccess, RegistryOptions};
use tonic::Request;

use crate::served::CriDaemon;
use crate::world::{LarderProcess, RuntimeFixture, larder_in};

const ENSURE: &str = "larder.control.v1.Control/Ensure";
const PULL: &str = "runtime.v1.ImageService/PullImage";
const FETCH: &str = "pkg.unpack.unpacker.fetchLayer";
const REQUEST: &str = "remotes.docker.resolver.HTTPRequest";
const CALLER: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER_SPAN: &str = "00f067aa0ba902b7";

/// A daemon on larder's own store with these variables.
fn serve(world: &RuntimeFixture, variables: &[(&str, &str)], flags: &[&str]) -> CriDaemon {
    let socket = PathBuf::from(world.path("larder.sock"));
    let serve = ["serve", "--socket", &socket.to_string_lossy(), "--metrics-address", ""];
    let mut command = world.command(&[&serve[..], &["--image-gc-high-threshold", "100"], flags].concat());
    command.env("OTEL_BSP_SCHEDULE_DELAY", "20").envs(variables.iter().copied());
    CriDaemon::at(socket, LarderProcess::start(command))
}

fn world_with(image: &ImageBuilder) -> Option<(RuntimeFixture, String)> {
    let world = RuntimeFixture::with_store(RegistryOptions::default())?;
    image.push(&world.registry, "shop/web:1").unwrap();
    let name = world.registry.image("shop/web:1");
    Some((world, name))
}

fn two_layers() -> ImageBuilder {
    ImageBuilder::new()
        .layer(LayerFiles::new().noise("a", 50_000, 1))
        .layer(LayerFiles::new().noise("b", 60_000, 2))
}

#[track_caller]
fn assert_attributes(span: &ReceivedSpan, expected: &[(&str, &str)]) {
    for (name, value) in expected {
        assert_eq!(span.attributes.get(*name).map(String::as_str), Some(*value), "{name} of {span:#?}");
    }
}

#[track_caller]
fn assert_nested(trace: &Trace) {
    for span in &trace.spans {
        let parent = trace.spans.iter().find(|parent| parent.span_id == span.parent_id);
        let inside = |parent: &ReceivedSpan| parent.start <= span.start && span.end <= parent.end;
        assert!(parent.is_none_or(inside), "{} lasts longer than its parent:\n{}", span.name, trace.tree());
        assert!(span.start <= span.end, "{span:#?}");
    }
}

#[test]
fn a_trace_of_one_ensure_shows_every_stage() {
    let Some((world, image)) = world_with(&two_layers()) else { return };
    let collector = OtlpReceiver::start().unwrap();
    let endpoint = format!("http://{}", collector.address());
    let daemon = serve(
        &world,
        &[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test"),
        ],
        &[],
    );
    let socket = daemon.socket.to_string_lossy().into_owned();
    world.larder(&["--daemon", &socket, "ensure", &image]).expect(0);
    let trace = collector.trace_with(ENSURE);
    eprintln!("{}", trace.tree());

    let call = trace.span(ENSURE);
    assert_eq!((call.kind, call.parent_id.as_str()), ("server", ""));
    assert_attributes(
        call,
        &[("rpc.system.name", "grpc"), ("rpc.method", ENSURE), ("rpc.response.status_code", "OK")],
    );
    let resource = |name: &str| call.resource.get(name).map(String::as_str);
    assert_eq!(resource("service.name"), Some("larder"));
    assert_eq!(resource("service.version"), Some(env!("CARGO_PKG_VERSION")));
    assert_eq!(resource("deployment.environment"), Some("test"));

    let ensure = trace.span("EnsureImageExists");
    assert_eq!(trace.path(ensure), [ENSURE, "EnsureImageExists"]);
    assert_attributes(ensure, &[("image.ref", &image), ("larder.outcome", "pulled")]);
    let pull = trace.span("pull.Pull");
    assert_eq!(trace.path(pull), [ENSURE, "EnsureImageExists", "pull.Pull"]);
    assert_eq!(pull.attributes["image.id"], ensure.attributes["image.id"]);
    let to_pull = [ENSURE, "EnsureImageExists", "pull.Pull"];
    let below = |names: &[&'static str]| [&to_pull[..], names].concat();

    let resolve = trace.span("pull.Resolve");
    assert_eq!(trace.path(resolve), below(&["pull.Resolve"]));
    assert_attributes(resolve, &[("larder.layers", "2")]);
    let waits = trace.all("pull.Wait");
    let queue = waits.iter().find(|wait| wait.attributes["larder.wait.reason"] == "queue").unwrap();
    assert_eq!(trace.path(queue), below(&["pull.Wait"]));

    let layers = trace.all(FETCH);
    assert_eq!(layers.len(), 2, "{}", trace.tree());
    for layer in layers {
        assert_eq!(trace.path(layer), below(&[FETCH]));
        assert_attributes(
            layer,
            &[
                ("larder.layer.resumed_bytes", "0"),
                ("larder.layer.attempts", "1"),
                ("larder.layer.registry", &world.registry.address()),
            ],
        );
        assert!(layer.attributes["layer.media.size"].parse::<u64>().unwrap() > 50_000);
        let digest = &layer.attributes["layer.media.digest"];
        let children = trace.spans.iter().filter(|span| span.parent_id == layer.span_id);
        let mut names: Vec<&str> = children.map(|span| span.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["pkg.unpack.unpacker.unpackLayer", "pull.Wait", REQUEST]);
        let merged = trace.all("pull.MergeLayer");
        let merged = merged.iter().find(|span| span.attributes["layer.media.digest"] == *digest).unwrap();
        assert_eq!(trace.path(merged), below(&["pull.MergeLayer"]));
    }
    let commit = trace.span("pull.pull.createNewImage");
    assert_eq!(trace.path(commit), below(&["pull.pull.createNewImage"]));
    assert!(resolve.end <= commit.start);

    let requests = trace.all(REQUEST);
    // On loopback TLS is tried first.
    assert_eq!(requests.len(), 5, "TLS, manifest, config, two layers:\n{}", trace.tree());
    for request in requests {
        assert_eq!(request.kind, "client");
        assert_attributes(request, &[("http.request.method", "GET"), ("server.address", "127.0.0.1")]);
        assert!(request.attributes["url.path"].starts_with("/v2/shop/web/"));
    }
    assert_nested(&trace);
    daemon.stop().expect(0);
}

#[test]
fn spans_are_exported_over_http_as_well() {
    let Some((world, image)) = world_with(&ImageBuilder::small(1, 50_000)) else { return };
    for (protocol, kind) in [("http/protobuf", "application/x-protobuf"), ("http/json", "application/json")] {
        let collector = OtlpReceiver::start().unwrap();
        let endpoint = format!("http://{}", collector.address());
        let daemon = serve(
            &world,
            &[
                ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
                ("OTEL_EXPORTER_OTLP_PROTOCOL", protocol),
                ("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=shop"),
                ("OTEL_SERVICE_NAME", "images"),
            ],
            &[],
        );
        daemon.pull(&image).unwrap();
        let trace = collector.trace_with(PULL);
        assert_eq!(trace.span(PULL).resource["service.name"], "images");
        let batch = &collector.batches()[0];
        assert_eq!(batch.headers["content-type"], kind);
        assert_eq!(batch.headers["x-tenant"], "shop");
        daemon.stop().expect(0);
    }
}

#[test]
fn spans_are_exported_over_tls_and_certificates_that_are_missing_are_named() {
    let Some((world, image)) = world_with(&ImageBuilder::small(1, 50_000)) else { return };
    let made = certificates(Path::new(&world.path("tls"))).unwrap();
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let files = [
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", path(&made.ca)),
        ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", path(&made.certificate)),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", path(&made.key)),
    ];
    for protocol in ["grpc", "http/protobuf"] {
        // The files that larder has, and whether the collector requires a client certificate.
        for (given, requires_client) in [(1, false), (3, true), (0, false), (1, true)] {
            let collector = OtlpReceiver::start_tls(&made, requires_client).unwrap();
            let endpoint = format!("https://{}", collector.address());
            let mut variables =
                vec![("OTEL_EXPORTER_OTLP_ENDPOINT", &*endpoint), ("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)];
            variables.extend(files[..given].iter().map(|(name, path)| (*name, path.as_str())));
            let daemon = serve(&world, &variables, &[]);
            daemon.pull(&image).unwrap();
            if given == 1 + 2 * usize::from(requires_client) {
                let trace = collector.trace_with(PULL);
                assert_eq!(trace.path(trace.span("pull.Resolve")), [PULL, "pull.Pull", "pull.Resolve"]);
                assert_eq!(daemon.logged("cannot export traces"), 0, "{}", daemon.running.stderr());
            } else {
                let failure = format!("cannot export traces to {endpoint}: ");
                daemon.wait_for_log(&failure, 1);
                let before = daemon.metric("larder_trace_spans_dropped_total");
                daemon.list();
                wait_until("more is dropped", || daemon.metric("larder_trace_spans_dropped_total") > before);
                assert_eq!(daemon.logged("cannot export traces"), 1, "{}", daemon.running.stderr());
                // A server that refuses a client may close before the client reads why.
                if !requires_client {
                    assert_eq!(daemon.logged("set OTEL_EXPORTER_OTLP_CERTIFICATE to a file"), 1);
                }
                assert_eq!(collector.spans(), [], "{protocol}");
            }
            daemon.stop().expect(0);
        }
    }
}

fn pull_request(image: &str, traceparent: &str) -> Request<PullImageRequest> {
    let spec = ImageSpec { image: image.to_owned(), ..ImageSpec::default() };
    let mut request = Request::new(PullImageRequest { image: Some(spec), ..PullImageRequest::default() });
    request.metadata_mut().insert("traceparent", traceparent.parse().unwrap());
    request
}

#[test]
fn a_call_of_kubelet_is_part_of_its_trace_and_sampled_as_it_says() {
    let Some((world, image)) = world_with(&ImageBuilder::small(1, 50_000)) else { return };
    let collector = OtlpReceiver::start().unwrap();
    // As kubelet has it: what begins in larder is not sampled.
    let kubelet = world.file(
        "kubelet.yaml",
        &format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
             tracing:\n  endpoint: {}\n  samplingRatePerMillion: 0\n",
            collector.address()
        ),
    );
    let daemon = serve(&world, &[], &["--kubelet-config", &kubelet]);
    daemon.list();
    let mut images = daemon.wire().images();
    for (trace, flags) in [("11111111111111111111111111111111", "00"), (CALLER, "01")] {
        let request = pull_request(&image, &format!("00-{trace}-{CALLER_SPAN}-{flags}"));
        daemon.runtime.block_on(images.pull_image(request)).unwrap();
    }
    let trace = collector.trace_with(PULL);
    daemon.stop().expect(0);
    let call = trace.span(PULL);
    assert_eq!((call.trace_id.as_str(), call.parent_id.as_str()), (CALLER, CALLER_SPAN));
    assert_eq!(trace.path(trace.span("pull.Resolve")), [PULL, "pull.Pull", "pull.Resolve"]);
    let others: Vec<_> = collector.spans().into_iter().filter(|span| span.trace_id != CALLER).collect();
    assert_eq!(others, [], "neither unsampled calls nor what begins here");
}

/// A runtime with one image, and its name.
fn runtime_with_image() -> (FakeCri, &'static str) {
    let (runtime, image) = (FakeCri::start(), "registry.example/shop/web:1");
    let offered =
        proto::Image { id: "sha256:1".into(), repo_tags: vec![image.into()], ..proto::Image::default() };
    runtime.offer(image, offered);
    (runtime, image)
}

/// The span that the runtime's `PullImage` is a child of, which has to be of the caller's trace.
fn parent_of_pull(runtime: &FakeCri) -> String {
    let received = runtime.received().into_iter().find(|call| call.rpc == Rpc::PullImage).unwrap();
    let parent = received.traceparent.expect("the trace is passed on");
    let span = parent.strip_prefix(&format!("00-{CALLER}-")).and_then(|rest| rest.strip_suffix("-01"));
    span.unwrap_or_else(|| panic!("{parent}")).to_owned()
}

#[test]
fn a_runtime_is_called_within_the_trace_of_kubelet_or_of_a_command() {
    let home = tempfile::tempdir().unwrap();
    for is_kubelet in [true, false] {
        let (runtime, image) = runtime_with_image();
        let collector = OtlpReceiver::start().unwrap();
        let path = |name: &str| home.path().join(format!("{is_kubelet}-{name}"));
        let mut command = larder_in(home.path());
        command.arg("serve").arg("--socket").arg(path("larder.sock")).args(["--metrics-address", ""]);
        command.arg("--state").arg(path("state")).arg("--backend").arg(runtime.endpoint().to_string());
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{}", collector.address()));
        command.env("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc").env("OTEL_BSP_SCHEDULE_DELAY", "20");
        let daemon = CriDaemon::at(path("larder.sock"), LarderProcess::start(command));
        let called = if is_kubelet {
            let request = pull_request(image, &format!("00-{CALLER}-{CALLER_SPAN}-01"));
            daemon.runtime.block_on(daemon.wire().images().pull_image(request)).unwrap();
            PULL
        } else {
            let mut command = larder_in(home.path());
            command.arg("--daemon").arg(&daemon.socket).args(["ensure", image]);
            command.env("TRACEPARENT", format!("00-{CALLER}-{CALLER_SPAN}-01"));
            LarderProcess::start(command).finish().expect(0);
            ENSURE
        };
        let parent = parent_of_pull(&runtime);
        // The daemon's own span of the call is exported after those in it; it has them all exported when it stops.
        daemon.stop().expect(0);
        let trace = collector.trace_with(called);
        let span = trace.spans.iter().find(|span| span.span_id == parent);
        let span = span.unwrap_or_else(|| panic!("{parent} is no span of larder:\n{}", trace.tree()));
        assert_eq!((trace.path(span)[0], span.kind), (called, "client"), "{}", trace.tree());
    }
}

#[test]
fn a_command_without_a_daemon_passes_the_trace_of_its_environment_on_to_the_runtime() {
    let home = tempfile::tempdir().unwrap();
    let (runtime, image) = runtime_with_image();
    let mut command = larder_in(home.path());
    command
        .arg("--state")
        .arg(home.path().join("state"))
        .args(["--backend", &runtime.endpoint().to_string()]);
    command.args(["ensure", image]).env("TRACEPARENT", format!("00-{CALLER}-{CALLER_SPAN}-01"));
    LarderProcess::start(command).finish().expect(0);
    assert_eq!(parent_of_pull(&runtime), CALLER_SPAN, "such a command makes no span");
}

#[test]
fn a_command_continues_the_trace_of_its_environment() {
    let Some((world, image)) = world_with(&ImageBuilder::small(1, 50_000)) else { return };
    let collector = OtlpReceiver::start().unwrap();
    let endpoint = format!("http://{}", collector.address());
    let collected = [("OTEL_EXPORTER_OTLP_ENDPOINT", &*endpoint), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")];
    let daemon = serve(&world, &collected, &[]);
    let mut command = world.command(&["--daemon", &daemon.socket.to_string_lossy(), "ensure", &image]);
    command.env("TRACEPARENT", format!("00-{CALLER}-{CALLER_SPAN}-01"));
    LarderProcess::start(command).finish().expect(0);
    let trace = collector.trace_with(ENSURE);
    let call = trace.span(ENSURE);
    assert_eq!((call.trace_id.as_str(), call.parent_id.as_str()), (CALLER, CALLER_SPAN));
    assert_eq!(trace.path(trace.span("pull.Pull")), [ENSURE, "EnsureImageExists", "pull.Pull"]);
    daemon.stop().expect(0);
}

#[test]
fn a_collection_shows_what_it_measured_planned_and_removed() {
    let Some((world, image)) = world_with(&ImageBuilder::small(1, 50_000)) else { return };
    let collector = OtlpReceiver::start().unwrap();
    let endpoint = format!("http://{}", collector.address());
    let settings = world.file(
        "larder.yaml",
        &format!(
            "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n\
             tracing:\n  endpoint: {endpoint}\n  samplingRatePerMillion: 1000000\n"
        ),
    );
    world.larder(&["pull", &image]).expect(0);
    world.end_leases();
    let daemon = serve(&world, &[], &["--config", &settings]);
    let socket = daemon.socket.to_string_lossy().into_owned();
    let gc = ["--daemon", &socket, "gc", "--all-unused", "--force", "--minimum-image-ttl-duration", "0"];
    world.larder(&gc).expect(0);
    // The span of the call is the last one to end.
    let trace = collector.trace_with("larder.control.v1.Control/Collect");
    eprintln!("{}", trace.tree());
    let round = trace.all("Images/GarbageCollect");
    let round = round.first().expect("a round");
    assert_attributes(round, &[("larder.gc.removed_images", "1")]);
    let children: Vec<&str> = trace
        .spans
        .iter()
        .filter(|span| span.parent_id == round.span_id)
        .map(|span| span.name.as_str())
        .collect();
    for stage in ["gc.Reclaim", "gc.Observe", "gc.Measure", "gc.Plan", "gc.Remove"] {
        assert!(children.contains(&stage), "{stage} in {children:?}");
    }
    let removal = trace.span("gc.Remove");
    assert_attributes(removal, &[("larder.gc.outcome", "removed"), ("larder.gc.reason", "unused")]);
    assert!(removal.attributes["image.names"].contains(&image), "{removal:#?}");
    for bytes in ["larder.gc.promised_bytes", "larder.gc.freed_bytes"] {
        assert!(removal.attributes[bytes].parse::<u64>().unwrap() >= 50_000, "{removal:#?}");
    }
    assert_nested(&trace);
    daemon.stop().expect(0);
}

#[test]
fn no_span_has_a_secret_and_a_failed_pull_is_an_error() {
    let options = RegistryOptions { auth: RegistryAccess::Basic, ..RegistryOptions::default() };
    let Some(world) = RuntimeFixture::with_store(options) else { return };
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let collector = OtlpReceiver::start().unwrap();
    let endpoint = format!("http://{}", collector.address());
    let daemon = serve(
        &world,
        &[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20planted-token"),
        ],
        &[],
    );
    let credential = |password: &str| Credential {
        username: USER.into(),
        password: Secret::new(password),
        ..Credential::default()
    };
    daemon.pull_as(&world.registry.image("shop/web:1"), Some(&credential("planted-wrong"))).unwrap_err();
    let trace = collector.trace_with(PULL);
    let pull = trace.span("pull.Pull");
    assert!(pull.error.as_ref().is_some_and(|error| !error.is_empty()), "{pull:#?}");
    assert_attributes(pull, &[("error.type", "access_denied")]);
    assert!(trace.span("pull.Resolve").error.is_some());

    daemon.pull_as(&world.registry.image("shop/web:1"), Some(&credential(PASSWORD))).unwrap();
    wait_until("the pull is exported", || {
        collector.spans().iter().any(|span| span.name == "pull.pull.createNewImage")
    });
    let log = daemon.stop().expect(0).stderr;
    // The base64 text of the name and each password, too.
    let secrets = [PASSWORD, "planted-wrong", "planted-token", "cHVsbGVyOn"];
    for span in collector.spans() {
        assert!(!secrets.iter().any(|secret| span.raw.contains(secret)), "{span:#?}");
    }
    assert!(!secrets.iter().any(|secret| log.contains(secret)), "{log}");
}

#[test]
fn a_bucket_of_the_metrics_names_the_trace_of_its_ensure() {
    let Some((world, image)) = world_with(&ImageBuilder::small(1, 50_000)) else { return };
    let collector = OtlpReceiver::start().unwrap();
    let endpoint = format!("http://{}", collector.address());
    let daemon = serve(&world, &[("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)], &[]);
    let socket = daemon.socket.to_string_lossy().into_owned();
    world.larder(&["--daemon", &socket, "ensure", &image]).expect(0);
    let trace = collector.trace_with(ENSURE).span("EnsureImageExists").trace_id.clone();
    let bucket = "larder_image_pull_duration_seconds_bucket{";
    let with_exemplar = |page: &str| -> Vec<String> {
        let lines = page.lines().filter(|line| line.starts_with(bucket) && line.contains(" # "));
        lines.map(|line| line.split(" # ").nth(1).unwrap().to_owned()).collect()
    };
    let open_metrics = daemon.get_as("/metrics", "application/openmetrics-text; version=1.0.0");
    assert!(
        open_metrics.to_lowercase().contains("content-type: application/openmetrics-text"),
        "{open_metrics}"
    );
    let [exemplar] = &with_exemplar(&open_metrics)[..] else { panic!("{open_metrics}") };
    assert!(exemplar.starts_with(&format!("{{trace_id=\"{trace}\"}} ")), "{exemplar} is not of {trace}");
    let text = daemon.get_as("/metrics", "text/plain");
    assert!(text.contains(bucket) && with_exemplar(&text).is_empty(), "{text}");
    daemon.stop().expect(0);
}

#[test]
fn callers_of_one_pull_are_linked_to_it() {
    let Some((world, _)) = world_with(&ImageBuilder::small(1, 50_000)) else { return };
    let collector = OtlpReceiver::start().unwrap();
    let endpoint = format!("http://{}", collector.address());
    let daemon = serve(&world, &[("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)], &[]);
    let socket = daemon.socket.to_string_lossy().into_owned();
    let gate = world.gate();
    let image = gate.image("shop/web:1");
    gate.hold_blobs_after(0);
    let ensure = || world.start_larder(&["--daemon", &socket, "ensure", &image]);
    let mut clients = [ensure(), ensure()];
    for client in &mut clients {
        client.wait_for_output("Pulling image");
    }
    gate.wait_until_held(1);
    gate.open();
    clients.into_iter().for_each(LarderProcess::succeed);
    let of = |name: &str| -> Vec<ReceivedSpan> {
        collector.spans().into_iter().filter(|span| span.name == name).collect()
    };
    wait_until("both calls are exported", || of(ENSURE).len() == 2);
    let (pulls, ensures) = (of("pull.Pull"), of("EnsureImageExists"));
    let [pull] = &pulls[..] else { panic!("{pulls:#?}") };
    let joined = ensures.iter().find(|ensure| ensure.span_id != pull.parent_id).unwrap();
    assert_ne!(joined.trace_id, pull.trace_id);
    assert_eq!(joined.links, [pull.span_id.as_str()]);
    assert_eq!(pull.links, [joined.span_id.as_str()]);
    daemon.stop().expect(0);
}

#[test]
fn a_collector_that_is_down_is_reported_once_and_holds_up_nothing() {
    let Some((world, image)) = world_with(&ImageBuilder::small(1, 50_000)) else { return };
    let port = free_address().port();
    let endpoint = format!("http://127.0.0.1:{port}");
    let daemon = serve(
        &world,
        &[("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")],
        &[],
    );
    daemon.pull(&image).unwrap();
    daemon.wait_for_log("cannot export traces to http://127.0.0.1:", 1);
    for _ in 0..2 {
        let before = daemon.metric("larder_trace_spans_dropped_total");
        daemon.list();
        wait_until("the spans are dropped", || daemon.metric("larder_trace_spans_dropped_total") > before);
    }
    assert_eq!(daemon.logged("cannot export traces"), 1, "{}", daemon.running.stderr());
    let collector = OtlpReceiver::start_at(port).unwrap();
    wait_until("it is exported to again", || {
        daemon.list();
        !collector.spans().is_empty()
    });
    daemon.wait_for_log("exporting traces to http://127.0.0.1:", 2);
    assert!(daemon.metric("larder_trace_spans_exported_total") > 0.5);
    daemon.stop().expect(0);
}
