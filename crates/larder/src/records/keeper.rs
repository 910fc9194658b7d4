//! The records of one node: asked in memory, kept on disk. Read [`ImageRecords::check`].

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::SystemTime;

use async_trait::async_trait;

use super::document::{Access, PulledRecord, RecordedSecret};
use super::folder::{Folder, Shelf, Witness};
use super::in_flight::InFlight;
use super::known::{Held, Known};
use super::memory::{MEMORY_BYTES, Memory};
use super::names::may_be_same;
use super::settle::Settler;
use super::utc::Utc;
use super::writer::{Change, Desk, Writer};
use super::{PullRecords, RecordedCredentials, RecordsError};
use crate::backend::{Backend, Image};
use crate::config::Verification;
use crate::credentials::{LazyLookup, PodCredentials};
use crate::gc::{Hook, Stamp};
use crate::reference::{ImageId, ImageName};
use crate::threads::blocking;

/// Why the records cannot be kept at all.
#[derive(Debug, thiserror::Error)]
#[error("no place for pull records in {}: {cause}", .folder.display())]
pub struct OpenError {
    folder: PathBuf,
    #[source]
    cause: io::Error,
}

impl OpenError {
    /// What the reader could try next.
    pub fn hint(&self) -> &'static str {
        if self.cause.kind() == io::ErrorKind::TimedOut {
            return "let that process go on, or end it, and try again";
        }
        "run as the owner of the folder, or name another one for larder's state"
    }
}

/// Records in a folder. Any number of processes may share it; each finds what the others wrote. Dropping the records
/// waits until all is on disk.
pub struct ImageRecords {
    folder: Arc<Folder>,
    memory: Arc<Memory>,
    in_flight: Arc<InFlight>,
    verification: RwLock<Arc<Verification>>,
    counts: Counts,
    writer: Arc<Writer>,
    settler: OnceLock<Settler>,
    /// Whether nobody has looked yet what pulls of dead processes brought.
    unrecovered: AtomicBool,
}

/// Looks up what a pod holds, at most once.
#[async_trait]
pub trait PodLookup: Send {
    /// The credentials of the pod, or why they cannot be had.
    async fn pod_credentials(&mut self) -> Result<PodCredentials, RecordsError>;
}

#[async_trait]
impl PodLookup for LazyLookup<'_> {
    async fn pod_credentials(&mut self) -> Result<PodCredentials, RecordsError> {
        Ok(PodCredentials::of(self.get().await?))
    }
}

/// How a check ended: the `result` of `kubelet_imagemanager_image_mustpull_checks_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckResult {
    /// The policy asks for no credentials.
    PolicyAllowed,
    /// The pod is known to be allowed.
    RecordFound,
    /// It has to show to the registry that it is.
    MustAuthenticate,
    /// Records or credentials could not be read; it has to show it as well.
    Error,
}

impl CheckResult {
    /// All of them.
    pub const ALL: [CheckResult; 4] = [
        CheckResult::PolicyAllowed,
        CheckResult::RecordFound,
        CheckResult::MustAuthenticate,
        CheckResult::Error,
    ];

    /// As the metric has it.
    pub fn name(self) -> &'static str {
        match self {
            CheckResult::PolicyAllowed => "credentialPolicyAllowed",
            CheckResult::RecordFound => "credentialRecordFound",
            CheckResult::MustAuthenticate => "mustAuthenticate",
            CheckResult::Error => "error",
        }
    }

    /// Whether the image has to be pulled.
    pub fn must_pull(self) -> bool {
        matches!(self, CheckResult::MustAuthenticate | CheckResult::Error)
    }
}

#[derive(Debug, Default)]
struct Counts([AtomicU64; 4]);

/// What one look at a record says.
enum Look {
    Ends(CheckResult),
    /// It may; this is to be remembered.
    Learns(RecordedSecret),
    /// That depends on what the pod holds.
    Asks,
}

impl ImageRecords {
    /// Opens the records of a folder, in kubelet's layout, and makes it if it is not there. Blocks on the disk. Kubelet's
    /// own is `/var/lib/kubelet/image_manager`.
    pub fn open(folder: &Path, verification: Verification) -> Result<ImageRecords, OpenError> {
        ImageRecords::watched(folder, verification, None)
    }

