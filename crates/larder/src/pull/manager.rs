//! Makes one image present for one pod. Read [`ImageManager::ensure`] first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::sync::watch;
use tokio::time::{self, Instant};
use tracing::instrument::Instrumented;
use tracing::{Instrument as _, Span};

use super::backoff::{Backoff, CredentialHashes};
use super::config::{DuplicatePullPolicy, NewCredentialsPolicy, PullConfig};
use super::ensure::{
    BackendFailure, EnsureError, EnsureReason, EnsureRequest, EnsuredImage, ImagePresence, Priority,
};
use super::intent::PullIntentGuard;
use super::metrics::{EnsureLabels, PullFailureReason, PullMetrics, TriState};
use super::policy::PullPolicy;
use super::present::StatusIntent;
use super::puller::{CredentialOwner, EnsureLeases, ImagePuller, PullJob, PullOutcome};
use super::room::RoomMaker;
use super::shared_pull::{JoinedPull, SharedPullResult, SharedPulls};
use super::spans::{ensure_span, note_ensured, note_pulled, pull_span};
use super::status::{PullStatus, PullTracker};
use super::times::PullTimeRecorder;
use crate::backend::{Backend, ImageSpec, PullOptions, PullUntil};
use crate::credentials::{Credential, LazyCredentialLookup, NodeKeyring};
use crate::events::{Event, EventReason, EventSink, EventType, LogSink};
use crate::go_format;
use crate::hidden::PrefetchCredentials;
use crate::image_service::ImageService;
use crate::pod::Pod;
use crate::records::{PullRecords, RecordedCredentials};
use crate::reference::{ImageId, ImageName};
use crate::retention::RemovalGate;
use crate::scheduler::{Callers, WorkDemand};

/// Makes images present, by kubelet's rules. Calls may overlap; dropping one abandons it.
pub struct ImageManager {
    pub(super) images: ImageService,
    pub(super) credentials: Arc<NodeKeyring>,
    pub(super) records: Option<Arc<dyn PullRecords>>,
    pub(super) events: Arc<dyn EventSink>,
    pub(super) metrics: Option<Arc<dyn PullMetrics>>,
    pub(super) times: Option<Arc<dyn PullTimeRecorder>>,
    room: Option<Arc<dyn RoomMaker>>,
    pub(super) backoff: Mutex<Backoff>,
    pub(super) puller: RwLock<Arc<ImagePuller>>,
    pub(super) shared_pulls: SharedPulls,
    /// Whether a request joins a pull that is in progress.
    pub(super) coalesce_pulls: AtomicBool,
    /// Whether other credentials end a back-off.
    pub(super) retry_on_new_credentials: AtomicBool,
    pub(super) pull_tracker: PullTracker,
    pub(super) leases: EnsureLeases,
    pub(super) prefetch_credentials: PrefetchCredentials,
    /// Set when the process stops.
    pub(super) stopping: watch::Sender<bool>,
}

impl ImageManager {
    /// Works on this backend with larder's defaults: events go to the log, and nothing is recorded or counted.
    pub fn new(backend: Arc<dyn Backend>) -> ImageManager {
        let (images, config) = (ImageService::new(backend), PullConfig::default());
        ImageManager {
            puller: RwLock::new(Arc::new(ImagePuller::new(images.clone(), &config, Instant::now()))),
            images,
            credentials: Arc::default(),
            records: None,
            events: Arc::new(LogSink),
            metrics: None,
            times: None,
            room: None,
            backoff: Mutex::new(Backoff::new(config.backoff_initial, config.backoff_max)),
            shared_pulls: SharedPulls::default(),
            coalesce_pulls: AtomicBool::new(config.same_image == DuplicatePullPolicy::Coalesce),
            retry_on_new_credentials: AtomicBool::new(
                config.new_credentials == NewCredentialsPolicy::PullAtOnce,
            ),
            pull_tracker: PullTracker::default(),
            leases: EnsureLeases::default(),
            prefetch_credentials: PrefetchCredentials::default(),
            stopping: watch::Sender::new(false),
        }
    }

    /// How pulls are queued, throttled, merged and retried.
    #[must_use]
    pub fn with_config(self, config: &PullConfig) -> Self {
        self.set_config(config);
        self
    }

    /// Credentials beside the pods' pull secrets.
    #[must_use]
    pub fn with_credentials(self, credentials: NodeKeyring) -> Self {
        ImageManager { credentials: Arc::new(credentials), ..self }
    }

    /// Records that decide who may use a present image.
    #[must_use]
    pub fn with_records(self, records: Arc<dyn PullRecords>) -> Self {
        ImageManager { records: Some(records), ..self }
    }

