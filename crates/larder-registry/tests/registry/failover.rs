//! Mirrors: requested first; the next host continues at the byte that was reached.

use larder_registry::{
    ByteRanges, FetchErrorKind, RegistryClient, RegistryConfig, RepositorySession, fetch_blob,
};
use larder_testkit::fault_registry::{
    FaultRegistry, FaultRegistryAuth, FaultTrigger, LoggedRequest, ResponseFault,
};
use larder_testkit_peers::process::wait_until;
use std::time::Duration;

use crate::support::*;

/// A session for `reg.example/shop/web:1`, which `mirror` mirrors and which is at `origin`.
fn mirrored(mirror: &FaultRegistry, origin: &FaultRegistry) -> (tempfile::TempDir, RepositorySession) {
    let (root, _, session) = mirrored_with(quick(), mirror, origin);
    (root, session)
}

/// Returns a mirrored registry with these settings, and its client.
fn mirrored_with(
    config: RegistryConfig,
    mirror: &FaultRegistry,
    origin: &FaultRegistry,
) -> (tempfile::TempDir, RegistryClient, RepositorySession) {
    let toml = format!("server = \"{}\"\n[host.\"{}\"]\n", origin.url(), mirror.url());
    let (root, with_hosts) = with_hosts("reg.example", &toml);
    let client = RegistryClient::new(RegistryConfig { config_dirs: with_hosts.config_dirs, ..config });
    let session = client.session(&reference("reg.example/shop/web:1"), None).unwrap();
    assert_eq!(session.hosts(), [mirror.address(), origin.address()]);
    (root, client, session)
}

#[tokio::test]
async fn a_mirror_is_requested_first_with_the_registry_as_ns() {
    let (mirror, origin) = (FaultRegistry::start(), FaultRegistry::start());
    let image = mirror.put_image("shop/web", "1", LAYER, &[content(10)], &[]);
    let (_root, session) = mirrored(&mirror, &origin);
    let resolved = session.resolve().await.unwrap();
    assert_eq!(
        (resolved.descriptor.digest.as_str(), resolved.host),
        (image.manifest.as_str(), mirror.address())
    );
    assert_eq!(mirror.requests()[0].path, "/v2/shop/web/manifests/1?ns=reg.example");
    assert_eq!(origin.requests(), []);
}

#[tokio::test]
async fn whatever_a_mirror_answers_the_next_host_is_asked() {
    for fault in [
        ResponseFault::status(404),
        ResponseFault::status(401),
        ResponseFault::status(403),
        ResponseFault::status(500),
        ResponseFault::status(429),
        ResponseFault::Hangup,
        ResponseFault::Corrupt,
        ResponseFault::Status(200, Vec::new(), "<html>please log in</html>".into()),
        ResponseFault::Overlong(8 << 20),
    ] {
        let (mirror, origin) = (FaultRegistry::start(), FaultRegistry::start());
        for registry in [&mirror, &origin] {
            registry.put_image("shop/web", "1", LAYER, &[content(10)], &[]);
        }
        mirror.fault(FaultTrigger::path("/"), fault.clone());
        let (_root, session) = mirrored(&mirror, &origin);
        let resolved = session.resolve().await.unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        assert_eq!(resolved.host, origin.address(), "{fault:?}");
        assert!(mirror.requests().len() <= 2, "{fault:?}");
    }
}

#[tokio::test]
async fn when_all_fail_the_error_names_each() {
    let (mirror, origin) = (FaultRegistry::start(), FaultRegistry::start());
    mirror.fault(FaultTrigger::path("/"), ResponseFault::status(403));
    let (_root, session) = mirrored(&mirror, &origin);
    let error = session.resolve().await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "reg.example/shop/web: manifest 1 at {}: not found: 404 Not Found (MANIFEST_UNKNOWN: manifest unknown); \
             before that, {}: pull access denied, repository does not exist or may require authorization: 403 Forbidden",
            origin.address(),
            mirror.address()
        )
    );
}

