//! Passwords and tokens: required, sent only to their servers, renewed.

use larder::credentials::{Credential, Secret, encode_auth};
use larder_registry::manifest::PlatformMatcher;
use larder_registry::{ByteRanges, FetchTarget, RegistryClient, fetch_blob};
use larder_testkit::fault_registry::{FaultRegistry, FaultRegistryAuth, FaultTrigger, ResponseFault};
use std::time::Duration;

use crate::support::*;

const PASSWORD: &str = "s3cret-word";

fn token(login: Option<(&str, &str)>) -> FaultRegistryAuth {
    let login = login.map(|(user, secret)| (user.to_owned(), secret.to_owned()));
    FaultRegistryAuth::Token { realm: String::new(), login, expires_in: 300 }
}

/// A registry with one image of one layer of 300 kB.
fn registry(auth: FaultRegistryAuth) -> FaultRegistry {
    let registry = FaultRegistry::start();
    registry.put_image("shop/web", "1", LAYER, &[content(300_000)], &[]);
    registry.require(auth);
    registry
}

/// Everything of the image.
async fn pull(registry: &FaultRegistry, credential: Option<&Credential>) -> Result<(), String> {
    let client = RegistryClient::new(quick());
    pull_with(&client, registry, credential).await
}

async fn pull_with(
    client: &RegistryClient,
    registry: &FaultRegistry,
    credential: Option<&Credential>,
) -> Result<(), String> {
    let session = client.session(&reference(&registry.image("shop/web:1")), credential).unwrap();
    let documents = session.documents(&PlatformMatcher::host()).await.map_err(|error| error.to_string())?;
    for layer in &documents.layers.layers {
        let fetched = fetch_blob(&session, layer, &ByteRanges::new(), MemorySink::new()).await;
        fetched.map_err(|error| error.to_string())?;
    }
    Ok(())
}

#[tokio::test]
async fn a_token_comes_over_plain_http_from_a_registry_that_may_be_reached_so() {
    // This address is that of loopback, and no host that is trusted without TLS.
    for (realm, is_accepted) in [("", true), ("http://token.example/token", false)] {
        let registry = registry(FaultRegistryAuth::Token {
            realm: realm.into(),
            login: Some(("u".into(), PASSWORD.into())),
            expires_in: 300,
        });
        let image = registry.image("shop/web:1").replace("127.0.0.1", "0.0.0.0");
        let client = RegistryClient::new(quick()).without_tls_verify();
        let session = client.session(&reference(&image), Some(&login("u", PASSWORD))).unwrap();
        let resolved = session.resolve().await.map_err(|error| error.to_string());
        assert_eq!(resolved.is_ok(), is_accepted, "{resolved:?}");
        if let Err(text) = resolved {
            assert!(text.contains("realm is not https"), "{text}");
        }
    }
}

#[tokio::test]
async fn a_password_is_shown_when_it_is_asked_for_and_not_before() {
    let registry = registry(FaultRegistryAuth::Basic { user: "u".into(), password: PASSWORD.into() });
    pull(&registry, Some(&login("u", PASSWORD))).await.unwrap();
    let requests = registry.requests();
    assert_eq!(requests[0].authorization, None);
    assert!(requests[1..].iter().all(|request| request.status < 300), "{requests:?}");

    let (wrong, missing) = ("the registry rejected the credential", "pull access denied");
    for (credential, requests, text) in [(Some(login("u", "wrong-word")), 2, wrong), (None, 1, missing)] {
        registry.forget_requests();
        let error = pull(&registry, credential.as_ref()).await.unwrap_err();
        assert!(error.contains(text), "{error}");
        let answer =
            if credential.is_some() { "UNAUTHORIZED" } else { "UNAUTHORIZED: authentication required" };
        assert!(error.contains(&format!("401 Unauthorized ({answer})")), "{error}");
        assert!(!error.contains("wrong-word"), "{error}");
        assert_eq!(registry.requests().len(), requests);
    }
}

#[tokio::test]
async fn one_token_serves_all_of_a_pull_and_the_next_one() {
    let registry = registry(token(Some(("u", PASSWORD))));
    let client = RegistryClient::new(quick());
    let credential = login("u", PASSWORD);
    pull_with(&client, &registry, Some(&credential)).await.unwrap();
    pull_with(&client, &registry, Some(&credential)).await.unwrap();
    let asked = registry.requests_for("/token");
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].path, "/token?service=fault%2Cregistry&scope=repository%3Ashop%2Fweb%3Apull");
    let refused = registry.requests().iter().filter(|request| request.status == 401).count();
    assert_eq!(refused, 1, "only the very first request came without a token");
}

#[tokio::test]
async fn anonymous_requests_get_tokens_too() {
    let registry = registry(token(None));
    pull(&registry, None).await.unwrap();
    assert_eq!(registry.requests_for("/token")[0].authorization, None);
}