    /// The sink of events.
    #[must_use]
    pub fn with_events(self, events: Arc<dyn EventSink>) -> Self {
        ImageManager { events, ..self }
    }

    /// The sink of metrics.
    #[must_use]
    pub fn with_metrics(self, metrics: Arc<dyn PullMetrics>) -> Self {
        ImageManager { metrics: Some(metrics), ..self }
    }

    /// The recorder of pull times per pod.
    #[must_use]
    pub fn with_times(self, times: Arc<dyn PullTimeRecorder>) -> Self {
        ImageManager { times: Some(times), ..self }
    }

    /// The gate and the time for which an ensured image is leased. Garbage collection must use the same gate.
    #[must_use]
    pub fn with_lease(self, gate: Arc<RemovalGate>, time: Duration) -> Self {
        ImageManager { leases: EnsureLeases::at(gate, time), ..self }
    }

    /// How credentials are handled in requests that are ahead of kubelet.
    #[must_use]
    pub fn with_prefetch_credentials(self, prefetch_credentials: PrefetchCredentials) -> Self {
        ImageManager { prefetch_credentials, ..self }
    }

    /// Frees disk space for pulls that are refused for lack of it; without this they fail.
    #[must_use]
    pub fn with_room(self, room: Arc<dyn RoomMaker>) -> Self {
        ImageManager { room: Some(room), ..self }
    }

    /// Where credentials come from, besides the pull secrets of requests.
    pub fn credentials(&self) -> &Arc<NodeKeyring> {
        &self.credentials
    }

    /// Makes the image present or returns why not, and emits kubelet's events. Returns when the pull has ended.
    pub async fn ensure(&self, request: &EnsureRequest) -> Result<EnsuredImage, EnsureError> {
        let mut labels = EnsureLabels {
            pull_policy: request.policy.as_str().to_lowercase(),
            present_locally: TriState::Unknown,
            pull_required: TriState::Unknown,
        };
        let span = ensure_span(request);
        let result = self.ensure_in_time(request, &mut labels).instrument(span.clone()).await;
        note_ensured(&span, &result);
        let withheld = labels.present_locally == TriState::True && labels.pull_required == TriState::True;
        let result = result.map_err(|error| EnsureError { access_denied: withheld, ..error });
        if let Some(metrics) = &self.metrics {
            metrics.ensure_requested(&labels);
        }
        result
    }

    /// Applies new settings. Queued and running pulls remain in their queue; existing back-offs do not change.
    pub fn set_config(&self, config: &PullConfig) {
        let mut puller = self.puller.write();
        *puller = Arc::new(puller.with_config(config, Instant::now()));
        drop(puller);
        self.coalesce_pulls.store(config.same_image == DuplicatePullPolicy::Coalesce, Ordering::Relaxed);
        self.retry_on_new_credentials
            .store(config.new_credentials == NewCredentialsPolicy::PullAtOnce, Ordering::Relaxed);
        self.lock_backoff().set_limits(config.backoff_initial, config.backoff_max);
    }

    /// Ends all pulls, now and from now on: the process stops. What they have fetched is kept.
    pub fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// The pulls in flight, oldest first.
    pub fn pulls(&self) -> Vec<PullStatus> {
        self.pull_tracker.snapshot()
    }

    /// How long an in-flight pull has received nothing: the longest time of all. Waiting pulls do not count.
    pub fn longest_stall(&self, now: Instant) -> Option<Duration> {
        self.pull_tracker.longest_stall(now)
    }

    /// Watches the pull in flight of an image, named with its tag. The channel closes when the pull ends.
    pub fn watch(&self, image: &str) -> Option<watch::Receiver<PullStatus>> {
        self.pull_tracker.watch(image)
    }

    async fn ensure_in_time(
        &self,
        request: &EnsureRequest,
        labels: &mut EnsureLabels,
    ) -> Result<EnsuredImage, EnsureError> {
        let ensured = self.ensure_labelled(request, labels);
        let Some(limit) = request.time_limit else { return ensured.await };
        if let Ok(ended) = time::timeout(limit, ensured).await {
            return ended;
        }
        let error = EnsureError::time_limit(limit);
        let message =
            format!("Failed to pull image {}: {}", go_format::quote(request.image.as_str()), error.message);
        self.event(request, EventType::Warning, EventReason::Failed, &message);
        Err(error)
    }

