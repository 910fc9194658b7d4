//! Pods, secrets and a directory.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use larder::credentials::{PodCredentials, SecretCoordinates};
use larder::records::{
    ImagePullCredentials, MustPullCheckResult, PodCredentialLookup, PullRecordStore, RecordDirStep,
    RecordedSecret, RecordsError, StepHook, Verification,
};
use larder::reference::{ImageId, ImageName};

pub(crate) const IMAGE: &str = "registry.example/team/app:v1";
pub(crate) const ID: &str = "sha256:aaaa";

pub(crate) fn image() -> ImageName {
    IMAGE.into()
}

pub(crate) fn id() -> ImageId {
    ID.into()
}

/// A pod with one pull secret.
pub(crate) struct PodWithSecret(pub(crate) &'static str);

#[async_trait::async_trait]
impl PodCredentialLookup for PodWithSecret {
    async fn pod_credentials(&mut self) -> Result<PodCredentials, RecordsError> {
        let secrets =
            if self.0.is_empty() { Vec::new() } else { vec![(at(self.0), format!("hash {}", self.0))] };
        Ok(PodCredentials { secrets, service_account: None })
    }
}

pub(crate) fn at(name: &str) -> SecretCoordinates {
    SecretCoordinates { uid: format!("uid {name}"), namespace: "team".into(), name: name.into() }
}

pub(crate) fn secret(name: &str) -> ImagePullCredentials {
    let secret = RecordedSecret { at: at(name), hash: format!("hash {name}") };
    ImagePullCredentials { secrets: vec![secret], ..ImagePullCredentials::default() }
}

pub(crate) fn open(dir: &Path) -> PullRecordStore {
    PullRecordStore::open(dir, Verification::of_unconfigured_kubelet()).unwrap()
}

/// Whether a pod with this secret may use the image.
pub(crate) async fn may_use(records: &PullRecordStore, holder: &'static str) -> bool {
    let (result, error) = records.check(&image(), &id(), &mut PodWithSecret(holder)).await;
    assert!(error.is_none(), "{error:?}");
    !result.is_none_or(MustPullCheckResult::must_pull)
}

/// Allows this many steps on the disk, and then fails.
pub(crate) fn dying_after(steps: usize) -> (StepHook, Arc<Mutex<Vec<RecordDirStep>>>) {
    let (left, done) = (AtomicUsize::new(steps), Arc::new(Mutex::new(Vec::new())));
    let seen = Arc::clone(&done);
    let witness = move |step, _: &Path| {
        let alive =
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
        if alive {
            seen.lock().unwrap().push(step);
            return Ok(());
        }
        Err(io::Error::other("the process is dead"))
    };
    (Arc::new(witness), done)
}
