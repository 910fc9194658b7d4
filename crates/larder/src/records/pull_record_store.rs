//! The pull records of one node, in memory and on disk. Read [`PullRecordStore::check`] first.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use async_trait::async_trait;
use parking_lot::RwLock;

use super::document::{ImagePullCredentials, ImagePulledRecord, RecordedSecret};
use super::indexed_record::{AccessCheck, IndexedRecord};
use super::interrupted_pulls::InterruptedPullResolver;
use super::memory::{MEMORY_BYTES, RecordCache};
use super::names::may_name_same_image;
use super::record_dir::{RecordDir, RecordDirKind, StepHook};
use super::rfc3339::Rfc3339Time;
use super::running_pulls::RunningPulls;
use super::writer::{PullRecordWriter, RecordChange, WriterContext};
use super::{PullRecords, RecordedCredentials, RecordsError};
use crate::backend::{Backend, BackendError, Image};
use crate::config::Verification;
use crate::credentials::{LazyCredentialLookup, PodCredentials};
use crate::gc::{PostImageGcHook, UnixMillis};
use crate::reference::{ImageId, ImageName};
use crate::threads::blocking;

/// Why the record directory cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open pull records in {}: {cause}", .dir.display())]
pub struct RecordDirError {
    dir: PathBuf,
    #[source]
    cause: io::Error,
}

impl RecordDirError {
    /// Next step, if there is one.
    pub fn hint(&self) -> &'static str {
        if self.cause.kind() == io::ErrorKind::TimedOut {
            return "resume (kill -CONT) or stop that process, then retry";
        }
        "run as the owner of the directory, or use another state directory"
    }
}

/// Pull records in a directory. Processes may share it; each sees the changes of the others. Dropping the store waits
/// until all changes are on disk.
pub struct PullRecordStore {
    dir: Arc<RecordDir>,
    memory: Arc<RecordCache>,
    in_flight: Arc<RunningPulls>,
    verification: RwLock<Arc<Verification>>,
    counts: MustPullCheckCounts,
    writer: Arc<PullRecordWriter>,
    resolver: OnceLock<InterruptedPullResolver>,
    /// Whether interrupted pulls of dead processes are still unresolved.
    unrecovered: AtomicBool,
}

/// Looks up a pod's credentials at most once.
#[async_trait]
pub trait PodCredentialLookup: Send {
    /// The credentials of the pod, or the error of the lookup.
    async fn pod_credentials(&mut self) -> Result<PodCredentials, RecordsError>;
}

#[async_trait]
impl PodCredentialLookup for LazyCredentialLookup<'_> {
    async fn pod_credentials(&mut self) -> Result<PodCredentials, RecordsError> {
        Ok(PodCredentials::from_lookup(self.get().await?))
    }
}

/// How a check ended: the `result` of `kubelet_imagemanager_image_mustpull_checks_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MustPullCheckResult {
    /// The policy requires no credentials.
    PolicyAllowed,
    /// The pod is known to be allowed.
    RecordFound,
    /// It must authenticate at the registry.
    MustAuthenticate,
    /// Records or credentials could not be read; it must authenticate as well.
    Error,
}

impl MustPullCheckResult {
    /// All of them.
    pub const ALL: [MustPullCheckResult; 4] = [
        MustPullCheckResult::PolicyAllowed,
        MustPullCheckResult::RecordFound,
        MustPullCheckResult::MustAuthenticate,
        MustPullCheckResult::Error,
    ];

    /// As the metric has it.
    pub fn name(self) -> &'static str {
        match self {
            MustPullCheckResult::PolicyAllowed => "credentialPolicyAllowed",
            MustPullCheckResult::RecordFound => "credentialRecordFound",
            MustPullCheckResult::MustAuthenticate => "mustAuthenticate",
            MustPullCheckResult::Error => "error",
        }
    }

    /// Whether the image has to be pulled.
    pub fn must_pull(self) -> bool {
        matches!(self, MustPullCheckResult::MustAuthenticate | MustPullCheckResult::Error)
    }
}

#[derive(Debug, Default)]
struct MustPullCheckCounts([AtomicU64; 4]);

/// The result of checking a record.
enum RecordCheck {
    Ends(MustPullCheckResult),
    /// Allowed; add this secret to the record.
    Learns(RecordedSecret),
    /// Depends on the pod's credentials.
    Asks,
}

impl PullRecordStore {
    /// Opens the records of a directory in kubelet's layout, and creates it if missing. Blocks on the disk. Kubelet's
    /// own is `/var/lib/kubelet/image_manager`.
    pub fn open(dir: &Path, verification: Verification) -> Result<PullRecordStore, RecordDirError> {
        PullRecordStore::watched(dir, verification, None)
    }

