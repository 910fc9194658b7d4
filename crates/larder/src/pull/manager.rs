//! Makes one image present for one pod. Read [`Manager::ensure`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use futures_util::FutureExt;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::backoff::{Backoff, Shown};
use super::builder::ManagerBuilder;
use super::config::{NewCredentials, PullConfig, SameImage};
use super::ensure::{EnsureError, EnsureReason, EnsureRequest, Ensured, Outcome, Priority};
use super::errors::evaluate_pull_error;
use super::flight::{FlightKey, Flights, Landed};
use super::intent::Intent;
use super::lease::Leases;
use super::metrics::{EnsureLabels, Known, PullMetrics};
use super::policy::PullPolicy;
use super::puller::{Job, Puller, PullerError, Whose};
use super::status::{Board, PullStatus};
use super::times::PullTimeRecorder;
use super::turns::Urgency;
use crate::backend::{Backend, ImageSpec};
use crate::credentials::{Credential, LazyLookup, Sources};
use crate::events::{Event, EventSink, EventType, Reason};
use crate::gotext;
use crate::image_service::ImageService;
use crate::records::{PullRecords, RecordedCredentials};
use crate::reference::{ImageId, ImageName};

/// Makes images present, by kubelet's rules. Calls may overlap; dropping one abandons it.
pub struct Manager {
    pub(super) images: ImageService,
    pub(super) credentials: Sources,
    pub(super) records: Option<Arc<dyn PullRecords>>,
    pub(super) events: Arc<dyn EventSink>,
    pub(super) metrics: Option<Arc<dyn PullMetrics>>,
    pub(super) times: Option<Arc<dyn PullTimeRecorder>>,
    pub(super) backoff: Mutex<Backoff>,
    pub(super) puller: RwLock<Arc<Puller>>,
    pub(super) flights: Flights,
    /// Whether a request joins a pull that is under way.
    pub(super) once: AtomicBool,
    /// Whether other credentials end a back-off.
    pub(super) anew: AtomicBool,
    pub(super) board: Board,
    pub(super) leases: Leases,
}

impl Manager {
    /// Where credentials come from, besides the pull secrets of requests.
    pub fn credentials(&self) -> &Sources {
        &self.credentials
    }

    /// Begins with a backend and larder's defaults.
    pub fn builder(backend: Arc<dyn Backend>) -> ManagerBuilder {
        ManagerBuilder::new(backend)
    }

    /// Makes the image present, or says why not, with an event for what it did. Returns when a pull has ended.
    pub async fn ensure(&self, request: &EnsureRequest) -> Result<Ensured, EnsureError> {
        let mut labels = EnsureLabels {
            pull_policy: request.policy.as_str().to_lowercase(),
            present_locally: Known::Unknown,
            pull_required: Known::Unknown,
        };
        let result = self.ensure_labelled(request, &mut labels).await;
        let withheld = labels.present_locally == Known::True && labels.pull_required == Known::True;
        let result = result.map_err(|error| EnsureError { withheld, ..error });
        if let Some(metrics) = &self.metrics {
            metrics.ensure_requested(&labels);
        }
        result
    }

    /// Takes over other settings. Pulls that wait or run stay in the queue that they are in; back-offs that were counted
    /// stay as they are.
    pub fn set_config(&self, config: &PullConfig) {
        let puller = Arc::new(Puller::new(self.images.clone(), config, Instant::now()));
        *self.puller.write().unwrap_or_else(PoisonError::into_inner) = puller;
        self.once.store(config.same_image == SameImage::Once, Ordering::Relaxed);
        self.anew.store(config.new_credentials == NewCredentials::PullAtOnce, Ordering::Relaxed);
        self.lock_backoff().set_limits(config.backoff_initial, config.backoff_max);
    }

    /// The pulls in flight, oldest first.
    pub fn pulls(&self) -> Vec<PullStatus> {
        self.board.snapshot()
    }

    /// Watches the pull in flight of an image, named with its tag. The channel closes when the pull ends.
    pub fn watch(&self, image: &str) -> Option<watch::Receiver<PullStatus>> {
        self.board.watch(image)
    }

    async fn ensure_labelled(
        &self,
        request: &EnsureRequest,
        labels: &mut EnsureLabels,
    ) -> Result<Ensured, EnsureError> {
        let spec = self.spec(request)?;
        let mut lookup = LazyLookup::new(&self.credentials, &spec.image, &request.secrets, &request.pod);
        if let Some(present) = self.look_first(request, &spec, &mut lookup, labels).await? {
            return Ok(present);
        }
        let credentials = lookup.into_inner().await.map_err(|error| EnsureError::free(&error))?;
        let intent = Intent::record(self.records.as_deref(), request).await?;
        if let Err(waits) = self.check_backoff(request, &Shown::of(&credentials)) {
            intent.unused();
            return Err(waits);
        }
        self.pull(request, spec, credentials, intent).await
    }

