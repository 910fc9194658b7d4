//! Keeps images present for as long as a source desires them.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use larder::backend::{Backend, ImageSpec};
use larder::events::{Event, EventSink};
use larder::gc::Collector;
use larder::pull::{EnsureError, EnsureReason, EnsureRequest, EnsuredImage, ImageManager, ImagePresence};
use larder::reference::{ImageId, ImageName};
use larder::retention::{Retention, RetentionError, RetentionPurpose, RetentionSource};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::{self, Instant};

use crate::node::pulls::pod_pulls::{PodPullRequest, PodPulls};

/// How often it is checked whether an image is still present.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// How soon a failed ensure is retried, if no back-off says otherwise: kubelet syncs a pod that often.
const RETRY: Duration = Duration::from_secs(10);

/// Identifies a desired image: two sources may desire the same one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DesiredKey {
    /// Name of the owner, such as `static pod kube-system/proxy`.
    pub(crate) owner: String,
    /// Which container or volume of it.
    pub(crate) part: String,
    /// The image, as written.
    pub(crate) image: ImageName,
    /// The pull policy.
    pub(crate) policy: String,
    /// Whether a removal is refused, over CRI and, unless forced, over the control API.
    pub(crate) is_pinned: bool,
}

/// The longest time for which a collection waits for the first scan of desired images: a backend that does not answer
/// must not keep a full disk full.
const FIRST_SCAN_LIMIT: Duration = Duration::from_secs(10);

/// Image ids of desired images: these images are in use.
#[derive(Debug, Clone, Default)]
pub(crate) struct DesiredUses {
    ids: Arc<Mutex<BTreeMap<DesiredKey, ImageId>>>,
    /// Until each source has been read once, the desired images are unknown.
    known: Arc<Mutex<Option<FirstScanDone>>>,
}

/// When what is held is known: once the channel is closed, and at the latest then.
#[derive(Debug, Clone)]
struct FirstScanDone(watch::Receiver<()>, Instant);

/// A first scan of desired images. Once all clones are dropped, their uses are known.
#[derive(Debug, Clone)]
pub(crate) struct FirstScan(
    #[expect(dead_code, reason = "what counts is when it is dropped")] Arc<watch::Sender<()>>,
);

impl DesiredUses {
    /// From now on, and until the scan has ended, reading the uses waits.
    pub(crate) fn begin_first_scan(&self) -> FirstScan {
        let (scan, ended) = watch::channel(());
        *self.known.lock() = Some(FirstScanDone(ended, Instant::now() + FIRST_SCAN_LIMIT));
        FirstScan(Arc::new(scan))
    }

    async fn known(&self) {
        let Some(FirstScanDone(mut ended, latest)) = self.known.lock().clone() else { return };
        // Nothing is ever sent: it changes only by being closed.
        if time::timeout_at(latest, ended.changed()).await.is_err() {
            tracing::warn!(
                "desired images of static pods, the prefetch list and bound pods are not known yet"
            );
        }
        *self.known.lock() = None;
    }

    /// From now on this image is in use by that key.
    pub(crate) fn keep(&self, key: DesiredKey, id: ImageId) {
        self.ids.lock().insert(key, id);
    }

    /// This image is no longer in use by that key.
    #[cfg(feature = "kube")]
    pub(in crate::node) fn remove(&self, key: &DesiredKey) {
        self.ids.lock().remove(key);
    }

    /// Of the images that this owner uses, only these remain in use.
    pub(super) fn retain(&self, owner: &str, keys: &[DesiredKey]) {
        self.ids.lock().retain(|key, _| key.owner != owner || keys.contains(key));
    }

    /// Keeps the image like [`keep`](DesiredUses::keep), if it is still desired.
    fn hold(&self, key: DesiredKey, wanted: &AtomicBool, id: ImageId) {
        let mut held = self.ids.lock();
        if wanted.load(Ordering::Relaxed) {
            held.insert(key, id);
        }
    }

    /// Nothing is held for it any more, whatever its task still does.
    fn release(&self, key: &DesiredKey, wanted: &AtomicBool) {
        let mut held = self.ids.lock();
        wanted.store(false, Ordering::Relaxed);
        held.remove(key);
    }
}

