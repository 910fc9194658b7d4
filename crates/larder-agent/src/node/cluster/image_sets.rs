//! The images that image sets want on this node.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use larder::backend::{ImageSpec, PullOptions, PullUntil};
use larder::gc::Collector;
use larder::pod::{ObjectRef, Pod};
use larder::pull::{EnsureRequest, ImageManager, Priority, PullPolicy};
use larder::reference::{ImageId, ImageName};
use larder_kube::image_sets::{
    FirstScanGuard, ImageCounts, ImageSetOptions, RetentionPolicy, SECRETS_SHARED_FOR, SetImages,
    WantedImage, clear_report, run_image_sets,
};
use larder_kube::{PullSecrets, own_namespace};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time;

use super::NodeCluster;
use super::pods::unusable;
use super::retained_file::{self, RetainedImages};
use crate::node::pods::desired::{DesiredKey, DesiredUses, FirstScan, note_if_pulled};

/// Context for pulling and retaining the images of image sets.
#[derive(Clone)]
pub(in crate::node) struct ImageSetContext {
    pub(in crate::node) manager: Arc<ImageManager>,
    pub(in crate::node) held: DesiredUses,
    pub(in crate::node) collector: Option<Arc<Collector>>,
    /// Where it is written what is retained.
    pub(in crate::node) file: Option<PathBuf>,
    /// The node, which events are about.
    pub(in crate::node) node: ObjectRef,
}

/// After a change the file of retained images is written that soon, with what else has changed.
const WRITE_DELAY: Duration = Duration::from_secs(1);
/// How soon it is written again after a failure, such as on a full disk.
const WRITE_RETRY: Duration = Duration::from_secs(60);

/// How long a pull secret of a set serves while the API server is unavailable.
const SECRETS_KNOWN_FOR: Duration = Duration::from_secs(24 * 3600);

/// Looks after the images of image sets until dropped. Without larder's own identity there are none. `first` is
/// released once those that are wanted at first were looked for.
pub(in crate::node) async fn follow_image_sets(
    cluster: &NodeCluster,
    context: ImageSetContext,
    sends_events: Arc<AtomicBool>,
    first: Option<FirstScan>,
) {
    let Some(identity) = &cluster.own else {
        drop(first);
        return std::future::pending().await;
    };
    let options = ImageSetOptions { events: sends_events, ..ImageSetOptions::new(&own_namespace().await) };
    let images = Arc::new(NodeSetImages {
        secrets: PullSecrets::of(&identity.cluster, SECRETS_SHARED_FOR, SECRETS_KNOWN_FOR),
        namespace: options.namespace.clone(),
        context,
        retained: Mutex::default(),
        changed: Notify::new(),
        first: Mutex::new(first),
        attempts: AtomicU64::new(0),
        counts: Arc::clone(&cluster.set_images),
    });
    images.restore().await;
    let writing = images.write_changes();
    tokio::join!(run_image_sets(identity.cluster.clone(), options, images.clone()), writing);
}

/// Image sets are turned off: says so to the cluster, and forgets what they have retained.
pub(in crate::node) async fn end_image_sets(cluster: &NodeCluster, file: Option<PathBuf>) {
    forget_image_sets(file).await;
    *cluster.set_images.lock() = None;
    if let Some(identity) = &cluster.own {
        clear_report(&identity.cluster, &ImageSetOptions::new(&own_namespace().await)).await;
    }
}

/// Forgets what image sets have retained: nothing follows them.
pub(in crate::node) async fn forget_image_sets(file: Option<PathBuf>) {
    let Some(file) = file else { return };
    let images = retained_file::read(file.clone()).await.map_or(0, |images| images.len());
    if images > 0 {
        tracing::info!("kubernetes: image sets are off: images no longer retained for them: {images}");
    }
    note_written(retained_file::write(file, BTreeMap::new()).await);
}

fn note_written(written: io::Result<()>) {
    if let Err(error) = written {
        tracing::warn!(
            "kubernetes: cannot write the images of image sets: {error}; without the API server, a restarted larder \
             does not retain them"
        );
    }
}

/// When the pull of an image returns that sets want lazily, in full, or as the settings say.
fn until(lazy: Option<bool>) -> PullUntil {
    match lazy {
        None => PullUntil::Configured,
        Some(true) => PullUntil::Startable,
        Some(false) => PullUntil::Complete,
    }
}

struct NodeSetImages {
    secrets: PullSecrets,
    /// Of the pull secrets.
    namespace: String,
    context: ImageSetContext,
    /// Under which key each image is retained.
    retained: Mutex<RetainedImages>,
    /// Notifies of a change of the retained images.
    changed: Notify,
    first: Mutex<Option<FirstScan>>,
    attempts: AtomicU64,
    /// For metrics.
    counts: Arc<Mutex<Option<ImageCounts>>>,
}

