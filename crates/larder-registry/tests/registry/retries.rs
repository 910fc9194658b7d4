//! Retries: with registries that ask to wait, and with those that fail.

use std::net::Ipv4Addr;
use std::time::{Duration, SystemTime};

use larder::credentials::Credential;
use larder_registry::{ByteRanges, FetchErrorKind, FetchWait, RegistryClient, RegistryConfig, fetch_blob};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, LoggedRequest, ResponseFault};
use tokio::net::TcpSocket;
use tokio::time::Instant;

use crate::support::*;

fn with_image() -> FaultRegistry {
    let registry = FaultRegistry::start();
    registry.put_image("shop/web", "1", LAYER, &[content(10)], &[]);
    registry
}

/// Waits until a registry has requested a wait and `requests` of the client obey it, and runs the clock ahead to its
/// end. How long it was.
async fn pass_hold(client: &RegistryClient, registry: &FaultRegistry, requests: usize) -> Duration {
    let load =
        load_until(client, registry, |load| !load.held_for.is_zero() && load.waiting == requests).await;
    advance(load.held_for);
    load.held_for
}

#[tokio::test]
async fn retry_after_in_seconds_or_as_a_date_is_obeyed() {
    let hold = Duration::from_secs(50);
    for as_date in [false, true] {
        for status in [429, 503] {
            let registry = with_image();
            let client = RegistryClient::new(quick());
            let session = client.session(&reference(&registry.image("shop/web:1")), None).unwrap();
            let (session, notices) = watched(&session);
            let (start, date) = (Instant::now(), SystemTime::now() + hold);
            let after = if as_date { httpdate::fmt_http_date(date) } else { hold.as_secs().to_string() };
            registry
                .fault(FaultTrigger::path("/manifests/").once(), ResponseFault::RetryAfter(status, after));
            let waiting = async {
                let time = pass_hold(&client, &registry, 1).await;
                assert!(time <= hold, "{time:?}");
                assert_eq!(registry.requests().len(), 1);
            };
            let (resolved, ()) = tokio::join!(session.resolve(), waiting);
            resolved.unwrap();
            // A date is a whole second, so up to one second is lost; the clocks may differ by a little.
            let lost = Duration::from_millis(if as_date { 1100 } else { 0 });
            assert!(start.elapsed() + lost >= hold, "{:?}", start.elapsed());
            let waits = waits(&notices);
            assert!(
                waits.iter().any(
                    |wait| matches!(wait, FetchWait::RateLimited { host, .. } if *host == registry.address())
                ),
                "{waits:?}"
            );
            assert_eq!(registry.requests().len(), 2);
        }
    }
}

#[tokio::test]
async fn one_pull_s_429_keeps_all_pulls_from_that_registry_waiting() {
    let registry = with_image();
    let other = with_image();
    registry.fault(FaultTrigger::path("/manifests/").once(), ResponseFault::RetryAfter(429, "50".into()));
    let client = RegistryClient::new(quick());
    let session =
        |registry: &FaultRegistry| client.session(&reference(&registry.image("shop/web:1")), None).unwrap();
    let (first, second, unlimited) = (session(&registry), session(&registry), session(&other));
    let start = Instant::now();
    let second = async {
        load_until(&client, &registry, |load| !load.held_for.is_zero()).await;
        unlimited.resolve().await.unwrap();
        assert!(!load_of(&client, &registry).held_for.is_zero(), "other registries are not concerned");
        second.resolve().await.unwrap();
        start.elapsed()
    };
    let held = async {
        pass_hold(&client, &registry, 2).await;
        assert_eq!(registry.requests().len(), 1);
    };
    let (first, second, ()) = tokio::join!(first.resolve(), second, held);
    first.unwrap();
    assert!(second >= Duration::from_secs(50), "{second:?}");
    assert_eq!(registry.requests().len(), 3);
}

