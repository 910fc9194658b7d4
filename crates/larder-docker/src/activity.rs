//! Images added and used since the last query: from the engine's own events.
//!
//! The engine keeps its last 256 events, so occasional queries see most of them. A follower misses none: it reads
//! events at once, because the engine drops events for slow readers, and inspects their subjects behind the reader. A
//! query for past events also runs before each report: events that are processed twice change nothing.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{self, StreamExt as _};
use larder::backend::{BackendError, Image};
use larder::gc::{ActivityFeed, ImageActivity};
use larder::reference::ImageId;
use parking_lot::Mutex;
use reqwest::header::HeaderMap;
use reqwest::{Method, Response};
use tokio::sync::mpsc;

use crate::api::{ContainerInspect, ContainerSummary, EventMessage, ImageInspect};
use crate::error;
use crate::events::{EngineImageEvent, is_id, life, moment, nanos, parse_event};
use crate::image_index::ImageNameIndex;
use crate::inspect_cache::{CALLS_AT_ONCE, InspectCache};
use crate::pending_activity::{EngineState, PendingActivity};
use crate::stream::JsonStreamBuffer;

/// Filter of the event request.
const FILTERS: &str = r#"{"type":["container","image"]}"#;
/// Time limit for past events; they are immediate unless the engine's clock is behind.
const PAST_EVENTS_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay before the next request after the engine ended the stream.
const PAUSE: Duration = Duration::from_secs(2);
/// Number of events that may wait for the inspection of their subjects.
const WAITING: usize = 10_000;
/// Number of removed containers whose image is remembered: their end may be reported once more.
const REMOVED_CONTAINERS: usize = 1_000;

/// The events of one engine.
pub struct EngineActivityFeed {
    inspections: Arc<InspectCache>,
    heard: Mutex<ReceivedEvents>,
}

#[derive(Default)]
struct ReceivedEvents {
    gathered: PendingActivity,
    /// Time of the last processed event, in nanoseconds since 1970.
    last: i64,
    /// Whether a follower runs, so that events arrive even if a query fails.
    following: bool,
    /// The image of each present or recently removed container, by container ID.
    containers: HashMap<String, ImageId>,
    /// The removed containers among them, oldest first.
    removed: VecDeque<String>,
}

impl ReceivedEvents {
    /// The time from which events may be unprocessed. A last event in the future comes from a clock that was set back
    /// since or is ahead of ours: then any event may be unprocessed, and the engine refuses a start time in the future.
    fn since(&mut self, now: i64) -> i64 {
        if self.last > now {
            self.last = 0;
        }
        self.last
    }

    /// Records a removed container.
    fn end(&mut self, container: &str) {
        self.removed.push_back(container.to_owned());
        if self.removed.len() > REMOVED_CONTAINERS
            && let Some(first) = self.removed.pop_front()
        {
            self.containers.remove(&first);
        }
    }
}

impl fmt::Debug for EngineActivityFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineFeed").field("following", &self.heard.lock().following).finish_non_exhaustive()
    }
}

/// The image with this name or ID, if there is one.
type ImageLookup = Result<(String, Option<ImageId>), BackendError>;

impl EngineActivityFeed {
    pub(crate) fn new(inspections: Arc<InspectCache>) -> EngineActivityFeed {
        EngineActivityFeed { inspections, heard: Mutex::default() }
    }

    /// Follows the stream until the engine ends it, beginning with past events.
    async fn listen(&self) -> Result<(), BackendError> {
        self.know_containers().await?;
        let since = moment(self.heard.lock().since(now()));
        let query = [("filters", FILTERS), ("since", since.as_str())];
        let response =
            self.inspections.engine().call(Method::GET, "/events", &query, HeaderMap::new()).await?;
        self.heard.lock().following = true;
        let (events_tx, mut events) = mpsc::channel(WAITING);
        let reading = async { Ok(read(response, events_tx).await) };
        let hearing = async {
            let mut batch = Vec::new();
            while events.recv_many(&mut batch, WAITING).await > 0 {
                self.take_in(&batch, &[]).await?;
                batch.clear();
            }
            Ok(())
        };
        // Events that were read are processed even if the stream then breaks.
        let (ended, ()) = tokio::try_join!(reading, hearing)?;
        ended
    }

