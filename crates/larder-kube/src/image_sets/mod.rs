//! Image sets: images that the cluster wants on its nodes.
//!
//! ```text
//! ImageSet, labels of the node -> wanted images -> one task for each -> NodeImages of this node
//! all NodeImages, all nodes -> the elected agent (Lease) -> status of ImageSet, nodes that may pull
//! ```
//!
//! Each node writes one small object of its own; only the elected agent writes the status of the sets.

mod aggregator;
mod ensure_slots;
mod lease;
mod node;
mod node_images;
mod progress;
mod redact;
mod report_writer;
mod resource;
mod rollout;
mod set_events;
mod set_secrets;
mod tasks;
mod validation;
mod wanted;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray,
};
use kube::CustomResourceExt as _;
use tokio::sync::watch;
use tokio::time;

use crate::cluster::Cluster;
use crate::error::{ClusterError, ErrorLog};

pub use lease::LEASE;
pub use node_images::{ImageFailure, NodeImages, NodeImagesReport, NodeSetReport, NodeSetState};
pub use resource::{
    ImageSet, ImageSetSpec, ImageSetStatus, LabelOperator, LabelRequirement, NodeFailure, NodeSelector,
    RetentionPolicy, RetryPolicy, SetImage, SetPullPolicy,
};
pub use tasks::{FirstScanGuard, ImageCounts, SetImages};
pub use wanted::WantedImage;

/// The definitions of the custom resources.
pub fn definitions() -> [CustomResourceDefinition; 2] {
    let mut definitions = [ImageSet::crd(), NodeImages::crd()];
    for version in definitions.iter_mut().flat_map(|definition| &mut definition.spec.versions) {
        let schema = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut());
        schema.into_iter().for_each(use_known_formats);
    }
    definitions
}

/// The API server knows no unsigned formats, and kubectl warns of each. `minimum` is in the schema as well.
fn use_known_formats(schema: &mut JSONSchemaProps) {
    if schema.format.as_deref() == Some("uint32") {
        schema.format = Some("int64".to_owned());
    }
    schema.properties.iter_mut().flat_map(|fields| fields.values_mut()).for_each(use_known_formats);
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        use_known_formats(items);
    }
}

/// How long a read of a pull secret serves all pulls of image sets.
pub const SECRETS_SHARED_FOR: Duration = Duration::from_secs(60);

/// Where the lease is, and how often what happens.
#[derive(Debug, Clone)]
pub struct ImageSetOptions {
    /// The namespace of larder: of the lease and of the pull secrets.
    pub namespace: String,
    /// How long an elected agent may be away before another one takes over. It renews four times in this time.
    pub lease: Duration,
    /// The first attempt to be elected comes within this time.
    pub first_attempt: Duration,
    /// Between two looks of a candidate at the lease are this time and up to twice as much.
    pub candidate_interval: Duration,
    /// A change on a node is reported after this time or up to twice as much, with what else has changed.
    pub report_delay: Duration,
    /// How often a node writes an unchanged report, in case it was removed.
    pub refresh: Duration,
    /// How long to wait after a failed call, at least.
    pub retry: Duration,
    /// How often the elected agent counts, if anything has changed.
    pub count_interval: Duration,
    /// How often it writes the status of a set, at most.
    pub status_interval: Duration,
    /// How often it looks whether the pull secrets of sets exist, while nothing else changes.
    pub secret_interval: Duration,
    /// True if the node sends events about the sets. May change at any time.
    pub events: Arc<AtomicBool>,
}

impl ImageSetOptions {
    /// The usual times.
    pub fn new(namespace: &str) -> ImageSetOptions {
        ImageSetOptions {
            namespace: namespace.to_owned(),
            lease: Duration::from_secs(60),
            first_attempt: Duration::from_secs(10),
            candidate_interval: Duration::from_secs(60),
            report_delay: Duration::from_secs(3),
            refresh: Duration::from_secs(600),
            retry: Duration::from_secs(10),
            count_interval: Duration::from_secs(1),
            status_interval: Duration::from_secs(5),
            secret_interval: Duration::from_secs(60),
            events: Arc::new(AtomicBool::new(true)),
        }
    }
}

/// Follows the sets of a cluster and looks after their images on this node; writes their status while elected. Never
/// ends; dropping it releases the images.
pub async fn run_image_sets(cluster: Cluster, options: ImageSetOptions, images: Arc<dyn SetImages>) {
    let (has_sets, receiver) = watch::channel(false);
    let node = node::NodeSets::new(&cluster, &options, images, has_sets);
    tokio::join!(Box::pin(node.run()), Box::pin(aggregator::campaign(cluster, options, receiver)));
}

/// Reports once that this node follows no image sets, where they were turned off. Ends when that is written, or may not
/// be.
pub async fn clear_report(cluster: &Cluster, options: &ImageSetOptions) {
    let mut log = ErrorLog::default();
    loop {
        let cleared = report_writer::clear_report(cluster).await;
        let is_temporary = cleared.as_ref().is_err_and(ClusterError::is_temporary);
        log.note("report about image sets", cleared);
        if !is_temporary {
            return;
        }
        time::sleep(options.retry.mul_f64(1.0 + tasks::random())).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CRDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/kubernetes/base/crds.yaml");

    #[test]
    fn the_definitions_that_are_installed_are_those_of_the_types() {
        // Through a value, so that fields come in the order of their names.
        let yaml = |definition| serde_saphyr::to_string(&serde_json::to_value(definition).unwrap()).unwrap();
        let [sets, nodes] = definitions().map(yaml);
        let command = "LARDER_WRITE_DOCS=1 cargo test -p larder-kube definitions";
        let text = format!("# Generated from crates/larder-kube: {command}\n---\n{sets}---\n{nodes}");
        if std::env::var_os("LARDER_WRITE_DOCS").is_some() {
            fs_err::write(CRDS, &text).unwrap();
        }
        // The API server knows no unsigned formats: kubectl would warn of each.
        assert!(!text.contains("format: uint"), "{text}");
        let installed = fs_err::read_to_string(CRDS).unwrap();
        assert!(installed == text, "{CRDS} is outdated: run this test once with LARDER_WRITE_DOCS=1");
    }
}