#[tokio::test]
async fn one_repository_s_429_holds_no_other_repository_and_no_other_credential() {
    let registry = with_image();
    registry.put_image("shop/api", "1", LAYER, &[content(20)], &[]);
    registry.fault(FaultTrigger::path("shop/web/").once(), ResponseFault::RetryAfter(429, "86400".into()));
    let client = RegistryClient::new(quick());
    let session = |name: &str, credential: Option<&Credential>| {
        client.session(&reference(&registry.image(name)), credential).unwrap()
    };
    let error = session("shop/web:1", None).resolve().await.unwrap_err();
    assert_eq!(kind(&error), "rate limited");
    session("shop/api:1", None).resolve().await.unwrap();
    session("shop/web:1", Some(&login("user", "password"))).resolve().await.unwrap();
    let error = session("shop/web:1", None).resolve().await.unwrap_err();
    assert_eq!(kind(&error), "rate limited", "it is not sent");
    assert_eq!(registry.requests_for("shop/web").len(), 2);
    assert!(!client.loads()[0].held_for.is_zero());
}

#[tokio::test]
async fn one_registry_s_503_holds_all_requests_to_it() {
    let registry = with_image();
    registry.put_image("shop/api", "1", LAYER, &[content(20)], &[]);
    registry.fault(FaultTrigger::path("shop/web/").once(), ResponseFault::RetryAfter(503, "50".into()));
    let client = RegistryClient::new(quick());
    let session = |name: &str| client.session(&reference(&registry.image(name)), None).unwrap();
    let (web, api) = (session("shop/web:1"), session("shop/api:1"));
    let start = Instant::now();
    let api = async {
        load_until(&client, &registry, |load| !load.held_for.is_zero()).await;
        api.resolve().await.unwrap();
        start.elapsed()
    };
    let held = async {
        pass_hold(&client, &registry, 2).await;
        assert_eq!(registry.requests().len(), 1, "another repository waits, too");
    };
    let (web, api, ()) = tokio::join!(web.resolve(), api, held);
    web.unwrap();
    assert!(api >= Duration::from_secs(50), "{api:?}");
}

#[tokio::test]
async fn a_requested_wait_beyond_the_limit_fails_with_the_reason_and_sends_nothing_more() {
    let registry = with_image();
    let body = r#"{"errors":[{"code":"TOOMANYREQUESTS","message":"You have reached your pull rate limit"}]}"#;
    registry.fault(
        FaultTrigger::path("/"),
        ResponseFault::Status(429, vec![("Retry-After".into(), "3600".into())], body.into()),
    );
    let client = RegistryClient::new(quick());
    let session = client.session(&reference(&registry.image("shop/web:1")), None).unwrap();
    let error = session.resolve().await.unwrap_err();
    assert!(
        matches!(*error.kind, FetchErrorKind::RateLimited { after: Some(after), .. } if after.as_secs() == 3600)
    );
    let text = error.to_string();
    assert!(
        text.contains(
            "429 Too Many Requests (TOOMANYREQUESTS: You have reached your pull rate limit); retry after 1h0m"
        ),
        "{text}"
    );
    let error = session.resolve().await.unwrap_err();
    assert_eq!(kind(&error), "rate limited");
    assert_eq!(registry.requests().len(), 1, "all pulls wait, also the next one");
}

#[tokio::test]
async fn a_used_up_quota_is_waited_for_before_the_next_request() {
    let registry = with_image();
    let client = RegistryClient::new(quick());
    let session = client.session(&reference(&registry.image("shop/web:1")), None).unwrap();
    let resolved = session.resolve().await.unwrap();
    let raw = String::from_utf8(resolved.raw.to_vec()).unwrap();
    let quota = vec![("RateLimit-Remaining".into(), "0".into()), ("RateLimit-Reset".into(), "50".into())];
    registry.fault(FaultTrigger::path("/manifests/").once(), ResponseFault::Status(200, quota, raw));
    let start = Instant::now();
    session.resolve().await.unwrap();
    let held = async {
        pass_hold(&client, &registry, 1).await;
        assert_eq!(registry.requests().len(), 2);
    };
    let (resolved, ()) = tokio::join!(session.resolve(), held);
    resolved.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(50), "{:?}", start.elapsed());
}

