//! One task for each wanted image: pulls it, retains it, and pulls it again.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use larder::reference::{ImageId, ImageName};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time;

use super::ensure_slots::{EnsureSlots, SlotOwner};
use super::progress::{ImageState, retry_after};
use super::redact::without_url_secrets;
use super::resource::RetentionPolicy;
use super::wanted::WantedImage;

/// The images of the node, as image sets need them.
#[async_trait]
pub trait SetImages: Send + Sync + 'static {
    /// Makes the image present. Users of the cluster see the error, without what URLs in it may have of secrets.
    async fn ensure(&self, image: &WantedImage) -> Result<ImageId, String>;

    /// Ensures an image after an attempt that failed and was reported.
    async fn retry(&self, image: &WantedImage) -> Result<ImageId, String> {
        self.ensure(image).await
    }

    /// The image, if it is present.
    ///
    /// # Errors
    /// If that is unknown.
    async fn find(&self, image: &WantedImage) -> Result<Option<ImageId>, String>;

    /// From now on the image is retained as its policy says, which is not `PullOnce`.
    fn retain(&self, image: &WantedImage, id: &ImageId);

    /// The image is no longer retained.
    fn release(&self, image: &ImageName);

    /// These are the images that are wanted, by name. Images that an earlier process has retained and that are not
    /// among them are released.
    fn note_wanted(&self, _wanted: &BTreeMap<String, WantedImage>) {}

    /// How many images are in each state.
    fn note_counts(&self, _counts: ImageCounts) {}

    /// A value that is dropped once the images that are wanted at first were looked for, or are not known because the
    /// API server does not answer.
    fn begin_first_scan(&self) -> Option<FirstScanGuard> {
        None
    }
}

/// How many images of the node's sets are in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImageCounts {
    /// Missing, and not admitted by `parallelism` yet.
    pub waiting: u64,
    /// Being looked for or pulled.
    pub pulling: u64,
    /// Present; with `PullOnce`, it was.
    pub present: u64,
    /// The last attempt failed.
    pub failed: u64,
}

/// See [`SetImages::begin_first_scan`].
pub type FirstScanGuard = Arc<dyn Any + Send + Sync>;

/// How often it is checked whether an image is still present, on average.
const PRESENCE_CHECK: Duration = Duration::from_secs(60);

/// The tasks for the images that are wanted now. Dropping it stops them and releases the images.
pub(super) struct ImageTasks {
    images: Arc<dyn SetImages>,
    states: States,
    slots: EnsureSlots,
    tasks: JoinSet<()>,
    running: BTreeMap<String, (Arc<ImageTask>, AbortHandle)>,
    /// Sets, with their generation, for which an image was pulled once, by image.
    pulled_once: BTreeMap<String, BTreeSet<(String, i64)>>,
}

/// The state of each image, and that one has changed.
#[derive(Clone, Default)]
struct States {
    by_image: Arc<Mutex<BTreeMap<String, ImageState>>>,
    changed: Arc<Notify>,
}

struct ImageTask {
    images: Arc<dyn SetImages>,
    image: WantedImage,
    states: States,
    slots: EnsureSlots,
    /// Changes with the lock of the states: afterwards the task changes nothing, whatever it still does.
    is_wanted: AtomicBool,
    /// Whether the image was ensured, for the sets that the task is for.
    is_ensured: AtomicBool,
}

impl ImageTasks {
    pub(super) fn new(images: Arc<dyn SetImages>) -> ImageTasks {
        ImageTasks {
            images,
            states: States::default(),
            slots: EnsureSlots::default(),
            tasks: JoinSet::new(),
            running: BTreeMap::new(),
            pulled_once: BTreeMap::new(),
        }
    }

