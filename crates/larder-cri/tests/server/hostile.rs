//! Clients that speak no gRPC, or speak it badly. Each gets an error or is disconnected; no other client notices.

use larder_cri::{MAX_MESSAGE_BYTES, proto};
use larder_testkit::fake_backend::FakeBackend;
use larder_testkit_peers::wire::RawConnection;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tonic::body::Body;
use tonic::codegen::Service as _;
use tonic::codegen::http::{Request, Response};
use tonic::{Code, Status};

use crate::world::CriTestServer;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

async fn still_serves(server: &CriTestServer) {
    let mut runtime = server.wire().await.runtime();
    runtime.version(proto::VersionRequest::default()).await.expect("the server serves still");
}

/// A gRPC message with this length in its head, whatever its content.
fn framed(compressed: u8, length: usize, bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(length).expect("a gRPC message has less than 4 GiB").to_be_bytes();
    [&[compressed][..], &length, bytes].concat()
}

async fn post(
    wire: &mut RawConnection,
    path: &str,
    content_type: &str,
    body: Vec<u8>,
) -> Response<hyper::body::Incoming> {
    let request = Request::post(format!("http://localhost{path}"))
        .header("content-type", content_type)
        .header("te", "trailers")
        .body(Body::new(http_body_util::Full::new(body.into())))
        .unwrap();
    wire.call(request).await.expect("an answer")
}

#[tokio::test]
async fn bytes_that_are_no_grpc_affect_no_other_client() {
    let server = CriTestServer::start(FakeBackend::new());
    let frames = [PREFACE, SETTINGS].concat();
    // A frame of data for a stream that was never opened, and one that says it has 16 MiB.
    let of_nothing = [&frames[..], &[0, 0, 1, 0, 0, 0, 0, 0, 1, 7]].concat();
    let huge = [&frames[..], &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat();
    let cut_headers = [&frames[..], &[0, 1, 0, 1, 4, 0, 0, 0, 1, 0x82]].concat();
    let junk: Vec<u8> = (0..4096_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let ones = vec![0xff; 100_000];
    let bodies: [&[u8]; 8] = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        &PREFACE[..10],
        &of_nothing,
        &huge,
        &cut_headers,
        &ones,
        &junk,
    ];
    for bytes in bodies {
        for hangs_up in [true, false] {
            let mut stream = UnixStream::connect(server.socket()).await.unwrap();
            // The server may have hung up before all of it was written.
            let _ = stream.write_all(bytes).await;
            if hangs_up {
                let _ = stream.shutdown().await;
                let _ = stream.read_to_end(&mut Vec::new()).await;
            }
            still_serves(&server).await;
        }
    }
}

#[tokio::test]
async fn invalid_messages_fail_only_their_own_call() {
    let server = CriTestServer::start(FakeBackend::new());
    let mut wire = server.wire().await;
    let path = "/runtime.v1.ImageService/ImageStatus";
    let bodies = [
        ("nothing at all", Vec::new()),
        ("half a head", vec![0, 0]),
        ("a message that is cut", framed(0, 100, b"abc")),
        ("a length of 4 GiB", framed(0, u32::MAX as usize, b"abc")),
        ("a length beyond the limit", framed(0, MAX_MESSAGE_BYTES + 1, b"abc")),
        ("compressed, and nothing says how", framed(1, 3, b"abc")),
        ("no such compression flag", framed(9, 3, b"abc")),
        ("no protobuf", framed(0, 4, &[0xff; 4])),
        ("a name that is no text", framed(0, 5, &[0x0a, 3, 0x0a, 1, 0xff])),
    ];
    for (what, body) in bodies {
        let response = post(&mut wire, path, "application/grpc", body).await;
        let status = status_of(response).await;
        assert_ne!(status.code(), Code::Ok, "{what}");
        still_serves(&server).await;
        wire.runtime().version(proto::VersionRequest::default()).await.expect("so does the same connection");
    }
}

/// The status of a response, from its head or its trailers.
async fn status_of(response: Response<hyper::body::Incoming>) -> Status {
    use http_body_util::BodyExt as _;
    let (head, body) = response.into_parts();
    if let Some(status) = Status::from_header_map(&head.headers) {
        return status;
    }
    let body = body.collect().await.expect("the body ends");
    body.trailers().and_then(Status::from_header_map).expect("a status at the end")
}

#[tokio::test]
async fn paths_and_types_that_are_not_served_are_refused() {
    let server = CriTestServer::start(FakeBackend::new());
    let mut wire = server.wire().await;
    for path in [
        "/",
        "/runtime.v1.ImageService",
        "/runtime.v1.ImageService/Nothing",
        "/runtime.v1alpha2.ImageService/ListImages",
    ] {
        let response = post(&mut wire, path, "application/grpc", framed(0, 0, b"")).await;
        assert_eq!(status_of(response).await.code(), Code::Unimplemented, "{path}");
    }
    for content_type in ["", "text/html", "application/grpc-web+json"] {
        // Any response is allowed, but there must be one.
        post(&mut wire, "/runtime.v1.ImageService/ListImages", content_type, framed(0, 0, b"")).await;
        still_serves(&server).await;
    }
}

#[tokio::test]
async fn a_message_that_is_too_large_is_refused() {
    let server = CriTestServer::start(FakeBackend::new());
    let wire = server.wire().await;
    let image = Some(proto::ImageSpec { image: "a".repeat(MAX_MESSAGE_BYTES), ..Default::default() });
    let request = proto::ImageStatusRequest { image, verbose: false };
    let status = wire.images().image_status(request).await.expect_err("too large");
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    still_serves(&server).await;
}

#[tokio::test]
async fn images_with_huge_users_do_not_break_the_list() {
    use larder_registry::{Proxy, RegistryClient, RegistryConfig};
    use larder_store::backend::StoreBackend;
    use larder_store::pull::{StorePullConfig, StorePuller};
    use larder_store::store::{Store, StoreConfig};
    use larder_testkit::fault_registry::FaultRegistry;
    const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
    let config = RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
    let puller = StorePuller::new(store, RegistryClient::new(config), StorePullConfig::default());
    let server = CriTestServer::start(StoreBackend::new(puller));
    let mut images = server.wire().await.images();
    let registry = FaultRegistry::start();
    for (name, length) in [
        ("a", 4_000_000),
        ("b", 4_000_000),
        ("c", 4_000_000),
        ("d", 4_000_000),
        ("e", 4_000_000),
        ("small", 10),
    ] {
        let user = name.repeat(length);
        let config = serde_json::json!({"architecture": std::env::consts::ARCH.replace("x86_64", "amd64").replace("aarch64", "arm64"),
            "os": "linux", "config": {"User": user}, "rootfs": {"type": "layers", "diff_ids": []}})
        .to_string();
        let manifest = serde_json::json!({"schemaVersion": 2, "mediaType": MANIFEST, "layers": [],
            "config": {"mediaType": CONFIG, "digest": registry.put_blob(config.clone()), "size": config.len()}});
        registry.put_manifest(name, "1", MANIFEST, manifest.to_string());
        let spec =
            proto::ImageSpec { image: registry.image(&format!("{name}:1")), ..proto::ImageSpec::default() };
        let request = proto::PullImageRequest { image: Some(spec), ..proto::PullImageRequest::default() };
        let outcome = images.pull_image(request).await;
        assert_eq!(outcome.is_ok(), name == "small", "{name}: {outcome:?}");
    }
    let listed = images.list_images(proto::ListImagesRequest::default()).await.unwrap().into_inner();
    assert_eq!(listed.images.len(), 1, "the list works, and has the other image");
}
