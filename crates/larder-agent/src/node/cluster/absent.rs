//! A larder without the feature `kube`.

use std::sync::Arc;

use larder::credentials::plugin::ServiceAccountClient;
use larder_api::v1 as api;

use super::EventCounts;
use crate::config::Config;
use crate::error::Error;

/// No cluster: there is no value of it.
pub(crate) enum NodeCluster {}

impl NodeCluster {
    /// Refuses the settings of a cluster.
    pub(crate) fn open(config: &Config) -> Result<Option<Arc<NodeCluster>>, Error> {
        let key = "kubernetes.enabled";
        if !config.kubernetes.enabled {
            return Ok(None);
        }
        let origin = config.origin(key);
        Err(Error::bad_input(format!("{origin}: {key}: this larder was built without the feature kube"))
            .hint("install a package of larder, or build it with cargo build --features kube"))
    }

    pub(crate) fn name(&self) -> &str {
        match *self {}
    }

    pub(crate) fn accounts(&self) -> Option<Arc<dyn ServiceAccountClient>> {
        match *self {}
    }

    pub(crate) fn event_counts(&self) -> EventCounts {
        match *self {}
    }

    pub(crate) fn image_counts(&self) -> Vec<(&'static str, u64)> {
        match *self {}
    }

    #[expect(clippy::unused_async, reason = "as with the feature")]
    pub(crate) async fn wait_released(&self) {
        match *self {}
    }

    pub(crate) fn status(&self) -> api::KubernetesStatus {
        match *self {}
    }
}

#[cfg(test)]
mod tests {
    use larder::hint::Hint;

    use super::*;
    use crate::config::{self, SettingOrigin, SettingsSource, SettingsSources};
    use crate::environment::DefaultPaths;

    #[test]
    fn a_cluster_is_refused_and_the_feature_named() {
        let of = |layers| {
            let places = DefaultPaths::of(true, |_| None);
            NodeCluster::open(&config::load(&SettingsSources { places, layers }).unwrap())
        };
        assert!(of(Vec::new()).unwrap().is_none());
        let by = SettingOrigin::Variable("LARDER_TEST");
        let given = SettingsSource::Given { by, key: "kubernetes.enabled", value: "true".to_owned() };
        let error = of(vec![given]).err().unwrap();
        let expected = "LARDER_TEST: kubernetes.enabled: this larder was built without the feature kube";
        assert_eq!(error.message(), expected);
        let steps: Vec<Hint> = error.next_steps().to_vec();
        assert!(steps[0].to_string().contains("--features kube"), "{steps:?}");
    }
}