    /// The image as the runtime shall see it: with a tag, otherwise as written.
    fn spec(&self, request: &EnsureRequest) -> Result<ImageSpec, EnsureError> {
        let image = request.image.with_default_tag().map_err(|error| {
            let message = format!(
                "Failed to apply default image tag {}: {error}",
                gotext::quote(request.image.as_str())
            );
            self.event(request, EventType::Warning, Reason::InspectFailed, &message);
            EnsureError::new(EnsureReason::InvalidImageName, message)
        })?;
        Ok(ImageSpec {
            image,
            annotations: request.pod.annotations.clone(),
            runtime_handler: request.runtime_handler.clone(),
            user_specified_image: ImageName::default(),
        })
    }

    /// Looks whether the image is here and may be used, if the policy cares. `None`: it must be pulled.
    async fn look_first(
        &self,
        request: &EnsureRequest,
        spec: &ImageSpec,
        lookup: &mut LazyLookup<'_>,
        labels: &mut EnsureLabels,
    ) -> Result<Option<Ensured>, EnsureError> {
        let mut present = None;
        if request.policy.looks_first() {
            present = self.leases.image_ref(&self.images, spec).await.map_err(|error| {
                // The quoted name is empty: kubelet prints the reference it failed to get.
                let message = format!("Failed to inspect image \"\": {error}");
                self.event(request, EventType::Warning, Reason::InspectFailed, &message);
                EnsureError::new(EnsureReason::ImageInspectError, message)
            })?;
        }
        labels.present_locally = match (&request.policy, &present) {
            (PullPolicy::Always, _) => Known::Unknown,
            (_, Some(_)) => Known::True,
            (_, None) => Known::False,
        };
        if present.is_none() && request.policy == PullPolicy::Never {
            return Err(self.never_pull(request));
        }
        if let Some(image_ref) = present
            && let Some(message) = self.may_use(request, &image_ref, lookup).await?
        {
            labels.pull_required = Known::False;
            self.event(request, EventType::Normal, Reason::Pulled, &message);
            self.finished_pulling(request);
            return Ok(Some(Ensured { image_ref, message, outcome: Outcome::Present }));
        }
        labels.pull_required = Known::True;
        if request.policy == PullPolicy::Never {
            return Err(self.never_pull(request));
        }
        Ok(None)
    }

    /// Asks the records whether this pod may use a present image; if so, the message that says it.
    async fn may_use(
        &self,
        request: &EnsureRequest,
        image_ref: &ImageId,
        lookup: &mut LazyLookup<'_>,
    ) -> Result<Option<String>, EnsureError> {
        let present =
            format!("Container image {} already present on machine", gotext::quote(request.image.as_str()));
        let Some(records) = &self.records else { return Ok(Some(present)) };
        match records.must_attempt_pull(&request.image, image_ref, lookup).await {
            Ok(false) => Ok(Some(format!("{present} and can be accessed by the pod"))),
            Ok(true) => Ok(None),
            Err(error) => Err(EnsureError::free(&error)),
        }
    }

    /// The same words for absent and for not permitted: presence is not revealed.
    fn never_pull(&self, request: &EnsureRequest) -> EnsureError {
        let quoted = gotext::quote(request.image.as_str());
        let message = format!("Container image {quoted} is not present with pull policy of Never");
        self.event(request, EventType::Warning, Reason::ErrImageNeverPull, &message);
        EnsureError::new(EnsureReason::ErrImageNeverPull, message)
    }

    /// Stops here when the last pull for this pod failed not long ago; else a new attempt starts.
    fn check_backoff(&self, request: &EnsureRequest, shown: &Shown) -> Result<(), EnsureError> {
        let key = backoff_key(request);
        let (left, last_failure) = {
            let mut backoff = self.lock_backoff();
            let anew = self.anew.load(Ordering::Relaxed) && backoff.has_shown_other(&key, shown);
            let Some(left) = backoff.remaining(&key, Instant::now()).filter(|_| !anew) else {
                backoff.forget(&key);
                return Ok(());
            };
            (left, backoff.remembered(&key).map(|(text, advice)| (text.to_owned(), advice.cloned())))
        };
        let mut message = format!("Back-off pulling image {}", gotext::quote(request.image.as_str()));
        self.event(request, EventType::Normal, Reason::BackOff, &message);
        let mut advice = None;
        if let Some((failure, of_backend)) = last_failure {
            message = format!("{message}: {failure}");
            advice = of_backend;
        }
        Err(EnsureError {
            retry_in: Some(left),
            advice,
            ..EnsureError::new(EnsureReason::ImagePullBackOff, message)
        })
    }

