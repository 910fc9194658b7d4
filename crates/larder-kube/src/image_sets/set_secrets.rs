//! Whether the pull secrets of image sets exist. The elected agent looks: a node reads them only when it pulls.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;

use super::SECRETS_SHARED_FOR;
use super::resource::ImageSet;
use crate::cluster::Cluster;
use crate::error::ClusterError;
use crate::pull_secrets::PullSecrets;

/// The pull secrets of all sets.
pub(super) struct SetSecrets {
    secrets: PullSecrets,
    namespace: String,
    /// Names of those that cannot be read.
    missing: BTreeSet<String>,
}

impl SetSecrets {
    /// None is missing yet.
    pub(super) fn new(cluster: &Cluster, namespace: &str) -> SetSecrets {
        let secrets = PullSecrets::of(cluster, SECRETS_SHARED_FOR, Duration::ZERO);
        SetSecrets { secrets, namespace: namespace.to_owned(), missing: BTreeSet::new() }
    }

    /// Reads the secrets of these sets, each at most once in a minute, or in ten seconds while it is missing.
    pub(super) async fn read<'a>(&mut self, sets: impl Iterator<Item = &'a ImageSet>) {
        let names: BTreeSet<_> = sets.flat_map(|set| set.spec.pull_secrets.iter().cloned()).collect();
        let answers = join_all(names.iter().map(|name| self.secrets.get(&self.namespace, name))).await;
        let was_missing = std::mem::take(&mut self.missing);
        let is_missing = |(name, answer): &(String, Result<_, ClusterError>)| match answer {
            Ok(_) => false,
            Err(ClusterError::NotFound { .. } | ClusterError::Forbidden { .. }) => true,
            // The API server does not answer.
            Err(_) => was_missing.contains(name),
        };
        self.missing = names.into_iter().zip(answers).filter(is_missing).map(|(name, _)| name).collect();
    }

    /// Lists the pull secrets of a set that cannot be read.
    pub(super) fn missing_of(&self, set: &ImageSet) -> Vec<String> {
        let names = set.spec.pull_secrets.iter();
        names.filter(|name| self.missing.contains(*name)).cloned().collect()
    }
}