#[tokio::test]
async fn a_refusal_is_reported_before_what_became_of_the_hosts_after_it() {
    let (registry, gone) = (FaultRegistry::start(), "127.0.0.1:1");
    for (is_mirror, status, first) in
        [(false, 401, "401"), (false, 404, "404"), (true, 403, "403"), (true, 404, "refused")]
    {
        registry.fault(FaultTrigger::path("/"), ResponseFault::status(status));
        let image_host = if is_mirror { "reg.example".to_owned() } else { registry.address() };
        let toml = format!("server = \"https://{gone}\"\n[host.\"{}\"]\n", registry.url());
        let (_root, config) = with_hosts(&image_host, &toml);
        let error = session(config, &format!("{image_host}/shop/web:1")).resolve().await.unwrap_err();
        let (headline, others) =
            error.to_string().split_once("; ").map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
        assert!(headline.contains(first), "{error}");
        let order = if first == "refused" { "before that" } else { "after that" };
        assert!(others.starts_with(order), "{error}");
        registry.clear_faults();
    }
}

#[tokio::test]
async fn a_mirror_that_fails_half_way_is_left_at_the_byte_that_was_reached() {
    for fault in [ResponseFault::ResetAfter(30_000), ResponseFault::StallAfter(30_000)] {
        let (mirror, origin) = (FaultRegistry::start(), FaultRegistry::start());
        let (content, blob) = put_blob(&mirror, 90_000);
        put_blob(&origin, 90_000);
        // It serves once, half of it, and is then broken for good.
        mirror.fault(FaultTrigger::path("/blobs/").once(), fault.clone());
        mirror.fault(FaultTrigger::path("/blobs/"), ResponseFault::status(500));
        let (_root, client, session) = mirrored_with(without_header_timeout(), &mirror, &origin);
        let (session, notices) = watched(&session);
        let sink = MemorySink::new();
        let (window, none) = (client.config().stall_window, ByteRanges::new());
        let has_stalled = |requests: &[LoggedRequest]| {
            matches!(fault, ResponseFault::StallAfter(_)) && requests.len() == 1 && requests[0].sent == 30_000
        };
        tokio::select! {
            fetched = fetch_blob(&session, &blob, &none, sink.clone()) => fetched.unwrap(),
            () = pass_limit(&client, &mirror, window, has_stalled) => unreachable!("it never ends"),
        }
        assert!(sink.content() == content);
        assert_eq!(hosts(&notices), [mirror.address(), origin.address()]);
        assert_eq!(origin.bytes_sent(blob.digest.as_str()), 60_000, "{fault:?}");
        assert_eq!(origin.requests()[0].range.as_deref(), Some("bytes=30000-89999"));
    }
}

#[tokio::test]
async fn ranges_after_a_failed_one_do_not_try_the_mirror_again() {
    let (mirror, origin) = (FaultRegistry::start(), FaultRegistry::start());
    let (content, blob) = put_blob(&mirror, 1_000_000);
    put_blob(&origin, 1_000_000);
    mirror.fault(FaultTrigger::path("/blobs/").nth(2..=usize::MAX), ResponseFault::status(404));
    let (_root, session) = mirrored(&mirror, &origin);
    let sink = MemorySink::new();
    fetch_blob(&session, &blob, &ByteRanges::new(), sink.clone()).await.unwrap();
    assert!(sink.content() == content);
    // Those that were under way when the first one failed, at most; there are ten ranges.
    assert!(mirror.requests().len() <= 6, "{}", mirror.requests().len());
    let sent = mirror.bytes_sent(blob.digest.as_str()) + origin.bytes_sent(blob.digest.as_str());
    assert_eq!(sent, 1_000_000);
}

#[tokio::test]
async fn a_next_host_without_ranges_takes_over_on_one_connection() {
    let (mirror, origin) = (FaultRegistry::start(), FaultRegistry::start());
    let (content, blob) = put_blob(&mirror, 1_000_000);
    put_blob(&origin, 1_000_000);
    mirror.fault(FaultTrigger::path("/blobs/").nth(3..=usize::MAX), ResponseFault::status(404));
    origin.fault(FaultTrigger::path("/blobs/"), ResponseFault::IgnoreRange);
    let (_root, session) = mirrored(&mirror, &origin);
    let sink = MemorySink::new();
    fetch_blob(&session, &blob, &ByteRanges::new(), sink.clone()).await.unwrap();
    assert!(sink.content() == content);
    assert!(origin.requests().len() <= 4, "not one whole blob for each range: {}", origin.requests().len());
}

