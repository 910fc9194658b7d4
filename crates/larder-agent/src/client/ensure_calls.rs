//! Ensures images through the control API: the same request and the same result as those of a manager.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::SystemTime;

use futures_util::TryStreamExt as _;
use larder::backend::PullUntil;
use larder::credentials::PullSecret;
use larder::events::{EventReason, EventSink};
use larder::pod::ObjectRef;
use larder::pull::{EnsureError, EnsurePlan, EnsureRequest, EnsuredImage, PullStatus};
use larder::reference::ImageName;
use larder_api::convert;
use larder_api::v1 as api;
use larder_api::v1::ensure_update::Update;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Client;
use crate::error::Error;

/// Ensures of one run of a command.
pub struct EnsureCalls {
    client: Client,
    /// A failure of an earlier run holds nothing back in this one.
    run: String,
    /// The user's own credentials.
    own: Option<PullSecret>,
    events: Arc<dyn EventSink>,
    /// Whether the caller wants the progress of pulls.
    progress: bool,
    under_way: Mutex<BTreeMap<u64, RequestedPulls>>,
    /// Why the process that has the images can be asked no more.
    connection_error: watch::Sender<Option<Error>>,
}

/// The pulls that one call waits for.
struct RequestedPulls {
    /// The image as the request names it; pulls have a name with a tag.
    image: ImageName,
    pulls: Vec<api::Pull>,
}

/// A text that no other run has.
fn new_run() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{}-{}", std::process::id(), now.as_nanos())
}

impl EnsureCalls {
    /// Sends nothing yet. Pod events that the answers contain go to `events`.
    pub fn new(
        client: Client,
        own: Option<PullSecret>,
        events: Arc<dyn EventSink>,
        progress: bool,
    ) -> EnsureCalls {
        let connection_error = watch::Sender::new(None);
        EnsureCalls {
            client,
            run: new_run(),
            own,
            events,
            progress,
            under_way: Mutex::default(),
            connection_error,
        }
    }

    /// A new run through the same client: earlier failures hold nothing back.
    #[must_use]
    pub fn begin_run(self) -> EnsureCalls {
        EnsureCalls { run: new_run(), ..self }
    }

    /// Continues the run through another client.
    #[must_use]
    pub fn through(self, client: Client) -> EnsureCalls {
        EnsureCalls {
            client,
            under_way: Mutex::default(),
            connection_error: watch::Sender::new(None),
            ..self
        }
    }

    /// The client that they go through.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// As [`ImageManager::ensure`](larder::pull::ImageManager::ensure). Does not end when
    /// the process that has the images is [lost](EnsureCalls::lost).
    pub async fn ensure(&self, request: &EnsureRequest) -> Result<EnsuredImage, EnsureError> {
        match self.ask(request).await {
            Ok(ended) => ended,
            Err(failure) => {
                self.connection_error.send_replace(Some(failure));
                std::future::pending().await
            }
        }
    }

    /// Returns the plan of [`ensure`](EnsureCalls::ensure). Changes nothing.
    pub async fn plan(&self, request: &EnsureRequest) -> Result<EnsurePlan, Error> {
        let asked = self.request(request);
        let answer = self.client.ask(async |mut calls| calls.plan_ensure(asked).await).await?;
        let planned = answer.images.into_iter().next().and_then(convert::plan_from);
        planned.ok_or_else(|| Error::failed(format!("{} returned no plan", self.client.shown())))
    }

    /// Done once the process that has the images can be asked no more, with the reason.
    pub async fn lost(&self) -> Error {
        let mut lost = self.connection_error.subscribe();
        // Its sender lives as long as this.
        let lost = lost.wait_for(Option::is_some).await.ok().and_then(|lost| lost.clone());
        lost.unwrap_or_else(|| Error::unreachable("the process that has the images closed the connection"))
    }

    /// The pulls that this run waits for, each once, with the name of the first request for it.
    pub fn pulls(&self) -> Vec<PullStatus> {
        let now = Instant::now();
        let (mut pulls, mut known): (Vec<PullStatus>, HashSet<String>) = Default::default();
        for RequestedPulls { image, pulls: requested } in self.under_way.lock().values() {
            for pull in requested.iter().filter(|pull| known.insert(pull.image.clone())) {
                let image = image.clone();
                pulls.push(PullStatus { image, ..convert::pull_from(pull.clone(), now) });
            }
        }
        pulls.sort_by_key(|pull| pull.since);
        pulls
    }