    /// From now on these images are wanted. `was_ready` is whether an image of a set, with the set's generation, was
    /// ready before larder started. `first` is held until those that are new have been looked for.
    pub(super) fn set(
        &mut self,
        wanted: BTreeMap<String, WantedImage>,
        was_ready: impl Fn(&str, &(String, i64)) -> bool,
        first: Option<&FirstScanGuard>,
    ) {
        self.images.note_wanted(&wanted);
        while let Some(ended) = self.tasks.try_join_next() {
            // No other task pulls its image.
            if let Err(Ok(panic)) = ended.map_err(JoinError::try_into_panic) {
                resume_unwind(panic);
            }
        }
        self.note_pulled_once(&wanted);
        self.running.retain(|name, (running, task)| {
            let new = wanted.get(name);
            let stays = new == Some(&running.image);
            if !stays {
                task.abort();
                running.stop(new);
            }
            stays
        });
        for (name, image) in wanted {
            if self.running.contains_key(&name) {
                continue;
            }
            let known = self.pulled_once.get(&name);
            let was_pulled =
                |set: &(String, i64)| was_ready(&name, set) || known.is_some_and(|known| known.contains(set));
            let is_done = image.retention == RetentionPolicy::PullOnce && image.sets.iter().all(was_pulled);
            let running = Arc::new(ImageTask {
                images: Arc::clone(&self.images),
                image,
                states: self.states.clone(),
                slots: self.slots.clone(),
                is_wanted: AtomicBool::new(true),
                is_ensured: AtomicBool::new(is_done),
            });
            let (own, first) = (Arc::clone(&running), first.cloned());
            let task = self.tasks.spawn(async move {
                if is_done { own.set_state(ImageState::Present) } else { own.maintain(first).await }
            });
            self.running.insert(name, (running, task));
        }
    }

    /// Remembers for which sets images were pulled once, while the sets want them: a change of another set is no reason
    /// to pull them again.
    fn note_pulled_once(&mut self, wanted: &BTreeMap<String, WantedImage>) {
        for (name, (running, _)) in &self.running {
            let is_pulled = running.is_ensured.load(Ordering::Relaxed);
            if is_pulled && running.image.retention == RetentionPolicy::PullOnce {
                let sets = running.image.sets.iter().cloned();
                self.pulled_once.entry(name.clone()).or_default().extend(sets);
            }
        }
        self.pulled_once.retain(|name, sets| {
            sets.retain(|set| wanted.get(name).is_some_and(|image| image.sets.contains(set)));
            !sets.is_empty()
        });
    }

    /// The state of each image, which it also counts.
    pub(super) fn states(&self) -> BTreeMap<String, ImageState> {
        let states = self.states.by_image.lock().clone();
        let mut counts = ImageCounts::default();
        for state in states.values() {
            *match state {
                ImageState::Waiting => &mut counts.waiting,
                ImageState::Pulling => &mut counts.pulling,
                ImageState::Present => &mut counts.present,
                ImageState::Failed { .. } => &mut counts.failed,
            } += 1;
        }
        self.images.note_counts(counts);
        states
    }

    /// Waits until a state has changed.
    pub(super) async fn changed(&self) {
        self.states.changed.notified().await;
    }
}

impl Drop for ImageTasks {
    fn drop(&mut self) {
        self.tasks.abort_all();
        for (running, _) in self.running.values() {
            running.stop(None);
        }
    }
}

impl ImageTask {
    /// Releases the image, unless the new task for it will retain it: until that has found it, it stays retained as it
    /// is.
    fn stop(&self, new: Option<&WantedImage>) {
        let mut states = self.states.by_image.lock();
        self.is_wanted.store(false, Ordering::Relaxed);
        if new.is_none_or(|new| new.retention == RetentionPolicy::PullOnce) {
            self.images.release(&self.image.image);
        }
        if new.is_none() {
            states.remove(self.image.image.as_str());
            tracing::debug!("{}: no longer desired by an ImageSet", self.image.image);
        }
    }

    fn set_state(&self, state: ImageState) {
        let mut states = self.states.by_image.lock();
        if self.is_wanted.load(Ordering::Relaxed)
            && states.insert(self.image.image.as_str().to_owned(), state.clone()) != Some(state)
        {
            self.states.changed.notify_one();
        }
    }

    fn retain(&self, id: &ImageId) {
        let _states = self.states.by_image.lock();
        if self.is_wanted.load(Ordering::Relaxed) && self.image.retention != RetentionPolicy::PullOnce {
            self.images.retain(&self.image, id);
        }
    }

    /// Retains the image if it is present.
    async fn retain_present(&self) -> Result<bool, String> {
        let found = self.images.find(&self.image).await?;
        if let Some(id) = &found {
            self.retain(id);
        }
        Ok(found.is_some())
    }

