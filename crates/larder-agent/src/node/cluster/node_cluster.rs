//! The identities with which the daemon uses the cluster.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use larder::credentials::plugin::ServiceAccountClient;
use larder::events::EventFollower;
use larder_api::v1 as api;
use larder_kube::image_sets::ImageCounts;
use larder_kube::{Cluster, ClusterOptions, ClusterServiceAccounts, node_name, other_node};
use parking_lot::Mutex;

use super::event_sender::{self, EventCounters};
use super::{Connection, EventCounts};
use crate::config::{Config, KubernetesSettings};
use crate::environment::variable;
use crate::error::Error;

/// The cluster of the node.
pub(crate) struct NodeCluster {
    name: String,
    /// kubelet's identity; `None` is without pods and tokens.
    pub(crate) node: Option<ClusterIdentity>,
    /// larder's own; `None` is without image sets and events.
    pub(crate) own: Option<ClusterIdentity>,
    /// How many pods are bound to the node and need images.
    pub(super) pods: AtomicUsize,
    pub(super) events: EventCounters,
    /// The images of image sets; `None` while it follows no sets.
    pub(super) set_images: Arc<Mutex<Option<ImageCounts>>>,
}

/// A client of the API server, and whether that answers it.
pub(crate) struct ClusterIdentity {
    pub(crate) cluster: Cluster,
    pub(crate) connection: Arc<Connection>,
}

impl ClusterIdentity {
    pub(super) fn new(cluster: Cluster, subject: &str) -> ClusterIdentity {
        let connection = Arc::new(Connection::new(subject.to_owned(), SystemTime::now()));
        ClusterIdentity { cluster: cluster.observed_by(connection.clone()), connection }
    }
}

impl NodeCluster {
    /// The cluster of the settings; `None` if they name none. Connects to nothing yet. Reads files, and must be called
    /// within a runtime.
    pub(crate) fn open(config: &Config) -> Result<Option<Arc<NodeCluster>>, Error> {
        let settings = &config.kubernetes;
        if !settings.enabled {
            return Ok(None);
        }
        let name = name_of(settings);
        if let Some(path) = &settings.node_kubeconfig
            && let Some((found, next)) = node_name(path).and_then(|own| other_node(path, &own, &name))
        {
            tracing::warn!("kubernetes: {found}: its pods are refused; {next}");
        }
        let ClusterIdentities { node, own } = ClusterIdentities::of(settings, &name);
        let identity =
            |options: ClusterOptions, subject: &str| ClusterIdentity::new(Cluster::open(&options), subject);
        let node = node.map(|options| identity(options, &format!("pods of node {name}")));
        let own = own.map(|options| identity(options, "image sets and events"));
        if node.is_none() && own.is_none() {
            let key = "kubernetes.enabled";
            let problem = format!("{}: {key}: no identity to connect with", config.origin(key));
            return Err(Error::bad_input(problem)
                .hint("set kubernetes.nodeKubeconfig to kubelet's kubeconfig, or kubernetes.kubeconfig"));
        }
        if node.is_none() {
            tracing::warn!("kubernetes: no images of pods and no tokens: kubernetes.nodeKubeconfig is empty");
        }
        if own.is_none() {
            tracing::info!(
                "kubernetes: no image sets and events: larder runs outside of a pod, and kubernetes.kubeconfig is empty"
            );
        }
        Ok(Some(Arc::new(NodeCluster::of(name, node, own))))
    }

    #[cfg(test)]
    pub(super) fn of_test_with(node: Option<ClusterIdentity>, own: Option<ClusterIdentity>) -> NodeCluster {
        NodeCluster::of("n1".into(), node, own)
    }

    fn of(name: String, node: Option<ClusterIdentity>, own: Option<ClusterIdentity>) -> NodeCluster {
        NodeCluster {
            name,
            node,
            own,
            pods: AtomicUsize::new(0),
            events: EventCounters::default(),
            set_images: Arc::default(),
        }
    }

    /// Name of the node's object.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Service accounts and their tokens; `None` without kubelet's identity.
    pub(crate) fn accounts(&self) -> Option<Arc<dyn ServiceAccountClient>> {
        let node = self.node.as_ref()?;
        Some(Arc::new(ClusterServiceAccounts::of(&node.cluster)))
    }

    /// Sends events about the node until dropped, if larder has an identity for that. `collects` is whether no other
    /// program collects images.
    pub(in crate::node) async fn send_events(&self, events: EventFollower, collects: impl Fn() -> bool) {
        if let Some(own) = &self.own {
            event_sender::send_events(&own.cluster, &self.events, events, collects).await;
        }
    }

    /// Counts of events about the node.
    pub(crate) fn event_counts(&self) -> EventCounts {
        self.events.counts()
    }

    /// How many images of image sets are in each state; none while it follows no sets.
    pub(crate) fn image_counts(&self) -> Vec<(&'static str, u64)> {
        let counts = *self.set_images.lock();
        let states = |ImageCounts { waiting, pulling, present, failed }| {
            vec![("waiting", waiting), ("pulling", pulling), ("present", present), ("failed", failed)]
        };
        counts.map(states).unwrap_or_default()
    }

    /// Waits until the lease of image sets is released, if this node held it when its tasks were dropped. Takes two
    /// seconds at most.
    pub(crate) async fn wait_released(&self) {
        if let Some(own) = &self.own {
            own.cluster.wait_released().await;
        }
    }

    pub(crate) fn status(&self) -> api::KubernetesStatus {
        let status = |identity: &ClusterIdentity| identity.connection.status();
        api::KubernetesStatus {
            node: self.name.clone(),
            node_identity: self.node.as_ref().map(status),
            own_identity: self.own.as_ref().map(status),
            pods: u32::try_from(self.pods.load(Ordering::Relaxed)).unwrap_or(u32::MAX),
        }
    }
}

fn is_in_pod() -> bool {
    variable("KUBERNETES_SERVICE_HOST").is_some()
}

/// `spec.nodeName` of larder's pod, where it runs in one.
const NODE_NAME_VARIABLE: &str = "NODE_NAME";

/// Identities to connect with, by the settings.
pub(super) struct ClusterIdentities {
    /// kubelet's.
    pub(super) node: Option<ClusterOptions>,
    /// larder's own.
    pub(super) own: Option<ClusterOptions>,
}

impl ClusterIdentities {
    pub(super) fn of(settings: &KubernetesSettings, name: &str) -> ClusterIdentities {
        let options = |kubeconfig| ClusterOptions { kubeconfig, node: name.to_owned() };
        let node = settings.node_kubeconfig.clone().map(|path| options(Some(path)));
        let has_own = is_in_pod() || settings.kubeconfig.is_some();
        ClusterIdentities { node, own: has_own.then(|| options(settings.kubeconfig.clone())) }
    }
}

/// As kubelet has it: its setting, its certificate, `NODE_NAME` of larder's pod, or the host name.
pub(super) fn name_of(settings: &KubernetesSettings) -> String {
    let of_certificate = || settings.node_kubeconfig.as_deref().and_then(node_name);
    let of_pod = || variable(NODE_NAME_VARIABLE).filter(|_| is_in_pod());
    settings.node_name.clone().or_else(of_certificate).or_else(of_pod).unwrap_or_else(|| {
        let host = rustix::system::uname().nodename().to_string_lossy().trim().to_lowercase();
        tracing::info!("kubernetes: no node name in settings or client certificate, using host name {host}");
        host
    })
}