#[tokio::test]
async fn an_unreachable_mirror_is_not_requested_for_every_blob() {
    let origin = FaultRegistry::start();
    let blobs: Vec<_> = (1..=5).map(|size| put_blob(&origin, size * 1000)).collect();
    let gone = FaultRegistry::start();
    let toml = format!("server = \"{}\"\n[host.\"{}\"]\n", origin.url(), gone.url());
    let (_root, config) = with_hosts("reg.example", &toml);
    drop(gone);
    let session = session(config, "reg.example/shop/web:1");
    for (number, (_, blob)) in blobs.iter().enumerate() {
        let (session, notices) = watched(&session);
        fetch_blob(&session, blob, &ByteRanges::new(), MemorySink::new()).await.unwrap();
        assert_eq!(waits(&notices), [], "blob {number}: the next host is asked at once");
    }
    // An avoided host is still requested when no other is left.
    origin.fault(FaultTrigger::path("/"), ResponseFault::status(404));
    let error = session.resolve().await.unwrap_err();
    assert!(error.to_string().contains("recently unreachable"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_host_that_never_accepts_a_connection_costs_one_connect_timeout() {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(0).unwrap();
    let address = listener.local_addr().unwrap();
    let connect = || std::net::TcpStream::connect_timeout(&address, Duration::from_millis(200));
    let _queued: Vec<_> = std::iter::from_fn(|| connect().ok()).collect();
    let (_root, config) = with_hosts("reg.example", &format!("server = \"http://{address}\"\n"));
    let config = RegistryConfig { tries: 1, ..config };
    let (limit, began) = (config.connect_timeout, tokio::time::Instant::now());
    let error = session(config, "reg.example/shop/web:1").resolve().await.unwrap_err();
    assert!(error.to_string().contains("no connection within"), "{error}");
    assert!(began.elapsed() < limit + limit / 2, "{:?}", began.elapsed());
}

#[tokio::test]
async fn the_credential_of_the_registry_is_not_for_its_mirrors() {
    let (mirror, origin) = (FaultRegistry::start(), FaultRegistry::start());
    for registry in [&mirror, &origin] {
        registry.put_image("shop/web", "1", LAYER, &[content(10)], &[]);
        registry.require(FaultRegistryAuth::Basic { user: "u".into(), password: "s3cret".into() });
    }
    let toml = format!("server = \"{}\"\n[host.\"{}\"]\n", origin.url(), mirror.url());
    let (_root, config) = with_hosts("reg.example", &toml);
    let client = RegistryClient::new(config);
    let session = client.session(&reference("reg.example/shop/web:1"), Some(&login("u", "s3cret"))).unwrap();
    assert_eq!(session.resolve().await.unwrap().host, origin.address());
    assert!(mirror.requests().iter().all(|request| request.authorization.is_none()));
}

#[tokio::test]
async fn hosts_without_a_capability_are_not_asked_for_it() {
    let (mirror, origin) = (FaultRegistry::start(), FaultRegistry::start());
    let (content, blob) = put_blob(&mirror, 1000);
    origin.put_image("shop/web", "1", LAYER, std::slice::from_ref(&content), &[]);
    let toml = format!(
        "server = \"{}\"\ncapabilities = [\"resolve\"]\n[host.\"{}\"]\ncapabilities = [\"pull\"]",
        origin.url(),
        mirror.url()
    );
    let (_root, config) = with_hosts("reg.example", &toml);
    let session = session(config, "reg.example/shop/web:1");
    assert_eq!(session.resolve().await.unwrap().host, origin.address());
    fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::new()).await.unwrap();
    assert_eq!(mirror.requests().len(), 1);
    assert_eq!(origin.requests().len(), 1);

    let (_root, config) = with_hosts("reg.example", "capabilities = [\"push\"]");
    let error = crate::support::session(config, "reg.example/shop/web:1").resolve().await.unwrap_err();
    assert!(matches!(*error.kind, FetchErrorKind::NoHost), "{error}");
}

#[tokio::test]
async fn a_host_that_lied_can_be_left_out() {
    let (mirror, origin) = (FaultRegistry::start(), FaultRegistry::start());
    let (content, blob) = put_blob(&mirror, 1000);
    put_blob(&origin, 1000);
    mirror.fault(FaultTrigger::path("/blobs/"), ResponseFault::Corrupt);
    let (_root, session) = mirrored(&mirror, &origin);
    let (session, notices) = watched(&session);
    let sink = MemorySink::new();
    fetch_blob(&session, &blob, &ByteRanges::new(), sink.clone()).await.unwrap();
    assert!(sink.content() != content, "blobs are verified by their reader");
    let session = session.without_hosts(&hosts(&notices));
    let sink = MemorySink::new();
    fetch_blob(&session, &blob, &ByteRanges::new(), sink.clone()).await.unwrap();
    assert!(sink.content() == content);
}

#[tokio::test]
async fn errors_in_hosts_toml_fail_the_pull_with_file_and_key() {
    let (_root, config) = with_hosts("reg.example", "[host.\"https://m.example\"]\nskip_verify = 1");
    let error = RegistryClient::new(config).session(&reference("reg.example/shop/web:1"), None).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("hosts.toml: line 2: host.\"https://m.example\".skip_verify: expected true or false, found integer"), "{text}");
}

/// A proxy that answers all requests itself and records them.
#[tokio::test]
async fn registries_are_reached_through_the_proxy_and_loopback_is_not() {
    let proxy = FaultRegistry::start();
    let registry = FaultRegistry::start();
    registry.put_image("shop/web", "1", LAYER, &[content(10)], &[]);
    let config = RegistryConfig {
        proxy: larder_registry::Proxy::Fixed { url: proxy.url(), except: "direct.invalid".into() },
        plain_http: vec!["reg.invalid".into(), "direct.invalid".into()],
        tries: 1,
        ..quick()
    };
    session(config.clone(), &registry.image("shop/web:1")).resolve().await.unwrap();
    assert_eq!(proxy.requests(), []);
    let error = session(config.clone(), "reg.invalid/shop/web:1").resolve().await.unwrap_err();
    assert_eq!(kind(&error), "not found", "the proxy answered: {error}");
    assert_eq!(proxy.requests()[0].host, "reg.invalid");
    let error = session(config, "direct.invalid/shop/web:1").resolve().await.unwrap_err();
    assert_eq!(kind(&error), "unreachable", "{error}");
    assert!(proxy.requests().iter().all(|request| request.host == "reg.invalid"));
    assert_eq!(proxy.requests_for("/manifests/").len(), 1);
}

/// Set where this test runs itself, with proxy variables: a test may not change the environment that it runs in.
const WITH_PROXY_VARIABLES: &str = "LARDER_TEST_WITH_PROXY_VARIABLES";

#[test]
fn proxy_variables_of_the_environment_are_obeyed() {
    if std::env::var_os(WITH_PROXY_VARIABLES).is_some() {
        return resolve_with_proxy_variables();
    }
    let proxy = FaultRegistry::start();
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["failover::proxy_variables_of_the_environment_are_obeyed", "--exact"])
        .envs([
            (WITH_PROXY_VARIABLES, "1".to_owned()),
            ("HTTP_PROXY", proxy.url()),
            ("http_proxy", proxy.url()),
            ("NO_PROXY", "direct.invalid".to_owned()),
        ])
        .env_remove("no_proxy")
        .env_remove("REQUEST_METHOD")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    wait_until("the proxy received a request", || !proxy.requests().is_empty());
    assert_eq!(proxy.requests_for("/manifests/").len(), 1);
    assert!(proxy.requests().iter().all(|request| request.host == "reg.invalid"));
}

#[tokio::main(flavor = "current_thread")]
async fn resolve_with_proxy_variables() {
    let config = RegistryConfig {
        plain_http: vec!["reg.invalid".into(), "direct.invalid".into()],
        proxy: larder_registry::Proxy::FromEnvironment,
        tries: 1,
        ..quick()
    };
    session(config.clone(), "reg.invalid/shop/web:1").resolve().await.unwrap_err();
    session(config, "direct.invalid/shop/web:1").resolve().await.unwrap_err();
}