#[tokio::test]
async fn a_token_of_one_credential_is_not_shown_for_another() {
    let registry = registry(token(Some(("u", PASSWORD))));
    let client = RegistryClient::new(quick());
    pull_with(&client, &registry, Some(&login("u", PASSWORD))).await.unwrap();
    let (wrong, missing) = ("the registry rejected the credential", "pull access denied");
    for (credential, text) in [(None, missing), (Some(login("u", "other-word")), wrong)] {
        let error = pull_with(&client, &registry, credential.as_ref()).await.unwrap_err();
        assert!(error.contains(text), "{error}");
        let repeated = error.contains("incorrect username or password");
        assert_eq!(repeated, credential.is_none(), "{error}");
    }
}

#[tokio::test]
async fn a_token_server_that_refuses_is_named() {
    let registry = registry(token(Some(("u", PASSWORD))));
    let client = RegistryClient::new(quick());
    let session = client.session(&reference(&registry.image("shop/web:1")), None).unwrap();
    let error = session.resolve().await.unwrap_err();
    assert_eq!((kind(&error), &error.target), ("denied", &FetchTarget::Token));
    assert_eq!(error.host, registry.address());
}

#[tokio::test]
async fn a_failing_token_server_has_one_budget_of_attempts_for_all_requests_of_a_pull() {
    let registry = registry(token(None));
    registry.fault(FaultTrigger::path("/token"), ResponseFault::status(500));
    let session = session(quick(), &registry.image("shop/web:1"));
    let (first, second) = tokio::join!(session.resolve(), session.resolve());
    for error in [first.unwrap_err(), second.unwrap_err()] {
        assert!(error.to_string().contains("500"), "{error}");
    }
    assert_eq!(registry.requests_for("/token").len(), 5);
}

#[tokio::test]
async fn an_identity_token_is_exchanged_by_post() {
    let registry = registry(token(Some(("", "identity-1"))));
    let credential = Credential { identity_token: Secret::new("identity-1"), ..login("u", PASSWORD) };
    pull(&registry, Some(&credential)).await.unwrap();
    let asked = &registry.requests_for("/token")[0];
    assert_eq!((asked.method.as_str(), asked.authorization.as_deref()), ("POST", None));
    assert!(!asked.path.contains("identity-1"));
}

#[tokio::test]
async fn a_registry_token_is_shown_as_it_is() {
    let registry = registry(FaultRegistryAuth::Fixed("given-token".into()));
    let with = |token: &str| Credential { registry_token: Secret::new(token), ..Credential::default() };
    pull(&registry, Some(&with("given-token"))).await.unwrap();
    assert!(registry.requests().iter().all(|request| request.status < 300));
    registry.forget_requests();
    let error = pull(&registry, Some(&with("old-token"))).await.unwrap_err();
    let rejected = error.contains("the registry rejected the credential");
    assert!(rejected && !error.contains("old-token"), "{error}");
    assert_eq!(registry.requests().len(), 1, "there is nothing else to try");
}

#[tokio::test]
async fn a_token_that_expires_in_the_middle_is_renewed_once_for_all_connections() {
    let registry = FaultRegistry::start();
    let (content, blob) = put_blob(&registry, 1_000_000);
    registry.require(token(None));
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::Trickle(20_000, Duration::from_millis(5)));
    let session = session(quick(), &registry.image("shop/web"));
    let sink = MemorySink::new();
    let none = ByteRanges::new();
    let fetch = fetch_blob(&session, &blob, &none, sink.clone());
    let expire = async {
        while registry.requests_for("/blobs/").len() < 5 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        registry.expire_tokens();
    };
    let (fetched, ()) = tokio::join!(fetch, expire);
    fetched.unwrap();
    assert!(sink.content() == content);
    assert_eq!(registry.requests_for("/token").len(), 2);
    assert_eq!(registry.bytes_sent(blob.digest.as_str()) / 1000, 1000, "no range came twice");
}

#[tokio::test]
async fn a_token_that_is_never_accepted_is_renewed_once_only() {
    let registry = registry(token(None));
    registry.fault(
        FaultTrigger::path("/manifests/"),
        ResponseFault::Status(
            401,
            vec![("WWW-Authenticate".into(), format!("Bearer realm=\"{}/token\"", registry.url()))],
            String::new(),
        ),
    );
    let error = pull(&registry, None).await.unwrap_err();
    assert!(error.contains("pull access denied"), "{error}");
    assert_eq!(registry.requests_for("/manifests/").len(), 2);
    assert_eq!(registry.requests_for("/token").len(), 1);
}

#[tokio::test]
async fn a_short_lived_token_is_renewed_before_it_is_refused() {
    let registry = registry(FaultRegistryAuth::Token { realm: String::new(), login: None, expires_in: 1 });
    let client = RegistryClient::new(quick());
    pull_with(&client, &registry, None).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1100)).await;
    registry.expire_tokens();
    registry.forget_requests();
    pull_with(&client, &registry, None).await.unwrap();
    assert!(registry.requests().iter().all(|request| request.status != 401), "{:?}", registry.requests());
}

