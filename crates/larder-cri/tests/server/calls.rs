//! The response to each call of CRI, as kubelet and crictl make it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::{
    BackendError, CallErrorKind, Condition, EndpointFailure, FilesystemUsage, Filesystems, Image, ImageSpec,
    RuntimeInfo,
};
use larder::credentials::{Secret, encode_auth};
use larder::pull::ImageManager;
use larder::retention::RemovalGate;
use larder_cri::{Endpoint, MAX_MESSAGE_BYTES, call_error, proto};
use larder_testkit::fake_backend::{BackendCall, FakeBackend, ScriptedPull, image};
use larder_testkit_peers::fake_cri::FakeCri;
use larder_testkit_peers::wire::with_deadline;
use tonic::{Code, Status};

use crate::world::CriTestServer;

const APP: &str = "registry.example/app:v1";

fn spec(image: &str) -> proto::ImageSpec {
    proto::ImageSpec { image: image.into(), ..proto::ImageSpec::default() }
}

fn of(image: &str) -> proto::ImageStatusRequest {
    proto::ImageStatusRequest { image: Some(spec(image)), verbose: false }
}

fn pull(image: &str) -> proto::PullImageRequest {
    proto::PullImageRequest { image: Some(spec(image)), ..proto::PullImageRequest::default() }
}

/// An image with all fields of CRI.
fn full() -> Image {
    Image {
        repo_tags: vec![APP.into(), "registry.example/app:stable".into()],
        repo_digests: vec!["registry.example/app@sha256:d".into()],
        uid: Some(0),
        pinned: true,
        spec: Some(ImageSpec {
            annotations: BTreeMap::from([("a".into(), "1".into())]),
            runtime_handler: "kata".into(),
            ..ImageSpec::named("sha256:app")
        }),
        ..image("sha256:app", 7)
    }
}

#[tokio::test]
async fn the_status_of_an_image_is_complete_and_equal_for_each_of_its_names() {
    let fake = FakeBackend::new();
    fake.set_images(vec![full(), image("sha256:other", 8)]);
    let server = CriTestServer::start(fake);
    let mut images = server.wire().await.images();
    let expected = proto::Image {
        id: "sha256:app".into(),
        repo_tags: full().repo_tags,
        repo_digests: full().repo_digests,
        size: 7,
        uid: Some(proto::Int64Value { value: 0 }),
        username: String::new(),
        spec: Some(proto::ImageSpec {
            image: "sha256:app".into(),
            annotations: BTreeMap::from([("a".into(), "1".into())]),
            runtime_handler: "kata".into(),
            ..proto::ImageSpec::default()
        }),
        pinned: true,
    };
    for name in ["sha256:app", APP, "registry.example/app:stable", "registry.example/app@sha256:d"] {
        let response = images.image_status(of(name)).await.unwrap().into_inner();
        assert_eq!((response.image.as_ref(), response.info.len()), (Some(&expected), 0), "{name}");
        let filter = Some(proto::ImageFilter { image: Some(spec(name)) });
        let listed = images.list_images(proto::ListImagesRequest { filter }).await.unwrap().into_inner();
        assert_eq!(listed.images, std::slice::from_ref(&expected), "{name}");
    }
    let absent = images.image_status(of("registry.example/none:v1")).await.unwrap().into_inner();
    assert_eq!(absent, proto::ImageStatusResponse::default());
    for filter in
        [None, Some(proto::ImageFilter { image: None }), Some(proto::ImageFilter { image: Some(spec("")) })]
    {
        let listed = images.list_images(proto::ListImagesRequest { filter }).await.unwrap().into_inner();
        assert_eq!(listed.images.len(), 2, "no filter is all of them");
    }
}

