//! Who may use and pull images: pull records, credentials of the node, and images hidden from kubelet.

use std::sync::Arc;

use larder::credentials::plugin::PluginRunObserver;
use larder::credentials::{NodeDockerConfig, NodeKeyring, SearchPath};
use larder::error_chain;
use larder::hidden::{HiddenImages, PrefetchCredentials};
use larder::records::{PullRecordStore, Verification};

use crate::backend::providers;
use crate::config::{Config, KubeletImageService};
use crate::error::Error;
use crate::node::Observability;
use crate::node::cluster::NodeCluster;
use crate::node::metrics::NodeMetrics;
use crate::state::StateDir;

/// Who may use and pull images.
#[derive(Default)]
pub(crate) struct PullAccess {
    /// Pull records; `None` keeps none.
    pub(crate) records: Option<Arc<PullRecordStore>>,
    /// The node's own credentials; requests bring theirs along.
    pub(crate) credentials: NodeKeyring,
    /// Treatment of the credentials of pulls ahead of kubelet.
    pub(crate) prefetch_credentials: PrefetchCredentials,
}

impl PullAccess {
    /// Opens records and hidden images in a state directory, if it is locked. `credentials` replace those of the
    /// settings and of the process's user. `is_store`: the backend is larder's own store.
    pub(crate) fn open(
        config: &Config,
        state: &StateDir,
        is_store: bool,
        credentials: Option<NodeKeyring>,
        cluster: Option<&NodeCluster>,
        observability: &Observability,
    ) -> Result<PullAccess, Error> {
        let verification = config.verification.as_ref().filter(|_| state.is_locked());
        Ok(PullAccess {
            records: open_records(verification, state)?,
            credentials: credentials
                .map_or_else(|| credentials_of(config, cluster, observability.metrics()), Ok)?,
            prefetch_credentials: prefetch_credentials(config, is_store, state)?,
        })
    }
}

/// The pull records of a state directory; `None` where kubelet's feature gate is off.
fn open_records(
    verification: Option<&Verification>,
    state: &StateDir,
) -> Result<Option<Arc<PullRecordStore>>, Error> {
    let Some(verification) = verification.cloned() else { return Ok(None) };
    let opened = PullRecordStore::open(&state.pull_records(), verification);
    let records = opened.map_err(|error| Error::failed(error_chain(&error)).hint(error.hint()))?;
    Ok(Some(Arc::new(records)))
}

/// Images that are fetched ahead of kubelet with credentials are hidden where kubelet asks larder for images. It sees
/// those of larder's own store in no other way. What was hidden with earlier settings stays so, unless there is no
/// kubelet.
fn prefetch_credentials(
    config: &Config,
    is_store: bool,
    state: &StateDir,
) -> Result<PrefetchCredentials, Error> {
    if config.kubelet_images == KubeletImageService::None {
        return Ok(PrefetchCredentials::Use);
    }
    if !state.is_locked() {
        return Ok(PrefetchCredentials::Withhold(None));
    }
    let (hides, path) = (is_store || config.kubelet_images == KubeletImageService::Larder, state.hidden());
    let failed = |error: std::io::Error| {
        Error::failed(format!("cannot determine which images are hidden from kubelet: {error}"))
            .hint("repair the file or its directory")
    };
    if !hides && !path.try_exists().map_err(failed)? {
        return Ok(PrefetchCredentials::Withhold(None));
    }
    let hidden = Arc::new(HiddenImages::open(&path).map_err(failed)?);
    Ok(if hides { PrefetchCredentials::Hide(hidden) } else { PrefetchCredentials::Withhold(Some(hidden)) })
}

/// The Docker configuration of the user that the process runs as, read again every five minutes, and the programs that
/// give more: credential helpers and kubelet's credential providers.
fn credentials_of(
    config: &Config,
    cluster: Option<&NodeCluster>,
    metrics: &Arc<NodeMetrics>,
) -> Result<NodeKeyring, Error> {
    let files = NodeDockerConfig::search(SearchPath::user());
    let mut credentials = NodeKeyring::new(files, Vec::new()).with_tokens(config.credential_tokens);
    if let Some(helpers) = providers::helpers(config.credential_tokens) {
        credentials = credentials.with_helpers(helpers);
    }
    let configured = &config.credential_plugins;
    if let (Some(file), Some(programs)) = (&configured.config, &configured.bin_dir) {
        let accounts = cluster.and_then(NodeCluster::accounts);
        let plugins = providers::plugins(file, programs, accounts)?;
        metrics.providers_configured(plugins.config_hash(), plugins.names());
        let runs = Arc::clone(metrics) as Arc<dyn PluginRunObserver>;
        credentials = credentials.with_provider(Arc::new(plugins.with_run_observer(&runs)));
    }
    Ok(credentials)
}

#[cfg(test)]
mod tests {
    use larder::backend::Image;
    use larder_testkit::fake_backend::FakeBackend;

    use super::*;
    use crate::node::testing;

    #[test]
    fn images_that_were_hidden_stay_so_where_kubelet_does_not_use_larder() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = None;
        let state =
            testing::parts(&FakeBackend::new(), dir.path(), None, |own| config = Some(own.clone())).state;
        let mut config = config.unwrap();
        let opened = prefetch_credentials(&config, false, &state).unwrap();
        assert!(matches!(opened, PrefetchCredentials::Withhold(None)), "{opened:?}");
        let document = r#"{"version":1,"hidden":["sha256:1"],"pulls":{},"isLost":false,"visible":[]}"#;
        fs_err::write(state.hidden(), document).unwrap();
        let opened = prefetch_credentials(&config, false, &state).unwrap();
        assert!(matches!(opened, PrefetchCredentials::Withhold(Some(_))), "{opened:?}");
        let image = Image { id: "sha256:1".into(), ..Image::default() };
        assert!(opened.hidden().unwrap().hides(&image));
        config.kubelet_images = KubeletImageService::None;
        for is_store in [false, true] {
            let opened = prefetch_credentials(&config, is_store, &state).unwrap();
            assert!(matches!(opened, PrefetchCredentials::Use), "{opened:?}");
        }
        assert!(state.hidden().exists(), "for a kubelet that is installed later");
    }
}