    /// Ends only for an image that needs no more attention.
    async fn maintain(&self, first: Option<FirstScanGuard>) {
        let found = self.retain_present().await;
        drop(first);
        if !self.image.is_admitted {
            return self.wait_for_admission(found).await;
        }
        let mut attempts = 0;
        self.set_state(ImageState::Pulling);
        loop {
            match self.ensure(attempts > 0).await {
                Ok(id) => {
                    attempts = 0;
                    self.is_ensured.store(true, Ordering::Relaxed);
                    self.retain(&id);
                    self.set_state(ImageState::Present);
                    if self.image.retention == RetentionPolicy::PullOnce {
                        return;
                    }
                    self.while_present().await;
                    tracing::warn!("{}: missing, but desired by {}", self.image.image, self.set_names());
                    self.set_state(ImageState::Pulling);
                }
                Err(message) => {
                    let message = without_url_secrets(&message);
                    attempts += 1;
                    if attempts == 1 {
                        tracing::warn!("{}: desired by {}: {message}", self.image.image, self.set_names());
                    } else {
                        let names = self.set_names();
                        tracing::debug!(
                            "{}: desired by {names}: attempt {attempts}: {message}",
                            self.image.image
                        );
                    }
                    // It stays failed while it is tried again.
                    self.set_state(ImageState::Failed { message });
                    let Some(wait) = retry_after(&self.image.retry, attempts, random()) else { return };
                    time::sleep(wait).await;
                }
            }
        }
    }

    async fn ensure(&self, is_retry: bool) -> Result<ImageId, String> {
        let owner = SlotOwner::new(&self.image.sets, &self.image.image);
        let _slot = self.slots.acquire(&owner).await;
        if is_retry { self.images.retry(&self.image).await } else { self.images.ensure(&self.image).await }
    }

    /// Reports whether the image is present. Never ends: once the node is admitted, there is a new task.
    async fn wait_for_admission(&self, mut found: Result<bool, String>) {
        self.set_state(ImageState::Waiting);
        loop {
            match found {
                Ok(true) => self.set_state(ImageState::Present),
                Ok(false) => self.set_state(ImageState::Waiting),
                Err(_) => {}
            }
            time::sleep(presence_check()).await;
            found = self.retain_present().await;
        }
    }

    /// Returns once the image is surely missing.
    async fn while_present(&self) {
        loop {
            time::sleep(presence_check()).await;
            if self.retain_present().await == Ok(false) {
                return;
            }
        }
    }

    fn set_names(&self) -> String {
        let names: Vec<_> = self.image.sets.iter().map(|(name, _)| format!("ImageSet {name}")).collect();
        names.join(", ")
    }
}

/// Nodes that pulled together do not look together.
fn presence_check() -> Duration {
    PRESENCE_CHECK.mul_f64(0.75 + random() / 2.0)
}