#[tokio::test]
async fn a_list_with_a_filter_leases_nothing_and_a_status_does() {
    let (fake, gate) = (FakeBackend::new(), Arc::new(RemovalGate::default()));
    fake.add_image(APP, image("sha256:app", 7));
    let manager = ImageManager::new(Arc::new(fake)).with_lease(gate.clone(), Duration::from_secs(60));
    let server = CriTestServer::start_with(manager);
    let mut images = server.wire().await.images();
    let filter = Some(proto::ImageFilter { image: Some(spec(APP)) });
    let listed = images.list_images(proto::ListImagesRequest { filter }).await.unwrap().into_inner();
    assert_eq!((listed.images.len(), gate.active_leases().len()), (1, 0));
    images.image_status(of(APP)).await.unwrap();
    assert_eq!(gate.active_leases().len(), 1);
}

#[tokio::test]
async fn a_streamed_list_is_the_whole_list() {
    let fake = FakeBackend::new();
    fake.set_images((0..3000).map(|n| image(format!("sha256:{n:0999}"), 1)).collect());
    let server = CriTestServer::start(fake);
    let mut images = server.wire().await.images();
    let mut parts = images.stream_images(proto::StreamImagesRequest::default()).await.unwrap().into_inner();
    let (mut count, mut all) = (0, Vec::new());
    while let Some(part) = parts.message().await.unwrap() {
        count += 1;
        all.extend(part.images);
    }
    assert!(count > 1, "three megabytes come in several parts");
    let listed = images.list_images(proto::ListImagesRequest::default()).await.unwrap().into_inner();
    assert_eq!(all, listed.images);
}

#[tokio::test]
async fn a_list_with_too_many_long_names_for_a_message_has_every_image() {
    let fake = FakeBackend::new();
    let image = |n: usize| {
        let name = |end: &str| format!("registry.example/{}{n:05}{end}", "n".repeat(230));
        Image {
            repo_tags: (0..4).map(|tag| name(&format!(":{}{tag}", "t".repeat(127)))).collect(),
            repo_digests: (0..4).map(|_| name(&format!("@sha256:{}", "0".repeat(64)))).collect(),
            pinned: n == 9_499,
            ..image(format!("sha256:{n:064}"), 1)
        }
    };
    fake.set_images((0..9_500).map(image).collect());
    let server = CriTestServer::start(fake);
    let mut images = server.wire().await.images();
    let listed = images.list_images(proto::ListImagesRequest::default()).await.unwrap().into_inner().images;
    assert_eq!(listed.len(), 9_500);
    assert!(
        listed.iter().all(|image| image.id.len() == 71 && image.size == 1 && !image.repo_tags.is_empty())
    );
    assert!(listed[9_499].pinned);
}

#[tokio::test]
async fn a_list_that_is_too_large_for_a_message_is_an_error_and_can_be_streamed() {
    let fake = FakeBackend::new();
    let large = |n: usize| Image { username: "u".repeat(MAX_MESSAGE_BYTES / 4), ..image(format!("i{n}"), 1) };
    fake.set_images((0..5).map(large).collect());
    let server = CriTestServer::start(fake);
    let mut images = server.wire().await.images();
    images.list_images(proto::ListImagesRequest::default()).await.expect_err("more than 16 MiB");
    let mut parts = images.stream_images(proto::StreamImagesRequest::default()).await.unwrap().into_inner();
    let mut count = 0;
    while let Some(part) = parts.message().await.unwrap() {
        count += part.images.len();
    }
    assert_eq!(count, 5);
}