#[async_trait]
impl RetentionSource for DesiredUses {
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError> {
        self.known().await;
        let held = self.ids.lock();
        Ok(held.iter().map(retention).collect())
    }
}

fn retention((key, id): (&DesiredKey, &ImageId)) -> Retention {
    let (by, name, is_pinned) = (key.owner.clone(), key.image.to_string(), key.is_pinned);
    Retention::new(id.clone(), RetentionPurpose::Desired { by, name, is_pinned })
}

/// The images that are ensured now. Dropping it stops that, and releases them.
pub(crate) struct DesiredImages {
    manager: Arc<ImageManager>,
    held: DesiredUses,
    events: Option<Arc<dyn EventSink>>,
    collector: Option<Arc<Collector>>,
    pod_pulls: Option<Arc<PodPulls>>,
    tasks: JoinSet<()>,
    running: BTreeMap<DesiredKey, DesiredImageTask>,
}

struct DesiredImageTask {
    task: AbortHandle,
    wanted: Arc<AtomicBool>,
}

impl DesiredImages {
    /// No desired images yet.
    pub(crate) fn new(manager: Arc<ImageManager>, held: DesiredUses) -> DesiredImages {
        DesiredImages {
            manager,
            held,
            events: None,
            collector: None,
            pod_pulls: None,
            tasks: JoinSet::new(),
            running: BTreeMap::new(),
        }
    }

    /// Sends the event that kubelet sends after each failed ensure of a container, in addition to the manager's.
    pub(crate) fn with_events(mut self, events: Arc<dyn EventSink>) -> DesiredImages {
        self.events = Some(events);
        self
    }

    /// Records images that are pulled as first seen then.
    pub(crate) fn with_collector(mut self, collector: Arc<Collector>) -> DesiredImages {
        self.collector = Some(collector);
        self
    }

    /// Measures how long the images of each pod are being pulled, from the first attempt to the last success.
    pub(crate) fn with_pod_pulls(mut self, pod_pulls: Arc<PodPulls>) -> DesiredImages {
        self.pod_pulls = Some(pod_pulls);
        self
    }

    /// From now on exactly these are wanted. What was wanted before and still is goes on undisturbed. `first` is held
    /// until those that are new have been looked for.
    pub(crate) fn set(&mut self, wanted: BTreeMap<DesiredKey, EnsureRequest>, first: Option<&FirstScan>) {
        while let Some(ended) = self.tasks.try_join_next() {
            // No other task ensures its image.
            if let Err(Ok(panic)) = ended.map_err(JoinError::try_into_panic) {
                resume_unwind(panic);
            }
        }
        self.running.retain(|key, running| {
            let stays = wanted.contains_key(key);
            if !stays {
                running.task.abort();
                self.held.release(key, &running.wanted);
                tracing::info!("{}: no longer desired by {}", key.image, key.owner);
            }
            stays
        });
        for (key, mut request) in wanted {
            request.ahead_of_kubelet = true;
            if self.running.contains_key(&key) {
                continue;
            }
            tracing::info!("{}: desired by {}", key.image, key.owner);
            let manager = Arc::clone(&self.manager);
            let is_wanted = Arc::new(AtomicBool::new(true));
            let (uses, own, still) = (self.held.clone(), key.clone(), Arc::clone(&is_wanted));
            let collector = self.collector.clone();
            let (first, events, pulls) = (first.cloned(), self.events.clone(), self.pod_pulls.clone());
            let task = self.tasks.spawn(async move {
                let hold = |id: &ImageId| uses.hold(own.clone(), &still, id.clone());
                let ensured = |ensured: &EnsuredImage| {
                    hold(&ensured.image_ref);
                    note_if_pulled(collector.as_deref(), ensured);
                };
                hold_present(manager.backend(), &request.image, hold).await;
                drop(first);
                let failed = |request: &EnsureRequest, error: &EnsureError| {
                    if let (Some(events), Some(target), false) = (&events, &request.target, request.is_retry)
                    {
                        events.record(Event::failed(target.clone(), error));
                    }
                };
                let measure = || pulls.as_ref().and_then(|pulls| pulls.begin(&request.pod));
                let observer = DesiredImageObserver { hold, ensured, failed, measure };
                maintain_image(&manager, request.clone(), &observer, &own).await;
            });
            self.running.insert(key, DesiredImageTask { task, wanted: is_wanted });
        }
    }
}

