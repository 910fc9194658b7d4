//! Back-off, and a pod with other credentials than the rejected ones. Time is simulated.

#![allow(clippy::unwrap_used, reason = "a panic is how a test says no")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use larder::credentials::{
    Credential, CredentialLocation, CredentialProvider, NodeDockerConfig, NodeKeyring, PullSecret,
    SecretCoordinates,
};
use larder::pod::Pod;
use larder::pull::{EnsureReason, EnsureRequest, ImageManager, NewCredentialsPolicy, PullConfig, PullPolicy};
use larder_testkit::fake_backend::{FakeBackend, ScriptedPull};
use tokio::time::advance;

const APP: &str = "registry.example/app:v1";

fn manager(config: &PullConfig, credentials: NodeKeyring) -> (FakeBackend, ImageManager) {
    let backend = FakeBackend::new();
    backend.on_pull_of(APP, ScriptedPull::fails("401 Unauthorized"));
    let manager =
        ImageManager::new(Arc::new(backend.clone())).with_config(config).with_credentials(credentials);
    (backend, manager)
}

/// A pod whose pull secret has this password.
fn pod(password: &str) -> EnsureRequest {
    let config =
        format!(r#"{{"auths": {{"registry.example": {{"username": "u", "password": "{password}"}}}}}}"#);
    let secret = PullSecret {
        kind: "kubernetes.io/dockerconfigjson".into(),
        coordinates: SecretCoordinates { name: "regcred".into(), ..SecretCoordinates::default() },
        data: [(".dockerconfigjson".to_owned(), config.into_bytes())].into(),
    };
    let pod = Pod { uid: "uid".into(), ..Pod::default() };
    EnsureRequest { secrets: vec![secret], ..EnsureRequest::new(APP, PullPolicy::Always, pod) }
}

/// The failure, and the seconds until the next try.
async fn fails(manager: &ImageManager, request: &EnsureRequest) -> (EnsureReason, u64) {
    let error = manager.ensure(request).await.unwrap_err();
    (error.reason, error.retry_in.unwrap_or_default().as_secs())
}

#[tokio::test(start_paused = true)]
async fn another_secret_is_tried_at_once_and_the_old_one_waits() {
    let (backend, manager) = manager(&PullConfig::default(), NodeKeyring::default());
    assert_eq!(fails(&manager, &pod("old")).await, (EnsureReason::ErrImagePull, 10));
    assert_eq!(fails(&manager, &pod("old")).await, (EnsureReason::ImagePullBackOff, 10));
    assert_eq!(fails(&manager, &pod("typo")).await, (EnsureReason::ErrImagePull, 20), "it still doubles");
    assert_eq!(fails(&manager, &pod("typo")).await, (EnsureReason::ImagePullBackOff, 20));
    backend.on_pull_of(APP, ScriptedPull::ok("sha256:app", 1));
    manager.ensure(&pod("new")).await.unwrap();
    assert_eq!(backend.counts().started, 3);
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_is_taken_away_or_added_is_another_one() {
    let (_, manager) = manager(&PullConfig::default(), NodeKeyring::default());
    let bare = EnsureRequest { secrets: Vec::new(), ..pod("") };
    assert_eq!(fails(&manager, &bare).await.0, EnsureReason::ErrImagePull);
    assert_eq!(fails(&manager, &bare).await.0, EnsureReason::ImagePullBackOff);
    assert_eq!(fails(&manager, &pod("new")).await.0, EnsureReason::ErrImagePull);
    assert_eq!(fails(&manager, &bare).await.0, EnsureReason::ErrImagePull);
}

#[tokio::test(start_paused = true)]
async fn kubelets_way_is_to_wait() {
    let config = PullConfig { new_credentials: NewCredentialsPolicy::Wait, ..PullConfig::default() };
    assert_eq!(PullConfig::kubelet().new_credentials, NewCredentialsPolicy::Wait);
    let (backend, manager) = manager(&config, NodeKeyring::default());
    assert_eq!(fails(&manager, &pod("old")).await.0, EnsureReason::ErrImagePull);
    assert_eq!(fails(&manager, &pod("new")).await, (EnsureReason::ImagePullBackOff, 10));
    manager.set_config(&PullConfig::default());
    assert_eq!(fails(&manager, &pod("new")).await.0, EnsureReason::ErrImagePull, "settings are live");
    assert_eq!(backend.counts().started, 2);
}

/// Returns another token each time.
#[derive(Default)]
struct RotatingTokenProvider(AtomicUsize);

#[async_trait]
impl CredentialProvider for RotatingTokenProvider {
    async fn provide(&self, _repository: &str, _pod: &Pod) -> Vec<Credential> {
        let hash = self.0.fetch_add(1, Ordering::Relaxed).to_string();
        vec![Credential { hash, origin: CredentialLocation::Provider("p".into()), ..Credential::default() }]
    }

    fn programs(&self) -> Vec<String> {
        Vec::new()
    }
}

#[tokio::test(start_paused = true)]
async fn a_program_that_gives_a_new_token_each_time_does_not_end_the_back_off() {
    let sources =
        NodeKeyring::new(NodeDockerConfig::none(), vec![Arc::new(RotatingTokenProvider::default())]);
    let (_, manager) = manager(&PullConfig::default(), sources);
    for delay in [10, 20] {
        assert_eq!(fails(&manager, &pod("old")).await.0, EnsureReason::ErrImagePull);
        assert_eq!(fails(&manager, &pod("old")).await, (EnsureReason::ImagePullBackOff, delay));
        advance(Duration::from_secs(delay)).await;
    }
    assert_eq!(fails(&manager, &pod("new")).await.0, EnsureReason::ErrImagePull);
}
