//! Keeps images present for as long as somebody wants them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use larder::backend::{Backend, ImageSpec};
use larder::gc::{Found, Use, UseError, UseSource};
use larder::pull::{EnsureReason, EnsureRequest, Manager};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time;

/// How often it is looked whether an image is still there.
const LOOK: Duration = Duration::from_secs(60);
/// How soon a failed ensure is tried again, if no back-off says otherwise: kubelet looks at a pod that often.
const RETRY: Duration = Duration::from_secs(10);

/// What makes two wishes the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WishKey {
    /// Who wants it, such as `static pod kube-system/proxy`.
    pub(crate) owner: String,
    /// Which container or volume of it.
    pub(crate) part: String,
    /// The image, as written.
    pub(crate) image: String,
    /// The pull policy.
    pub(crate) policy: String,
}

/// What is held for whom, by image id: it counts as used.
#[derive(Debug, Clone, Default)]
pub(crate) struct Held(Arc<Mutex<BTreeMap<WishKey, String>>>);

impl Held {
    fn map(&self) -> MutexGuard<'_, BTreeMap<WishKey, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this image is held for that wish.
    pub(super) fn keep(&self, key: WishKey, id: String) {
        self.map().insert(key, id);
    }

    /// Nothing is held for that wish any more.
    pub(super) fn give_up(&self, key: &WishKey) {
        self.map().remove(key);
    }

    /// The same as [`keep`](Held::keep), if it is a wish still.
    fn hold(&self, key: WishKey, wanted: &AtomicBool, id: String) {
        let mut held = self.map();
        if wanted.load(Ordering::Relaxed) {
            held.insert(key, id);
        }
    }

    /// Nothing is held for it any more, whatever its task still does.
    fn release(&self, key: &WishKey, wanted: &AtomicBool) {
        let mut held = self.map();
        wanted.store(false, Ordering::Relaxed);
        held.remove(key);
    }
}

#[async_trait]
impl UseSource for Held {
    async fn uses(&self) -> Result<Vec<Found>, UseError> {
        let held = self.map();
        let found = held.iter().map(|(key, id)| Found {
            image: id.clone(),
            handler: None,
            by: Use::Wanted { by: key.owner.clone() },
        });
        Ok(found.collect())
    }
}

/// The wishes that are looked after now. Dropping it gives all of them up, and releases what they hold.
pub(crate) struct Wishes {
    manager: Arc<Manager>,
    backend: Arc<dyn Backend>,
    held: Held,
    tasks: JoinSet<()>,
    running: BTreeMap<WishKey, Running>,
}

struct Running {
    task: AbortHandle,
    wanted: Arc<AtomicBool>,
}

impl Wishes {
    /// No wishes yet.
    pub(crate) fn new(manager: Arc<Manager>, backend: Arc<dyn Backend>, held: Held) -> Wishes {
        Wishes { manager, backend, held, tasks: JoinSet::new(), running: BTreeMap::new() }
    }

    /// From now on exactly these are wanted. What was wanted before and still is goes on undisturbed.
    pub(crate) fn set(&mut self, wanted: BTreeMap<WishKey, EnsureRequest>) {
        while self.tasks.try_join_next().is_some() {}
        self.running.retain(|key, wish| {
            let stays = wanted.contains_key(key);
            if !stays {
                wish.task.abort();
                self.held.release(key, &wish.wanted);
                tracing::info!("{} wants {} no more", key.owner, key.image);
            }
            stays
        });
        for (key, request) in wanted {
            if self.running.contains_key(&key) {
                continue;
            }
            tracing::info!("{} wants {}", key.owner, key.image);
            let (manager, backend) = (Arc::clone(&self.manager), Arc::clone(&self.backend));
            let wish_lives = Arc::new(AtomicBool::new(true));
            let (hands, own, still) = (self.held.clone(), key.clone(), Arc::clone(&wish_lives));
            let task = self.tasks.spawn(async move {
                let hold = |id: &str| hands.hold(own.clone(), &still, id.to_owned());
                keep_present(&manager, &*backend, &request, hold, &own).await;
            });
            self.running.insert(key, Running { task, wanted: wish_lives });
        }
    }
}

impl Drop for Wishes {
    fn drop(&mut self) {
        for (key, wish) in &self.running {
            self.held.release(key, &wish.wanted);
        }
    }
}

/// Makes the image present, holds it, and makes it present again when somebody removed it. Ends only for a name that
/// can never be pulled.
async fn keep_present(
    manager: &Manager,
    backend: &dyn Backend,
    request: &EnsureRequest,
    hold: impl Fn(&str),
    key: &WishKey,
) {
    loop {
        match manager.ensure(request).await {
            Ok(ensured) => {
                hold(&ensured.image_ref);
                while_present(backend, &ensured.image_ref).await;
                tracing::warn!("{} is gone, and {} wants it", key.image, key.owner);
            }
            Err(error) if error.reason == EnsureReason::InvalidImageName => return,
            // The manager has sent the event.
            Err(error) => time::sleep(error.retry_in.unwrap_or(RETRY).min(RETRY)).await,
        }
    }
}

/// Returns once the image is surely not there any more.
async fn while_present(backend: &dyn Backend, id: &str) {
    loop {
        time::sleep(LOOK).await;
        if let Ok(None) = backend.status(&ImageSpec::named(id)).await {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use larder::pod::Pod;
    use larder::pull::PullPolicy;
    use larder_testkit::fake_backend::{FakeBackend, Pull, image};

    use super::*;

    fn wish(owner: &str, image: &str) -> (WishKey, EnsureRequest) {
        let key = WishKey {
            owner: owner.into(),
            part: "app".into(),
            image: image.into(),
            policy: "IfNotPresent".into(),
        };
        (key, EnsureRequest::new(image, PullPolicy::IfNotPresent, Pod::default()))
    }

    async fn held_by(held: &Held) -> Vec<String> {
        let uses = held.uses().await.unwrap();
        uses.into_iter().map(|found| format!("{}: {}", found.by, found.image)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn images_are_held_while_they_are_wanted_and_brought_back_when_they_go() {
        let backend = FakeBackend::new();
        backend.on_pull_of("a:1", Pull::fails("no route"));
        backend.offer("a:1", image("sha256:a", 1));
        backend.offer("b:1", image("sha256:b", 1));
        let manager = Arc::new(Manager::builder(Arc::new(backend.clone())).build());
        let held = Held::default();
        let mut wishes = Wishes::new(manager, Arc::new(backend.clone()), held.clone());
        wishes.set(BTreeMap::from([wish("pod x/a", "a:1"), wish("pod x/b", "b:1")]));
        time::sleep(Duration::from_secs(5)).await;
        assert_eq!(held_by(&held).await, ["pod x/b: sha256:b"], "the other one failed");
        time::sleep(Duration::from_secs(20)).await;
        assert_eq!(held_by(&held).await, ["pod x/a: sha256:a", "pod x/b: sha256:b"]);
        backend.set_images(Vec::new());
        time::sleep(2 * LOOK).await;
        assert_eq!(backend.images().len(), 2, "brought back");
        wishes.set(BTreeMap::from([wish("pod x/b", "b:1")]));
        assert_eq!(held_by(&held).await, ["pod x/b: sha256:b"]);
        drop(wishes);
        assert!(held_by(&held).await.is_empty());
    }
}
