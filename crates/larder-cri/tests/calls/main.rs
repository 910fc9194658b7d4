//! Requests of the client and its reading of answers, over a real socket to a scripted runtime.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::{
    Backend as _, BackendError, CallErrorKind, EndpointFailure, Image, ImageSpec, ProgressReporter,
    PullOptions, RemoveOptions, Removed,
};
use larder::credentials::{Credential, Secret};
use larder::gc::Collector;
use larder::image_service::{FsStats, ImageService, local_disk};
use larder::pod::{Pod, SandboxConfig};
use larder::reference::{ImageId, ImageName};
use larder_cri::{CriBackend, CriConfig, MAX_MESSAGE_BYTES, proto};
use larder_testkit_peers::fake_cri::{FakeCri, Rpc};
use tokio::time::Instant;
use tonic::Code;

use container_uses::run_a_container;

mod container_uses;

fn client(fake: &FakeCri) -> CriBackend {
    CriBackend::new(fake.endpoint(), CriConfig::default())
}

fn streaming_client(fake: &FakeCri) -> CriBackend {
    CriBackend::new(fake.endpoint(), CriConfig { list_streaming: true, ..CriConfig::default() })
}

fn listed(id: &str) -> proto::Image {
    proto::Image { id: id.into(), size: 1, ..proto::Image::default() }
}

async fn pull(client: &CriBackend, name: &str) -> Result<ImageId, BackendError> {
    client.pull(&ImageSpec::named(name), None, None, &ProgressReporter::unwatched()).await
}

fn ids(images: Vec<Image>) -> Vec<ImageId> {
    images.into_iter().map(|image| image.id).collect()
}

#[tokio::test]
async fn a_pull_sends_credentials_annotations_and_sandbox() {
    let fake = FakeCri::start();
    fake.answer_pull("sha256:app");
    let annotations = BTreeMap::from([("b".to_owned(), "2".to_owned()), ("a".to_owned(), "1".to_owned())]);
    let pod = Pod {
        uid: "u".into(),
        namespace: "ns".into(),
        name: "web".into(),
        annotations: annotations.clone(),
        ..Pod::default()
    };
    let spec = ImageSpec {
        image: "app:v1".into(),
        annotations: annotations.clone(),
        runtime_handler: "kata".into(),
        user_specified_image: ImageName::default(),
        options: PullOptions::default(),
    };
    let credential = Credential {
        username: "user".into(),
        password: Secret::new("pw"),
        email: "mail".into(),
        ..Credential::default()
    };
    let sandbox = SandboxConfig::of(&pod);
    let id =
        client(&fake).pull(&spec, Some(&credential), Some(&sandbox), &ProgressReporter::unwatched()).await;
    assert_eq!(id, Ok("sha256:app".into()));
    let received = fake.received().pop().unwrap();
    let image = received.image.unwrap();
    assert_eq!((image.image.as_str(), &image.annotations), ("app:v1", &annotations));
    assert_eq!(image.runtime_handler, "", "the gate is off");
    let expected =
        proto::AuthConfig { username: "user".into(), password: "pw".into(), ..proto::AuthConfig::default() };
    assert!(received.auth == Some(expected));
    let sandbox = received.sandbox.unwrap();
    let metadata = sandbox.metadata.unwrap();
    assert_eq!(
        (metadata.name.as_str(), metadata.namespace.as_str(), metadata.uid.as_str()),
        ("web", "ns", "u")
    );
    assert_eq!(sandbox.annotations, annotations);
}

#[tokio::test]
async fn only_pulls_lose_the_code_of_an_unknown_error() {
    let fake = FakeCri::start();
    let client = client(&fake);
    fake.fail_next(Rpc::PullImage, Code::Unknown, "RegistryUnavailable: try later");
    fake.fail_next(Rpc::PullImage, Code::PermissionDenied, "no");
    assert_eq!(pull(&client, "app:v1").await.unwrap_err().to_string(), "RegistryUnavailable: try later");
    let denied = pull(&client, "app:v1").await.unwrap_err().to_string();
    assert_eq!(denied, "rpc error: code = PermissionDenied desc = no");
    fake.fail_next(Rpc::ImageStatus, Code::Unknown, "boom");
    let failed = client.status(&ImageSpec::named("app:v1")).await.unwrap_err().to_string();
    assert_eq!(failed, "rpc error: code = Unknown desc = boom");
}

