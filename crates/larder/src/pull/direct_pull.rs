//! Pulls for callers with their own pull policy, back-off and events, such as kubelet over CRI.

use tokio::time::Instant;

use super::intent::PullIntentGuard;
use super::manager::ImageManager;
use super::puller::{CredentialOwner, PullJob};
use crate::backend::{BackendError, CallErrorKind, ImageSpec, PullOptions, PullUntil};
use crate::credentials::Credential;
use crate::hint::Hint;
use crate::pod::SandboxConfig;
use crate::records::{RecordedCredentials, RecordsError};
use crate::reference::ImageId;
use crate::scheduler::{Callers, WorkDemand};

/// The result of [`ImageManager::pull_directly`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectPull {
    /// The image's ID.
    pub image_ref: ImageId,
    /// Size in bytes as the backend counts it; 0 if it does not report one.
    pub size_bytes: u64,
    /// Warnings about the image for people, a sentence each.
    pub warnings: Vec<String>,
}

impl ImageManager {
    /// Pulls an image, whether it is present or not. The image may be named without a tag.
    ///
    /// It shares in-flight pulls, queue, rate limit, leases and progress with [`ensure`](ImageManager::ensure). It uses
    /// only the given credential, whatever its source; its success also serves other callers with the same credential.
    /// There is no back-off and no event. Dropping the future abandons the pull, and cancels it unless other callers
    /// wait for it. The pull record says that the image was pulled by larder, but grants no pod access unless the pull
    /// was anonymous, because the owner of the credential is unknown.
    ///
    /// Fails with the backend's error, including kind and hint.
    pub async fn pull_directly(
        &self,
        spec: ImageSpec,
        credential: Option<Credential>,
        sandbox: Option<SandboxConfig>,
    ) -> Result<DirectPull, BackendError> {
        let image = spec.image.with_default_tag().map_err(|error| {
            let hint = error.hint().map(Hint::from);
            BackendError::call(CallErrorKind::Other, error.to_string()).with_cause(error).with_hint(hint)
        })?;
        let asked = spec.image.clone();
        let invalid = PullUntil::of_pod(&spec.annotations).err();
        let until = spec.options.until.or_of_pod(&spec.annotations);
        let spec = ImageSpec { image, options: PullOptions { until, ..spec.options }, ..spec };
        let intent = PullIntentGuard::begin(self.records.as_deref(), &asked).await.map_err(no_intent)?;
        let credentials = credential.into_iter().collect();
        let namespace = sandbox.as_ref().map_or("", |sandbox| &sandbox.namespace);
        let demand = WorkDemand::new(true, Callers::new(namespace));
        let job = PullJob {
            spec,
            credentials,
            sandbox,
            credential_owner: CredentialOwner::Caller,
            demand,
            hide_in: None,
        };
        let start = Instant::now();
        let shared = self.pull_shared(&job).await;
        let pulled = match &shared.result.pulled {
            Ok(pulled) => pulled,
            Err(error) => {
                intent.failed(error).await;
                return Err(error.as_of_backend());
            }
        };
        let recorded = match pulled.credential {
            None => RecordedCredentials::NodePodsAccessible,
            Some(_) => RecordedCredentials::NotRecorded,
        };
        self.show(&pulled.image_ref).await;
        intent.pulled(&pulled.image_ref, &recorded).await;
        let size_bytes = shared.result.size_bytes;
        if let Some(metrics) = &self.metrics {
            metrics.image_pulled(size_bytes, start.elapsed());
        }
        let mut warnings = shared.result.warnings.clone();
        if let Some(invalid) = invalid {
            let pod = job.sandbox.as_ref().map(|pod| format!("pod {}/{}: ", pod.namespace, pod.name));
            warnings.push(format!("{}{invalid}", pod.unwrap_or_default()));
        }
        Ok(DirectPull { image_ref: pulled.image_ref.clone(), size_bytes, warnings })
    }
}

/// The error of a pull whose intent could not be recorded.
fn no_intent(error: RecordsError) -> BackendError {
    if !error.is_no_space() {
        return BackendError::call(CallErrorKind::Other, error.to_string()).with_cause(error);
    }
    let hint = Hint::from("free space in larder's state directory with ").command(["gc"]);
    let kind = CallErrorKind::InsufficientSpace { reclaim_bytes: None };
    BackendError::call(kind, format!("{error}: no free space")).with_cause(error).with_hint(hint)
}
