//! How the daemon takes part in a Kubernetes cluster.

use std::path::PathBuf;

/// Settings for reading from, and reporting to, the cluster of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of its own")]
pub struct KubernetesSettings {
    /// Whether the daemon takes part in a cluster.
    pub enabled: bool,
    /// Name of the node's object; `None` is the name in the client certificate of `node_kubeconfig`, or else the host
    /// name.
    pub node_name: Option<String>,
    /// kubelet's kubeconfig, for pods, their pull secrets and tokens; `None` is without them.
    pub node_kubeconfig: Option<PathBuf>,
    /// A kubeconfig of larder's own identity, for image sets, leases and events; `None` is the service account of the
    /// pod that larder runs in, if it runs in one.
    pub kubeconfig: Option<PathBuf>,
    /// Pull images of pods that are bound to the node.
    pub pods: bool,
    /// Pull images of image sets.
    pub image_sets: bool,
    /// Send events to the cluster.
    pub events: bool,
}

impl Default for KubernetesSettings {
    fn default() -> KubernetesSettings {
        KubernetesSettings {
            enabled: false,
            node_name: None,
            node_kubeconfig: Some("/etc/kubernetes/kubelet.conf".into()),
            kubeconfig: None,
            pods: true,
            image_sets: true,
            events: true,
        }
    }
}