#[tokio::test]
async fn failures_of_the_server_are_tried_again_a_bounded_number_of_times() {
    for (fault, name) in [
        (ResponseFault::status(500), "failing"),
        (ResponseFault::status(502), "failing"),
        (ResponseFault::Hangup, "unreachable"),
        (ResponseFault::SlowHeaders(Duration::from_secs(3600)), "no answer"),
        (ResponseFault::StallAfter(10), "stalled"),
        (ResponseFault::CloseAfter(10), "unreachable"),
        (ResponseFault::status(429), "rate limited"),
    ] {
        let registry = with_image();
        let (config, limit, hangs_after) = match fault {
            ResponseFault::SlowHeaders(_) => (quick(), quick().header_timeout, Some(0)),
            ResponseFault::StallAfter(sent) => (without_header_timeout(), quick().stall_window, Some(sent)),
            _ => (quick(), Duration::ZERO, None),
        };
        // The result of a new client, and its notices, while the first `faulty` responses have the fault.
        let resolve = async |faulty: usize| {
            registry.forget_requests();
            registry.fault(FaultTrigger::path("/manifests/").nth(1..=faulty), fault.clone());
            let client = RegistryClient::new(config.clone());
            let session = client.session(&reference(&registry.image("shop/web:1")), None).unwrap();
            let (session, notices) = watched(&session);
            let hangs = |requests: &[LoggedRequest]| {
                requests.len() <= faulty && requests.last().is_some_and(|last| Some(last.sent) == hangs_after)
            };
            tokio::select! {
                resolved = session.resolve() => (resolved, waits(&notices)),
                () = pass_limit(&client, &registry, limit, hangs) => unreachable!("it never ends"),
            }
        };
        let (resolved, _) = resolve(2).await;
        resolved.unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        assert_eq!(registry.requests().len(), 3, "{fault:?}");

        let (resolved, waits) = resolve(usize::MAX).await;
        let error = resolved.unwrap_err();
        assert_eq!(kind(&error), name, "{fault:?}: {error}");
        assert_eq!(registry.requests().len(), 5, "{fault:?}");
        assert!(error.hint().is_some(), "{error}");
        assert!(matches!(waits[..], [FetchWait::Retry { .. }, ..]), "{fault:?}");
    }
}

#[tokio::test]
async fn connection_refused_and_unknown_host_are_distinguished() {
    // Bound, so that no other process takes the port, and nothing listens.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let address = socket.local_addr().unwrap();
    let (refused, notices) = watched(&session(quick(), &format!("{address}/shop/web:1")));
    let error = refused.resolve().await.unwrap_err();
    assert_eq!(kind(&error), "unreachable");
    assert!(error.to_string().contains("refused"), "{error}");
    assert!(waits(&notices).is_empty(), "a wrong address is not retried: {:?}", waits(&notices));
    let config = RegistryConfig { tries: 1, ..quick() };
    let error = session(config, "no-such-host.invalid/shop/web:1").resolve().await.unwrap_err();
    assert_eq!(kind(&error), "unreachable");
    assert!(
        error.to_string().contains("no-such-host.invalid/shop/web: manifest 1 at no-such-host.invalid"),
        "{error}"
    );
    assert!(error.to_string().contains("dns error"), "{error}");
}

#[tokio::test]
async fn manifests_pass_while_blobs_take_all_connections() {
    let registry = with_image();
    let (_, blob) = put_blob(&registry, 90_000);
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::StallAfter(4000));
    let client = RegistryClient::new(RegistryConfig { connections: 1, ..quick() });
    let session = client.session(&reference(&registry.image("shop/web:1")), None).unwrap();
    let none = ByteRanges::new();
    let resolved = async {
        load_until(&client, &registry, |load| load.connections == load.limit && load.bytes == 4000).await;
        session.resolve().await.unwrap();
        load_of(&client, &registry).connections
    };
    tokio::select! {
        fetched = fetch_blob(&session, &blob, &none, MemorySink::new()) => panic!("it has stalled: {fetched:?}"),
        connections = resolved => assert_eq!(connections, 1),
    }
}