#[tokio::test]
async fn a_pull_hands_on_spec_credentials_and_sandbox() {
    let fake = FakeBackend::new();
    fake.offer(APP, image("sha256:app", 7));
    let server = CriTestServer::start(fake.clone());
    let labels = BTreeMap::from([("l".to_owned(), "2".to_owned())]);
    let annotations = BTreeMap::from([("a".to_owned(), "1".to_owned())]);
    let request = proto::PullImageRequest {
        image: Some(proto::ImageSpec {
            image: APP.into(),
            annotations: annotations.clone(),
            user_specified_image: "app:v1".into(),
            runtime_handler: "kata".into(),
            image_ref: String::new(),
        }),
        auth: Some(proto::AuthConfig {
            auth: encode_auth("ann", &Secret::new("pw:1")).reveal().into(),
            registry_token: "registry".into(),
            ..proto::AuthConfig::default()
        }),
        sandbox_config: Some(proto::PodSandboxConfig {
            metadata: Some(proto::PodSandboxMetadata {
                name: "web".into(),
                uid: "u".into(),
                namespace: "ns".into(),
                attempt: 3,
            }),
            labels: labels.clone(),
            annotations: annotations.clone(),
        }),
    };
    let reply = server.wire().await.images().pull_image(request).await.unwrap().into_inner();
    assert_eq!(reply.image_ref, "sha256:app");
    let pull = BackendCall::Pull { image: APP.into(), username: Some("ann".into()) };
    let sent = fake.requests().into_iter().find(|sent| sent.call == pull).unwrap();
    let spec = sent.spec.unwrap();
    assert_eq!((&spec.annotations, spec.runtime_handler.as_str()), (&annotations, "kata"));
    assert_eq!(spec.user_specified_image, "app:v1");
    let credential = sent.credential.unwrap();
    assert_eq!((credential.password.reveal(), credential.registry_token.reveal()), ("pw:1", "registry"));
    let sandbox = sent.sandbox.unwrap();
    assert_eq!((sandbox.name, sandbox.uid, sandbox.namespace), ("web".into(), "u".into(), "ns".into()));
    assert_eq!((sandbox.labels, sandbox.annotations), (labels, annotations));
}

#[tokio::test]
async fn an_absent_image_can_be_removed() {
    let fake = FakeBackend::new();
    fake.set_images(vec![full()]);
    let server = CriTestServer::start(fake.clone());
    let mut images = server.wire().await.images();
    for name in [APP, APP, "sha256:none"] {
        images.remove_image(proto::RemoveImageRequest { image: Some(spec(name)) }).await.unwrap();
    }
    assert_eq!(fake.images(), []);
}

#[tokio::test]
async fn filesystem_info_has_the_usage_of_images() {
    let fake = FakeBackend::new();
    let usage = |mountpoint: &str, used| FilesystemUsage {
        mountpoint: mountpoint.into(),
        timestamp_ns: 5,
        used_bytes: used,
        inodes_used: used,
    };
    let (image, container) = (vec![usage("/images", Some(0))], vec![usage("/containers", None)]);
    fake.set_filesystems(Filesystems { image, container });
    let server = CriTestServer::start(fake);
    let response =
        server.wire().await.images().image_fs_info(proto::ImageFsInfoRequest {}).await.unwrap().into_inner();
    let expected = |mountpoint: &str, used: Option<u64>| proto::FilesystemUsage {
        timestamp: 5,
        fs_id: Some(proto::FilesystemIdentifier { mountpoint: mountpoint.into() }),
        used_bytes: used.map(|value| proto::UInt64Value { value }),
        inodes_used: used.map(|value| proto::UInt64Value { value }),
    };
    assert_eq!(response.image_filesystems, [expected("/images", Some(0))]);
    assert_eq!(response.container_filesystems, [expected("/containers", None)]);
}

