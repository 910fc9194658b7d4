//! From settings to a node: opens what must be open, and starts nothing.

use std::net::TcpListener;
use std::sync::Arc;

use larder::credentials::plugin::Runs;
use larder::credentials::{self, NodeFiles, SearchPath};
use larder::gc::{GcPolicy, KeepRule};
use larder::records::Verification;
use larder_cri::{CriBackend, Endpoint, NoRuntimeFound, WELL_KNOWN_SOCKETS, discover};
use tracing::Level;

use super::metrics::Metrics;
use super::node::{Backed, Node, Parts};
use super::reload::Settings;
use crate::access;
use crate::collect::{KeepFile, Place};
use crate::config::{self, BackendAt, Config, Sources};
use crate::connect::Chosen;
use crate::docker;
use crate::failure::Failure;
use crate::store;

/// The node that the settings describe.
pub(super) fn node(sources: Sources, config: Config, loud: Level) -> Result<Node, Failure> {
    let chosen = backend(&config)?;
    let place = Place::configured(config.state.as_deref(), &chosen)?.locked()?;
    let policy = policy(&config, KeepFile::at(&place).read()?);
    let metrics = Arc::new(Metrics::default());
    let credentials = credentials(&config, &metrics)?;
    let records = match verification(&config) {
        Some(verification) => Some(access::records(&place, verification)?),
        None => None,
    };
    Ok(Node::build(Parts {
        chosen: Backed::by(chosen, config.prune_build_cache),
        place,
        policy,
        credentials,
        metrics,
        records,
        pull: config.pull.clone(),
        spared: config.ensured_lease,
        periods: config.periods,
        events: config.event_ring_size,
        name: host_name(),
        settings: Settings::new(sources, config, loud),
    }))
}

/// The policy of the settings, with the rules of `larder keep` on top.
pub(super) fn policy(config: &Config, kept: Vec<KeepRule>) -> GcPolicy {
    let mut policy = config.gc.clone();
    policy.keep.extend(kept);
    policy
}

/// Which present images need credentials; `None` where kubelet's gate is off, and no records are kept.
pub(super) fn verification(config: &Config) -> Option<Verification> {
    let images = &config.images;
    let allowlist = images.preloaded_images_verification_allowlist.iter().map(String::as_str);
    let policy = &images.image_pull_credentials_verification_policy;
    // Both were checked when they were read.
    let verification = Verification::parse(policy, allowlist).unwrap_or_default();
    config.gates.ensure_secret_pulled_images.then_some(verification)
}

/// The docker config of the user that the daemon runs as, read again every five minutes, and programs that give more.
fn credentials(config: &Config, metrics: &Arc<Metrics>) -> Result<credentials::Sources, Failure> {
    let files = NodeFiles::search(SearchPath::user());
    let mut credentials = credentials::Sources::new(files, Vec::new()).with_tokens(config.credential_tokens);
    if let Some(helpers) = access::helpers(config.credential_tokens) {
        credentials = credentials.with_helpers(helpers);
    }
    let plugins = &config.credential_plugins;
    if let (Some(file), Some(programs)) = (&plugins.config, &plugins.bin_dir) {
        let plugins = access::plugins(file, programs)?;
        metrics.configured(plugins.config_hash());
        let runs = Arc::clone(metrics) as Arc<dyn Runs>;
        credentials = credentials.with_provider(Arc::new(plugins.told(&runs)));
    }
    Ok(credentials)
}

fn backend(config: &Config) -> Result<Chosen, Failure> {
    if let BackendAt::Docker(text) = &config.backend {
        let request = config.images.runtime_request_timeout.to_std();
        return docker::open(text, "backend", request, Some(config.runtime.connect_timeout));
    }
    let Some((endpoint, cri)) = config.cri() else {
        let settings = config.store.config.clone();
        let store =
            store::open_configured(&config.root, settings, config.registry.clone(), config.store_pull())?;
        return Ok(Chosen::Store(store));
    };
    let endpoint = match endpoint {
        Some(endpoint) => endpoint,
        None => found_or_expected(discover()),
    };
    Ok(Chosen::Runtime(Arc::new(CriBackend::new(endpoint, cri))))
}

/// The runtime that was found. Where none is, it may start later than larder: then it is waited for where it is most
/// likely to come up.
fn found_or_expected(found: Result<Endpoint, NoRuntimeFound>) -> Endpoint {
    found.unwrap_or_else(|error| {
        let expected = Endpoint::at(WELL_KNOWN_SOCKETS[0]);
        tracing::warn!("{error}; waiting for {expected}; name another with backend: unix:///path/to.sock");
        expected
    })
}

/// Where metrics are served over TCP. The usual address is left alone when somebody else has it; one that was asked for
/// must be had.
pub(super) fn metrics(config: &Config) -> Result<Option<TcpListener>, Failure> {
    let Some(address) = config.metrics.address else { return Ok(None) };
    let bound = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    match bound {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if matches!(config.origin("metrics.address"), config::Origin::Default) => {
            tracing::warn!("metrics are served on the socket only: {address}: {error}");
            Ok(None)
        }
        Err(error) => Err(Failure::failed(format!("metrics cannot be served at {address}: {error}"))
            .hint("name another address with metrics.address, or \"\" for none")),
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_that_is_not_there_yet_is_waited_for() {
        let found = Endpoint::at("/run/crio/crio.sock");
        assert_eq!(found_or_expected(Ok(found.clone())), found);
        let none = NoRuntimeFound { tried: Vec::new() };
        assert_eq!(found_or_expected(Err(none)), Endpoint::at("/run/containerd/containerd.sock"));
    }
}
