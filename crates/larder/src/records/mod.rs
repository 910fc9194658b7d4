//! Who may use an image that is already here.
//!
//! With records, a present image is handed out only to pods that could have pulled it (kubelet's gate
//! `KubeletEnsureSecretPulledImages`). A [`ImageManager`](crate::pull::ImageManager) without them behaves as with that gate off.
//!
//! ```text
//! check:  memory -> (before a no) folder -> known -> verification -> yes, or pull
//! change: writer -> merge -> folder (durable) -> memory
//! ```
//!
//! [`PullRecordStore`] keeps them in a folder, in kubelet's own format: a kubelet can take the folder over, and the reverse.
//! Read [`PullRecordStore::check`] first.
//!
//! Promises: a pull starts when its intent is durable, and ends when its record is; whatever dies in between, nobody is
//! granted an image that he did not show credentials for.

mod document;
mod error;
mod hash_index;
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

/// Remembers what was pulled and with which credential.
#[async_trait]
pub trait PullRecords: Send + Sync {
    /// Whether the pod must show to the registry that it may have this image, although it is present.
    /// `image` is the text as requested; `credentials` are looked up only if the answer depends on them.
    async fn must_attempt_pull(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        credentials: &mut LazyCredentialLookup<'_>,
    ) -> Result<bool, RecordsError>;

    /// A pull of `image` is about to start; it must not before this returns. Closed by one of the next calls, on
    /// every path; not if this fails, or is dropped.
    async fn record_pull_intent(&self, image: &ImageName) -> Result<(), RecordsError>;

    /// The pull of `image` succeeded. Counts once this was polled, also if it is dropped then.
    async fn record_image_pulled(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        credentials: &RecordedCredentials,
    );

    /// The pull of `image` did not start.
    fn record_image_pull_failed(&self, image: &ImageName);

    /// The pull of `image` failed, and nothing works at it any more. Says whether it is known now what is there; if not, or
    /// if this is dropped, one of the other calls has to close it.
    async fn record_image_pull_ended(&self, image: &ImageName) -> bool {
        self.record_image_pull_failed(image);
        true
    }

    /// Who waited for the pull of `image` has left, or how it ended is not known: the image may come after all.
    fn record_image_pull_interrupted(&self, image: &ImageName) {
        self.record_image_pull_failed(image);
    }
}

/// What is remembered of the credential that a pull succeeded with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordedCredentials {
    /// A credential, and nobody knows whose: who wants the image has to show one of their own.
    NotRecorded,
    /// No credential, or one that belongs to the node: every pod on the node may use the image.
    NodePodsAccessible,
    /// A pull secret, with the hash of what it held.
    Secret(SecretCoordinates, String),
    /// A service account.
    ServiceAccount(ServiceAccountCoordinates),
}

impl RecordedCredentials {
    /// What to remember of the credential that was used; `None` is an anonymous pull.
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
