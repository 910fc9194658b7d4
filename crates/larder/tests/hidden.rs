//! Images that are fetched with credentials ahead of kubelet: when callers of CRI see them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::{BackendError, CallErrorKind, ImageSpec};
use larder::credentials::{
    Credential, DockerConfig, DockerConfigEntry, NodeDockerConfig, NodeKeyring, PullSecret, Secret,
    SecretCoordinates,
};
use larder::events::{EventReason, RingSink};
use larder::hidden::{HiddenImages, PrefetchCredentials};
use larder::pod::{ObjectRef, Pod};
use larder::pull::{EnsureRequest, ImageManager, PullPolicy};
use larder_testkit::fake_backend::{BackendCall, FakeBackend, ScriptedPull, image};

const APP: &str = "registry.example/app:v1";
const ID: &str = "sha256:app";

struct HidingNode {
    backend: FakeBackend,
    hidden: Arc<HiddenImages>,
    manager: Arc<ImageManager>,
}

impl HidingNode {
    fn open(dir: &Path, backend: &FakeBackend) -> HidingNode {
        let hidden = Arc::new(HiddenImages::open(&dir.join("hidden.json")).expect("a new file"));
        let manager = ImageManager::new(Arc::new(backend.clone()))
            .with_prefetch_credentials(PrefetchCredentials::Hide(hidden.clone()));
        HidingNode { backend: backend.clone(), hidden, manager: Arc::new(manager) }
    }

    /// Returns the images that kubelet sees.
    fn visible(&self) -> Vec<String> {
        let images = self.backend.images().into_iter();
        images.filter(|image| !self.hidden.hides(image)).map(|image| image.id.to_string()).collect()
    }

    async fn prefetch(&self, secrets: Vec<PullSecret>) {
        let request = EnsureRequest {
            ahead_of_kubelet: true,
            secrets,
            ..EnsureRequest::new(APP, PullPolicy::Always, Pod::default())
        };
        self.manager.ensure(&request).await.expect("it is offered");
    }

    async fn pull(&self, credential: Option<Credential>) -> Result<(), BackendError> {
        self.manager.pull_directly(ImageSpec::named(APP), credential, None).await.map(drop)
    }
}

fn backend() -> FakeBackend {
    let backend = FakeBackend::new();
    backend.offer(APP, image(ID, 1));
    backend
}

fn login() -> Credential {
    Credential { username: "bob".into(), password: Secret::new("p"), ..Credential::default() }
}

fn secret() -> Vec<PullSecret> {
    let coordinates = SecretCoordinates { uid: "u".into(), namespace: "team".into(), name: "reg".into() };
    let config = r#"{"auths":{"registry.example":{"username":"bob","password":"p"}}}"#;
    let data = [(".dockerconfigjson".to_owned(), config.into())].into();
    vec![PullSecret { kind: "kubernetes.io/dockerconfigjson".into(), coordinates, data }]
}

#[tokio::test]
async fn a_private_image_fetched_ahead_is_visible_after_a_pull_that_succeeds() {
    let (dir, backend) = (tempfile::tempdir().unwrap(), backend());
    let node = HidingNode::open(dir.path(), &backend);
    node.prefetch(secret()).await;
    assert_eq!((backend.images().len(), node.visible().len()), (1, 0));

    let node = HidingNode::open(dir.path(), &backend);
    assert_eq!(node.visible(), [""; 0], "after a restart");
    backend.on_pull_of(APP, ScriptedPull::fails("401"));
    node.pull(Some(login())).await.expect_err("refused");
    assert_eq!(node.visible(), [""; 0]);
    node.pull(Some(login())).await.unwrap();
    assert_eq!(node.visible(), [ID]);

    node.prefetch(secret()).await;
    assert_eq!(HidingNode::open(dir.path(), &backend).visible(), [ID], "it stays visible");
}