impl NodeSetImages {
    async fn ensure_image(&self, image: &WantedImage, is_retry: bool) -> Result<ImageId, String> {
        // A present image needs no secrets, whatever it was pulled with: no pod uses it because of a set.
        if image.pull_policy != PullPolicy::Always
            && let Some(present) = self.find(image).await?
        {
            return Ok(present);
        }
        let (secrets, missing) = self.secrets.of_pod(&self.namespace, &image.pull_secrets).await;
        let missing = missing.iter().map(ToString::to_string);
        let problems: Vec<_> = missing.chain(secrets.iter().filter_map(unusable)).collect();
        let name = &image.image;
        let pod = Pod { uid: format!("image-set/{name}"), name: "image-set".to_owned(), ..Pod::default() };
        let request = EnsureRequest {
            secrets,
            target: Some(self.context.node.clone()),
            priority: Priority::Prefetch,
            ahead_of_kubelet: true,
            options: PullOptions { until: until(image.lazy), ..PullOptions::default() },
            is_retry,
            // The set says when to retry: back-off counts for each run.
            run: self.attempts.fetch_add(1, Ordering::Relaxed).to_string(),
            ..EnsureRequest::new(name, image.pull_policy.clone(), pod)
        };
        match self.context.manager.ensure(&request).await {
            Ok(ensured) => {
                note_if_pulled(self.context.collector.as_deref(), &ensured);
                Ok(ensured.image_ref)
            }
            Err(error) => {
                let without = problems.iter().map(|problem| format!("; without a pull secret: {problem}"));
                Err(error.message + &without.collect::<String>())
            }
        }
    }

    /// Retains what was retained before a restart, until the API server says what is wanted.
    async fn restore(&self) {
        let Some(file) = self.context.file.clone() else { return };
        match retained_file::read(file).await {
            Ok(images) => {
                for (key, id) in images.values() {
                    self.context.held.keep(key.clone(), id.clone());
                }
                *self.retained.lock() = images;
            }
            Err(error) => tracing::warn!(
                "kubernetes: cannot read the images of image sets: {error}; they are retained once the API server has answered"
            ),
        }
    }

    /// Writes what is retained after each change, until dropped.
    async fn write_changes(&self) {
        let Some(file) = &self.context.file else { return };
        loop {
            self.changed.notified().await;
            time::sleep(WRITE_DELAY).await;
            let images = self.retained.lock().clone();
            let written = retained_file::write(file.clone(), images).await;
            let has_failed = written.is_err();
            note_written(written);
            if has_failed {
                time::sleep(WRITE_RETRY).await;
                self.changed.notify_one();
            }
        }
    }
}

impl Drop for NodeSetImages {
    /// Also of images that were retained before a restart, and for which there is no task yet.
    fn drop(&mut self) {
        for (key, _) in self.retained.lock().values() {
            self.context.held.remove(key);
        }
    }
}

#[async_trait]
impl SetImages for NodeSetImages {
    async fn ensure(&self, image: &WantedImage) -> Result<ImageId, String> {
        self.ensure_image(image, false).await
    }

    async fn retry(&self, image: &WantedImage) -> Result<ImageId, String> {
        self.ensure_image(image, true).await
    }

    async fn find(&self, image: &WantedImage) -> Result<Option<ImageId>, String> {
        // An invalid name fails when it is pulled.
        let Ok(name) = image.image.with_default_tag() else { return Ok(None) };
        let found = self.context.manager.backend().usable_status(&ImageSpec::named(&name)).await;
        found.map(|found| found.map(|image| image.id)).map_err(|error| error.to_string())
    }

    fn retain(&self, image: &WantedImage, id: &ImageId) {
        let names: Vec<_> = image.sets.iter().map(|(name, _)| name.as_str()).collect();
        let key = DesiredKey {
            owner: format!("ImageSet {}", names.join(", ")),
            part: String::new(),
            image: image.image.clone(),
            policy: image.pull_policy.to_string(),
            is_pinned: image.retention == RetentionPolicy::Pin,
        };
        let value = (key.clone(), id.clone());
        // Locked until the image is in use: what is retained is what is in use.
        let mut retained = self.retained.lock();
        let known = retained.insert(image.image.as_str().to_owned(), value.clone());
        self.context.held.keep(key.clone(), id.clone());
        if known.as_ref() != Some(&value) {
            self.changed.notify_one();
        }
        if let Some((known, _)) = known.filter(|(known, _)| *known != key) {
            self.context.held.remove(&known);
        }
    }

    fn release(&self, image: &ImageName) {
        if let Some((known, _)) = self.retained.lock().remove(image.as_str()) {
            self.context.held.remove(&known);
            self.changed.notify_one();
        }
    }

    fn note_wanted(&self, wanted: &BTreeMap<String, WantedImage>) {
        let stays =
            |name: &str| wanted.get(name).is_some_and(|image| image.retention != RetentionPolicy::PullOnce);
        self.retained.lock().retain(|name, (key, _)| {
            let stays = stays(name);
            if !stays {
                self.context.held.remove(key);
                self.changed.notify_one();
            }
            stays
        });
    }

    fn note_counts(&self, counts: ImageCounts) {
        *self.counts.lock() = Some(counts);
    }

    fn begin_first_scan(&self) -> Option<FirstScanGuard> {
        let first = self.first.lock().take()?;
        Some(Arc::new(first))
    }
}
