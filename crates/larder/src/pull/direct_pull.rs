//! The way of callers that have a pull policy, a back-off and events of their own, such as kubelet over CRI.

use tokio::time::Instant;

use super::intent::PullIntentGuard;
use super::manager::ImageManager;
use super::priority_semaphore::QueuePriority;
use super::puller::{CredentialOwner, PullJob};
use crate::backend::{BackendError, CallErrorKind, ImageSpec};
use crate::credentials::Credential;
use crate::hint::Hint;
use crate::pod::SandboxConfig;
use crate::records::{RecordedCredentials, RecordsError};
use crate::reference::ImageId;

impl ImageManager {
    /// Pulls an image and returns its id, whether it is present or not. The image may be named without a tag.
    ///
    /// It is one more caller of the same flights, turns, rate and leases as those of [`ensure`](ImageManager::ensure), and
    /// shows on the same board. It shows nothing to the registry but the credential it brings, whose source is not
    /// looked at; a success with it serves those who hold it, too. There is no back-off and no event. Dropping the
    /// future abandons the pull, which ends it unless others wait for it. Records say that the image was pulled here, and
    /// trust nobody because of it, unless the pull was anonymous: nobody says whose the credential is.
    ///
    /// Fails as the backend failed, with kind and hint.
    pub async fn pull_directly(
        &self,
        spec: ImageSpec,
        credential: Option<Credential>,
        sandbox: Option<SandboxConfig>,
    ) -> Result<ImageId, BackendError> {
        let image = spec.image.with_default_tag().map_err(|error| BackendError::Call {
            message: error.to_string(),
            kind: CallErrorKind::Other,
            hint: error.hint().map(Hint::from),
        })?;
        let asked = spec.image.clone();
        let spec = ImageSpec { image, ..spec };
        let intent = PullIntentGuard::begin(self.records.as_deref(), &asked)
            .await
            .map_err(|error| no_intent(&error))?;
        let credentials = credential.into_iter().collect();
        let job = PullJob {
            spec,
            credentials,
            sandbox,
            credential_owner: CredentialOwner::Caller,
            urgency: QueuePriority::new(true),
        };
        let start = Instant::now();
        let landed = self.pull_shared(&job).await;
        let pulled = match &landed.result.pulled {
            Ok(pulled) => pulled,
            Err(error) => {
                intent.failed(error).await;
                return Err(error.as_of_backend());
            }
        };
        let whose = match pulled.credential {
            None => RecordedCredentials::NodePodsAccessible,
            Some(_) => RecordedCredentials::NotRecorded,
        };
        intent.pulled(&pulled.image_ref, &whose).await;
        if let Some(metrics) = &self.metrics {
            metrics.image_pulled(landed.result.size_bytes, start.elapsed());
        }
        Ok(pulled.image_ref.clone())
    }
}

/// A pull that must not start, since it could not be noted before.
fn no_intent(error: &RecordsError) -> BackendError {
    let full = error.is_no_space();
    let (kind, hint) = if full {
        let hint = Hint::from("free space in larder's state directory with ").command(["gc"]);
        (CallErrorKind::InsufficientSpace, Some(hint))
    } else {
        (CallErrorKind::Other, None)
    };
    let message = if full { format!("{error}: no free space") } else { error.to_string() };
    BackendError::Call { message, kind, hint }
}