#[tokio::test]
async fn version_and_status_are_served_while_the_backend_is_down() {
    let fake = FakeBackend::new();
    let server = CriTestServer::start(fake.clone());
    let mut runtime = server.wire().await.runtime();
    let version = runtime.version(proto::VersionRequest::default()).await.unwrap().into_inner();
    assert_eq!((version.runtime_name.as_str(), version.runtime_version.as_str()), ("served", "1.2.3"));
    assert_eq!((version.version.as_str(), version.runtime_api_version.as_str()), ("0.1.0", "v1"));
    let verbose = proto::StatusRequest { verbose: true };
    let up = runtime.status(verbose).await.unwrap().into_inner();
    let conditions: Vec<_> = up
        .status
        .unwrap()
        .conditions
        .into_iter()
        .map(|condition| (condition.r#type, condition.status))
        .collect();
    assert_eq!(conditions, [("RuntimeReady".into(), true), ("NetworkReady".into(), true)]);
    let expected = r#"{"backend":{"apiVersion":"v1","endpoint":"fake","name":"fake","version":"1"},"name":"served","version":"1.2.3"}"#;
    assert_eq!(up.info["larder"], expected);

    let own = Condition { kind: "NetworkReady".into(), reason: "NoPlugin".into(), ..Condition::default() };
    fake.set_info(RuntimeInfo { conditions: vec![own], ..RuntimeInfo::default() });
    let quiet = runtime.status(proto::StatusRequest { verbose: false }).await.unwrap().into_inner();
    let network = quiet.status.unwrap().conditions.pop().unwrap();
    assert_eq!((network.status, network.reason.as_str(), quiet.info.len()), (false, "NoPlugin", 0));

    let gone =
        BackendError::Unreachable { endpoint: "unix:///a.sock".into(), problem: EndpointFailure::Missing };
    fake.set_down(Some(gone));
    runtime.version(proto::VersionRequest::default()).await.expect("larder itself is there");
    let down = runtime.status(verbose).await.unwrap().into_inner().status.unwrap().conditions.remove(0);
    assert_eq!((down.r#type.as_str(), down.status), ("RuntimeReady", false));
    assert_eq!(down.message, "unix:///a.sock: socket not found");
}

#[tokio::test]
async fn containers_are_not_served() {
    let server = CriTestServer::start(FakeBackend::new());
    let mut runtime = server.wire().await.runtime();
    let answers = [
        runtime.list_containers(proto::ListContainersRequest::default()).await.err(),
        runtime.list_pod_sandbox(proto::ListPodSandboxRequest::default()).await.err(),
        runtime.container_status(proto::ContainerStatusRequest::default()).await.err(),
        runtime.stream_containers(proto::StreamContainersRequest::default()).await.err(),
        runtime.stream_pod_sandboxes(proto::StreamPodSandboxesRequest::default()).await.err(),
    ];
    for status in answers {
        assert_eq!(status.map(|status| status.code()), Some(Code::Unimplemented));
    }
}

#[tokio::test]
async fn a_deadline_ends_a_pull_and_the_backend_hears_of_it() {
    let fake = FakeBackend::new();
    fake.hold_pulls();
    let server = CriTestServer::start(fake.clone());
    let mut images = server.wire().await.images();
    let late = images.pull_image(with_deadline(pull(APP), "1m")).await.unwrap_err();
    assert_eq!((late.code(), late.message()), (Code::DeadlineExceeded, "context deadline exceeded"));
    let counts = fake.until(|counts| counts.running == 0).await;
    assert_eq!((counts.started, counts.canceled), (1, 1));
    fake.on_pull(ScriptedPull::ok("sha256:app", 7));
    let in_time = images.pull_image(with_deadline(pull(APP), "1H")).await.unwrap().into_inner();
    assert_eq!(in_time.image_ref, "sha256:app");
}

#[tokio::test]
async fn a_caller_that_vanishes_cancels_its_pull() {
    let fake = FakeBackend::new();
    fake.hold_pulls();
    let server = CriTestServer::start(fake.clone());
    // One gives up its call, the other dies with its connection.
    for connection_dies in [false, true] {
        let wire = server.wire().await;
        let mut images = wire.images();
        let pulling = tokio::spawn(async move { images.pull_image(pull(APP)).await });
        fake.until(|counts| counts.running == 1).await;
        if connection_dies {
            drop(wire);
        }
        pulling.abort();
        fake.until(|counts| counts.running == 0).await;
    }
    assert_eq!(fake.counts().canceled, 2);
}

#[tokio::test]
async fn an_error_of_the_backend_reaches_the_client_unchanged() {
    let fake = FakeBackend::new();
    let server = CriTestServer::start(fake.clone());
    let client = server.client();
    let errors = [
        (
            BackendError::call(CallErrorKind::RegistryUnavailable, "RegistryUnavailable: no route"),
            "RegistryUnavailable: no route",
        ),
        (
            BackendError::call(CallErrorKind::InsufficientSpace { reclaim_bytes: None }, "the disk is full"),
            "the disk is full",
        ),
        (BackendError::call(CallErrorKind::NotFound, "gone"), "rpc error: code = NotFound desc = gone"),
        // As a runtime behind the server returns it: not wrapped twice.
        (
            call_error(&Endpoint::at("/run/a.sock"), &Status::permission_denied("no")),
            "rpc error: code = PermissionDenied desc = no",
        ),
    ];
    for (error, expected) in errors {
        fake.on_pull(ScriptedPull::with_outcome(Err(error)));
        let spec = ImageSpec::named(APP);
        let progress = larder::backend::ProgressReporter::unwatched();
        let arrived = larder::backend::Backend::pull(&client, &spec, None, None, &progress).await;
        assert_eq!(arrived.unwrap_err().to_string(), expected);
    }
}

#[tokio::test]
async fn a_filter_without_tag_lists_the_repository() {
    let fake = FakeBackend::new();
    let named = |id: &str, names: &[&str]| Image {
        repo_tags: names.iter().filter(|name| !name.contains('@')).map(ToString::to_string).collect(),
        repo_digests: names.iter().filter(|name| name.contains('@')).map(ToString::to_string).collect(),
        ..image(format!("sha256:{id}"), 7)
    };
    fake.set_images(vec![
        named("a", &["registry.example/app:v1", "registry.example/app:v2"]),
        named("b", &["registry.example/app@sha256:d"]),
        named("c", &["registry.example/app/part:v1"]),
        named("d", &["registry.example/apple:v1"]),
        named("e", &["docker.io/library/busybox:1.36"]),
    ]);
    let server = CriTestServer::start(fake);
    let mut images = server.wire().await.images();
    for (filter, expected) in [
        ("registry.example/app", vec!["sha256:a", "sha256:b"]),
        ("registry.example/app:v2", vec!["sha256:a"]),
        ("busybox", vec!["sha256:e"]),
        ("registry.example/none", vec![]),
    ] {
        let filter = Some(proto::ImageFilter { image: Some(spec(filter)) });
        let listed = images.list_images(proto::ListImagesRequest { filter }).await.unwrap().into_inner();
        let ids: Vec<_> = listed.images.into_iter().map(|image| image.id).collect();
        assert_eq!(ids, expected);
    }
}

#[tokio::test]
async fn containers_are_those_of_the_runtime_with_all_fields() {
    let mut runtime = FakeCri::start();
    let container =
        proto::Container { id: "c1".into(), image_ref: "sha256:app".into(), ..Default::default() };
    runtime.change(|contents| contents.containers.push(container.clone()));
    let server = CriTestServer::start_before(runtime.socket());
    let mut client = server.wire().await.runtime();
    let listed = client.list_containers(proto::ListContainersRequest::default()).await.unwrap().into_inner();
    assert_eq!(listed.containers, [container]);
    let missing = proto::ContainerStatusRequest { container_id: "c9".into(), verbose: false };
    assert_eq!(client.container_status(missing).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(
        client.version(proto::VersionRequest::default()).await.unwrap().into_inner().runtime_name,
        "served"
    );

    runtime.stop();
    let gone = client.list_containers(proto::ListContainersRequest::default()).await.unwrap_err();
    assert_eq!(gone.code(), Code::Unavailable);
    assert!(gone.message().contains("cri.sock"), "{gone}");
}

#[tokio::test]
async fn without_a_runtime_a_list_of_containers_is_an_error() {
    let server = CriTestServer::start(FakeBackend::new());
    let mut client = server.wire().await.runtime();
    let refused = client.list_containers(proto::ListContainersRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    let refused = client.list_pod_sandbox(proto::ListPodSandboxRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
}