    /// The same; the witness is told of each step on the disk, and can stop it.
    pub fn watched(
        folder: &Path,
        verification: Verification,
        witness: Option<Witness>,
    ) -> Result<ImageRecords, OpenError> {
        let open = || {
            let opened = Arc::new(Folder::open(folder, witness)?);
            let (memory, in_flight) = (Arc::new(Memory::new(MEMORY_BYTES)), Arc::new(InFlight::default()));
            let desk = Desk {
                folder: Arc::clone(&opened),
                memory: Arc::clone(&memory),
                in_flight: Arc::clone(&in_flight),
            };
            Ok((opened, memory, in_flight, Writer::start(desk)?))
        };
        let (opened, memory, in_flight, writer) =
            open().map_err(|cause| OpenError { folder: folder.to_owned(), cause })?;
        let verification = RwLock::new(Arc::new(verification));
        Ok(ImageRecords {
            folder: opened,
            memory,
            in_flight,
            verification,
            counts: Counts::default(),
            writer: Arc::new(writer),
            settler: OnceLock::new(),
            unrecovered: AtomicBool::new(false),
        })
    }

    /// Asks this backend what came of pulls that did not succeed, from now on. The first one counts. Without any, what
    /// fails brought nothing, and what was left in the middle is settled at the next start.
    pub fn settle_with(&self, backend: Arc<dyn Backend>) {
        let (in_flight, writer) = (Arc::clone(&self.in_flight), Arc::downgrade(&self.writer));
        let _ = self.settler.set(Settler { backend, in_flight, writer });
    }

    /// Checks by another policy from now on.
    pub fn set_verification(&self, verification: Verification) {
        *self.verification.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(verification);
    }

    /// To be done once before the first pull: writes documents of older versions anew, and turns intents of pulls that
    /// died into records that trust nobody, where their image is there. Trouble is logged, as in kubelet. Says whether the
    /// intents are sorted out; if not, this is to be tried again, and meanwhile see
    /// [`await_recovery`](ImageRecords::await_recovery).
    pub async fn recover(&self, backend: &dyn Backend) -> bool {
        if let Err(error) = self.writer.ordered(Change::Renew).await {
            tracing::warn!("pull records of older versions stay as they are: {error}");
        }
        let folder = Arc::clone(&self.folder);
        let recovered = match blocking(move || folder.count(Shelf::Pulling)).await {
            Ok(0) => Ok(()),
            _ => match backend.list().await {
                Ok(images) => self.recover_from(images).await,
                Err(error) => Err(RecordsError::other(error)),
            },
        };
        if let Err(error) = &recovered {
            tracing::warn!("pulls that were cut off are not recorded: {error}");
        }
        self.unrecovered.store(recovered.is_err(), Ordering::Release);
        recovered.is_ok()
    }

    async fn recover_from(&self, images: Vec<Image>) -> Result<(), RecordsError> {
        self.writer.ordered(Change::Recover { images: Arc::new(images), now: SystemTime::now().into() }).await
    }

    /// Until [`recover`](ImageRecords::recover) succeeds, every image without a record may be what a dead process pulled, if
    /// there is an intent at all. For who serves before that.
    pub fn await_recovery(&self) {
        self.unrecovered.store(true, Ordering::Release);
    }

    /// Removes the records of images that are not among these, unless they changed at `before` or later.
    pub async fn prune(
        &self,
        kept: impl IntoIterator<Item = ImageId>,
        before: Utc,
    ) -> Result<(), RecordsError> {
        self.writer.ordered(Change::Prune { kept: Arc::new(kept.into_iter().collect()), before }).await
    }

    /// Waits until all that was told before is on disk.
    pub async fn flush(&self) -> Result<(), RecordsError> {
        self.writer.ordered(Change::Nothing).await
    }

    /// Records that an image was pulled, and who may use it because of that; `None` leaves that as it is.
    pub async fn pulled(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        access: Option<Access>,
        now: Utc,
    ) -> Result<(), RecordsError> {
        let (image, image_ref) = (image.clone(), image_ref.clone());
        self.writer.ordered(Change::Pulled { image, image_ref, access, now }).await
    }

    /// How many pulls of this image, as requested, run in this process.
    pub fn in_flight(&self, image: &ImageName) -> usize {
        self.in_flight.count(image)
    }

    /// How many checks ended so.
    pub fn checks(&self, result: CheckResult) -> u64 {
        self.counts.of(result).load(Ordering::Relaxed)
    }

    /// How much of the memory for records is taken, in whole percent.
    pub fn memory_percent(&self) -> usize {
        self.memory.percent()
    }

