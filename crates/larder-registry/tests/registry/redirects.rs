//! Redirects: followed, bounded, and without credentials to others.

use std::net::TcpListener;

use larder_registry::{ByteRanges, RegistryClient, fetch_blob};
use larder_testkit::fault_registry::{FaultRegistry, FaultRegistryAuth, FaultTrigger, ResponseFault};

use crate::support::*;

#[tokio::test]
async fn a_redirect_to_another_host_is_followed_without_credentials() {
    let registry = FaultRegistry::start();
    let storage = FaultRegistry::start();
    let (content, blob) = put_blob(&storage, 250_000);
    registry.require(FaultRegistryAuth::Basic { user: "u".into(), password: "s3cret".into() });
    let digest = blob.digest.as_str().to_owned();
    registry.fault(FaultTrigger::path("/manifests/"), ResponseFault::status(404));
    // The registry requires the password first, so that one could leak.
    registry.fault(
        FaultTrigger::path("/blobs/").nth(2..=usize::MAX),
        ResponseFault::Redirect(format!("{}/v2/x/blobs/{digest}?sig=signed", storage.url())),
    );
    let toml = format!("server = \"{}\"\n[header]\nx-own = \"mine\"", registry.url());
    let (_root, config) = with_hosts(&registry.address(), &toml);
    let session = RegistryClient::new(config)
        .session(&reference(&registry.image("a/b")), Some(&login("u", "s3cret")))
        .unwrap();
    let (session, notices) = watched(&session);
    let sink = MemorySink::new();
    fetch_blob(&session, &blob, &ByteRanges::new(), sink.clone()).await.unwrap();
    assert!(sink.content() == content);
    assert_eq!(hosts(&notices), [registry.address()]);
    assert!(registry.requests().iter().all(|request| request.header("x-own") == Some("mine")));
    assert!(registry.requests()[1].authorization.is_some());
    let there = storage.requests();
    assert_eq!(there.len(), 3, "each range follows its own redirect");
    assert!(
        there.iter().all(|request| request.authorization.is_none() && request.header("x-own").is_none()),
        "{there:?}"
    );
    assert!(there.iter().all(|request| request.range.is_some() && request.path.ends_with("?sig=signed")));
}

#[tokio::test]
async fn a_redirect_within_the_host_keeps_the_credentials() {
    let registry = FaultRegistry::start();
    let (_, blob) = put_blob(&registry, 1000);
    registry.require(FaultRegistryAuth::Basic { user: "u".into(), password: "s3cret".into() });
    registry.fault(
        FaultTrigger::path("/a/b/blobs/").nth(2..=2),
        ResponseFault::Redirect(format!("/v2/other/blobs/{}", blob.digest)),
    );
    let session = RegistryClient::new(quick())
        .session(&reference(&registry.image("a/b")), Some(&login("u", "s3cret")))
        .unwrap();
    fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::new()).await.unwrap();
    assert!(registry.requests_for("/other/")[0].authorization.is_some());
}

#[tokio::test]
async fn a_redirect_back_to_the_registry_sends_no_credentials() {
    let registry = FaultRegistry::start();
    let other = FaultRegistry::start();
    let (_, blob) = put_blob(&registry, 1000);
    registry.require(FaultRegistryAuth::Basic { user: "u".into(), password: "s3cret".into() });
    registry.fault(
        FaultTrigger::path("/a/b/blobs/").nth(2..=usize::MAX),
        ResponseFault::Redirect(format!("{}/away", other.url())),
    );
    other.fault(
        FaultTrigger::path("/away"),
        ResponseFault::Redirect(format!("{}/v2/back/blobs/x", registry.url())),
    );
    let session = RegistryClient::new(quick())
        .session(&reference(&registry.image("a/b")), Some(&login("u", "s3cret")))
        .unwrap();
    fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::new()).await.unwrap_err();
    let back = registry.requests_for("/back/");
    assert!(!back.is_empty());
    assert!(back.iter().all(|request| request.authorization.is_none()));
}

