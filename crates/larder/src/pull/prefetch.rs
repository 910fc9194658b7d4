//! Requests ahead of kubelet: their credentials, and the images that they hide.

use super::ensure::{EnsureError, EnsureRequest};
use super::manager::ImageManager;
use crate::credentials::{Credential, LazyCredentialLookup};
use crate::hidden::PrefetchCredentials;
use crate::reference::ImageId;

impl ImageManager {
    /// The credentials of a request, but none that may not be used ahead of kubelet; and whether there were such.
    pub(super) async fn permitted_credentials(
        &self,
        request: &EnsureRequest,
        lookup: LazyCredentialLookup<'_>,
    ) -> Result<(Vec<Credential>, bool), EnsureError> {
        let found = lookup.into_inner().await.map_err(|error| EnsureError::free(&error))?;
        let is_withheld = matches!(self.prefetch_credentials, PrefetchCredentials::Withhold(_));
        if !is_withheld || !request.ahead_of_kubelet || found.is_empty() {
            return Ok((found, false));
        }
        Ok((Vec::new(), true))
    }

    /// The error of a request whose credentials were withheld.
    pub(super) fn without_credentials(error: EnsureError) -> EnsureError {
        let message = format!(
            "{}; pulled without its credentials, because kubelet does not ask larder for images: set cri.kubelet to \
             larder if its imageServiceEndpoint is larder's socket, or to none on a host without kubelet",
            error.message
        );
        EnsureError { message, credentials_withheld: true, ..error }
    }

    /// Shows an image that was hidden from kubelet.
    pub(super) async fn show(&self, id: &ImageId) {
        if let Some(hidden) = self.prefetch_credentials.hidden() {
            hidden.show(id).await;
        }
    }
}