    async fn ensure_labelled(
        &self,
        request: &EnsureRequest,
        labels: &mut EnsureLabels,
    ) -> Result<EnsuredImage, EnsureError> {
        let spec = self.spec(request)?;
        let mut lookup =
            LazyCredentialLookup::new(&self.credentials, &spec.image, &request.secrets, &request.pod);
        if let Some(present) = self.check_present(request, &spec, &mut lookup, labels).await? {
            return Ok(present);
        }
        let (credentials, credentials_withheld) = self.permitted_credentials(request, lookup).await?;
        let intent = PullIntentGuard::record(self.records.as_deref(), request).await?;
        let pulled = match self.check_backoff(request, &CredentialHashes::of(&credentials)) {
            Ok(()) => self.pull(request, spec, credentials, credentials_withheld, intent).await,
            Err(waits) => {
                intent.unused();
                Err(waits)
            }
        };
        pulled.map_err(|error| EnsureError { credentials_withheld, ..error })
    }

    /// The image as sent to the runtime: with a tag, otherwise as written.
    fn spec(&self, request: &EnsureRequest) -> Result<ImageSpec, EnsureError> {
        let image = request.image.with_default_tag().map_err(|error| {
            let message = format!(
                "Failed to apply default image tag {}: {error}",
                go_format::quote(request.image.as_str())
            );
            self.event(request, EventType::Warning, EventReason::InspectFailed, &message);
            EnsureError::new(EnsureReason::InvalidImageName, message)
        })?;
        Ok(ImageSpec {
            image,
            annotations: request.pod.annotations.clone(),
            runtime_handler: request.runtime_handler.clone(),
            user_specified_image: ImageName::default(),
            options: PullOptions {
                refuse_artifact: request.is_for_container(),
                until: request.options.until.or_of_pod(&request.pod.annotations),
                ..request.options
            },
        })
    }

    /// Checks whether the image is present and may be used, if the policy requires it. `None`: it must be pulled.
    async fn check_present(
        &self,
        request: &EnsureRequest,
        spec: &ImageSpec,
        lookup: &mut LazyCredentialLookup<'_>,
        labels: &mut EnsureLabels,
    ) -> Result<Option<EnsuredImage>, EnsureError> {
        let mut present = None;
        if request.policy.checks_presence_first() {
            let found = self.status(spec, StatusIntent::Use).await.map_err(|error| {
                // The quoted name is empty: kubelet prints the reference it failed to get.
                let message = format!("Failed to inspect image \"\": {error}");
                self.event(request, EventType::Warning, EventReason::InspectFailed, &message);
                EnsureError::new(EnsureReason::ImageInspectError, message)
            })?;
            present = found;
        }
        labels.present_locally = match (&request.policy, &present) {
            (PullPolicy::Always, _) => TriState::Unknown,
            (_, Some(_)) => TriState::True,
            (_, None) => TriState::False,
        };
        if present.is_none() && request.policy == PullPolicy::Never {
            return Err(self.never_pull(request));
        }
        if let Some(image) = present
            && let Some(message) = self.may_use(request, &image.id, lookup).await?
        {
            if let Some(refusal) = request.refusal(&image) {
                let quoted = go_format::quote(request.image.as_str());
                let message = format!("Failed to pull image {quoted}: {}", refusal.message);
                self.event(request, EventType::Warning, EventReason::Failed, &message);
                return Err(refusal);
            }
            let image_ref = image.id;
            labels.pull_required = TriState::False;
            if !request.ahead_of_kubelet {
                self.show(&image_ref).await;
            }
            self.event(request, EventType::Normal, EventReason::Pulled, &message);
            self.finished_pulling(request);
            return Ok(Some(EnsuredImage { image_ref, message, outcome: ImagePresence::Present }));
        }
        labels.pull_required = TriState::True;
        if request.policy == PullPolicy::Never {
            return Err(self.never_pull(request));
        }
        Ok(None)
    }

    /// Checks the pull records for this pod's access to a present image; if allowed, returns kubelet's message.
    async fn may_use(
        &self,
        request: &EnsureRequest,
        image_ref: &ImageId,
        lookup: &mut LazyCredentialLookup<'_>,
    ) -> Result<Option<String>, EnsureError> {
        let present = format!(
            "Container image {} already present on machine",
            go_format::quote(request.image.as_str())
        );
        let Some(records) = &self.records else { return Ok(Some(present)) };
        match records.must_attempt_pull(&request.image, image_ref, lookup).await {
            Ok(false) => Ok(Some(format!("{present} and can be accessed by the pod"))),
            Ok(true) => Ok(None),
            Err(error) => Err(EnsureError::free(&error)),
        }
    }

    fn never_pull(&self, request: &EnsureRequest) -> EnsureError {
        let error = EnsureError::never_pull(&request.image);
        self.event(request, EventType::Warning, EventReason::ErrImageNeverPull, &error.message);
        error
    }

