//! The code and text of each call that fails.

use larder::backend::{BackendError, CallErrorKind, EndpointFailure};
use larder::hint::Hint;
use larder_cri::proto;
use larder_testkit::fake_backend::{BackendOp, FakeBackend};
use larder_testkit_peers::wire::RawConnection;
use tonic::{Code, Status};

use crate::world::CriTestServer;

/// Every call that names an image or needs the backend, by its name.
async fn ask(wire: &RawConnection, call: &str, image: &str) -> Result<(), Status> {
    let mut images = wire.images();
    let image = Some(proto::ImageSpec { image: image.into(), ..proto::ImageSpec::default() });
    match call {
        "ListImages" => images.list_images(proto::ListImagesRequest::default()).await.map(drop),
        "StreamImages" => images.stream_images(proto::StreamImagesRequest::default()).await.map(drop),
        "ImageStatus" => {
            images.image_status(proto::ImageStatusRequest { image, verbose: false }).await.map(drop)
        }
        "ImageStatus verbose" => {
            images.image_status(proto::ImageStatusRequest { image, verbose: true }).await.map(drop)
        }
        "PullImage" => {
            let request = proto::PullImageRequest { image, ..proto::PullImageRequest::default() };
            images.pull_image(request).await.map(drop)
        }
        "RemoveImage" => images.remove_image(proto::RemoveImageRequest { image }).await.map(drop),
        "ImageFsInfo" => images.image_fs_info(proto::ImageFsInfoRequest {}).await.map(drop),
        other => panic!("no call {other}"),
    }
}

const CALLS: [(&str, BackendOp); 7] = [
    ("ListImages", BackendOp::List),
    ("StreamImages", BackendOp::List),
    ("ImageStatus", BackendOp::Status),
    ("ImageStatus verbose", BackendOp::Inspect),
    ("PullImage", BackendOp::Pull),
    ("RemoveImage", BackendOp::Remove),
    ("ImageFsInfo", BackendOp::Filesystems),
];

#[tokio::test]
async fn a_failure_of_the_backend_has_the_same_code_in_each_call() {
    let fake = FakeBackend::new();
    let server = CriTestServer::start(fake.clone());
    let wire = server.wire().await;
    let call = |kind, message: &str| BackendError::call(kind, message).with_hint(Hint::from("a hint"));
    let gone =
        BackendError::Unreachable { endpoint: "unix:///a.sock".into(), problem: EndpointFailure::Refused };
    let errors = [
        (call(CallErrorKind::NotFound, "no such tag"), Code::NotFound, "no such tag"),
        (call(CallErrorKind::Denied, "not for you"), Code::Unknown, "not for you"),
        (
            call(CallErrorKind::InsufficientSpace { reclaim_bytes: None }, "the disk is full"),
            Code::Unknown,
            "the disk is full",
        ),
        (call(CallErrorKind::DeadlineExceeded, "late"), Code::DeadlineExceeded, "late"),
        (call(CallErrorKind::Canceled, "left"), Code::Cancelled, "left"),
        (call(CallErrorKind::Unavailable, "restarting"), Code::Unavailable, "restarting"),
        (call(CallErrorKind::Other, "boom \u{e9}\n%"), Code::Unknown, "boom \u{e9}\n%"),
        (gone, Code::Unavailable, "unix:///a.sock: connection refused: no process listens on this socket"),
    ];
    for (name, op) in CALLS {
        for (error, code, message) in &errors {
            fake.fail_next(op, error.clone());
            let status = ask(&wire, name, "registry.example/app:v1").await.expect_err(name);
            assert_eq!((status.code(), status.message()), (*code, *message), "{name}");
        }
    }
}

#[tokio::test]
async fn a_blank_image_name_is_an_invalid_argument_without_a_backend_call() {
    let fake = FakeBackend::new();
    let server = CriTestServer::start(fake.clone());
    let wire = server.wire().await;
    for name in ["ImageStatus", "ImageStatus verbose", "RemoveImage"] {
        for blank in ["", " \t"] {
            let status = ask(&wire, name, blank).await.expect_err(name);
            let expected = format!("{}: an image name must not be empty", larder::go_format::quote(blank));
            assert_eq!(
                (status.code(), status.message()),
                (Code::InvalidArgument, expected.as_str()),
                "{name}"
            );
        }
    }
    let no_spec = wire.images().image_status(proto::ImageStatusRequest::default()).await.unwrap_err();
    assert_eq!(no_spec.code(), Code::InvalidArgument);
    assert_eq!(fake.calls(), []);
}

#[tokio::test]
async fn a_pull_by_an_invalid_name_has_the_code_and_text_of_containerd() {
    let fake = FakeBackend::new();
    let server = CriTestServer::start(fake.clone());
    let wire = server.wire().await;
    let digits = "a".repeat(64);
    let names =
        ["registry.example/App:v1", "a b", "-", "app@sha256:short", "app#linux/s390x", digits.as_str(), ""];
    for bad in names {
        let status = ask(&wire, "PullImage", bad).await.expect_err(bad);
        assert_eq!(status.code(), Code::Unknown, "{bad}: {status}");
        let start = format!("failed to parse image reference {}: ", larder::go_format::quote(bad));
        assert!(status.message().starts_with(&start), "{status}");
    }
    assert_eq!(fake.calls(), []);
}

#[tokio::test]
async fn credentials_that_cannot_be_read_are_not_shown() {
    let fake = FakeBackend::new();
    let server = CriTestServer::start(fake.clone());
    let request = proto::PullImageRequest {
        image: Some(proto::ImageSpec { image: "registry.example/app:v1".into(), ..Default::default() }),
        auth: Some(proto::AuthConfig { auth: "aHVudGVyMg==".into(), ..proto::AuthConfig::default() }),
        sandbox_config: None,
    };
    let status = server.wire().await.images().pull_image(request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let shown = format!("{status:?}");
    assert!(shown.contains("registry.example/app"), "{shown}");
    assert!(!shown.contains("hunter2") && !shown.contains("aHVudGVyMg"), "{shown}");
    assert_eq!(fake.calls(), []);
}