impl Drop for DesiredImages {
    fn drop(&mut self) {
        for (key, running) in &self.running {
            self.held.release(key, &running.wanted);
        }
    }
}

/// Actions at each step of a desired image.
struct DesiredImageObserver<H, E, F, M> {
    /// Retains the image.
    hold: H,
    /// Records that it was ensured.
    ensured: E,
    /// Records that it could not be ensured.
    failed: F,
    /// Begins to measure an ensure for a pod.
    measure: M,
}

/// Ensures the image, retains it, and ensures it again after a removal. Ends only for a name that
/// can never be pulled.
async fn maintain_image(
    manager: &ImageManager,
    mut request: EnsureRequest,
    observer: &DesiredImageObserver<
        impl Fn(&ImageId),
        impl Fn(&EnsuredImage),
        impl Fn(&EnsureRequest, &EnsureError),
        impl Fn() -> Option<PodPullRequest>,
    >,
    key: &DesiredKey,
) {
    let mut measured = (observer.measure)();
    loop {
        match manager.ensure(&request).await {
            Ok(ensured) => {
                (observer.ensured)(&ensured);
                request.is_retry = false;
                drop(measured.take());
                while_present(manager.backend(), &ensured.image_ref).await;
                tracing::warn!("{}: missing, but desired by {}", key.image, key.owner);
                measured = (observer.measure)();
            }
            Err(error) => {
                (observer.failed)(&request, &error);
                // The next attempts fail alike.
                request.is_retry |= error.credentials_withheld;
                if error.reason == EnsureReason::InvalidImageName {
                    return;
                }
                // An image that could not be refreshed is desired all the same.
                hold_present(manager.backend(), &request.image, &observer.hold).await;
                time::sleep(error.retry_in.unwrap_or(RETRY).min(RETRY)).await;
            }
        }
    }
}

/// An image that was pulled is first seen by its pull, not by the next round of GC.
pub(in crate::node) fn note_if_pulled(collector: Option<&Collector>, ensured: &EnsuredImage) {
    if let (Some(collector), ImagePresence::Pulled { .. }) = (collector, &ensured.outcome) {
        collector.note_pulled(&ensured.image_ref);
    }
}

/// Retains an image if it is present, and does not pull it.
pub(super) async fn hold_present(backend: &dyn Backend, image: &ImageName, hold: impl Fn(&ImageId)) {
    // An invalid name fails when it is pulled.
    let Ok(name) = image.with_default_tag() else { return };
    if let Ok(Some(present)) = backend.status(&ImageSpec::named(&name)).await {
        hold(&present.id);
    }
}

