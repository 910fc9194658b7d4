//! Pulls of a node: the image manager, pull records, and images that kubelet does not see.

mod access;
mod cri_pull;
pub(crate) mod pod_pulls;

use std::sync::Arc;
use std::time::Duration;

use larder::backend::{Backend, Image};
use larder::config::Verification;
use larder::hidden::HiddenImages;
use larder::pull::{
    EnsureError, EnsureRequest, EnsuredImage, ImageManager, ImagePresence, PullConfig, RoomMaker,
};
use larder::records::{PullRecordStore, PullRecords};
use larder::retry::retry_until;
use tokio::sync::OnceCell;

use super::Observability;
use super::collection::Collection;
use crate::config::Config;

pub(crate) use access::PullAccess;
pub(crate) use cri_pull::CriPull;
use pod_pulls::PodPulls;

/// First and longest back-off after a failed recovery of an earlier process's pulls.
const RECOVERY_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Settings of pulls.
#[derive(Debug, Clone)]
pub(crate) struct PullsSettings {
    pub(crate) pull: PullConfig,
    /// How long an image that was just ensured is leased.
    pub(crate) ensured_lease: Duration,
}

impl PullsSettings {
    pub(crate) fn of(config: &Config) -> PullsSettings {
        PullsSettings { pull: config.pull.clone(), ensured_lease: config.ensured_lease }
    }
}

/// Pulls of a node.
pub(crate) struct Pulls {
    manager: Arc<ImageManager>,
    /// Pull times of pods whose images are being requested.
    pods: Arc<PodPulls>,
    records: Option<Arc<PullRecordStore>>,
    /// The images that kubelet does not see, where there may be any.
    hidden: Option<Arc<HiddenImages>>,
    /// Whether the pulls of an earlier process are resolved.
    recovered: OnceCell<()>,
    observability: Arc<Observability>,
    collection: Arc<Collection>,
}

impl Pulls {
    /// Pulls into a backend, behind the gate of `collection`.
    pub(crate) fn build(
        settings: &PullsSettings,
        access: PullAccess,
        backend: &Arc<dyn Backend>,
        collection: Arc<Collection>,
        observability: Arc<Observability>,
    ) -> Pulls {
        let PullAccess { records, credentials, prefetch_credentials } = access;
        let (metrics, sink) = (observability.metrics(), observability.sink());
        let pod_pulls = Arc::new(PodPulls::new(metrics.clone(), Arc::clone(sink)));
        let hidden = prefetch_credentials.hidden().cloned();
        let mut manager = ImageManager::new(Arc::clone(backend))
            .with_config(&settings.pull)
            .with_credentials(credentials)
            .with_events(Arc::clone(sink))
            .with_metrics(metrics.clone())
            .with_times(pod_pulls.recorder())
            .with_prefetch_credentials(prefetch_credentials)
            .with_lease(Arc::clone(collection.gate()), settings.ensured_lease)
            .with_room(Arc::clone(&collection) as Arc<dyn RoomMaker>);
        if let Some(records) = &records {
            records.resolve_interrupted_with(Arc::clone(backend));
            records.await_recovery();
            manager = manager.with_records(Arc::clone(records) as Arc<dyn PullRecords>);
        }
        let (manager, recovered) = (Arc::new(manager), OnceCell::new());
        Pulls { manager, pods: pod_pulls, records, hidden, recovered, observability, collection }
    }

    /// Takes over settings that changed.
    pub(super) fn apply(&self, old: &Config, new: &Config) {
        // The manager gets another puller, with a queue of its own; pulls in progress end with the old one.
        if new.pull != old.pull {
            self.manager.set_config(&new.pull);
        }
        // A degraded start denies while the policy cannot be read, also where the gate turns out to be off.
        let without_gate = || old.degraded.is_some().then(Verification::never_verify);
        let verification = new.verification.clone().or_else(without_gate);
        if let (Some(records), Some(verification)) = (&self.records, verification) {
            records.set_verification(verification);
        }
    }

    /// The image manager. Pulls through it alone are not recorded for later GC processes.
    pub(crate) fn manager(&self) -> &Arc<ImageManager> {
        &self.manager
    }

    /// Ensures an image for a client, and records it for later GC processes.
    pub(crate) async fn ensure(&self, request: &EnsureRequest) -> Result<EnsuredImage, EnsureError> {
        let ensured = self.manager.ensure(request).await?;
        // On disk before the answer: a process that collects after this one was killed must find it.
        let was_pulled = matches!(ensured.outcome, ImagePresence::Pulled { .. });
        self.collection.note_ensured(&ensured.image_ref, was_pulled).await;
        Ok(ensured)
    }

    /// Measures the pulls of pods.
    pub(crate) fn pod_pulls(&self) -> &Arc<PodPulls> {
        &self.pods
    }

    /// Pull records; `None` where kubelet's feature gate is off.
    pub(crate) fn records(&self) -> Option<&PullRecordStore> {
        self.records.as_deref()
    }

    /// The images that kubelet does not see; `None` where there can be none.
    pub(crate) fn hidden(&self) -> Option<&HiddenImages> {
        self.hidden.as_deref()
    }

    /// Whether kubelet has to pull the image with credentials of its own first.
    pub(crate) fn hides(&self, image: &Image) -> bool {
        self.hidden().is_some_and(|hidden| hidden.hides(image))
    }

    /// Resolves pulls that an earlier process did not finish; `false` if the backend did not answer. Until this has
    /// succeeded, pods have no access to images that those pulls may have stored. Does nothing after a success.
    pub(crate) async fn recover(&self) -> bool {
        let Some(records) = &self.records else { return true };
        let recover = async || if records.recover(self.manager.backend()).await { Ok(()) } else { Err(()) };
        self.recovered.get_or_try_init(recover).await.is_ok()
    }

    /// Recovers, which is retried until the backend answers: a runtime may start later than larder.
    pub(super) async fn run(&self) {
        retry_until(RECOVERY_BACKOFF, || self.recover()).await;
    }
}
