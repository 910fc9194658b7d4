//! `larder kube check`: what is missing on the cluster of the settings.

use jiff::Timestamp;
use larder_kube::{ClusterCheck, check_cluster, own_namespace};

use super::node_cluster::{ClusterIdentities, name_of};
use crate::config::{BackendSetting, Config, KubeletImageService};

/// Checks both identities of the settings. Blocks on reading their files.
pub async fn check(config: &Config) -> Vec<ClusterCheck> {
    let settings = &config.kubernetes;
    let name = name_of(settings);
    let ClusterIdentities { node, own } = ClusterIdentities::of(settings, &name);
    let namespace = own_namespace().await;
    let mut checks = vec![ClusterCheck {
        name: "settings",
        ok: settings.enabled,
        found: format!("kubernetes.enabled: {}, node {name}", settings.enabled),
        next: (!settings.enabled).then(|| "set kubernetes.enabled: true in the settings file".to_owned()),
    }];
    if let Some(found) = prefetch(config) {
        checks.push(ClusterCheck { name: "prefetch", ok: true, found: found.to_owned(), next: None });
    }
    let (node, own, needs_own) = (node.as_ref(), own.as_ref(), settings.image_sets || settings.events);
    checks.extend(check_cluster(node, own, needs_own, &namespace, Timestamp::now()).await);
    checks
}

/// How images of pods and sets are fetched, where kubelet does not ask larder for them.
fn prefetch(config: &Config) -> Option<&'static str> {
    match (config.kubelet_images, &config.backend) {
        (KubeletImageService::None, _) => Some(
            "with credentials, and visible at once: there is no kubelet on this host (cri.kubelet: none)",
        ),
        (KubeletImageService::Runtime, backend) if *backend != BackendSetting::Store => Some(
            "without credentials: kubelet asks the runtime for images (cri.kubelet: runtime), which cannot hide them",
        ),
        _ => None,
    }
}