#[tokio::test]
async fn a_redirect_to_a_dead_host_is_retried_and_then_names_the_host() {
    let registry = FaultRegistry::start();
    let (content, blob) = put_blob(&registry, 1000);
    let dead = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let session = session(quick(), &registry.image("a/b"));
    let secret = ResponseFault::Redirect(format!("http://{dead}/x?X-Signature=abcdef"));
    registry.fault(FaultTrigger::path("/blobs/").nth(1..=2), secret.clone());
    let sink = MemorySink::new();
    fetch_blob(&session, &blob, &ByteRanges::new(), sink.clone()).await.unwrap();
    assert!(sink.content() == content);

    registry.fault(FaultTrigger::path("/blobs/"), secret);
    let error = fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::new()).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("redirected to {dead}: ")) && text.contains("refused"), "{text}");
    assert!(!text.contains("abcdef"), "signed URLs are secrets: {text}");
}

#[tokio::test]
async fn a_redirect_into_the_nodes_own_network_is_refused() {
    for target in
        ["http://169.254.169.254/latest/meta-data/", "https://[fe80::1]/x", "http://[::ffff:a9fe:a9fe]/x"]
    {
        let registry = FaultRegistry::start();
        let (_, blob) = put_blob(&registry, 1000);
        registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::Redirect(target.to_owned()));
        let session = session(quick(), &registry.image("a/b"));
        let error = fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::new()).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("an address of the node's own network"), "{target}: {text}");
    }
}

#[tokio::test]
async fn the_text_of_a_redirect_target_is_not_repeated() {
    let (registry, storage) = (FaultRegistry::start(), FaultRegistry::start());
    let (_, blob) = put_blob(&registry, 1000);
    let text = r#"{"errors":[{"code":"DENIED","message":"instance role: admin"}]}"#;
    storage.fault(FaultTrigger::path("/x"), ResponseFault::Status(404, Vec::new(), text.into()));
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::Redirect(format!("{}/x", storage.url())));
    let session = session(quick(), &registry.image("a/b"));
    let error = fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::new()).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&storage.address()) && !text.contains("admin"), "{text}");
}

#[tokio::test]
async fn redirects_without_end_or_to_nonsense_are_refused() {
    for (target, text) in [
        ("/v2/a/b/blobs/loop", "more than 5 redirects"),
        ("ftp://x.example/y", "redirect to a URL that is not HTTP"),
        ("http://", "redirect to an invalid URL"),
    ] {
        let registry = FaultRegistry::start();
        let (_, blob) = put_blob(&registry, 1000);
        registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::Redirect(target.into()));
        let session = session(quick(), &registry.image("a/b"));
        let error = fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::new()).await.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert!(registry.requests().len() <= 6);
    }
}

#[tokio::test]
async fn a_user_in_a_redirect_s_url_is_not_sent() {
    let registry = FaultRegistry::start();
    let (_, blob) = put_blob(&registry, 1000);
    let target = format!("http://u:p@{}/v2/x/blobs/{}", registry.address(), blob.digest);
    registry.fault(FaultTrigger::path("/a/b/"), ResponseFault::Redirect(target));
    let session = session(quick(), &registry.image("a/b"));
    fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::new()).await.unwrap();
    assert!(registry.requests().iter().all(|request| request.authorization.is_none()));
}

#[tokio::test]
async fn a_redirect_names_the_registry_as_its_referer() {
    let registry = FaultRegistry::start();
    let storage = FaultRegistry::start();
    let (_, blob) = put_blob(&storage, 1000);
    let target = format!("{}/v2/x/blobs/{}?sig=signed", storage.url(), blob.digest);
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::Redirect(target));
    let session = session(quick(), &registry.image("a/b"));
    fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::new()).await.unwrap();
    let referer = format!("{}/v2/a/b/blobs/{}", registry.url(), blob.digest);
    assert_eq!(storage.requests()[0].header("referer"), Some(referer.as_str()));
    assert_eq!(registry.requests()[0].header("referer"), None);
}