#[tokio::test]
async fn an_image_that_is_public_or_was_pulled_by_an_operator_is_visible() {
    let (dir, backend) = (tempfile::tempdir().unwrap(), backend());
    let node = HidingNode::open(dir.path(), &backend);
    node.prefetch(Vec::new()).await;
    assert_eq!(node.visible(), [ID]);

    for policy in [PullPolicy::Always, PullPolicy::IfNotPresent] {
        backend.set_images(Vec::new());
        node.prefetch(secret()).await;
        assert_eq!(node.visible(), [""; 0]);
        let request = EnsureRequest::new(APP, policy.clone(), Pod::default());
        node.manager.ensure(&EnsureRequest { secrets: secret(), ..request }).await.unwrap();
        assert_eq!(node.visible(), [ID], "{policy}");
    }
}

#[tokio::test]
async fn an_image_that_the_runtime_recorded_before_its_pull_failed_is_hidden() {
    let (dir, backend) = (tempfile::tempdir().unwrap(), backend());
    backend.add_image("registry.example/app:v0", image("sha256:older", 1));
    let node = HidingNode::open(dir.path(), &backend);
    backend.hold_pulls();
    let request = EnsureRequest::new(APP, PullPolicy::Always, Pod::default());
    let request = EnsureRequest { ahead_of_kubelet: true, secrets: secret(), ..request };
    let manager = node.manager.clone();
    let ensure = tokio::spawn(async move { manager.ensure(&request).await });
    backend.until(|counts| counts.running == 1).await;
    backend.add_image(APP, image(ID, 1));
    backend.finish_pull(ScriptedPull::fails("write references: no space left on device"));
    ensure.await.unwrap().expect_err("it failed");
    assert_eq!(node.visible(), ["sha256:older"]);
    assert_eq!(HidingNode::open(dir.path(), &backend).visible(), ["sha256:older"], "after a restart");
}

#[tokio::test]
async fn a_pull_that_the_runtime_finishes_after_its_failure_is_hidden() {
    let (dir, backend) = (tempfile::tempdir().unwrap(), backend());
    let lost = BackendError::call(CallErrorKind::Unavailable, "connection lost");
    backend.on_pull_of(APP, ScriptedPull::with_outcome(Err(lost)));
    let node = HidingNode::open(dir.path(), &backend);
    let request = EnsureRequest::new(APP, PullPolicy::Always, Pod::default());
    let request = EnsureRequest { ahead_of_kubelet: true, secrets: secret(), ..request };
    node.manager.ensure(&request).await.expect_err("the connection is lost");
    backend.add_image(APP, image(ID, 1));
    assert_eq!(node.visible(), [""; 0]);
    let node = HidingNode::open(dir.path(), &backend);
    assert_eq!(node.hidden.list(&backend).await.unwrap().len(), 1);
    assert_eq!(node.visible(), [""; 0], "after a restart");
}

#[tokio::test]
async fn what_cannot_be_hidden_is_not_pulled_and_a_damaged_file_hides_all() {
    let (dir, backend) = (tempfile::tempdir().unwrap(), backend());
    let node = HidingNode::open(&dir.path().join("missing"), &backend);
    let request = EnsureRequest::new(APP, PullPolicy::Always, Pod::default());
    let request = EnsureRequest { ahead_of_kubelet: true, secrets: secret(), ..request };
    let error = node.manager.ensure(&request).await.expect_err("there is no directory");
    assert!(error.message.contains("cannot hide the image from kubelet"), "{error}");
    assert_eq!(backend.images(), []);

    backend.add_image("preloaded:1", image("sha256:preloaded", 1));
    for damaged in ["", "{", r#"{"version":1,"hidden":[],"repositories":[],"isLost":false,"visible":[]}"#] {
        fs_err::write(dir.path().join("hidden.json"), damaged).unwrap();
        drop(HidingNode::open(dir.path(), &backend));
        let node = HidingNode::open(dir.path(), &backend);
        assert_eq!(node.visible(), [""; 0], "{damaged}");
        node.hidden.list(&backend).await.unwrap();
        assert_eq!(node.visible(), [""; 0], "{damaged}");
    }
}