    async fn pull(
        &self,
        request: &EnsureRequest,
        spec: ImageSpec,
        credentials: Vec<Credential>,
        intent: Intent<'_>,
    ) -> Result<Ensured, EnsureError> {
        let quoted = gotext::quote(request.image.as_str());
        let start = Instant::now();
        if let Some(times) = &self.times {
            times.started_pulling(&request.pod.uid, start);
        }
        self.event(request, EventType::Normal, Reason::Pulling, &format!("Pulling image {quoted}"));

        let (sandbox, urgency) = (request.sandbox.clone(), Urgency::new(request.priority == Priority::Pod));
        let job = Job { spec, credentials, sandbox, whose: Whose::Pod, urgency };
        let landed = self.fly(&job).await;

        let total_duration = start.elapsed();
        let pulled = match &landed.result.pulled {
            Ok(pulled) => pulled,
            Err(error) => {
                let failed = self.pull_failed(request, &job.credentials, &landed, error);
                intent.failed(error).await;
                return Err(failed);
            }
        };
        self.finished_pulling(request);
        let used = RecordedCredentials::of(landed.credential_of(&job.credentials));
        intent.pulled(&pulled.image_ref, &used).await;
        let outcome = self.tell_pulled(request, &landed, total_duration);
        self.lock_backoff().gc(Instant::now());
        Ok(Ensured { image_ref: pulled.image_ref.clone(), message: String::new(), outcome })
    }

    fn tell_pulled(&self, request: &EnsureRequest, landed: &Landed, total_duration: Duration) -> Outcome {
        let size_bytes = landed.result.size_bytes;
        // Who joined a pull under way waited less than it took.
        let pull_duration = landed.result.duration.min(total_duration);
        let message = format!(
            "Successfully pulled image {} in {} ({} including waiting). Image size: {size_bytes} bytes.",
            gotext::quote(request.image.as_str()),
            gotext::duration(gotext::truncated_to_millis(pull_duration)),
            gotext::duration(gotext::truncated_to_millis(total_duration)),
        );
        self.event(request, EventType::Normal, Reason::Pulled, &message);
        if let Some(metrics) = &self.metrics {
            metrics.image_pulled(size_bytes, total_duration);
        }
        Outcome::Pulled { size_bytes, pull_duration, total_duration }
    }

    /// Pulls, or joins a pull under way whose outcome is also this caller's.
    pub(super) async fn fly(&self, job: &Job) -> Arc<Landed> {
        if !self.once.load(Ordering::Relaxed) {
            return Arc::new(self.departure(job.clone()).await);
        }
        let key =
            FlightKey { image: job.spec.image.clone(), runtime_handler: job.spec.runtime_handler.clone() };
        loop {
            let (flight, own) =
                self.flights.join(key.clone(), &job.urgency, || self.departure(job.clone()).boxed());
            let landed = flight.await;
            if own || landed.serves(&job.credentials) {
                return landed;
            }
        }
    }

    /// A pull that owns all it needs, so that it can outlive the caller that started it.
    fn departure(&self, job: Job) -> impl Future<Output = Landed> + Send + 'static {
        let puller = Arc::clone(&self.puller.read().unwrap_or_else(PoisonError::into_inner));
        let (leases, metrics) = (self.leases.clone(), self.metrics.clone());
        let entry = self.board.enter(&job.spec.image, Instant::now());
        let span = tracing::info_span!("pull", image = %job.spec.image);
        let pull = async move {
            let result = leases.pull(&puller, &job, &entry).await;
            if let (Some(metrics), Ok(_)) = (&metrics, &result.pulled) {
                metrics.image_came(result.size_bytes);
            }
            Landed::new(result, job)
        };
        pull.instrument(span)
    }

    fn pull_failed(
        &self,
        request: &EnsureRequest,
        credentials: &[Credential],
        landed: &Landed,
        error: &PullerError,
    ) -> EnsureError {
        let (advice, error) = (error.advice(), error.to_string());
        let message = format!("Failed to pull image {}: {error}", gotext::quote(request.image.as_str()));
        self.event(request, EventType::Warning, Reason::Failed, &message);
        let evaluated = evaluate_pull_error(request.image.as_str(), &error);
        let key = backoff_key(request);
        let mut backoff = self.lock_backoff();
        let delay =
            if landed.counts_for(&key) { backoff.fail(&key, Instant::now()) } else { backoff.delay(&key) };
        backoff.note_shown(&key, Shown::of(credentials));
        backoff.remember(&key, format!("{}: {}", evaluated.reason, evaluated.message), advice.clone());
        let error = EnsureError::new(evaluated.reason, evaluated.message);
        EnsureError { retry_in: Some(delay), advice, ..error }
    }

    fn finished_pulling(&self, request: &EnsureRequest) {
        if let Some(times) = &self.times {
            times.finished_pulling(&request.pod.uid, Instant::now());
        }
    }

    fn lock_backoff(&self) -> std::sync::MutexGuard<'_, Backoff> {
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn event(&self, request: &EnsureRequest, event_type: EventType, reason: Reason, message: &str) {
        let Some(object) = request.target.clone() else {
            let (pod, image) = (&request.pod, &request.image);
            if pod.name.is_empty() {
                tracing::info!(%reason, "{message}");
            } else {
                tracing::info!(%reason, "{}/{}/{image} {message}", pod.namespace, pod.name);
            }
            return;
        };
        let message = message.to_owned();
        self.events.record(Event { time: SystemTime::now(), event_type, reason, object, message });
    }
}

/// Back-off is counted per pod and image text: `busybox` and `busybox:latest` are two.
fn backoff_key(request: &EnsureRequest) -> String {
    format!("{}_{}", request.pod.uid, request.image)
}