#[tokio::test]
async fn long_error_messages_arrive_whole() {
    let fake = FakeCri::start();
    let message = "x".repeat(100_000);
    fake.fail_next(Rpc::PullImage, Code::Unknown, &message);
    assert_eq!(pull(&client(&fake), "app:v1").await.unwrap_err().to_string(), message);
}

#[tokio::test]
async fn incomplete_replies_are_errors() {
    let fake = FakeCri::start();
    let client = client(&fake);
    fake.answer_pull("");
    assert_eq!(
        pull(&client, "app:v1").await.unwrap_err().to_string(),
        "imageRef of image \"app:v1\" is not set"
    );
    for (id, size) in [("", 1), ("x", 0)] {
        fake.answer_status(Some(proto::Image { id: id.into(), size, ..proto::Image::default() }));
        let error = client.status(&ImageSpec::named("app:v1")).await.unwrap_err().to_string();
        assert_eq!(error, "Id or size of image \"app:v1\" is not set");
    }
}

#[tokio::test]
async fn a_blank_name_is_refused_and_the_runtime_is_not_asked() {
    let fake = FakeCri::start();
    fake.change(|contents| contents.images = vec![listed("sha256:a")]);
    let client = client(&fake);
    for name in ["", " "] {
        let spec = ImageSpec::named(name);
        for error in [
            client.status(&spec).await.map(drop).unwrap_err(),
            client.inspect(&spec).await.map(drop).unwrap_err(),
            client.remove(&spec, &RemoveOptions::default()).await.unwrap_err(),
            pull(&client, name).await.map(drop).unwrap_err(),
        ] {
            assert_eq!(error.to_string(), format!("{name:?}: an image name must not be empty"));
        }
    }
    assert_eq!(fake.received(), []);
}

#[tokio::test]
async fn dropping_a_pull_cancels_it_in_the_runtime() {
    let fake = FakeCri::start();
    let client = client(&fake);
    fake.hang_next(Rpc::PullImage);
    let pulling = pull(&client, "app:v1");
    tokio::select! {
        ended = pulling => panic!("a hanging pull ended: {ended:?}"),
        calls = fake.until(Rpc::PullImage, |calls| calls.running == 1) => assert_eq!(calls.canceled, 0),
    }
    let calls = fake.until(Rpc::PullImage, |calls| calls.running == 0).await;
    assert_eq!(calls.canceled, 1);
    fake.answer_pull("sha256:app");
    assert_eq!(pull(&client, "app:v1").await, Ok("sha256:app".into()), "the connection is still good");
}

#[tokio::test]
async fn every_call_but_a_pull_has_a_deadline() {
    let fake = FakeCri::start();
    let client = client(&fake);
    client.list().await.expect("the connection is open");
    // The deadline passes at once, before that of the runtime, which is a second later.
    tokio::time::pause();
    let spec = ImageSpec::named("app:v1");
    let hung = [
        Rpc::Version,
        Rpc::ListImages,
        Rpc::ImageStatus,
        Rpc::ImageStatus,
        Rpc::RemoveImage,
        Rpc::ImageFsInfo,
        Rpc::ListContainers,
    ];
    for rpc in hung {
        fake.hang_next(rpc);
    }
    fake.hang_next(Rpc::PullImage);
    let pulling = pull(&client, "app:v1");
    let others = async {
        [
            client.info().await.map(drop),
            client.list().await.map(drop),
            client.status(&spec).await.map(drop),
            client.inspect(&spec).await.map(drop),
            client.remove(&spec, &RemoveOptions::default()).await.map(drop),
            client.filesystems().await.map(drop),
            client.container_inventory().await.map(drop),
        ]
    };
    let is_late = |answer: Result<(), BackendError>| {
        let Err(BackendError::Call { message, kind, hint: Some(hint), .. }) = answer else { return false };
        message == "rpc error: code = DeadlineExceeded desc = context deadline exceeded"
            && kind == CallErrorKind::DeadlineExceeded
            && hint.to_string().contains(&fake.endpoint().to_string())
    };
    tokio::select! {
        ended = pulling => panic!("a pull has no deadline, but it ended: {ended:?}"),
        answers = others => assert_eq!(answers.map(is_late), [true; 7]),
    }
}