#[tokio::test]
async fn credentials_are_not_used_ahead_of_a_kubelet_that_sees_the_images() {
    let backend = backend();
    let events = Arc::new(RingSink::new(10));
    let manager = ImageManager::new(Arc::new(backend.clone()))
        .with_events(events.clone())
        .with_prefetch_credentials(PrefetchCredentials::Withhold(None));
    let request = EnsureRequest::new(APP, PullPolicy::Always, Pod::default());
    let request = EnsureRequest { secrets: secret(), target: Some(ObjectRef::node("n")), ..request };
    for (ahead_of_kubelet, users) in [(true, vec![None]), (false, vec![None, Some("bob".to_owned())])] {
        manager.ensure(&EnsureRequest { ahead_of_kubelet, ..request.clone() }).await.unwrap();
        let pulls =
            backend.requests().into_iter().filter(|request| matches!(request.call, BackendCall::Pull { .. }));
        let sent = pulls.map(|request| request.credential.map(|credential| credential.username));
        assert_eq!(sent.collect::<Vec<_>>(), users);
    }
    for _ in 0..2 {
        backend.on_pull_of(APP, ScriptedPull::fails("401"));
        let error = manager.ensure(&EnsureRequest { ahead_of_kubelet: true, ..request.clone() }).await;
        let message = error.expect_err("refused, then in back-off").message;
        let (_, end) = message.split_once("401").expect("the registry's answer");
        assert!(end.starts_with("; pulled without its credentials"), "{message}");
        assert_eq!(end.matches("; ").count(), 1, "once: {end}");
        assert!(end.len() < 128, "an image set's status has it whole: {end}");
    }
    let failed: Vec<_> =
        events.snapshot().into_iter().filter(|event| event.reason == EventReason::Failed).collect();
    assert_eq!(failed.len(), 1);
    assert!(failed[0].message.contains("401; pulled without its credentials"), "{}", failed[0].message);
}