    /// How many intents and records are on disk. Blocks on the disk.
    pub fn on_disk(&self) -> io::Result<(usize, usize)> {
        Ok((self.folder.count(Shelf::Pulling)?, self.folder.count(Shelf::Pulled)?))
    }

    /// Who may use an image, by its id, as it is on disk; `None` where no pull of it is on record.
    pub async fn record(&self, image_ref: &ImageId) -> Result<Option<PulledRecord>, RecordsError> {
        let (folder, image_ref) = (Arc::clone(&self.folder), image_ref.clone());
        Ok(blocking(move || folder.record(&image_ref)).await?)
    }

    /// Whether a pod must show to the registry that it may use a present image, and why if that could not be said.
    /// `None`: there is no image.
    ///
    /// A yes from memory is final. Before a no the disk is asked, where another process may have recorded more.
    pub async fn check(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        lookup: &mut dyn PodLookup,
    ) -> (Option<CheckResult>, Option<RecordsError>) {
        if image_ref.is_empty() {
            return (None, None);
        }
        let (mut result, mut error) = (CheckResult::MustAuthenticate, None);
        let known = self.memory.get(image_ref);
        if let Some(known) = &known {
            (result, error) = self.ask(image, image_ref, Some(known), lookup).await;
        }
        if known.is_none() || (result == CheckResult::MustAuthenticate && error.is_none()) {
            (result, error) = match self.read(image_ref).await {
                Ok(known) => self.ask(image, image_ref, known.as_deref(), lookup).await,
                Err(why) => {
                    tracing::warn!("{image} has to be pulled, its record cannot be read: {why}");
                    (CheckResult::Error, None)
                }
            };
        }
        self.counts.of(result).fetch_add(1, Ordering::Relaxed);
        (Some(result), error)
    }

    /// What memory alone says of a pod that holds this; `None` if it does not know the image.
    pub fn check_from_memory(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        pod: &PodCredentials,
    ) -> Option<CheckResult> {
        let known = self.memory.get(image_ref)?;
        match self.look(image, Some(&known), Some(pod), true) {
            Look::Ends(result) => Some(result),
            Look::Learns(_) => Some(CheckResult::RecordFound),
            Look::Asks => None,
        }
    }

    async fn ask(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        known: Option<&Known>,
        lookup: &mut dyn PodLookup,
    ) -> (CheckResult, Option<RecordsError>) {
        let asks = self.verification.read().unwrap_or_else(PoisonError::into_inner).asks_who_pulled();
        let pulled_here = known.is_some() || !asks || self.may_be_ours(image).await;
        let mut look = self.look(image, known, None, pulled_here);
        if let Look::Asks = look {
            match lookup.pod_credentials().await {
                Ok(pod) => look = self.look(image, known, Some(&pod), pulled_here),
                Err(error) => return (CheckResult::Error, Some(error)),
            }
        }
        match look {
            Look::Ends(result) => (result, None),
            Look::Learns(secret) => {
                self.learn(image, image_ref, secret);
                (CheckResult::RecordFound, None)
            }
            Look::Asks => (CheckResult::MustAuthenticate, None),
        }
    }

    fn look(
        &self,
        image: &ImageName,
        known: Option<&Known>,
        pod: Option<&PodCredentials>,
        pulled_here: bool,
    ) -> Look {
        let verification = self.verification.read().unwrap_or_else(PoisonError::into_inner);
        if !verification.required(image, pulled_here) {
            return Look::Ends(CheckResult::PolicyAllowed);
        }
        drop(verification);
        let Some(known) = known else { return Look::Ends(CheckResult::MustAuthenticate) };
        let Ok(holders) = known.under(image) else { return Look::Ends(CheckResult::Error) };
        match holders {
            Some(holders) if holders.are_all() => Look::Ends(CheckResult::RecordFound),
            Some(holders) if !holders.are_none() => {
                let Some(pod) = pod else { return Look::Asks };
                let secrets = pod.secrets.iter().map(|(at, hash)| (at, hash.as_str()));
                match holders.include(secrets, pod.service_account.as_ref()) {
                    Held::Yes => Look::Ends(CheckResult::RecordFound),
                    Held::Learn(secret) => Look::Learns(secret),
                    Held::No => Look::Ends(CheckResult::MustAuthenticate),
                }
            }
            _ => Look::Ends(CheckResult::MustAuthenticate),
        }
    }