/// Stops a paused clock, which otherwise runs ahead while all tasks wait, until dropped.
#[must_use]
fn stopped_clock() -> std::sync::mpsc::Sender<()> {
    let (clock, dropped) = std::sync::mpsc::channel();
    // A paused clock does not run ahead while a blocking task runs.
    tokio::task::spawn_blocking(move || dropped.recv());
    clock
}

#[tokio::test]
async fn all_that_one_method_asks_shares_one_time_limit() {
    let limit = CriConfig::default().request_timeout;
    let fake = FakeCri::start();
    run_a_container(&fake);
    let client = client(&fake);
    client.list().await.expect("the connection is open");
    tokio::time::pause();
    for (first, second) in [(Rpc::Version, Rpc::Status), (Rpc::ListContainers, Rpc::ContainerStatus)] {
        let held = fake.hold_next(first);
        fake.hang_next(second);
        let clock = stopped_clock();
        let began = Instant::now();
        let asked = async {
            match first {
                Rpc::Version => client.info().await.map(drop),
                _ => client.container_inventory().await.map(drop),
            }
        };
        // The first call takes three quarters of the limit, so that the second has a quarter left.
        let release = async {
            fake.until(first, |calls| calls.running == 1).await;
            tokio::time::advance(limit * 3 / 4).await;
            held.release();
            fake.until(second, |calls| calls.running == 1).await;
            drop(clock);
        };
        let (answer, ()) = tokio::join!(asked, release);
        let error = answer.expect_err("the second call hangs").to_string();
        assert_eq!(error, "rpc error: code = DeadlineExceeded desc = context deadline exceeded");
        assert_eq!(began.elapsed().as_secs(), limit.as_secs(), "{second:?} had a limit of its own");
    }
}

#[tokio::test]
async fn no_time_limit_is_too_long() {
    let fake = FakeCri::start();
    let config =
        CriConfig { request_timeout: Duration::MAX, connect_timeout: Duration::MAX, ..CriConfig::default() };
    CriBackend::new(fake.endpoint(), config).info().await.expect("as good as any");
}

#[tokio::test]
async fn removing_an_unknown_image_succeeds_and_sends_only_the_name() {
    let fake = FakeCri::start();
    let config = CriConfig { runtime_class_in_image: true, ..CriConfig::default() };
    let client = CriBackend::new(fake.endpoint(), config);
    fake.fail_next(Rpc::RemoveImage, Code::NotFound, "no such image");
    let spec = ImageSpec {
        image: "sha256:x".into(),
        annotations: BTreeMap::from([("a".into(), "1".into())]),
        runtime_handler: "kata".into(),
        user_specified_image: "x".into(),
        options: PullOptions::default(),
    };
    assert_eq!(client.remove(&spec, &RemoveOptions::default()).await, Ok(Removed::Image { freed: None }));
    let sent = fake.received().pop().unwrap().image;
    assert_eq!(sent, Some(proto::ImageSpec { image: "sha256:x".into(), ..proto::ImageSpec::default() }));
    fake.fail_next(Rpc::RemoveImage, Code::FailedPrecondition, "in use");
    let error = client.remove(&spec, &RemoveOptions::default()).await.unwrap_err().to_string();
    assert_eq!(error, "rpc error: code = FailedPrecondition desc = in use");
}

#[tokio::test]
async fn inspect_asks_for_everything() {
    let fake = FakeCri::start();
    fake.change(|contents| contents.images = vec![listed("sha256:a")]);
    let found = client(&fake).inspect(&ImageSpec::named("sha256:a")).await.unwrap().unwrap();
    assert_eq!(found.image.id, "sha256:a");
    assert_eq!(found.info["info"], "{\"id\":\"sha256:a\"}");
    assert!(fake.received()[0].verbose);
}