    /// Fails while the last failed pull for this pod is in back-off; else a new attempt starts.
    fn check_backoff(&self, request: &EnsureRequest, shown: &CredentialHashes) -> Result<(), EnsureError> {
        let key = backoff_key(request);
        let (left, last_failure) = {
            let mut backoff = self.lock_backoff();
            let new_credentials = self.retry_on_new_credentials.load(Ordering::Relaxed)
                && backoff.has_new_credentials(&key, shown);
            let Some(left) = backoff.remaining(&key, Instant::now()).filter(|_| !new_credentials) else {
                backoff.forget(&key);
                return Ok(());
            };
            (left, backoff.remembered(&key).map(|(text, failure)| (text.to_owned(), failure.cloned())))
        };
        let mut message = format!("Back-off pulling image {}", go_format::quote(request.image.as_str()));
        self.event(request, EventType::Normal, EventReason::BackOff, &message);
        let mut failure = None;
        if let Some((text, of_backend)) = last_failure {
            message = format!("{message}: {text}");
            failure = of_backend;
        }
        Err(EnsureError {
            retry_in: Some(left),
            failure,
            ..EnsureError::new(EnsureReason::ImagePullBackOff, message)
        })
    }

    async fn pull(
        &self,
        request: &EnsureRequest,
        spec: ImageSpec,
        credentials: Vec<Credential>,
        credentials_withheld: bool,
        intent: PullIntentGuard<'_>,
    ) -> Result<EnsuredImage, EnsureError> {
        let quoted = go_format::quote(request.image.as_str());
        let start = Instant::now();
        if let Some(times) = &self.times {
            times.started_pulling(&request.pod.key(), start);
        }
        self.event(request, EventType::Normal, EventReason::Pulling, &format!("Pulling image {quoted}"));

        let sandbox = request.sandbox.clone();
        let namespace = sandbox.as_ref().map_or("", |sandbox| &sandbox.namespace);
        let demand = WorkDemand::new(request.priority == Priority::Pod, Callers::new(namespace));
        let hidden = self.prefetch_credentials.hidden();
        let hide_in = hidden.filter(|_| request.ahead_of_kubelet && !credentials.is_empty());
        let credential_owner = CredentialOwner::Pod;
        let job = PullJob { spec, credentials, sandbox, credential_owner, demand, hide_in: hide_in.cloned() };
        let shared = self.pull_shared(&job).await;

        let total_duration = start.elapsed();
        let pulled = match &shared.result.pulled {
            Ok(pulled) => pulled,
            Err(error) => {
                let mut text = error.to_string();
                if credentials_withheld {
                    text = Self::with_withheld_note(&text);
                }
                let failed = self.pull_failed(request, &shared, &job.credentials, error.failure(), &text);
                intent.failed(error).await;
                return Err(failed);
            }
        };
        self.finished_pulling(request);
        if !request.ahead_of_kubelet || pulled.credential.is_none() {
            self.show(&pulled.image_ref).await;
        }
        let used = RecordedCredentials::of(shared.credential_of(&job.credentials));
        intent.pulled(&pulled.image_ref, &used).await;
        let outcome = self.report_pulled(request, &shared, total_duration);
        self.lock_backoff().gc(Instant::now());
        Ok(EnsuredImage { image_ref: pulled.image_ref.clone(), message: String::new(), outcome })
    }

    fn report_pulled(
        &self,
        request: &EnsureRequest,
        shared: &SharedPullResult,
        total_duration: Duration,
    ) -> ImagePresence {
        let PullOutcome { size_bytes, ref fill, .. } = shared.result;
        // A caller that joined a pull in progress waited less than the pull took.
        let pull_duration = shared.result.duration.min(total_duration);
        let rest = fill.as_ref().map_or_else(String::new, |fill| {
            format!(" (startable, {}; rest follows)", fill.describe(size_bytes))
        });
        let message = format!(
            "Successfully pulled image {} in {} ({} including waiting). Image size: {size_bytes} bytes.{rest}",
            go_format::quote(request.image.as_str()),
            go_format::duration(go_format::truncated_to_millis(pull_duration)),
            go_format::duration(go_format::truncated_to_millis(total_duration)),
        );
        self.event(request, EventType::Normal, EventReason::Pulled, &message);
        let mut warnings = shared.result.warnings.clone();
        if let Err(invalid) = PullUntil::of_pod(&request.pod.annotations) {
            let Pod { namespace, name, .. } = &request.pod;
            warnings.push(format!("pod {namespace}/{name}: {invalid}"));
        }
        if !warnings.is_empty() {
            let image = go_format::quote(request.image.as_str());
            let message = format!("Image {image}: {}", warnings.join("; "));
            self.event(request, EventType::Warning, EventReason::ImageWarning, &message);
        }
        if let Some(metrics) = &self.metrics {
            metrics.image_pulled(size_bytes, total_duration);
        }
        ImagePresence::Pulled { size_bytes, pull_duration, total_duration, fill: fill.clone() }
    }