    /// Whether a pull of ours may have brought an image that has no record.
    async fn may_be_ours(&self, image: &ImageName) -> bool {
        let unrecovered = self.unrecovered.load(Ordering::Acquire);
        if self.in_flight.any(|pulled| may_be_same(pulled, image)) {
            return true;
        }
        let (folder, image) = (Arc::clone(&self.folder), image.clone());
        let is_it = move |pulled: &ImageName| unrecovered || may_be_same(pulled, &image);
        blocking(move || folder.has_intent_like(is_it)).await.unwrap_or_else(|error| {
            tracing::warn!("a pull may have been cut off: {error}");
            true
        })
    }

    async fn read(&self, image_ref: &ImageId) -> Result<Option<Arc<Known>>, RecordsError> {
        let record = self.record(image_ref).await?;
        let known = record.map(|record| Arc::new(Known::new(&record)));
        match &known {
            Some(known) => self.memory.put(image_ref, Arc::clone(known)),
            None => self.memory.forget(image_ref),
        }
        Ok(known)
    }

    fn learn(&self, image: &ImageName, image_ref: &ImageId, secret: RecordedSecret) {
        let Ok(name) = image.trimmed() else { return };
        let access = Access { secrets: vec![secret], ..Access::default() };
        let (name, image_ref) = (name.to_owned(), image_ref.clone());
        self.writer.order(Change::Learn { name, image_ref, access, now: SystemTime::now().into() });
    }
}

impl Counts {
    fn of(&self, result: CheckResult) -> &AtomicU64 {
        &self.0[CheckResult::ALL.iter().position(|other| *other == result).unwrap_or_default()]
    }
}

#[async_trait]
impl PullRecords for ImageRecords {
    async fn must_attempt_pull(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        credentials: &mut LazyLookup<'_>,
    ) -> Result<bool, RecordsError> {
        match self.check(image, image_ref, credentials).await {
            (_, Some(error)) => Err(error),
            (result, None) => Ok(result.is_none_or(CheckResult::must_pull)),
        }
    }

    async fn record_pull_intent(&self, image: &ImageName) -> Result<(), RecordsError> {
        let alone = self.in_flight.begins(image);
        // Also when nobody waits for the answer any more.
        let begun = Begun { records: self, image };
        let written = self.writer.ordered(Change::Intent { image: image.clone() }).await;
        written.map_err(|error| RecordsError::Intent(Box::new(error)))?;
        if let Some(settler) = self.settler.get().filter(|_| alone) {
            settler.look_before(image).await;
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
        let access = Some(Access::from(credentials));
        if let Err(error) = self.pulled(image, image_ref, access, SystemTime::now().into()).await {
            tracing::error!("failed to record that {image} was pulled; pods have to pull it again: {error}");
        }
    }

    fn record_image_pull_failed(&self, image: &ImageName) {
        if self.in_flight.ends(image) {
            self.writer.order(Change::Failed { image: image.clone(), absent: false });
        }
    }

    async fn record_image_pull_ended(&self, image: &ImageName) -> bool {
        if let Some(settler) = self.settler.get() {
            return settler.settle(image).await;
        }
        self.record_image_pull_failed(image);
        true
    }

    fn record_image_pull_left(&self, image: &ImageName) {
        // Without anybody to ask the intent stays: the image is nobody's, and the next start looks.
        if let Some(settler) = self.settler.get() {
            settler.clone().settle_later(image);
        }
    }
}

/// A pull that was counted, and did not start.
struct Begun<'a> {
    records: &'a ImageRecords,
    image: &'a ImageName,
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.records.record_image_pull_failed(self.image);
    }
}

impl Hook for ImageRecords {
    fn collected(&self, kept: &[ImageId], started: Stamp) {
        let kept: Arc<HashSet<ImageId>> = Arc::new(kept.iter().cloned().collect());
        let before = Utc(started.0.div_euclid(1000));
        self.writer.order(Change::Prune { kept, before });
    }
}

impl From<&RecordedCredentials> for Access {
    fn from(credentials: &RecordedCredentials) -> Access {
        match credentials {
            RecordedCredentials::Nobody => Access::default(),
            RecordedCredentials::NodePodsAccessible => Access::node(),
            RecordedCredentials::Secret(at, hash) => Access {
                secrets: vec![RecordedSecret { at: at.clone(), hash: hash.clone() }],
                ..Access::default()
            },
            RecordedCredentials::ServiceAccount(at) => {
                Access { service_accounts: vec![at.clone()], ..Access::default() }
            }
        }
    }
}