    /// Reads past events since the last processed one. Events read before a failure of the engine count.
    async fn ask(&self) -> Result<Vec<EventMessage>, BackendError> {
        let now = now();
        let (since, until) = (moment(self.heard.lock().since(now)), moment(now));
        let query = [("filters", FILTERS), ("since", since.as_str()), ("until", until.as_str())];
        let engine = self.inspections.engine();
        let asked = engine.call(Method::GET, "/events", &query, HeaderMap::new());
        let mut response = engine.within(asked).await?;
        let (mut values, mut events) = (JsonStreamBuffer::default(), Vec::new());
        let all = async {
            while let Some(chunk) = response.chunk().await.map_err(|cause| error::broken(&cause))? {
                events.append(&mut values.push(&chunk).map_err(|why| error::unreadable("/events", why))?);
            }
            Ok(())
        };
        match tokio::time::timeout(PAST_EVENTS_TIMEOUT, all).await {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) | Err(_) => Ok(events),
        }
    }

    /// Processes events. If the engine becomes unreachable or the call is dropped, none of them counts, and they can be
    /// read again.
    async fn take_in(&self, events: &[EventMessage], images: &[Image]) -> Result<(), BackendError> {
        for event in events {
            if let Some(EngineImageEvent::Deleted(id)) = parse_event(event) {
                self.inspections.forget(id).await;
            }
        }
        let now = self.look_up(events, images).await?;
        let mut heard = self.heard.lock();
        heard.gathered.add_events(events, &now);
        heard.containers.extend(now.containers);
        for event in events {
            heard.last = heard.last.max(nanos(event));
            if let Some(container) = life(event, "destroy") {
                heard.end(container);
            }
        }
        Ok(())
    }

    /// Resolves the subjects of these events, from these images or by inspection. Each subject is inspected once.
    async fn look_up(&self, events: &[EventMessage], images: &[Image]) -> Result<EngineState, BackendError> {
        let uses = || {
            events.iter().filter_map(|event| match parse_event(event) {
                Some(EngineImageEvent::Used { container, image }) => Some((container, image)),
                _ => None,
            })
        };
        let pulled = events.iter().filter_map(|event| match parse_event(event) {
            Some(EngineImageEvent::Pulled(name)) => Some(name),
            _ => None,
        });
        let mut now = EngineState {
            containers: self.known_containers(uses().map(|(id, _)| id)),
            ..EngineState::default()
        };
        let unknown: HashSet<&str> =
            uses().map(|(id, _)| id).filter(|id| !now.containers.contains_key(*id)).collect();
        let calls: Vec<_> = unknown.into_iter().map(|id| self.image_of_container(id)).collect();
        now.containers.extend(answers(calls).await?);
        let unknown: Vec<&str> =
            uses().filter(|(id, _)| !now.containers.contains_key(*id)).map(|(_, image)| image).collect();
        let listed = ImageNameIndex::of(images);
        let names: HashSet<&str> = unknown.iter().copied().chain(pulled).collect();
        let calls: Vec<_> =
            names.into_iter().map(|name| self.image_called(name, listed.find(name))).collect();
        now.names = answers(calls).await?;
        let by_name: Vec<&ImageId> = unknown.iter().filter_map(|name| now.names.get(*name)).collect();
        let facts = self.inspections.of(&by_name).await?;
        now.added_at = facts.into_iter().filter_map(|(id, facts)| Some((id, facts.added_at?))).collect();
        Ok(now)
    }

    async fn image_of_container(&self, id: &str) -> ImageLookup {
        let path = format!("/containers/{id}/json");
        let found = self.inspections.engine().get::<ContainerInspect>(&path, &[]).await;
        let image = if_found(found)?.map(|found| found.image).filter(|image| !image.is_empty());
        Ok((id.to_owned(), image))
    }

    async fn image_called(&self, name: &str, listed: Option<&ImageId>) -> ImageLookup {
        if let Some(known) = listed.cloned().or_else(|| is_id(name).then(|| name.into())) {
            return Ok((name.to_owned(), Some(known)));
        }
        let found = self.inspections.engine().inspect::<ImageInspect>(name).await;
        Ok((name.to_owned(), if_found(found)?.map(|found| found.id)))
    }

    /// The known images of these containers.
    fn known_containers<'a>(&self, ids: impl Iterator<Item = &'a str>) -> HashMap<String, ImageId> {
        let heard = self.heard.lock();
        ids.filter_map(|id| Some((id.to_owned(), heard.containers.get(id)?.clone()))).collect()
    }

    /// Records the image of each present container: after the end of some it is too late to inspect them.
    async fn know_containers(&self) -> Result<(), BackendError> {
        let engine = self.inspections.engine();
        let listed =
            engine.get_required::<Vec<ContainerSummary>>("/containers/json", &[("all", "1")]).await?;
        let known = listed.into_iter().filter(|container| !container.image_id.is_empty());
        let mut heard = self.heard.lock();
        heard.containers = known.map(|container| (container.id, container.image_id)).collect();
        heard.removed.clear();
        Ok(())
    }
}

