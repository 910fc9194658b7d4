//! Background tasks of a node: health checks, garbage collection on a timer, recovery, reloads, static pods, prefetch.

use std::collections::BTreeMap;
use std::future;
use std::sync::Arc;
#[cfg(feature = "kube")]
use std::sync::atomic::{AtomicBool, Ordering};

use super::Node;
#[cfg(feature = "kube")]
use super::cluster::{ImageSetContext, end_image_sets, follow_image_sets, forget_image_sets, run_pods};
use super::pods::desired::{DesiredImages, FirstScan};
use super::pods::prefetch::{self, PrefetchContext};
use super::pods::static_pods;
use crate::config::Config;

impl Node {
    /// Runs the background tasks until dropped.
    pub(crate) async fn run(self: &Arc<Node>) {
        // The first collection waits until it is known what has to stay.
        let first = self.desired_uses.begin_first_scan();
        tokio::join!(
            self.storage.run(),
            self.collection.run(),
            self.watch_files(),
            self.pulls.run(),
            self.want(first),
            self.remove_dead_containers(),
            self.send_events(),
        );
    }

    /// Ensures the images that the node itself desires.
    async fn want(&self, first: FirstScan) {
        tokio::join!(
            self.look_after_static_pods(first.clone()),
            self.ensure_bound_pods(first.clone()),
            self.ensure_image_sets(first.clone()),
            self.prefetch(first)
        );
    }

    /// Ensures the images of pods that are bound to the node.
    #[cfg(feature = "kube")]
    async fn ensure_bound_pods(&self, first: FirstScan) {
        let Some(cluster) = &self.cluster else { return };
        let Some(identity) = &cluster.node else { return };
        let mut first = Some(first);
        let setting = |config: &Config| (config.kubernetes.pods, config.runtime.runtime_class_in_image);
        self.for_each_setting(setting, async |(is_on, uses_runtime_handlers)| {
            let first = first.take();
            if is_on {
                run_pods(cluster, identity, self.desired_images(), uses_runtime_handlers, first).await;
            } else {
                drop(first);
                future::pending::<()>().await;
            }
        })
        .await;
    }

    /// Sends events about the node to the cluster.
    #[cfg(feature = "kube")]
    async fn send_events(&self) {
        let Some(cluster) = &self.cluster else { return };
        let collects = || {
            let is_on = self.settings.now().gc.is_enabled();
            is_on && self.collection.warning().is_none()
        };
        self.for_each_setting(
            |config| config.kubernetes.events,
            async |is_on| {
                if is_on {
                    let journal = self.observability.journal();
                    cluster.send_events(journal.follow(journal.next_number()), collects).await;
                } else {
                    future::pending::<()>().await;
                }
            },
        )
        .await;
    }

    /// A build without clusters has none.
    #[cfg(not(feature = "kube"))]
    #[expect(clippy::unused_async, reason = "as with the feature")]
    async fn ensure_bound_pods(&self, _: FirstScan) {}

    /// Ensures the images of image sets.
    #[cfg(feature = "kube")]
    async fn ensure_image_sets(&self, first: FirstScan) {
        let file = self.state.is_locked().then(|| self.state.image_sets());
        let Some(cluster) = &self.cluster else { return forget_image_sets(file).await };
        let context = ImageSetContext {
            manager: Arc::clone(self.pulls.manager()),
            backend: Arc::clone(self.storage.backend()),
            held: self.desired_uses.clone(),
            collector: Some(Arc::clone(self.collection.unchecked_collector())),
            file,
            node: self.observability.node().clone(),
        };
        let (sends_events, mut first) = (Arc::new(AtomicBool::new(false)), Some(first));
        // Turning events off and on does not release images.
        let events = self.for_each_setting(
            |config| config.kubernetes.events,
            async |is_on| {
                sends_events.store(is_on, Ordering::Relaxed);
                future::pending::<()>().await;
            },
        );
        let images = self.for_each_setting(
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

    /// A build without clusters has none.
    #[cfg(not(feature = "kube"))]
    #[expect(clippy::unused_async, reason = "as with the feature")]
    async fn ensure_image_sets(&self, _: FirstScan) {}

    #[cfg(not(feature = "kube"))]
    #[expect(clippy::unused_async, reason = "as with the feature")]
    async fn send_events(&self) {}

    /// No images yet, for one of the sources of this node.
    fn desired_images(&self) -> DesiredImages {
        let (manager, backend) = (Arc::clone(self.pulls.manager()), Arc::clone(self.storage.backend()));
        DesiredImages::new(manager, backend, self.desired_uses.clone())
            .with_collector(Arc::clone(self.collection.unchecked_collector()))
    }

    /// Ensures the images of static pods at the path of the settings, whichever that is.
    async fn look_after_static_pods(&self, first: FirstScan) {
        let path = |config: &Config| config.static_pod_path.clone();
        let mut first = Some(first);
        let desired = self.desired_images().with_events(Arc::clone(self.observability.sink()));
        let mut desired = desired.with_pod_pulls(Arc::clone(self.pulls.pod_pulls()));
        self.for_each_setting(path, async |path| {
            let first = first.take();
            if let Some(path) = path {
                static_pods::run_static_pods(path, &mut desired, first).await;
            } else {
                drop(first);
                desired.set(BTreeMap::new(), None);
                future::pending::<()>().await;
            }
        })
        .await;
    }

    async fn prefetch(&self, first: FirstScan) {
        let mut first = Some(first);
        let context = PrefetchContext {
            manager: Arc::clone(self.pulls.manager()),
            backend: Arc::clone(self.storage.backend()),
            gate: Arc::clone(self.collection.gate()),
            held: self.desired_uses.clone(),
            collector: Some(Arc::clone(self.collection.unchecked_collector())),
            node: self.observability.node().clone(),
        };
        self.for_each_setting(
            |config| config.prefetch.clone(),
            async |list| prefetch::run_prefetch(list, context.clone(), first.take()).await,
        )
        .await;
    }

    /// Does this with a setting until it changes, and then with the new one.
    async fn for_each_setting<T: PartialEq + Clone>(
        &self,
        setting: impl Fn(&Config) -> T,
        mut work: impl AsyncFnMut(T),
    ) {
        let mut changes = self.settings.changes();
        loop {
            let now = setting(&changes.borrow_and_update());
            let news = async {
                // The sender lives as long as the node.
                let _ = changes.wait_for(|config| setting(config) != now).await;
            };
            tokio::select! {
                () = work(now.clone()) => return,
                () = news => {}
            }
        }
    }
}