    /// Like `open`; the hook is called before each step on the disk, and can fail it.
    pub fn watched(
        dir: &Path,
        verification: Verification,
        witness: Option<StepHook>,
    ) -> Result<PullRecordStore, RecordDirError> {
        let open = || {
            let opened = Arc::new(RecordDir::open(dir, witness)?);
            let (memory, in_flight) =
                (Arc::new(RecordCache::new(MEMORY_BYTES)), Arc::new(RunningPulls::default()));
            let desk = WriterContext {
                dir: Arc::clone(&opened),
                memory: Arc::clone(&memory),
                in_flight: Arc::clone(&in_flight),
            };
            Ok((opened, memory, in_flight, PullRecordWriter::start(desk)?))
        };
        let (opened, memory, in_flight, writer) =
            open().map_err(|cause| RecordDirError { dir: dir.to_owned(), cause })?;
        let verification = RwLock::new(Arc::new(verification));
        Ok(PullRecordStore {
            dir: opened,
            memory,
            in_flight,
            verification,
            counts: MustPullCheckCounts::default(),
            writer: Arc::new(writer),
            resolver: OnceLock::new(),
            unrecovered: AtomicBool::new(false),
        })
    }

    /// Resolves interrupted pulls with this backend from now on. Only the first call takes effect. Without a backend, a
    /// failed pull counts as having pulled nothing, and interrupted pulls are resolved at the next start.
    pub fn resolve_interrupted_with(&self, backend: Arc<dyn Backend>) {
        let (in_flight, writer) = (Arc::clone(&self.in_flight), Arc::downgrade(&self.writer));
        let _ = self.resolver.set(InterruptedPullResolver { backend, in_flight, writer });
    }

    /// Sets the policy for later checks.
    pub fn set_verification(&self, verification: Verification) {
        *self.verification.write() = Arc::new(verification);
    }

    /// Must be called once before the first pull: rewrites documents of older versions, and turns intents of dead
    /// processes into records without access, if their image is present. Errors are logged, as in kubelet. Returns
    /// whether all intents are resolved; if not, retry, and see [`await_recovery`](PullRecordStore::await_recovery) for
    /// the time until then.
    pub async fn recover(&self, backend: &dyn Backend) -> bool {
        if let Err(error) = self.writer.submit_and_wait(RecordChange::Migrate).await {
            tracing::warn!("cannot migrate pull records of older versions: {error}");
        }
        let dir = Arc::clone(&self.dir);
        let recovered = match blocking(move || dir.count(RecordDirKind::Pulling)).await {
            Ok(0) => Ok(()),
            _ => match images_of(backend).await {
                Ok((images, preloaded)) => self.recover_from(images, preloaded).await,
                Err(error) => Err(RecordsError::other(error)),
            },
        };
        if let Err(error) = &recovered {
            tracing::warn!("cannot recover interrupted pulls: {error}");
        }
        self.unrecovered.store(recovered.is_err(), Ordering::Release);
        recovered.is_ok()
    }

    async fn recover_from(
        &self,
        images: Vec<Image>,
        preloaded: HashSet<ImageId>,
    ) -> Result<(), RecordsError> {
        let (images, preloaded) = (Arc::new(images), Arc::new(preloaded));
        let change = RecordChange::Recover { images, preloaded, now: SystemTime::now().into() };
        self.writer.submit_and_wait(change).await
    }

    /// Until [`recover`](PullRecordStore::recover) succeeds, treats every image without a record as possibly pulled by
    /// a dead process, if there is any intent. For serving before recovery.
    pub fn await_recovery(&self) {
        self.unrecovered.store(true, Ordering::Release);
    }

    /// Removes the records of images that are not among these, unless they changed at `before` or later.
    pub async fn prune(
        &self,
        kept: impl IntoIterator<Item = ImageId>,
        before: Rfc3339Time,
    ) -> Result<(), RecordsError> {
        self.writer
            .submit_and_wait(RecordChange::Prune { kept: Arc::new(kept.into_iter().collect()), before })
            .await
    }

    /// Waits until all earlier changes are on disk.
    pub async fn flush(&self) -> Result<(), RecordsError> {
        self.writer.submit_and_wait(RecordChange::Barrier).await
    }

