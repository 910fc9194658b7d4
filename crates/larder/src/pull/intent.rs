//! Reports the intent and the outcome of a pull to the pull records.

use super::ensure::{BackendFailure, EnsureError, EnsureReason, EnsureRequest};
use super::puller::PullerError;
use crate::backend::CallErrorKind;
use crate::go_format;
use crate::records::{PullRecords, RecordedCredentials, RecordsError};
use crate::reference::{ImageId, ImageName};

/// A recorded intent to pull. Unless it is closed, the pull counts as interrupted, as when the caller is canceled.
pub(super) struct PullIntentGuard<'a> {
    records: Option<&'a dyn PullRecords>,
    image: &'a ImageName,
}

impl<'a> PullIntentGuard<'a> {
    /// Durable when it returns.
    pub(super) async fn record(
        records: Option<&'a dyn PullRecords>,
        request: &'a EnsureRequest,
    ) -> Result<Self, EnsureError> {
        let image = &request.image;
        PullIntentGuard::begin(records, image).await.map_err(|error| {
            let message = format!(
                "Failed to record image pull intent for container image {}: {error}",
                go_format::quote(image.as_str())
            );
            let failure =
                error.hint().map(|hint| BackendFailure { kind: CallErrorKind::Other, hint: Some(hint) });
            EnsureError { failure, ..EnsureError::new(EnsureReason::Other(error.to_string()), message) }
        })
    }

    /// Like `record`, for a caller that is not a pod.
    pub(super) async fn begin(
        records: Option<&'a dyn PullRecords>,
        image: &'a ImageName,
    ) -> Result<Self, RecordsError> {
        if let Some(records) = records {
            records.record_pull_intent(image).await?;
        }
        Ok(PullIntentGuard { records, image })
    }

    /// Closes the intent: the pull did not start.
    pub(super) fn unused(mut self) {
        if let Some(records) = self.records.take() {
            records.record_image_pull_failed(self.image);
        }
    }

    /// Closes the intent: the pull succeeded with these credentials.
    pub(super) async fn pulled(mut self, image_ref: &ImageId, credentials: &RecordedCredentials) {
        if let Some(records) = self.records.take() {
            records.record_image_pulled(self.image, image_ref, credentials).await;
        }
    }

    /// Closes the intent: the pull failed. If the backend may continue the pull, the image may still become present.
    pub(super) async fn failed(mut self, error: &PullerError) {
        if let Some(records) = self.records
            && error.is_final()
            && records.record_image_pull_ended(self.image).await
        {
            self.records = None;
        }
    }
}

impl Drop for PullIntentGuard<'_> {
    fn drop(&mut self) {
        if let Some(records) = self.records {
            records.record_image_pull_interrupted(self.image);
        }
    }
}
