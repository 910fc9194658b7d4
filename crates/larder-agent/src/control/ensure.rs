//! Ensures images for one caller, and streams progress and results.
//!
//! Promises: a caller that reads slowly, or not at all, blocks no pull and costs a bounded amount of memory; one
//! that disconnects withdraws its requests; events reach the caller whose image they are about and no other.

use std::collections::HashSet;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use futures_util::{Stream, stream};
use larder::backend::{PullOptions, PullUntil};
use larder::credentials::PullSecret;
use larder::events::{Event, EventSink};
use larder::pod::{ObjectRef, Pod, SandboxConfig};
use larder::pull::{EnsureError, EnsureRequest, EnsuredImage, ImagePresence};
use larder::reference::ImageName;
use larder_api::convert::{self, millis};
use larder_api::v1 as api;
use larder_api::v1::ensure_update::Update;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{self, Instant, MissedTickBehavior};
use tonic::Status;
use tracing::Instrument as _;

use super::caller::CALLER;
use crate::error::{DEFECT, Error};
use crate::node::Observability;
use crate::node::peer::Peer;
use crate::node::pulls::Pulls;

/// Interval of progress updates.
const PROGRESS: Duration = Duration::from_millis(200);
/// How many images one call may ask for.
const MAX_IMAGES: usize = 10_000;
/// How much of secrets and annotations one call may take, counted for each image, in bytes.
const MAX_REPEATED: usize = 64 << 20;

/// Starts to ensure the images, and returns the stream of updates.
pub(super) fn start(
    pulls: &Arc<Pulls>,
    observability: &Arc<Observability>,
    request: api::EnsureRequest,
) -> Result<EnsureUpdateStream, Error> {
    let progress = request.progress;
    let requests = requests(request)?;
    let (pulls, events) = (Arc::clone(pulls), Arc::clone(observability.sink()));
    let (updates, receiver) = mpsc::unbounded_channel();
    let (progress_sender, progress_receiver) = watch::channel(Vec::new());
    let mut work = JoinSet::new();
    let progress = progress.then_some(progress_sender);
    let work_of_call = async move { run(&pulls, &*events, &requests, &updates, progress).await };
    // Its events name the process that called.
    match Peer::of_call() {
        Some(peer) => work.spawn(peer.scope(work_of_call).in_current_span()),
        None => work.spawn(work_of_call.in_current_span()),
    };
    Ok(EnsureUpdateStream::new(receiver, progress_receiver, work))
}

/// Converts a request for the manager.
pub(super) fn requests(request: api::EnsureRequest) -> Result<Vec<EnsureRequest>, Error> {
    let api::EnsureRequest {
        images,
        pod,
        secrets,
        run,
        skip_tls_verify,
        accept_only_platform,
        complete,
        time_limit_milliseconds,
        progress: _,
    } = request;
    let time_limit = match time_limit_milliseconds {
        Some(0) => return Err(Error::bad_input("a time limit of 0: no image is ready at once")),
        limit => limit.map(Duration::from_millis),
    };
    if images.len() > MAX_IMAGES {
        return Err(Error::bad_input(format!("{} images in one call", images.len()))
            .hint(format!("request at most {MAX_IMAGES} in one call")));
    }
    let repeated = held_by_each(pod.as_ref(), &secrets).saturating_mul(images.len());
    if repeated > MAX_REPEATED {
        return Err(Error::bad_input("too much data: secrets and annotations are copied for each image")
            .hint("request fewer images in one call, or leave out secrets that they do not need"));
    }
    let api::PodReference { namespace, name, uid, annotations, service_account } = pod.unwrap_or_default();
    let pod = Pod { uid, namespace, name, annotations, service_account };
    let secrets: Vec<PullSecret> = secrets.into_iter().map(convert::secret_from).collect();
    let until = if complete { PullUntil::Complete } else { PullUntil::Configured };
    let requests = images.into_iter().map(|wanted| {
        let policy = convert::policy_from(&wanted);
        EnsureRequest {
            target: Some(ObjectRef::new(&pod, &wanted.field_path)),
            // Who asks without a pod has none.
            sandbox: (!pod.name.is_empty()).then(|| SandboxConfig::of(&pod)),
            secrets: secrets.clone(),
            run: run.clone(),
            options: PullOptions { skip_tls_verify, accept_only_platform, until, ..PullOptions::default() },
            time_limit,
            ..EnsureRequest::new(wanted.image, policy, pod.clone())
        }
    });
    Ok(requests.collect())
}

/// Returns the bytes that each image's request holds for itself.
fn held_by_each(pod: Option<&api::PodReference>, secrets: &[api::PullSecret]) -> usize {
    let annotations = pod.iter().flat_map(|pod| &pod.annotations).map(|(key, value)| key.len() + value.len());
    annotations.sum::<usize>() + secrets.iter().map(|secret| secret.document.len()).sum::<usize>()
}

