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
        let usable = lookup.into_inner().await.map_err(|error| EnsureError::free(&error))?;
        let withholds = matches!(self.prefetch_credentials, PrefetchCredentials::Withhold(_));
        if !withholds || !request.ahead_of_kubelet || usable.is_empty() {
            return Ok((usable, false));
        }
        Ok((Vec::new(), true))
    }

    /// The text of a pull that failed while credentials were withheld. The note is short: the status of an `ImageSet`
    /// has only the end of a long text.
    pub(super) fn with_withheld_note(error: &str) -> String {
        format!(
            "{error}; pulled without its credentials: kubelet does not ask larder for images (cri.kubelet)"
        )
    }

    /// Shows an image that was hidden from kubelet.
    pub(super) async fn show(&self, id: &ImageId) {
        if let Some(hidden) = self.prefetch_credentials.hidden() {
            hidden.show(id).await;
        }
    }
}
