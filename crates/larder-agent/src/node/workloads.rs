//! The images that the node itself desires: those of static pods, the prefetch list, and pods and image sets of the
//! cluster.

use std::collections::BTreeMap;
use std::future;
use std::path::PathBuf;
use std::sync::Arc;
#[cfg(feature = "kube")]
use std::sync::atomic::{AtomicBool, Ordering};

use super::Observability;
use super::cluster::NodeCluster;
#[cfg(feature = "kube")]
use super::cluster::{ImageSetContext, end_image_sets, follow_image_sets, forget_image_sets, run_pods};
use super::collection::Collection;
use super::pods::desired::{DesiredImages, DesiredUses, FirstScan};
use super::pods::prefetch::{self, PrefetchContext};
use super::pods::static_pods;
use super::pulls::Pulls;
use super::settings::NodeSettings;
use crate::config::Config;
use crate::state::StateDir;

/// The images that the node itself desires.
pub(crate) struct Workloads {
    /// Uses of images, which garbage collection respects.
    uses: DesiredUses,
    /// The Kubernetes cluster, if the daemon takes part in one.
    cluster: Option<Arc<NodeCluster>>,
    /// Where it is written which images image sets retain; `None` where no state is kept.
    #[cfg_attr(
        not(feature = "kube"),
        expect(dead_code, reason = "without clusters there are no image sets")
    )]
    image_sets: Option<PathBuf>,
    settings: Arc<NodeSettings>,
    pulls: Arc<Pulls>,
    collection: Arc<Collection>,
    observability: Arc<Observability>,
}

impl Workloads {
    /// Desired images of the settings in force. `uses` retain them.
    pub(super) fn build(
        settings: Arc<NodeSettings>,
        cluster: Option<Arc<NodeCluster>>,
        state: &StateDir,
        uses: DesiredUses,
        pulls: Arc<Pulls>,
        collection: Arc<Collection>,
        observability: Arc<Observability>,
    ) -> Workloads {
        let image_sets = state.is_locked().then(|| state.image_sets());
        Workloads { uses, cluster, image_sets, settings, pulls, collection, observability }
    }

    /// Uses of images by what the node desires.
    #[cfg(test)]
    pub(crate) fn uses(&self) -> &DesiredUses {
        &self.uses
    }

    /// The Kubernetes cluster, if the daemon takes part in one.
    pub(crate) fn cluster(&self) -> Option<&NodeCluster> {
        self.cluster.as_deref()
    }

    /// Begins the first scan of desired images: collections wait until it has ended.
    pub(super) fn begin_first_scan(&self) -> FirstScan {
        self.uses.begin_first_scan()
    }

    /// Ensures the images, and sends events to the cluster, until dropped.
    pub(super) async fn run(&self, first: FirstScan) {
        tokio::join!(
            self.ensure_static_pods(first.clone()),
            self.ensure_bound_pods(first.clone()),
            self.ensure_image_sets(first.clone()),
            self.prefetch(first),
            self.send_events(),
        );
    }

    /// No images yet, for one of the sources of this node.
    fn desired_images(&self) -> DesiredImages {
        DesiredImages::new(Arc::clone(self.pulls.manager()), self.uses.clone())
            .with_collector(Arc::clone(self.collection.unchecked_collector()))
    }

    /// Ensures the images of static pods at the path of the settings, whichever that is.
    async fn ensure_static_pods(&self, first: FirstScan) {
        let path = |config: &Config| config.static_pod_path.clone();
        let mut first = Some(first);
        let desired = self.desired_images().with_events(Arc::clone(self.observability.sink()));
        let mut desired = desired.with_pod_pulls(Arc::clone(self.pulls.pod_pulls()));
        let ensure = async |path: Option<PathBuf>| {
            let first = first.take();
            if let Some(path) = path {
                static_pods::run_static_pods(path, &mut desired, first).await;
            } else {
                drop(first);
                desired.set(BTreeMap::new(), None);
                future::pending::<()>().await;
            }
        };
        self.settings.for_each(path, ensure).await;
    }

    async fn prefetch(&self, first: FirstScan) {
        let mut first = Some(first);
        let context = PrefetchContext {
            manager: Arc::clone(self.pulls.manager()),
            gate: Arc::clone(self.collection.gate()),
            held: self.uses.clone(),
            collector: Some(Arc::clone(self.collection.unchecked_collector())),
            node: self.observability.node().clone(),
        };
        self.settings
            .for_each(
                |config| config.prefetch.clone(),
                async |list| prefetch::run_prefetch(list, context.clone(), first.take()).await,
            )
            .await;
    }
}

/// The cluster of the node.
#[cfg(feature = "kube")]
impl Workloads {
    /// Ensures the images of pods that are bound to the node.
    async fn ensure_bound_pods(&self, first: FirstScan) {
        let Some(cluster) = &self.cluster else { return };
        let Some(identity) = &cluster.node else { return };
        let mut first = Some(first);
        let setting = |config: &Config| (config.kubernetes.pods, config.runtime.runtime_class_in_image);
        let ensure = async |(is_on, uses_runtime_handlers)| {
            let first = first.take();
            if is_on {
                run_pods(cluster, identity, self.desired_images(), uses_runtime_handlers, first).await;
            } else {
                drop(first);
                future::pending::<()>().await;
            }
        };
        self.settings.for_each(setting, ensure).await;
    }

    /// Sends events about the node to the cluster.
    async fn send_events(&self) {
        let Some(cluster) = &self.cluster else { return };
        let collects = || self.settings.now().gc.is_enabled() && self.collection.warning().is_none();
        let journal = self.observability.journal();
        // The start may have recorded why the settings are not in force.
        let mut first = Some(0);
        let send = async |is_on| {
            let from = first.take().unwrap_or_else(|| journal.next_number());
            if is_on {
                cluster.send_events(journal.follow(from), collects).await;
            } else {
                future::pending::<()>().await;
            }
        };
        self.settings.for_each(|config| config.kubernetes.events, send).await;
    }

    /// Ensures the images of image sets.
    async fn ensure_image_sets(&self, first: FirstScan) {
        let file = self.image_sets.clone();
        let Some(cluster) = &self.cluster else { return forget_image_sets(file).await };
        let context = ImageSetContext {
            manager: Arc::clone(self.pulls.manager()),
            held: self.uses.clone(),
            collector: Some(Arc::clone(self.collection.unchecked_collector())),
            file,
            node: self.observability.node().clone(),
        };
        let (sends_events, mut first) = (Arc::new(AtomicBool::new(false)), Some(first));
        // Turning events off and on does not release images.
        let events = self.settings.for_each(
            |config| config.kubernetes.events,
            async |is_on| {
                sends_events.store(is_on, Ordering::Relaxed);
                future::pending::<()>().await;
            },
        );
        let images = self.settings.for_each(
            |config| config.kubernetes.image_sets,
            async |is_on| {
                let first = first.take();
                if is_on {
                    follow_image_sets(cluster, context.clone(), Arc::clone(&sends_events), first).await;
                } else {
                    drop(first);
                    end_image_sets(cluster, context.file.clone()).await;
                    future::pending::<()>().await;
                }
            },
        );
        tokio::join!(events, images);
    }
}

/// A build without clusters has none.
#[cfg(not(feature = "kube"))]
#[expect(clippy::unused_async, reason = "as with the feature")]
impl Workloads {
    async fn ensure_bound_pods(&self, _: FirstScan) {}

    async fn ensure_image_sets(&self, _: FirstScan) {}

    async fn send_events(&self) {}
}