    /// Records that an image was pulled, and the access that follows; `None` does not change the access.
    pub async fn pulled(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        access: Option<ImagePullCredentials>,
        now: Rfc3339Time,
    ) -> Result<(), RecordsError> {
        let (image, image_ref) = (image.clone(), image_ref.clone());
        self.writer.submit_and_wait(RecordChange::Pulled { image, image_ref, access, now }).await
    }

    /// How many pulls of this image, as requested, run in this process.
    pub fn in_flight(&self, image: &ImageName) -> usize {
        self.in_flight.count(image)
    }

    /// Number of checks with this result.
    pub fn checks(&self, result: MustPullCheckResult) -> u64 {
        self.counts.of(result).load(Ordering::Relaxed)
    }

    /// Memory use of the records in percent of their limit.
    pub fn memory_percent(&self) -> usize {
        self.memory.percent()
    }

    /// How many intents and records are on disk. Blocks on the disk.
    pub fn on_disk(&self) -> io::Result<(usize, usize)> {
        Ok((self.dir.count(RecordDirKind::Pulling)?, self.dir.count(RecordDirKind::Pulled)?))
    }

    /// The record on disk of an image ID; `None` if no pull of it is recorded.
    pub async fn record(&self, image_ref: &ImageId) -> Result<Option<ImagePulledRecord>, RecordsError> {
        let (dir, image_ref) = (Arc::clone(&self.dir), image_ref.clone());
        Ok(blocking(move || dir.record(&image_ref)).await?)
    }

    /// Whether every pod may use a present image that has no record: by policy, unless larder may have pulled it.
    pub async fn allows_unrecorded(&self, image: &ImageName, image_ref: &ImageId) -> bool {
        let asks = self.verification.read().requires_pull_records();
        let pulled_here = !asks || self.may_be_ours(image, image_ref).await;
        let check = self.look(image, None, None, pulled_here);
        matches!(check, RecordCheck::Ends(MustPullCheckResult::PolicyAllowed))
    }

    /// Whether a pod must authenticate at the registry to use a present image, and the error if that could not be
    /// determined. `None`: the image is absent.
    ///
    /// Access granted from memory is final. Before denying, the disk is read, because another process may have recorded
    /// more.
    pub async fn check(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        lookup: &mut dyn PodCredentialLookup,
    ) -> (Option<MustPullCheckResult>, Option<RecordsError>) {
        if image_ref.is_empty() {
            return (None, None);
        }
        let (mut result, mut error) = (MustPullCheckResult::MustAuthenticate, None);
        let known = self.memory.get(image_ref);
        if let Some(known) = &known {
            (result, error) = self.ask(image, image_ref, Some(known), true, lookup).await;
        }
        if known.is_none() || (result == MustPullCheckResult::MustAuthenticate && error.is_none()) {
            // In this order: a record is durable before its intent is removed.
            let may_be_ours = self.may_be_ours(image, image_ref).await;
            (result, error) = match self.read(image_ref).await {
                Ok(known) => self.ask(image, image_ref, known.as_deref(), may_be_ours, lookup).await,
                Err(why) => {
                    tracing::warn!("{image} must be pulled: cannot read its pull record: {why}");
                    (MustPullCheckResult::Error, None)
                }
            };
        }
        self.counts.of(result).fetch_add(1, Ordering::Relaxed);
        (Some(result), error)
    }

    /// Whether [`check`](PullRecordStore::check) would require a pull. Adds no rotated secret to the record, and is not
    /// counted.
    pub async fn would_require_pull(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        lookup: &mut dyn PodCredentialLookup,
    ) -> Result<bool, RecordsError> {
        let may_be_ours = self.may_be_ours(image, image_ref).await;
        let Ok(record) = self.record(image_ref).await else { return Ok(true) };
        let known = record.map(|record| IndexedRecord::new(&record));
        Ok(match self.decide(image, known.as_ref(), may_be_ours, lookup).await? {
            RecordCheck::Ends(result) => result.must_pull(),
            RecordCheck::Learns(_) => false,
            RecordCheck::Asks => true,
        })
    }

    /// The result from memory for a pod with these credentials; `None` if the image is not in memory.
    pub fn check_from_memory(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        pod: &PodCredentials,
    ) -> Option<MustPullCheckResult> {
        let known = self.memory.get(image_ref)?;
        match self.look(image, Some(&known), Some(pod), true) {
            RecordCheck::Ends(result) => Some(result),
            RecordCheck::Learns(_) => Some(MustPullCheckResult::RecordFound),
            RecordCheck::Asks => None,
        }
    }