/// Waits until a pull of a pod is held, as many as given in all.
async fn held(backend: &FakeBackend, pulls: usize) {
    let begun = backend.until(|counts| counts.started == pulls);
    tokio::time::timeout(Duration::from_secs(1), begun).await.expect("as many pulls begin");
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

fn ahead(credentials: Vec<PullSecret>) -> EnsureRequest {
    let request = EnsureRequest::new(APP, PullPolicy::Always, Pod::default());
    EnsureRequest { ahead_of_kubelet: true, secrets: credentials, ..request }
}

#[tokio::test(start_paused = true)]
async fn a_caller_without_credentials_has_no_success_through_the_nodes_own() {
    let (dir, backend) = (tempfile::tempdir().unwrap(), backend());
    let entry = DockerConfigEntry { username: "node".into(), ..DockerConfigEntry::default() };
    let files = NodeDockerConfig::fixed(&DockerConfig::with_entry("registry.example", entry));
    let hidden = Arc::new(HiddenImages::open(&dir.path().join("hidden.json")).unwrap());
    let manager = ImageManager::new(Arc::new(backend.clone()))
        .with_credentials(NodeKeyring::new(files, Vec::new()))
        .with_prefetch_credentials(PrefetchCredentials::Hide(hidden.clone()));
    let node = HidingNode { backend: backend.clone(), hidden, manager: Arc::new(manager) };
    backend.hold_pulls();
    let manager = Arc::clone(&node.manager);
    let prefetch = tokio::spawn(async move { manager.ensure(&ahead(Vec::new())).await });
    held(&backend, 1).await;
    for credential in [None, Some(login())] {
        let manager = Arc::clone(&node.manager);
        let kubelet =
            tokio::spawn(async move { manager.pull_directly(ImageSpec::named(APP), credential, None).await });
        held(&backend, 1).await;
        assert_eq!(backend.counts().started, 1, "it waits for the pull in flight");
        kubelet.abort();
    }
    let manager = Arc::clone(&node.manager);
    let kubelet = tokio::spawn(async move { manager.pull_directly(ImageSpec::named(APP), None, None).await });
    held(&backend, 1).await;
    backend.finish_pull(ScriptedPull::with_outcome(Ok(image(ID, 1)))).expect("the prefetch");
    prefetch.await.unwrap().expect("offered to the node");
    held(&backend, 2).await;
    backend.finish_pull(ScriptedPull::fails("401")).expect("kubelet's own pull");
    kubelet.await.unwrap().expect_err("it has no credentials");
    assert_eq!(node.visible(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_pull_with_credentials_does_not_go_on_for_a_caller_without_them() {
    let (dir, backend) = (tempfile::tempdir().unwrap(), backend());
    let node = HidingNode::open(dir.path(), &backend);
    backend.hold_pulls();
    let kubelet = || {
        let manager = Arc::clone(&node.manager);
        tokio::spawn(async move { manager.pull_directly(ImageSpec::named(APP), Some(login()), None).await })
    };
    let first = kubelet();
    held(&backend, 1).await;
    let (manager, other) = (Arc::clone(&node.manager), Arc::clone(&node.manager));
    let prefetch = tokio::spawn(async move { manager.ensure(&ahead(Vec::new())).await });
    let wrong = Some(Credential { username: "eve".into(), ..login() });
    let stranger = tokio::spawn(async move { other.pull_directly(ImageSpec::named(APP), wrong, None).await });
    let second = kubelet();
    held(&backend, 1).await;
    for (gives_up, pulls) in [(first, 1), (second, 2)] {
        gives_up.abort();
        let _ = gives_up.await;
        held(&backend, pulls).await;
    }
    for pulls in [2, 3] {
        held(&backend, pulls).await;
        backend.finish_pull(ScriptedPull::fails("401")).expect("a pull of its own");
    }
    prefetch.await.unwrap().expect_err("it has no credentials");
    stranger.await.unwrap().expect_err("it has others");
    assert_eq!((backend.images(), node.visible()), (Vec::new(), Vec::new()));
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_goes_on_for_the_prefetch_after_kubelet_gave_up_is_hidden() {
    let (dir, backend) = (tempfile::tempdir().unwrap(), backend());
    let node = HidingNode::open(dir.path(), &backend);
    backend.hold_pulls();
    let manager = Arc::clone(&node.manager);
    let kubelet =
        tokio::spawn(async move { manager.pull_directly(ImageSpec::named(APP), Some(login()), None).await });
    held(&backend, 1).await;
    let manager = Arc::clone(&node.manager);
    let prefetch = tokio::spawn(async move { manager.ensure(&ahead(secret())).await });
    held(&backend, 1).await;
    kubelet.abort();
    let _ = kubelet.await;
    held(&backend, 2).await;
    backend.finish_pull(ScriptedPull::with_outcome(Ok(image(ID, 1)))).expect("the prefetch");
    prefetch.await.unwrap().expect("offered");
    assert_eq!((backend.images().len(), node.visible()), (1, Vec::new()));

    // kubelet joins a pull that hides: one pull.
    let manager = Arc::clone(&node.manager);
    let prefetch = tokio::spawn(async move { manager.ensure(&ahead(secret())).await });
    held(&backend, 3).await;
    let kubelet = node.pull(Some(login()));
    let finish = async {
        held(&backend, 3).await;
        backend.finish_pull(ScriptedPull::with_outcome(Ok(image(ID, 1)))).expect("one for both");
    };
    let (kubelet, ()) = tokio::join!(kubelet, finish);
    kubelet.expect("the same login");
    prefetch.await.unwrap().expect("offered");
    assert_eq!((backend.counts().started, node.visible()), (3, vec![ID.to_owned()]));
}