#[tokio::test]
async fn a_runtime_without_streams_is_asked_once_and_then_for_whole_lists() {
    let fake = FakeCri::start();
    fake.change(|contents| contents.images = vec![listed("a")]);
    let client = streaming_client(&fake);
    for expected in [vec![Rpc::StreamImages, Rpc::ListImages], vec![Rpc::ListImages]] {
        assert_eq!(ids(client.list().await.unwrap()), ["a"]);
        assert_eq!(fake.take_rpcs(), expected);
    }
}

#[tokio::test]
async fn a_stream_that_breaks_drops_its_parts_and_is_asked_for_again() {
    let fake = FakeCri::start();
    fake.change(|contents| {
        contents.streaming = true;
        contents.image_parts = Some(vec![vec![listed("a")], vec![listed("b"), listed("c")]]);
        contents.stream_errors.insert(Rpc::StreamImages, (Code::Internal, "disk".into()));
    });
    let client = streaming_client(&fake);
    let error = client.list().await.unwrap_err().to_string();
    assert_eq!(error, "rpc error: code = Internal desc = disk");
    fake.change(|contents| contents.stream_errors.clear());
    assert_eq!(ids(client.list().await.unwrap()), ["a", "b", "c"]);
    assert_eq!(fake.take_rpcs(), [Rpc::StreamImages, Rpc::StreamImages]);
}

#[tokio::test]
async fn lists_up_to_the_limit_of_kubernetes_are_read() {
    let fake = FakeCri::start();
    let big = |bytes: usize| proto::Image { username: "u".repeat(bytes), ..listed("a") };
    fake.change(|contents| contents.images = vec![big(MAX_MESSAGE_BYTES - 1024)]);
    let client = client(&fake);
    assert_eq!(client.list().await.unwrap().len(), 1);
    fake.change(|contents| contents.images = vec![big(MAX_MESSAGE_BYTES)]);
    client.list().await.expect_err("more than 16 MiB");
}

#[tokio::test]
async fn info_has_version_and_conditions() {
    let fake = FakeCri::start();
    fake.change(|contents| {
        contents.conditions = vec![proto::RuntimeCondition {
            r#type: "NetworkReady".into(),
            status: false,
            reason: "NoPlugin".into(),
            message: "cni".into(),
        }];
    });
    let info = client(&fake).info().await.unwrap();
    assert_eq!(
        (info.name.as_str(), info.version.as_str(), info.api_version.as_str()),
        ("fake", "1.0.0", "v1")
    );
    assert_eq!(info.endpoint, fake.endpoint().to_string());
    assert_eq!((info.conditions[0].kind.as_str(), info.conditions[0].ok), ("NetworkReady", false));
}

#[tokio::test]
async fn images_may_be_served_by_another_repository() {
    let (fake, images) = (FakeCri::start(), FakeCri::start());
    images.change(|contents| contents.images = vec![listed("a")]);
    let config = CriConfig { image_endpoint: Some(images.endpoint()), ..CriConfig::default() };
    let client = CriBackend::new(fake.endpoint(), config);
    client.info().await.unwrap();
    assert_eq!(ids(client.list().await.unwrap()), ["a"]);
    assert_eq!(fake.take_rpcs(), [Rpc::Version, Rpc::Status]);
    assert_eq!(images.take_rpcs(), [Rpc::ImageFsInfo, Rpc::ListImages]);
    images.fail_next(Rpc::ImageFsInfo, Code::Internal, "disk");
    let endpoint = images.endpoint();
    let expected = format!(
        "validate service connection: validate CRI v1 image API for endpoint \"{endpoint}\": rpc error: code = Internal desc = disk"
    );
    assert_eq!(client.info().await.unwrap_err().to_string(), expected);
}