    async fn ask(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        known: Option<&IndexedRecord>,
        may_be_ours: bool,
        lookup: &mut dyn PodCredentialLookup,
    ) -> (MustPullCheckResult, Option<RecordsError>) {
        match self.decide(image, known, may_be_ours, lookup).await {
            Err(error) => (MustPullCheckResult::Error, Some(error)),
            Ok(RecordCheck::Ends(result)) => (result, None),
            Ok(RecordCheck::Learns(secret)) => {
                self.learn(image, image_ref, secret);
                (MustPullCheckResult::RecordFound, None)
            }
            Ok(RecordCheck::Asks) => (MustPullCheckResult::MustAuthenticate, None),
        }
    }

    /// Looks up credentials only if the result depends on them. `may_be_ours` is whether larder may have pulled an
    /// image without a record, as [`may_be_ours`](PullRecordStore::may_be_ours) returned before the record was read.
    async fn decide(
        &self,
        image: &ImageName,
        known: Option<&IndexedRecord>,
        may_be_ours: bool,
        lookup: &mut dyn PodCredentialLookup,
    ) -> Result<RecordCheck, RecordsError> {
        let pulled_here = known.is_some() || may_be_ours;
        match self.look(image, known, None, pulled_here) {
            RecordCheck::Asks => {
                let pod = lookup.pod_credentials().await?;
                Ok(self.look(image, known, Some(&pod), pulled_here))
            }
            decided => Ok(decided),
        }
    }

    fn look(
        &self,
        image: &ImageName,
        known: Option<&IndexedRecord>,
        pod: Option<&PodCredentials>,
        pulled_here: bool,
    ) -> RecordCheck {
        let verification = self.verification.read();
        if !verification.required(image, pulled_here) {
            return RecordCheck::Ends(MustPullCheckResult::PolicyAllowed);
        }
        drop(verification);
        let Some(known) = known else { return RecordCheck::Ends(MustPullCheckResult::MustAuthenticate) };
        let Ok(holders) = known.credentials_for(image) else {
            return RecordCheck::Ends(MustPullCheckResult::Error);
        };
        match holders {
            Some(holders) if holders.allows_all_pods() => RecordCheck::Ends(MustPullCheckResult::RecordFound),
            Some(holders) if !holders.is_empty() => {
                let Some(pod) = pod else { return RecordCheck::Asks };
                let secrets = pod.secrets.iter().map(|(at, hash)| (at, hash.as_str()));
                match holders.check_pod(secrets, pod.service_account.as_ref()) {
                    AccessCheck::Yes => RecordCheck::Ends(MustPullCheckResult::RecordFound),
                    AccessCheck::AllowedByRotatedSecret(secret) => RecordCheck::Learns(secret),
                    AccessCheck::No => RecordCheck::Ends(MustPullCheckResult::MustAuthenticate),
                }
            }
            _ => RecordCheck::Ends(MustPullCheckResult::MustAuthenticate),
        }
    }

    /// Whether larder may have pulled an image that has no record; always, where the policy does not depend on it. A
    /// backend that records the origin of images knows; with any other one, an intent of a pull that may name the image
    /// decides.
    async fn may_be_ours(&self, image: &ImageName, image_ref: &ImageId) -> bool {
        if !self.verification.read().requires_pull_records() {
            return true;
        }
        if let Some(resolver) = self.resolver.get() {
            match resolver.is_preloaded(image_ref).await {
                Ok(None) => {}
                Ok(Some(preloaded)) => return !preloaded,
                Err(error) => {
                    tracing::warn!(
                        "{image} must be pulled: cannot determine whether it was preloaded: {error}"
                    );
                    return true;
                }
            }
        }
        let unrecovered = self.unrecovered.load(Ordering::Acquire);
        if self.in_flight.any(|pulled| may_name_same_image(pulled, image)) {
            return true;
        }
        let (dir, image) = (Arc::clone(&self.dir), image.clone());
        let is_it = move |pulled: &ImageName| unrecovered || may_name_same_image(pulled, &image);
        blocking(move || dir.has_intent_like(is_it)).await.unwrap_or_else(|error| {
            tracing::warn!("cannot check for interrupted pulls: {error}");
            true
        })
    }

    async fn read(&self, image_ref: &ImageId) -> Result<Option<Arc<IndexedRecord>>, RecordsError> {
        let record = self.record(image_ref).await?;
        let known = record.map(|record| Arc::new(IndexedRecord::new(&record)));
        match &known {
            Some(known) => self.memory.put(image_ref, Arc::clone(known)),
            None => self.memory.forget(image_ref),
        }
        Ok(known)
    }