#[async_trait]
impl ActivityFeed for EngineActivityFeed {
    async fn take_activity(&self, images: &[Image]) -> Result<Vec<ImageActivity>, BackendError> {
        // Unprocessed events must not wait for the next query: no later query returns a container that was removed
        // since.
        match self.ask().await {
            Ok(events) => self.take_in(&events, images).await?,
            Err(error) if self.heard.lock().following => {
                tracing::debug!("cannot read the engine's events up to now: {error}");
            }
            Err(error) => return Err(error),
        }
        let listed: Vec<&ImageId> = images.iter().map(|image| &image.id).collect();
        let facts = self.inspections.of(&listed).await?;
        // No await follows: activity that is taken out is reported.
        Ok(self.heard.lock().gathered.drain(images, &facts))
    }

    /// Follows the engine through its restarts.
    async fn follow(&self) {
        loop {
            if let Err(error) = self.listen().await {
                tracing::debug!("engine event stream failed: {error}");
            }
            self.heard.lock().following = false;
            // The restarted engine may be of another version.
            self.inspections.engine().forget_version();
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Reads events until the stream ends.
async fn read(mut response: Response, events_tx: mpsc::Sender<EventMessage>) -> Result<(), BackendError> {
    let mut values = JsonStreamBuffer::default();
    while let Some(chunk) = response.chunk().await.map_err(|cause| error::broken(&cause))? {
        for event in values.push(&chunk).map_err(|why| error::unreadable("/events", why))? {
            if events_tx.send(event).await.is_err() {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// The results of these calls, some made concurrently.
async fn answers(
    calls: Vec<impl Future<Output = ImageLookup>>,
) -> Result<HashMap<String, ImageId>, BackendError> {
    let mut answers = stream::iter(calls).buffer_unordered(CALLS_AT_ONCE);
    let mut found = HashMap::new();
    while let Some(answer) = answers.next().await {
        let (name, id) = answer?;
        found.extend(id.map(|id| (name, id)));
    }
    Ok(found)
}

/// An engine that fails on one subject knows nothing of it; only an unreachable engine is an error.
fn if_found<T>(answer: Result<Option<T>, BackendError>) -> Result<Option<T>, BackendError> {
    match answer {
        Err(error) if !matches!(error, BackendError::Unreachable { .. }) => {
            tracing::debug!("cannot inspect the subject of an engine event: {error}");
            Ok(None)
        }
        answer => answer,
    }
}

fn now() -> i64 {
    i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}