#[tokio::test]
async fn a_filesystem_without_an_id_is_no_error() {
    let fake = FakeCri::start();
    fake.change(|contents| {
        let used_bytes = Some(proto::UInt64Value { value: 5 });
        contents.filesystems.image_filesystems =
            vec![proto::FilesystemUsage { used_bytes, ..Default::default() }];
    });
    let client = Arc::new(client(&fake));
    let found = ImageService::new(client.clone()).image_filesystem(local_disk).await.unwrap();
    assert_eq!(
        (found.usage.used_bytes, found.usage.mountpoint.as_os_str().len(), found.disk),
        (Some(5), 0, None)
    );
    let collector = Collector::builder(client).build();
    assert_eq!(collector.measure_filesystem().await, Ok(FsStats::default()));
    assert_eq!(collector.measure_other_filesystems().await, Ok(Vec::new()));
}

#[tokio::test]
async fn images_of_the_settings_and_of_the_runtimes_configuration_are_pinned() {
    let fake = FakeCri::start();
    let image = |id: &str, name: &str| proto::Image {
        id: id.into(),
        repo_tags: vec![name.into()],
        size: 1,
        ..proto::Image::default()
    };
    fake.change(|contents| {
        contents.images = vec![
            image("sha256:1", "registry.k8s.io/pause:3.9"),
            image("sha256:2", "registry.example/infra:2"),
            image("sha256:3", "registry.example/web:1"),
        ];
        let config = r#"{"sandboxImage":"registry.example/infra:2"}"#;
        contents.status_info.insert("config".into(), config.into());
    });
    let pinned = async |sandbox_images: &[&str]| {
        let sandbox_images = sandbox_images.iter().map(|&name| name.to_owned()).collect();
        let client = CriBackend::new(fake.endpoint(), CriConfig { sandbox_images, ..CriConfig::default() });
        let listed = client.list().await.unwrap();
        for image in &listed {
            let status = client.status(&ImageSpec::named(&image.id)).await.unwrap();
            assert_eq!(status.map(|found| found.pinned), Some(image.pinned), "{}", image.id);
        }
        listed.into_iter().map(|image| image.pinned).collect::<Vec<_>>()
    };
    assert_eq!(pinned(&[]).await, [false, false, false]);
    assert_eq!(fake.calls(Rpc::Status).started, 0);
    assert_eq!(pinned(&["registry.k8s.io/pause:*"]).await, [true, false, false]);
    assert_eq!(pinned(&["registry.k8s.io/pause:*", "configured"]).await, [true, true, false]);
    assert_eq!(fake.calls(Rpc::Status).started, 1, "the configuration is read once");
    fake.refuse(Rpc::Status, Code::Unknown, "broken");
    assert_eq!(pinned(&["configured"]).await, [false, false, false], "images are listed all the same");
}

#[tokio::test]
async fn another_larder_is_refused() {
    let fake = FakeCri::start();
    fake.change(|contents| contents.version.runtime_name = "larder".into());
    let refused = client(&fake).info().await.unwrap_err();
    assert!(
        matches!(refused, BackendError::Unreachable { problem: EndpointFailure::Larder, .. }),
        "{refused}"
    );
    assert!(refused.to_string().contains(&fake.endpoint().to_string()), "{refused}");
    assert!(refused.hint().is_some());
}

#[tokio::test]
async fn a_connection_to_another_larder_is_refused_before_any_other_call() {
    let mut fake = FakeCri::start();
    let config = CriConfig { refuse_larder: true, ..CriConfig::default() };
    let client = CriBackend::new(fake.endpoint(), config);
    client.list().await.expect("it is a runtime");
    assert_eq!(fake.take_rpcs(), [Rpc::Version, Rpc::ListImages], "once for each connection");
    client.list().await.unwrap();
    assert_eq!(fake.take_rpcs(), [Rpc::ListImages]);
    fake.change(|contents| contents.version.runtime_name = "larder".into());
    fake.restart();
    let image = ImageSpec::named("a:1");
    let refusals = [
        client.list().await.err(),
        client.pull(&image, None, None, &ProgressReporter::unwatched()).await.err(),
        client.remove(&image, &RemoveOptions::default()).await.err(),
    ];
    for refused in refusals {
        assert!(
            matches!(refused, Some(BackendError::Unreachable { problem: EndpointFailure::Larder, .. })),
            "{refused:?}"
        );
    }
    assert!(fake.take_rpcs().iter().all(|rpc| *rpc == Rpc::Version));
}