    fn learn(&self, image: &ImageName, image_ref: &ImageId, secret: RecordedSecret) {
        let Ok(name) = image.trimmed() else { return };
        let access = ImagePullCredentials { secrets: vec![secret], ..ImagePullCredentials::default() };
        let (name, image_ref) = (name.to_owned(), image_ref.clone());
        self.writer.submit(RecordChange::AddCredentials {
            name,
            image_ref,
            access,
            now: SystemTime::now().into(),
        });
    }
}

/// The images that are present, and which of them were loaded from archives, if the backend records it.
async fn images_of(backend: &dyn Backend) -> Result<(Vec<Image>, HashSet<ImageId>), BackendError> {
    let images = backend.list().await?;
    let mut preloaded = HashSet::new();
    if let Some(origins) = backend.origins() {
        for image in &images {
            if origins.is_preloaded(&image.id).await? {
                preloaded.insert(image.id.clone());
            }
        }
    }
    Ok((images, preloaded))
}

impl MustPullCheckCounts {
    fn of(&self, result: MustPullCheckResult) -> &AtomicU64 {
        &self.0[MustPullCheckResult::ALL.iter().position(|other| *other == result).unwrap_or_default()]
    }
}

#[async_trait]
impl PullRecords for PullRecordStore {
    async fn must_attempt_pull(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        credentials: &mut LazyCredentialLookup<'_>,
    ) -> Result<bool, RecordsError> {
        match self.check(image, image_ref, credentials).await {
            (_, Some(error)) => Err(error),
            (result, None) => Ok(result.is_none_or(MustPullCheckResult::must_pull)),
        }
    }

    async fn record_pull_intent(&self, image: &ImageName) -> Result<(), RecordsError> {
        let alone = self.in_flight.begin(image);
        // Also if the caller is canceled.
        let begun = UnstartedPullGuard { records: self, image };
        let written = self.writer.submit_and_wait(RecordChange::Intent { image: image.clone() }).await;
        written.map_err(|error| RecordsError::Intent(Box::new(error)))?;
        if let Some(resolver) = self.resolver.get().filter(|_| alone) {
            resolver.record_prior_image(image).await;
        }
        std::mem::forget(begun);
        Ok(())
    }

    async fn record_image_pulled(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        credentials: &RecordedCredentials,
    ) {
        let access = Some(ImagePullCredentials::from(credentials));
        if let Err(error) = self.pulled(image, image_ref, access, SystemTime::now().into()).await {
            tracing::error!("cannot record the pull of {image}: {error}; pods must pull it again");
        }
    }

    fn record_image_pull_failed(&self, image: &ImageName) {
        if self.in_flight.end(image) {
            self.writer.submit(RecordChange::Failed { image: image.clone(), absent: false });
        }
    }

    async fn record_image_pull_ended(&self, image: &ImageName) -> bool {
        if let Some(resolver) = self.resolver.get() {
            return resolver.resolve(image).await;
        }
        self.record_image_pull_failed(image);
        true
    }

    fn record_image_pull_interrupted(&self, image: &ImageName) {
        // Without a backend the intent remains: no pod has access, and the next start resolves it.
        if let Some(resolver) = self.resolver.get() {
            resolver.clone().resolve_later(image);
        }
    }
}

/// A pull that was counted, and did not start.
struct UnstartedPullGuard<'a> {
    records: &'a PullRecordStore,
    image: &'a ImageName,
}

impl Drop for UnstartedPullGuard<'_> {
    fn drop(&mut self) {
        self.records.record_image_pull_failed(self.image);
    }
}

impl PostImageGcHook for PullRecordStore {
    fn collected(&self, kept: &[ImageId], started: UnixMillis) {
        let kept: Arc<HashSet<ImageId>> = Arc::new(kept.iter().cloned().collect());
        let before = Rfc3339Time(started.0.div_euclid(1000));
        self.writer.submit(RecordChange::Prune { kept, before });
    }
}

impl From<&RecordedCredentials> for ImagePullCredentials {
    fn from(credentials: &RecordedCredentials) -> ImagePullCredentials {
        match credentials {
            RecordedCredentials::NotRecorded => ImagePullCredentials::default(),
            RecordedCredentials::NodePodsAccessible => ImagePullCredentials::node(),
            RecordedCredentials::Secret(at, hash) => ImagePullCredentials {
                secrets: vec![RecordedSecret { at: at.clone(), hash: hash.clone() }],
                ..ImagePullCredentials::default()
            },
            RecordedCredentials::ServiceAccount(at) => {
                ImagePullCredentials { service_accounts: vec![at.clone()], ..ImagePullCredentials::default() }
            }
        }
    }
}