/// A number from 0 up to 1, so that nodes do not do the same at the same time.
pub(super) fn random() -> f64 {
    let [high, low, ..] = RandomState::new().hash_one(0).to_be_bytes();
    f64::from(u16::from_be_bytes([high, low])) / 65536.0
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use serde_json::{Value, json};

    use super::*;
    use crate::image_sets::resource::ImageSet;
    use crate::image_sets::wanted::tests::set;
    use crate::image_sets::wanted::{NodeLabels, wanted_images};

    #[derive(Default)]
    struct TestImages {
        present: Mutex<bool>,
        failures: AtomicU32,
        retries: AtomicU32,
        pulls: AtomicU32,
        pulling: AtomicU32,
        most_pulling: AtomicU32,
        retained: Mutex<BTreeMap<String, RetentionPolicy>>,
    }

    #[async_trait]
    impl SetImages for TestImages {
        async fn retry(&self, image: &WantedImage) -> Result<ImageId, String> {
            self.retries.fetch_add(1, Ordering::Relaxed);
            self.ensure(image).await
        }

        async fn ensure(&self, image: &WantedImage) -> Result<ImageId, String> {
            if self.failures.load(Ordering::Relaxed) > 0 {
                self.failures.fetch_sub(1, Ordering::Relaxed);
                return Err("Get \"https://r.example/a?sig=k3y\": no route".into());
            }
            self.pulls.fetch_add(1, Ordering::Relaxed);
            let now = self.pulling.fetch_add(1, Ordering::Relaxed) + 1;
            self.most_pulling.fetch_max(now, Ordering::Relaxed);
            if image.image.as_str().contains("hangs") {
                std::future::pending::<()>().await;
            }
            time::sleep(Duration::from_millis(10)).await;
            self.pulling.fetch_sub(1, Ordering::Relaxed);
            *self.present.lock() = true;
            Ok(ImageId::from(image.image.as_str()))
        }

        async fn find(&self, image: &WantedImage) -> Result<Option<ImageId>, String> {
            Ok(self.present.lock().then(|| ImageId::from(image.image.as_str())))
        }

        fn retain(&self, image: &WantedImage, _: &ImageId) {
            self.retained.lock().insert(image.image.to_string(), image.retention);
        }

        fn release(&self, image: &ImageName) {
            self.retained.lock().remove(image.as_str());
        }
    }

    fn wanted(spec: impl Into<Value>) -> BTreeMap<String, WantedImage> {
        wanted_images(&[&set("s", spec)], &NodeLabels::default())
    }

    fn of_policy(policy: &str) -> BTreeMap<String, WantedImage> {
        wanted(json!({ "images": [{ "image": "a:1" }], "policy": policy }))
    }

    async fn after(seconds: u64, tasks: &ImageTasks) -> Option<ImageState> {
        time::sleep(Duration::from_secs(seconds)).await;
        tasks.states().remove("a:1")
    }

    #[tokio::test(start_paused = true)]
    async fn an_image_is_retained_by_its_policy_pulled_again_when_missing_and_released_with_its_set() {
        let images = Arc::new(TestImages::default());
        let mut tasks = ImageTasks::new(images.clone());
        let pulls = || images.pulls.load(Ordering::Relaxed);
        let retained = || images.retained.lock().get("a:1").copied();
        tasks.set(of_policy("PullOnce"), |_, _| false, None);
        assert_eq!(after(1, &tasks).await, Some(ImageState::Present));
        *images.present.lock() = false;
        assert_eq!(after(600, &tasks).await, Some(ImageState::Present), "GC may take it");
        assert_eq!((pulls(), retained()), (1, None));
        tasks.set(of_policy("KeepPresent"), |_, _| false, None);
        after(1, &tasks).await;
        assert_eq!((pulls(), retained()), (2, Some(RetentionPolicy::KeepPresent)));
        *images.present.lock() = false;
        after(120, &tasks).await;
        assert_eq!(pulls(), 3, "pulled again");
        tasks.set(of_policy("Pin"), |_, _| false, None);
        assert_eq!(retained(), Some(RetentionPolicy::KeepPresent), "until it is pinned");
        after(1, &tasks).await;
        assert_eq!(retained(), Some(RetentionPolicy::Pin));
        tasks.set(BTreeMap::new(), |_, _| false, None);
        assert_eq!((after(1, &tasks).await, retained()), (None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn an_image_that_never_resolves_is_tried_until_the_limit_and_again_after_a_change_of_the_set() {
        let images = Arc::new(TestImages::default());
        images.failures.store(3, Ordering::Relaxed);
        let mut tasks = ImageTasks::new(images.clone());
        let limited = |seconds: u32| {
            wanted(
                json!({ "images": [{ "image": "a:1" }], "retry": { "limit": 2, "backoffSeconds": seconds } }),
            )
        };
        tasks.set(limited(10), |_, _| false, None);
        let failed =
            Some(ImageState::Failed { message: "Get \"https://r.example/a?****\": no route".into() });
        assert_eq!(after(4, &tasks).await, failed);
        assert_eq!(after(3600, &tasks).await, failed);
        assert_eq!(images.failures.load(Ordering::Relaxed), 1, "two attempts");
        tasks.set(limited(20), |_, _| false, None);
        assert_eq!(after(21, &tasks).await, Some(ImageState::Present));
        assert_eq!(images.retries.load(Ordering::Relaxed), 2, "the first attempt of a set is none");
    }

    #[tokio::test(start_paused = true)]
    async fn an_image_that_may_not_be_pulled_yet_or_was_pulled_once_before_a_restart_is_not_pulled() {
        let images = Arc::new(TestImages::default());
        let mut tasks = ImageTasks::new(images.clone());
        let limited = || wanted(json!({ "images": [{ "image": "a:1" }], "parallelism": 1 }));
        tasks.set(limited(), |_, _| false, None);
        assert_eq!(after(600, &tasks).await, Some(ImageState::Waiting));
        *images.present.lock() = true;
        tasks.set(BTreeMap::new(), |_, _| false, None);
        tasks.set(limited(), |_, _| false, None);
        assert_eq!(after(1, &tasks).await, Some(ImageState::Present));
        assert_eq!(images.retained.lock().len(), 1, "a present image is retained all the same");
        *images.present.lock() = false;
        assert_eq!(after(120, &tasks).await, Some(ImageState::Waiting), "it was removed");
        *images.present.lock() = true;
        tasks.set(of_policy("PullOnce"), |_, _| true, None);
        assert_eq!(after(1, &tasks).await, Some(ImageState::Present));
        assert_eq!(images.pulls.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn an_image_that_is_present_before_its_node_is_admitted_is_pulled_once_for_its_set() {
        let images = Arc::new(TestImages::default());
        *images.present.lock() = true;
        let mut tasks = ImageTasks::new(images.clone());
        let spec = json!({ "images": [{ "image": "a:1" }], "policy": "PullOnce", "parallelism": 1 });
        tasks.set(wanted(spec.clone()), |_, _| false, None);
        assert_eq!(after(1, &tasks).await, Some(ImageState::Present));
        let mut admitted = set("s", spec);
        let status = json!({ "observedGeneration": 1, "admittedUpTo": "z" });
        admitted.status = serde_json::from_value(status).unwrap();
        tasks.set(wanted_images(&[&admitted], &NodeLabels::default()), |_, _| false, None);
        assert_eq!(after(1, &tasks).await, Some(ImageState::Present));
        assert_eq!(images.pulls.load(Ordering::Relaxed), 1, "its tag may be another image now");
    }

    #[tokio::test(start_paused = true)]
    async fn an_image_that_was_pulled_once_is_not_pulled_again_for_a_change_of_another_set() {
        let images = Arc::new(TestImages::default());
        let mut tasks = ImageTasks::new(images.clone());
        let spec = json!({ "images": [{ "image": "a:1" }], "policy": "PullOnce" });
        let (one, mut two) = (set("one", spec.clone()), set("two", spec));
        let wanted = |sets: &[&ImageSet]| wanted_images(sets, &NodeLabels::default());
        let pulls = || images.pulls.load(Ordering::Relaxed);
        tasks.set(wanted(&[&one, &two]), |_, _| false, None);
        assert_eq!(after(1, &tasks).await, Some(ImageState::Present));
        *images.present.lock() = false;
        tasks.set(wanted(&[&one]), |_, _| false, None);
        assert_eq!((after(1, &tasks).await, pulls()), (Some(ImageState::Present), 1), "two was deleted");
        two.metadata.generation = Some(2);
        tasks.set(wanted(&[&one, &two]), |_, _| false, None);
        assert_eq!((after(1, &tasks).await, pulls()), (Some(ImageState::Present), 2), "two is new");
        *images.present.lock() = false;
        tasks.set(BTreeMap::new(), |_, _| false, None);
        tasks.set(wanted(&[&one]), |_, _| false, None);
        assert_eq!((after(1, &tasks).await, pulls()), (Some(ImageState::Present), 3), "one was deleted");
    }

    #[tokio::test(start_paused = true)]
    async fn a_thousand_images_are_ensured_a_few_at_a_time_after_all_were_looked_for() {
        let images = Arc::new(TestImages::default());
        let mut tasks = ImageTasks::new(images.clone());
        let many: Vec<_> = (0..1000).map(|index| json!({ "image": format!("a:{index}") })).collect();
        let first: FirstScanGuard = Arc::new(());
        tasks.set(wanted(json!({ "images": many })), |_, _| false, Some(&first));
        assert!(Arc::strong_count(&first) > 1);
        time::sleep(Duration::from_millis(1)).await;
        assert_eq!(Arc::strong_count(&first), 1, "all were looked for");
        time::sleep(Duration::from_secs(10)).await;
        assert_eq!(images.pulls.load(Ordering::Relaxed), 1000);
        assert_eq!(images.most_pulling.load(Ordering::Relaxed), 16);
    }

    #[tokio::test(start_paused = true)]
    async fn a_set_whose_registry_hangs_delays_neither_other_sets_nor_its_images_of_other_registries() {
        let mut tasks = ImageTasks::new(Arc::new(TestImages::default()));
        let images = |names: &[&str]| {
            let image = |(name, index): (&&str, usize)| json!({ "image": format!("{name}:{index}") });
            let images = names.iter().flat_map(|name| (0..40).map(move |index| (name, index)));
            json!({ "images": images.map(image).collect::<Vec<_>>() })
        };
        let sets = [
            set("a", images(&["a.example/hangs", "b.example/app"])),
            set("b", images(&["a.example/other", "c.example/hangs"])),
            set("c", images(&["a.example/third"])),
        ];
        let sets: Vec<_> = sets.iter().collect();
        tasks.set(wanted_images(&sets, &NodeLabels::default()), |_, _| false, None);
        time::sleep(Duration::from_secs(1)).await;
        let pulling: Vec<_> =
            tasks.states().into_iter().filter(|(_, state)| *state != ImageState::Present).collect();
        assert_eq!(pulling.len(), 80, "{pulling:?}");
        assert!(pulling.iter().all(|(image, _)| image.contains("hangs")), "{pulling:?}");
    }
}