/// Returns once the image is surely not there any more.
async fn while_present(backend: &dyn Backend, id: &ImageId) {
    loop {
        time::sleep(CHECK_INTERVAL).await;
        if let Ok(None) = backend.usable_status(&ImageSpec::named(id)).await {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use larder::credentials::{PullSecret, SecretCoordinates};
    use larder::events::{EventReason, RingSink};
    use larder::hidden::PrefetchCredentials;
    use larder::pod::{ObjectRef, Pod};
    use larder::pull::PullPolicy;
    use larder_testkit::fake_backend::{FakeBackend, ScriptedPull, image};

    use super::*;

    fn desired(owner: &str, image: &str) -> (DesiredKey, EnsureRequest) {
        let key = DesiredKey {
            owner: owner.into(),
            part: "app".into(),
            image: image.into(),
            policy: "IfNotPresent".into(),
            is_pinned: true,
        };
        (key, EnsureRequest::new(image, PullPolicy::IfNotPresent, Pod::default()))
    }

    /// The pull secret of a user at `r.example`.
    fn secret() -> PullSecret {
        let config = r#"{"auths":{"r.example":{"username":"bob","password":"p"}}}"#;
        PullSecret {
            kind: "kubernetes.io/dockerconfigjson".into(),
            coordinates: SecretCoordinates { uid: "u".into(), namespace: "x".into(), name: "s".into() },
            data: [(".dockerconfigjson".to_owned(), config.into())].into(),
        }
    }

    async fn held_by(held: &DesiredUses) -> Vec<String> {
        let uses = held.retentions().await.unwrap();
        uses.into_iter().map(|found| format!("{}: {}", found.purpose, found.image)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn desired_images_are_fetched_ahead_of_kubelet() {
        let backend = FakeBackend::new();
        backend.offer("r.example/a:1", image("sha256:a", 1));
        let manager = ImageManager::new(Arc::new(backend.clone()));
        let manager = Arc::new(manager.with_prefetch_credentials(PrefetchCredentials::Withhold(None)));
        let held = DesiredUses::default();
        let mut images = DesiredImages::new(manager, held.clone());
        let (key, request) = desired("pod x/a", "r.example/a:1");
        let request = EnsureRequest { secrets: vec![secret()], ..request };
        images.set(BTreeMap::from([(key, request)]), None);
        backend.until(|counts| counts.succeeded == 1).await;
        assert!(
            backend.requests().iter().all(|request| request.credential.is_none()),
            "kubelet sees the image"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_without_withheld_credentials_is_reported_once() {
        let backend = FakeBackend::new();
        for _ in 0..20 {
            backend.on_pull_of("r.example/a:1", ScriptedPull::fails("denied"));
        }
        let events = Arc::new(RingSink::new(100));
        let manager = ImageManager::new(Arc::new(backend.clone())).with_events(events.clone());
        let manager = Arc::new(manager.with_prefetch_credentials(PrefetchCredentials::Withhold(None)));
        let mut images = DesiredImages::new(manager, DesiredUses::default()).with_events(events.clone());
        let (key, request) = desired("pod x/a", "r.example/a:1");
        let target = Some(ObjectRef::new(&request.pod, "spec.containers{app}"));
        let request = EnsureRequest { secrets: vec![secret()], target, ..request };
        images.set(BTreeMap::from([(key, request)]), None);
        time::sleep(Duration::from_secs(300)).await;
        assert!(backend.requests().len() > 3, "it is tried again");
        let failed = events.snapshot().into_iter().filter(|event| event.reason == EventReason::Failed);
        assert_eq!(failed.count(), 2, "of the pull, and of the container");
    }

    #[tokio::test(start_paused = true)]
    async fn desired_images_are_in_use_and_pulled_again_after_a_removal() {
        let backend = FakeBackend::new();
        backend.on_pull_of("a:1", ScriptedPull::fails("no route"));
        backend.offer("a:1", image("sha256:a", 1));
        backend.offer("b:1", image("sha256:b", 1));
        let manager = Arc::new(ImageManager::new(Arc::new(backend.clone())));
        let held = DesiredUses::default();
        let mut images = DesiredImages::new(manager, held.clone());
        images.set(BTreeMap::from([desired("pod x/a", "a:1"), desired("pod x/b", "b:1")]), None);
        time::sleep(Duration::from_secs(5)).await;
        assert_eq!(held_by(&held).await, ["pod x/b: sha256:b"], "the other one failed");
        time::sleep(Duration::from_secs(20)).await;
        assert_eq!(held_by(&held).await, ["pod x/a: sha256:a", "pod x/b: sha256:b"]);
        backend.set_images(Vec::new());
        time::sleep(2 * CHECK_INTERVAL).await;
        assert_eq!(backend.images().len(), 2, "pulled again");
        images.set(BTreeMap::from([desired("pod x/b", "b:1")]), None);
        assert_eq!(held_by(&held).await, ["pod x/b: sha256:b"]);
        drop(images);
        assert!(held_by(&held).await.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_ensure_of_a_pod_sends_the_callers_event_of_kubelet() {
        let backend = FakeBackend::new();
        backend.on_pull_of("a:1", ScriptedPull::fails("no route"));
        backend.offer("a:1", image("sha256:a", 1));
        let manager = Arc::new(ImageManager::new(Arc::new(backend.clone())));
        let events = Arc::new(RingSink::new(10));
        let mut images = DesiredImages::new(manager, DesiredUses::default()).with_events(events.clone());
        let pod = Pod { name: "proxy".into(), namespace: "kube-system".into(), ..Pod::default() };
        let target = Some(ObjectRef::new(&pod, "spec.containers{app}"));
        let of_pod = |(key, request): (DesiredKey, EnsureRequest)| {
            (key, EnsureRequest { target: target.clone(), ..request })
        };
        images.set(
            BTreeMap::from([of_pod(desired("pod x/a", "a:1")), of_pod(desired("pod x/b", "B:1"))]),
            None,
        );
        time::sleep(Duration::from_secs(30)).await;
        let mut found: Vec<_> = events.snapshot().into_iter().map(|event| event.message).collect();
        found.sort();
        assert_eq!(found, ["Error: ErrImagePull", "Error: InvalidImageName"]);
        assert_eq!(events.snapshot()[0].object.field_path, "spec.containers{app}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_that_a_static_pod_pulls_is_one_event_with_its_retries() {
        let backend = FakeBackend::new();
        backend.on_pull_of("a:1", ScriptedPull::fails("no route"));
        for name in ["a:1", "b:1"] {
            backend.offer(name, image(format!("sha256:{name}"), 1));
        }
        let events = Arc::new(RingSink::new(10));
        let pulls = Arc::new(PodPulls::new(Arc::default(), events.clone()));
        let manager = Arc::new(ImageManager::new(Arc::new(backend.clone())).with_times(pulls.recorder()));
        let mut images =
            DesiredImages::new(manager, DesiredUses::default()).with_pod_pulls(Arc::clone(&pulls));
        let pod = Pod { uid: "u".into(), name: "proxy".into(), ..Pod::default() };
        let of_pod = |(key, request): (DesiredKey, EnsureRequest)| {
            (key, EnsureRequest { pod: pod.clone(), ..request })
        };
        images.set(
            BTreeMap::from([of_pod(desired("pod x/a", "a:1")), of_pod(desired("pod x/b", "b:1"))]),
            None,
        );
        time::sleep(Duration::from_secs(30)).await;
        let found = events.snapshot();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            (found[0].object.name.as_str(), found[0].reason.to_string()),
            ("proxy", "ImagesPulled".into())
        );
        assert!(found[0].message.contains(" in 10"), "{found:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_image_that_is_here_is_held_although_it_cannot_be_refreshed() {
        let backend = FakeBackend::new();
        backend.add_image("a:latest", image("sha256:a", 1));
        let manager = Arc::new(ImageManager::new(Arc::new(backend.clone())));
        let held = DesiredUses::default();
        let mut images = DesiredImages::new(manager, held.clone());
        let (key, _) = desired("pod x/a", "a");
        let request = EnsureRequest::new("a", PullPolicy::Always, Pod::default());
        images.set(BTreeMap::from([(key, request)]), None);
        backend.until(|counts| counts.failed > 0).await;
        assert_eq!(held_by(&held).await, ["pod x/a: sha256:a"]);
    }

    #[tokio::test(start_paused = true)]
    async fn images_in_use_are_known_after_all_lookups_or_ten_seconds() {
        let backend = FakeBackend::new();
        backend.add_image("a:1", image("sha256:a", 1));
        let manager = Arc::new(ImageManager::new(Arc::new(backend.clone())));
        let held = DesiredUses::default();
        let mut images = DesiredImages::new(manager, held.clone());
        let first = held.begin_first_scan();
        images.set(BTreeMap::from([desired("pod x/a", "a:1")]), Some(&first));
        drop(first);
        let started = Instant::now();
        assert_eq!(held_by(&held).await, ["pod x/a: sha256:a"]);
        assert!(started.elapsed() < Duration::from_secs(1));
        let _unended = held.begin_first_scan();
        assert_eq!(held_by(&held).await.len(), 1);
        assert_eq!(started.elapsed().as_secs(), 10);
        assert_eq!(held_by(&held).await.len(), 1);
        assert_eq!(started.elapsed().as_secs(), 10, "once");
    }
}
