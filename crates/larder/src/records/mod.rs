//! Pull records: which pods may use a present image.
//!
//! With records, only pods that could have pulled a present image may use it (kubelet's gate
//! `KubeletEnsureSecretPulledImages`). A [`ImageManager`](crate::pull::ImageManager) without them behaves as with that
//! gate off.
//!
//! ```text
//! check:  memory -> (before a no) directory -> known -> verification -> yes, or pull
//! change: writer -> merge -> directory (durable) -> memory
//! ```
//!
//! [`PullRecordStore`] keeps them in a directory in kubelet's own format: kubelet can take over the directory, and the
//! reverse. Read [`PullRecordStore::check`] first.
//!
//! Promises: a pull starts when its intent is durable, and ends when its record is; after a crash in between, no pod
//! gets access to an image without credentials for it.

mod document;
mod error;
mod indexed_record;
mod interrupted_pulls;
mod lock;
mod memory;
mod merge;
mod names;
mod pull_locks;
mod pull_record_store;
mod record_dir;
mod rfc3339;
mod running_pulls;
mod writer;

use async_trait::async_trait;

pub use crate::config::{Verification, VerificationError};
pub use document::{
    Decoded, DocumentError, ImagePullCredentials, ImagePullIntent, ImagePulledRecord, RecordedSecret,
    file_name,
};
pub use error::RecordsError;
pub use indexed_record::LEARNED_SECRETS;
pub use merge::merge;
pub use pull_record_store::{MustPullCheckResult, PodCredentialLookup, PullRecordStore, RecordDirError};
pub use record_dir::{RecordDirStep, StepHook};
pub use rfc3339::Rfc3339Time;

use crate::credentials::{
    Credential, CredentialSource, LazyCredentialLookup, SecretCoordinates, ServiceAccountCoordinates,
};
use crate::reference::{ImageId, ImageName};

/// Records which images were pulled with which credentials.
#[async_trait]
pub trait PullRecords: Send + Sync {
    /// Whether the pod must authenticate at the registry although the image is present. `image` is the text as
    /// requested; `credentials` are looked up only if the answer depends on them.
    async fn must_attempt_pull(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        credentials: &mut LazyCredentialLookup<'_>,
    ) -> Result<bool, RecordsError>;

    /// Records that a pull of `image` is about to start; the pull must not start before this returns. Every path must
    /// close it by one of the next calls, except if this fails or is dropped.
    async fn record_pull_intent(&self, image: &ImageName) -> Result<(), RecordsError>;

    /// Records that the pull of `image` succeeded. Takes effect with the first poll, even if dropped later.
    async fn record_image_pulled(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        credentials: &RecordedCredentials,
    );

    /// Records that the pull of `image` did not start.
    fn record_image_pull_failed(&self, image: &ImageName);

    /// Records that the pull of `image` failed and has ended at the backend. Returns whether the outcome is known; if
    /// not, or if this is dropped, another call must close the pull.
    async fn record_image_pull_ended(&self, image: &ImageName) -> bool {
        self.record_image_pull_failed(image);
        true
    }

    /// Records that the caller of the pull of `image` was canceled, or that its outcome is unknown: the image may
    /// still become present.
    fn record_image_pull_interrupted(&self, image: &ImageName) {
        self.record_image_pull_failed(image);
    }
}

/// The recorded part of the credential that a pull succeeded with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordedCredentials {
    /// A credential of unknown owner: pods must authenticate with their own.
    NotRecorded,
    /// No credential, or one that belongs to the node: every pod on the node may use the image.
    NodePodsAccessible,
    /// A pull secret, with the hash of its content.
    Secret(SecretCoordinates, String),
    /// A service account.
    ServiceAccount(ServiceAccountCoordinates),
}

impl RecordedCredentials {
    /// The record for the credential that was used; `None` is an anonymous pull.
    pub fn of(used: Option<&Credential>) -> Self {
        match used.and_then(|credential| credential.source.as_ref().map(|source| (source, credential))) {
            None => RecordedCredentials::NodePodsAccessible,
            Some((CredentialSource::Secret(secret), credential)) => {
                RecordedCredentials::Secret(secret.clone(), credential.hash.clone())
            }
            Some((CredentialSource::ServiceAccount(account), _)) => {
                RecordedCredentials::ServiceAccount(account.clone())
            }
        }
    }
}