    async fn ask(&self, request: &EnsureRequest) -> Result<Result<EnsuredImage, EnsureError>, Error> {
        let asked = self.request(request);
        let mut updates = self.client.wait(async |mut calls| calls.ensure(asked).await).await?;
        let place = OngoingEnsure::enter(self, &request.image);
        loop {
            let update = updates.try_next().await.map_err(|status| self.client.error(&status))?;
            match update.and_then(|update| update.update) {
                Some(Update::Event(event)) => self.record_event(request, event),
                Some(Update::Progress(progress)) => place.set(progress.pulls),
                Some(Update::Ensured(ensured)) => return Ok(Ok(convert::ensured_from(ensured))),
                Some(Update::Failed(failed)) => return Ok(Err(convert::failed_from(failed))),
                None => {
                    let peer = self.client.shown();
                    return Err(Error::unreachable(format!("{peer} ended the call before its result")));
                }
            }
        }
    }

    fn request(&self, request: &EnsureRequest) -> api::EnsureRequest {
        let EnsureRequest { image, policy, pod, target, secrets, options, time_limit, .. } = request;
        let secrets = secrets.iter().chain(&self.own).filter_map(convert::secret);
        api::EnsureRequest {
            images: vec![api::WantedImage {
                image: image.to_string(),
                pull_policy: convert::policy(policy).into(),
                field_path: target.as_ref().map(|target| target.field_path.clone()).unwrap_or_default(),
            }],
            pod: Some(api::PodReference {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: pod.uid.clone(),
                annotations: pod.annotations.clone(),
                service_account: pod.service_account.clone(),
            }),
            secrets: secrets.collect(),
            progress: self.progress,
            run: self.run.clone(),
            skip_tls_verify: options.skip_tls_verify,
            accept_only_platform: options.accept_only_platform,
            complete: options.until == PullUntil::Complete,
            // Rounded up: 0 is not a limit.
            time_limit_milliseconds: time_limit.map(|limit| convert::millis(limit).max(1)),
        }
    }

    fn record_event(&self, request: &EnsureRequest, event: api::Event) {
        let object = request.target.clone().unwrap_or_else(|| ObjectRef::new(&request.pod, ""));
        // Without an object there is nothing to say but what is odd about the image.
        if request.target.is_none() && event.reason != EventReason::ImageWarning.to_string() {
            tracing::info!(reason = event.reason, "{}", event.message);
        } else if let Some(event) = convert::event_from(event, object) {
            self.events.record(event);
        }
    }
}

/// Wait of one call, while it lasts.
struct OngoingEnsure<'a> {
    pulls: &'a EnsureCalls,
    id: u64,
}

impl OngoingEnsure<'_> {
    fn enter<'a>(pulls: &'a EnsureCalls, image: &ImageName) -> OngoingEnsure<'a> {
        let mut under_way = pulls.under_way.lock();
        let id = under_way.last_key_value().map_or(0, |(last, _)| last + 1);
        under_way.insert(id, RequestedPulls { image: image.clone(), pulls: Vec::new() });
        OngoingEnsure { pulls, id }
    }

    fn set(&self, pulls: Vec<api::Pull>) {
        if let Some(requested) = self.pulls.under_way.lock().get_mut(&self.id) {
            requested.pulls = pulls;
        }
    }
}

impl Drop for OngoingEnsure<'_> {
    fn drop(&mut self) {
        self.pulls.under_way.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use larder::events::LogSink;

    use super::super::ControlServerAddress;
    use super::*;

    #[test]
    fn a_pull_has_the_name_of_the_first_request_for_it() {
        let client = Client::of(ControlServerAddress::Daemon("/nowhere/s".into()), None);
        let session = EnsureCalls::new(client, None, Arc::new(LogSink), true);
        let requests = ["busybox", "busybox:latest"].map(|name| OngoingEnsure::enter(&session, &name.into()));
        for request in &requests {
            request.set(vec![api::Pull { image: "busybox:latest".into(), ..api::Pull::default() }]);
        }
        let names: Vec<String> = session.pulls().into_iter().map(|pull| pull.image.to_string()).collect();
        assert_eq!(names, ["busybox"]);
    }
}
