//! Sockets that are wrong in every way, and runtimes that come and go.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use larder::backend::{Backend as _, BackendError, EndpointFailure, ImageSpec, ProgressReporter};
use larder_cri::{CriBackend, CriConfig, Endpoint};
use larder_testkit_peers::fake_cri::{FakeCri, Rpc};
use tempfile::TempDir;
use tokio::time::Instant;
use tonic::Code;

fn client(path: &Path) -> CriBackend {
    CriBackend::new(Endpoint::at(path), CriConfig::default())
}

/// Returns the failure that is found at a path.
async fn found_at(path: &Path) -> EndpointFailure {
    let error = client(path).info().await.expect_err("nothing to talk to");
    let BackendError::Unreachable { endpoint, problem } = error else { panic!("another error: {error}") };
    assert_eq!(endpoint, format!("unix://{}", path.display()));
    problem
}

/// Returns the failure found at a path by a paused clock, which runs ahead while nothing is received: for peers that
/// do not answer. Also how long it took.
async fn found_in_time(path: &Path) -> (EndpointFailure, Duration) {
    let began = Instant::now();
    let found = found_at(path).await;
    (found, began.elapsed())
}

/// Returns a failure that is found without waiting.
fn at_once(found: EndpointFailure) -> (EndpointFailure, Duration) {
    (found, Duration::ZERO)
}

/// Returns the failure of a peer that does not answer.
fn silent() -> (EndpointFailure, Duration) {
    let after = CriConfig::default().connect_timeout;
    (EndpointFailure::Silent { after }, after)
}

/// A server on a socket that sends `greeting` on each connection, and then closes it or keeps it open.
fn server(dir: &TempDir, greeting: &'static [u8], stays: bool) -> std::path::PathBuf {
    let path = dir.path().join("other.sock");
    let listener = UnixListener::bind(&path).expect("the path is free");
    std::thread::spawn(move || {
        let mut callers = Vec::new();
        for mut caller in listener.incoming().flatten() {
            let _ = caller.write_all(greeting);
            if stays {
                callers.push(caller);
            }
        }
    });
    path
}

#[tokio::test(start_paused = true)]
async fn a_missing_socket_is_named() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(found_in_time(&dir.path().join("missing.sock")).await, at_once(EndpointFailure::Missing));
    assert_eq!(found_in_time(Path::new("/dev/null/x.sock")).await, at_once(EndpointFailure::Missing));
}

#[tokio::test(start_paused = true)]
async fn a_file_or_directory_is_not_a_socket() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs_err::write(&file, "").unwrap();
    assert_eq!(found_in_time(&file).await, at_once(EndpointFailure::NotASocket));
    assert_eq!(found_in_time(dir.path()).await, at_once(EndpointFailure::NotASocket));
}

#[tokio::test(start_paused = true)]
async fn a_socket_without_listener_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stale.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert_eq!(found_in_time(&path).await, at_once(EndpointFailure::Refused));
}

#[tokio::test(start_paused = true)]
async fn a_socket_of_another_user_is_denied() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("private.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o0)).unwrap();
    // Root may open anything; then the server's silence is what is left to see.
    let root = rustix::process::geteuid().is_root();
    let expected = if root { silent() } else { at_once(EndpointFailure::Denied) };
    assert_eq!(found_in_time(&path).await, expected);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_hangs_is_silent() {
    let dir = tempfile::tempdir().unwrap();
    let path = server(&dir, b"", true);
    assert_eq!(found_in_time(&path).await, silent());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_hangs_is_silent_however_short_a_call_may_be() {
    let dir = tempfile::tempdir().unwrap();
    let path = server(&dir, b"", true);
    let connect_timeout = CriConfig::default().connect_timeout;
    let config = CriConfig { request_timeout: connect_timeout / 4, ..CriConfig::default() };
    let error = CriBackend::new(Endpoint::at(&path), config).info().await.expect_err("no answer");
    assert!(
        matches!(error, BackendError::Unreachable { problem: EndpointFailure::Silent { .. }, .. }),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_server_whose_queue_is_full_is_silent() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("full.sock");
    let listener =
        rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _waiting = std::os::unix::net::UnixStream::connect(&path).unwrap();
    assert_eq!(found_in_time(&path).await, silent());
}

#[tokio::test]
async fn another_protocol_is_shown() {
    for stays in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let path = server(&dir, b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", stays);
        let expected = EndpointFailure::NotGrpc { detail: "received \"HTTP/1.1 400 Bad Request\"".into() };
        assert_eq!(found_at(&path).await, expected);
        let dir = tempfile::tempdir().unwrap();
        let path = server(&dir, &[0xff; 64], stays);
        let found = found_at(&path).await;
        assert!(matches!(found, EndpointFailure::NotGrpc { .. }), "{found:?}");
    }
}

#[tokio::test]
async fn a_server_that_hangs_up_at_once_is_broken() {
    let dir = tempfile::tempdir().unwrap();
    let path = server(&dir, b"", false);
    let found = found_at(&path).await;
    assert!(matches!(found, EndpointFailure::ConnectionLost { .. }), "{found:?}");
}

#[tokio::test]
async fn a_grpc_server_without_cri_is_named() {
    let fake = FakeCri::start();
    fake.fail_next(Rpc::Version, Code::Unimplemented, "unknown service runtime.v1.RuntimeService");
    let expected = EndpointFailure::NotCri { detail: "unknown service runtime.v1.RuntimeService".into() };
    assert_eq!(found_at(fake.socket()).await, expected);
}

#[tokio::test(start_paused = true)]
async fn callers_that_wait_together_fail_together() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("silent.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let client = client(&path);
    let began = Instant::now();
    let answers = tokio::join!(client.list(), client.list(), client.list(), client.list(), client.list());
    assert!(answers.0.is_err() && answers.4.is_err());
    assert_eq!(began.elapsed(), silent().1, "one after another would take five times the timeout");
    listener.set_nonblocking(true).unwrap();
    let connections = std::iter::from_fn(|| listener.accept().ok()).count();
    assert_eq!(connections, 1, "they wait for the same attempt");
}

#[tokio::test]
async fn a_runtime_that_restarts_is_found_again() {
    let mut fake = FakeCri::start();
    let client = client(fake.socket());
    client.info().await.unwrap();
    fake.restart();
    client.info().await.expect("the same client, after a quick restart");
    fake.stop();
    let gone = client.info().await.unwrap_err();
    let BackendError::Unreachable { problem: EndpointFailure::Missing, .. } = gone else { panic!("{gone}") };
    fake.restart();
    client.info().await.expect("the same client, once it is back");
}

#[tokio::test]
async fn a_crash_ends_a_running_pull_and_is_not_repeated() {
    let mut fake = FakeCri::start();
    let client = client(fake.socket());
    fake.hang_next(Rpc::PullImage);
    let spec = ImageSpec::named("app:v1");
    let progress = ProgressReporter::unwatched();
    let pulling = client.pull(&spec, None, None, &progress);
    let crash = async {
        fake.until(Rpc::PullImage, |calls| calls.running == 1).await;
        fake.restart();
    };
    let (pulled, ()) = tokio::join!(pulling, crash);
    let error = pulled.unwrap_err().to_string();
    let start = format!("rpc error: code = Unavailable desc = {}: connection lost: ", fake.endpoint());
    assert!(error.starts_with(&start), "{error}");
    assert_eq!(fake.calls(Rpc::PullImage).started, 1);
    client.info().await.expect("the client goes on");
}