async fn run(
    pulls: &Pulls,
    events: &dyn EventSink,
    requests: &[EnsureRequest],
    updates: &mpsc::UnboundedSender<Update>,
    progress: Option<watch::Sender<Vec<api::Pull>>>,
) {
    // All of them are of one pod.
    let _measured = requests.first().and_then(|request| pulls.pod_pulls().begin(&request.pod));
    let each = requests.iter().zip(0..).map(|(request, index)| {
        CALLER.scope(updates.clone(), async move { (index, pulls.ensure(request).await) })
    });
    let mut running: FuturesUnordered<_> = each.collect();
    let images: HashSet<ImageName> =
        requests.iter().filter_map(|request| request.image.with_default_tag().ok()).collect();
    let mut ticks = time::interval_at(Instant::now() + PROGRESS, PROGRESS);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            ended = running.next() => {
                let Some((index, ended)) = ended else { return };
                if let (Err(error), Some(object)) = (&ended, target(requests, index)) {
                    // Outside of any caller's scope: a caller reports it itself.
                    events.record(Event::failed(object, error));
                }
                // If the receiver is gone, this task ends soon, too.
                let _ = updates.send(ensure_ended(index, ended));
            }
            _ = ticks.tick(), if progress.is_some() => {
                let Some(progress) = &progress else { continue };
                let now = Instant::now();
                let pulls = pulls.manager().pulls().into_iter();
                let pulls = pulls.filter(|pull| images.contains(&pull.image));
                progress.send_replace(pulls.map(|pull| convert::pull(&pull, now)).collect());
            }
        }
    }
}

/// Returns the object of events about the request of this number.
fn target(requests: &[EnsureRequest], index: u32) -> Option<ObjectRef> {
    requests.get(usize::try_from(index).ok()?)?.target.clone()
}

fn ensure_ended(index: u32, ended: Result<EnsuredImage, EnsureError>) -> Update {
    match ended {
        Ok(EnsuredImage { image_ref, message, outcome }) => {
            let ensured =
                api::Ensured { index, image_ref: image_ref.to_string(), message, ..api::Ensured::default() };
            Update::Ensured(match outcome {
                ImagePresence::Present => ensured,
                ImagePresence::Pulled { size_bytes, pull_duration, total_duration, fill } => api::Ensured {
                    pulled: true,
                    size_bytes,
                    pull_milliseconds: millis(pull_duration),
                    total_milliseconds: millis(total_duration),
                    fill: fill.map(convert::fill),
                    ..ensured
                },
            })
        }
        Err(error) => Update::Failed(convert::failed(index, error)),
    }
}

/// The stream of one call. Dropping it withdraws the requests.
pub struct EnsureUpdateStream {
    updates: Pin<Box<dyn Stream<Item = Update> + Send>>,
    work: JoinSet<()>,
}

impl EnsureUpdateStream {
    /// `updates` are delivered in full and first; of the progress only the latest.
    fn new(
        updates: mpsc::UnboundedReceiver<Update>,
        progress: watch::Receiver<Vec<api::Pull>>,
        work: JoinSet<()>,
    ) -> EnsureUpdateStream {
        let updates = stream::unfold((updates, progress), |(mut updates, mut progress)| async move {
            let update = tokio::select! {
                biased;
                update = updates.recv() => update?,
                Ok(()) = progress.changed() => {
                    let pulls = progress.borrow_and_update().clone();
                    Update::Progress(api::Progress { pulls })
                }
            };
            Some((update, (updates, progress)))
        });
        // After the last update, the stream is polled until the work has ended.
        EnsureUpdateStream { updates: Box::pin(updates.fuse()), work }
    }
}

impl Stream for EnsureUpdateStream {
    type Item = Result<api::EnsureUpdate, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(update) = ready!(self.updates.as_mut().poll_next(context)) {
            return Poll::Ready(Some(Ok(api::EnsureUpdate { update: Some(update) })));
        }
        let ended = ready!(self.work.poll_join_next(context));
        let has_panicked = matches!(ended, Some(Err(error)) if error.is_panic());
        Poll::Ready(has_panicked.then(|| Err(Status::internal(DEFECT))))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_stream_waits_for_work_that_ends_after_its_last_update() {
        let (updates, receiver) = mpsc::unbounded_channel();
        let (_, progress) = watch::channel(Vec::new());
        let (end, ended) = oneshot::channel::<()>();
        let mut work = JoinSet::new();
        work.spawn(async { ended.await.unwrap() });
        let mut stream = EnsureUpdateStream::new(receiver, progress, work);
        drop(updates);
        assert!(stream.next().now_or_never().is_none(), "the work has not ended");
        end.send(()).unwrap();
        assert!(stream.next().await.is_none());
    }
}