#[tokio::test]
async fn a_token_server_at_fault_is_asked_again() {
    let registry = registry(token(None));
    registry.fault(FaultTrigger::path("/token").nth(1..=1), ResponseFault::status(500));
    registry.fault(FaultTrigger::path("/token").nth(2..=2), ResponseFault::Hangup);
    pull(&registry, None).await.unwrap();
    assert_eq!(registry.requests_for("/token").len(), 3);
}

#[tokio::test]
async fn token_replies_that_are_huge_or_make_no_sense_are_refused() {
    let huge = format!("{{\"token\":\"{}\"}}", "x".repeat(200_000));
    for (body, text) in [
        (huge, "too large"),
        ("<html>".into(), "contains no token"),
        (r#"{"token":"a\nb"}"#.into(), "not a valid header value"),
    ] {
        let registry = registry(token(None));
        registry.fault(FaultTrigger::path("/token"), ResponseFault::Status(200, Vec::new(), body));
        let error = pull(&registry, None).await.unwrap_err();
        assert!(error.contains(text), "{error}");
        assert_eq!(registry.requests_for("/token").len(), 1);
    }
}

#[tokio::test]
async fn a_secret_is_never_in_an_error() {
    let registry = registry(token(Some(("u", PASSWORD))));
    let encoded = encode_auth("u", &Secret::new(PASSWORD));
    let encoded = encoded.reveal().trim_end_matches('=');
    let text = format!("no {PASSWORD}, no token-1 and no {encoded} here");
    let echo = format!(r#"{{"errors":[{{"code":"DENIED","message":"{text}"}}]}}"#);
    registry.fault(
        FaultTrigger::path("/manifests/").nth(2..=2),
        ResponseFault::Status(403, Vec::new(), echo.clone()),
    );
    let error = pull(&registry, Some(&login("u", PASSWORD))).await.unwrap_err();
    assert!(error.contains("403 Forbidden (DENIED)"), "{error}");
    registry.clear_faults();
    registry.fault(
        FaultTrigger::path("/token"),
        ResponseFault::Status(401, Vec::new(), format!(r#"{{"details":"{PASSWORD}?"}}"#)),
    );
    let error = pull(&registry, Some(&login("u", PASSWORD))).await.unwrap_err();
    assert!(error.contains("401 Unauthorized") && !error.contains(PASSWORD), "{error}");
}

#[tokio::test]
async fn a_header_of_the_settings_is_never_in_an_error() {
    let registry = FaultRegistry::start();
    registry.fault(
        FaultTrigger::path("/manifests/"),
        ResponseFault::Status(403, Vec::new(), r#"{"message":"x-own: s3cret-header"}"#.into()),
    );
    let toml = format!("server = \"{}\"\n[header]\nx-own = \"s3cret-header\"", registry.url());
    let (_root, config) = with_hosts(&registry.address(), &toml);
    let session = RegistryClient::new(config).session(&reference(&registry.image("a/b")), None).unwrap();
    let error = session.resolve().await.unwrap_err().to_string();
    assert!(error.contains("403 Forbidden") && !error.contains("s3cret"), "{error}");
}

#[tokio::test]
async fn a_token_server_in_the_nodes_own_network_is_not_asked() {
    for realm in ["https://169.254.169.254/latest", "https://[fe80::1]/token"] {
        let registry = registry(FaultRegistryAuth::Token {
            realm: realm.into(),
            login: Some(("u".into(), PASSWORD.into())),
            expires_in: 300,
        });
        let error = pull(&registry, Some(&login("u", PASSWORD))).await.unwrap_err();
        assert!(error.contains("an address of the node's own network"), "{error}");
    }
}

#[tokio::test]
async fn a_token_that_is_refused_as_a_bad_request_is_renewed_once() {
    let registry = registry(token(None));
    let client = RegistryClient::new(quick());
    pull_with(&client, &registry, None).await.unwrap();
    let expired = ResponseFault::Status(400, Vec::new(), "Your Authorization Token has expired.".into());
    registry.fault(FaultTrigger::path("/manifests/").once(), expired.clone());
    pull_with(&client, &registry, None).await.unwrap();
    assert_eq!(registry.requests_for("/token").len(), 2);
    registry.fault(FaultTrigger::path("/manifests/"), expired);
    let error = pull_with(&client, &registry, None).await.unwrap_err();
    assert!(error.contains("400 Bad Request (Your Authorization Token has expired.)"), "{error}");
    assert_eq!(registry.requests_for("/token").len(), 3);
}

#[tokio::test]
async fn a_refusal_is_reported_with_the_registry_s_message() {
    let registry = registry(FaultRegistryAuth::None);
    let refusal = ResponseFault::Status(403, Vec::new(), "this address is not allowed".into());
    registry.fault(FaultTrigger::path("/manifests/"), refusal);
    let session = session(quick(), &registry.image("shop/web:1"));
    let attempts = session.try_hosts().await;
    assert_eq!(attempts[0].answer, "403 Forbidden (this address is not allowed)");
    assert_eq!((attempts[0].status, attempts[0].accepted), (Some(403), false));
}