    /// Pulls, or joins a pull in progress whose outcome applies to this caller.
    pub(super) async fn pull_shared(&self, job: &PullJob) -> Arc<SharedPullResult> {
        if !self.coalesce_pulls.load(Ordering::Relaxed) {
            return Arc::new(self.start_shared_pull(job.clone()).await);
        }
        loop {
            match self.shared_pulls.join(job, || self.start_shared_pull(job.clone())) {
                JoinedPull::Started(outcome) => return outcome.await,
                JoinedPull::InFlight(outcome) => {
                    let shared = outcome.await;
                    if shared.applies_to(job) {
                        return shared;
                    }
                }
                // An error is its end.
                JoinedPull::OfOthers(mut ended) => drop(ended.changed().await),
            }
        }
    }

    /// A pull that owns all it needs, so that it can outlive the caller that started it.
    fn start_shared_pull(&self, job: PullJob) -> Instrumented<BoxFuture<'static, SharedPullResult>> {
        let puller = Arc::clone(&self.puller.read());
        let (leases, room, metrics) = (self.leases.clone(), self.room.clone(), self.metrics.clone());
        let entry = self.pull_tracker.track(&job.spec.image, Instant::now());
        let span = pull_span(&job);
        let mut stopping = self.stopping.subscribe();
        let pull = async move {
            let result = tokio::select! {
                biased;
                Ok(_) = stopping.wait_for(|stopping| *stopping) => PullOutcome::stopped(),
                result = puller.pull_leased(&job, &entry, &leases, room.as_deref()) => result,
            };
            note_pulled(&Span::current(), &result);
            if let Some(metrics) = &metrics {
                match &result.pulled {
                    Ok(_) => metrics.image_downloaded(result.size_bytes),
                    Err(error) => metrics.pull_failed(PullFailureReason::of(&error.as_of_backend())),
                }
            }
            SharedPullResult::new(result, job)
        };
        pull.boxed().instrument(span)
    }

    fn pull_failed(
        &self,
        request: &EnsureRequest,
        shared: &SharedPullResult,
        credentials: &[Credential],
        failure: Option<BackendFailure>,
        error: &str,
    ) -> EnsureError {
        let message = format!("Failed to pull image {}: {error}", go_format::quote(request.image.as_str()));
        self.event(request, EventType::Warning, EventReason::Failed, &message);
        let failed = EnsureError::of_failed_pull(request.image.as_str(), error);
        let key = backoff_key(request);
        let mut backoff = self.lock_backoff();
        let delay =
            if shared.counts_for(&key) { backoff.fail(&key, Instant::now()) } else { backoff.delay(&key) };
        backoff.note_shown(&key, CredentialHashes::of(credentials));
        backoff.remember(&key, format!("{}: {}", failed.reason, failed.message), failure.clone());
        EnsureError { retry_in: Some(delay), failure, ..failed }
    }

    fn finished_pulling(&self, request: &EnsureRequest) {
        if let Some(times) = &self.times {
            times.finished_pulling(&request.pod.key(), Instant::now());
        }
    }

    fn lock_backoff(&self) -> MutexGuard<'_, Backoff> {
        self.backoff.lock()
    }

    fn event(&self, request: &EnsureRequest, event_type: EventType, reason: EventReason, message: &str) {
        if request.is_retry && reason != EventReason::Pulled {
            tracing::debug!(%reason, "{message}");
            return;
        }
        let Some(object) = request.target.clone() else {
            let (pod, image) = (&request.pod, &request.image);
            if pod.name.is_empty() {
                tracing::info!(%reason, "{message}");
            } else {
                tracing::info!(%reason, "{}/{}/{image} {message}", pod.namespace, pod.name);
            }
            return;
        };
        let (message, requester) = (message.to_owned(), String::new());
        self.events.record(Event { time: SystemTime::now(), event_type, reason, object, message, requester });
    }
}

/// Back-off is counted per pod, run and image text: `busybox` and `busybox:latest` are two.
fn backoff_key(request: &EnsureRequest) -> String {
    let EnsureRequest { pod, run, image, .. } = request;
    if run.is_empty() { format!("{}_{image}", pod.uid) } else { format!("{}/{run}_{image}", pod.uid) }
}
