//! What came and was used between two looks: the engine's own events.
//!
//! The engine keeps its last 256 events, so whoever looks now and then is told most of them. Who follows misses none.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use larder::backend::{BackendError, Image};
use larder::gc::{Seen, Sighting, Stamp, UseFeed};
use reqwest::Method;
use reqwest::header::HeaderMap;

use crate::answers::{EventMessage, ImageInspect};
use crate::error;
use crate::inspections::Inspections;
use crate::stream::Values;

/// What is asked for.
const FILTERS: &str = r#"{"type":["container","image"]}"#;
/// How long past events may take to come; they come at once, unless the engine's clock is behind.
const PATIENCE: Duration = Duration::from_secs(5);
/// How soon an engine that ended the stream is asked again.
const PAUSE: Duration = Duration::from_secs(2);
/// How many sightings are kept until somebody asks for them.
const MOST: usize = 100_000;

/// The events of one engine.
pub struct EngineFeed {
    inspections: Arc<Inspections>,
    /// What came and was not asked for yet, and the time of the last event, in nanoseconds since 1970.
    heard: Mutex<Heard>,
}

#[derive(Default)]
struct Heard {
    sightings: Vec<Sighting>,
    last: i64,
    /// Somebody follows: there is no need to ask.
    following: bool,
}

impl EngineFeed {
    pub(crate) fn new(inspections: Arc<Inspections>) -> EngineFeed {
        EngineFeed { inspections, heard: Mutex::default() }
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn listen(&self) -> Result<(), BackendError> {
        let since = moment(self.heard().last);
        let query = [("filters", FILTERS), ("since", since.as_str())];
        let mut response =
            self.inspections.engine().call(Method::GET, "/events", &query, HeaderMap::new()).await?;
        self.heard().following = true;
        let mut values = Values::default();
        while let Some(chunk) = response.chunk().await.map_err(|cause| error::broken(&cause))? {
            let events: Vec<EventMessage> =
                values.push(&chunk).map_err(|why| error::unreadable("/events", why))?;
            for event in events {
                self.hear(&event).await;
            }
        }
        Ok(())
    }

    /// Takes an event in while what it names is still what it was.
    async fn hear(&self, event: &EventMessage) {
        let time = nanos(event);
        if let Some((image, what)) = subject(event) {
            let id = if image.starts_with("sha256:") {
                Some(image.to_owned())
            } else {
                let found = self.inspections.engine().inspect::<ImageInspect>(image).await;
                found.ok().flatten().map(|found| found.id)
            };
            let mut heard = self.heard();
            if heard.sightings.len() < MOST {
                heard.sightings.extend(id.map(|image| Sighting { image, at: stamp(time), what }));
            }
        }
        let mut heard = self.heard();
        heard.last = heard.last.max(time);
    }

    /// Past events since the last one that is known. What came until the engine stops to answer counts.
    async fn ask(&self) -> Result<Vec<EventMessage>, BackendError> {
        let (since, now) = (moment(self.heard().last), moment(now()));
        let query = [("filters", FILTERS), ("since", since.as_str()), ("until", now.as_str())];
        let engine = self.inspections.engine();
        let asked = engine.call(Method::GET, "/events", &query, HeaderMap::new());
        let mut response = engine.within(asked).await?;
        let (mut values, mut events) = (Values::default(), Vec::new());
        let all = async {
            while let Some(chunk) = response.chunk().await.map_err(|cause| error::broken(&cause))? {
                events.append(&mut values.push(&chunk).map_err(|why| error::unreadable("/events", why))?);
            }
            Ok(())
        };
        match tokio::time::timeout(PATIENCE, all).await {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) | Err(_) => Ok(events),
        }
    }
}

#[async_trait]
impl UseFeed for EngineFeed {
    async fn sightings(&self, images: &[Image]) -> Result<Vec<Sighting>, BackendError> {
        let events = if self.heard().following { Vec::new() } else { self.ask().await? };
        let mut sightings = std::mem::take(&mut self.heard().sightings);
        let ids = ids_by_name(images);
        let mut last = 0;
        for event in &events {
            last = last.max(nanos(event));
            let Some((name, what)) = subject(event) else { continue };
            let found = candidates(name).into_iter().find_map(|name| ids.get(name.as_str()).copied());
            let at = stamp(nanos(event));
            sightings.extend(found.map(|id| Sighting { image: id.to_owned(), at, what }));
        }
        {
            let mut heard = self.heard();
            heard.last = heard.last.max(last);
        }
        // What the engine has forgotten of the coming of an image, the image itself may tell.
        let listed: Vec<&str> = images.iter().map(|image| image.id.as_str()).collect();
        for (id, facts) in self.inspections.of(&listed).await? {
            sightings.extend(facts.named.map(|at| Sighting { image: id, at, what: Seen::Came }));
        }
        Ok(sightings)
    }

    /// Through restarts of the engine.
    async fn follow(&self) {
        loop {
            if let Err(error) = self.listen().await {
                tracing::debug!("events of the engine: {error}");
            }
            self.heard().following = false;
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// The image that an event is about, by id or as somebody named it, and what happened to it.
fn subject(event: &EventMessage) -> Option<(&str, Seen)> {
    let actor = &event.actor;
    match (event.kind.as_str(), event.action.as_str()) {
        // The end of a container is the end of a use.
        ("container", "create" | "start" | "die" | "destroy") => {
            Some((actor.attributes.get("image")?.as_str(), Seen::Used))
        }
        ("image", "pull" | "load" | "import" | "tag") => Some((actor.id.as_str(), Seen::Came)),
        _ => None,
    }
}

/// Images by all that they are called.
fn ids_by_name(images: &[Image]) -> HashMap<&str, &str> {
    let mut ids = HashMap::new();
    for image in images {
        ids.insert(image.id.as_str(), image.id.as_str());
        for name in image.repo_tags.iter().chain(&image.repo_digests) {
            ids.insert(name, &image.id);
        }
    }
    ids
}

/// How the engine may list what somebody named so.
fn candidates(name: &str) -> Vec<String> {
    let short = name.strip_prefix("docker.io/").unwrap_or(name);
    let short = short.strip_prefix("library/").unwrap_or(short);
    let last = short.rsplit('/').next().unwrap_or(short);
    let tagged = if last.contains([':', '@']) { short.to_owned() } else { format!("{short}:latest") };
    vec![name.to_owned(), tagged, format!("sha256:{name}")]
}

fn nanos(event: &EventMessage) -> i64 {
    if event.time_nano > 0 { event.time_nano } else { event.time.saturating_mul(1_000_000_000) }
}

fn stamp(nanos: i64) -> Stamp {
    Stamp(nanos / 1_000_000)
}

fn now() -> i64 {
    i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

/// A moment in the engine's words: seconds and nanoseconds.
fn moment(nanos: i64) -> String {
    format!("{}.{:09}", nanos / 1_000_000_000, nanos % 1_000_000_000)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn event(json: Value) -> EventMessage {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn events_of_containers_are_uses_and_events_of_images_sights() {
        let create = json!({"Type": "container", "Action": "create", "time": 7,
            "Actor": {"ID": "c", "Attributes": {"image": "busybox", "name": "x"}}});
        let create = event(create);
        assert_eq!(subject(&create), Some(("busybox", Seen::Used)));
        assert_eq!(stamp(nanos(&create)), Stamp(7000));
        let pull = event(
            json!({"Type": "image", "Action": "pull", "Actor": {"ID": "busybox:1"}, "timeNano": 5_000_000}),
        );
        assert_eq!(subject(&pull), Some(("busybox:1", Seen::Came)));
        assert_eq!(stamp(nanos(&pull)), Stamp(5));
        for (kind, action) in [("container", "exec_start: sh"), ("image", "untag"), ("network", "create")] {
            assert_eq!(subject(&event(json!({"Type": kind, "Action": action}))), None);
        }
    }

    #[test]
    fn a_name_that_somebody_typed_is_found_among_those_that_the_engine_lists() {
        let image =
            Image { id: "sha256:a".into(), repo_tags: vec!["busybox:latest".into()], ..Image::default() };
        let images = [image];
        let ids = ids_by_name(&images);
        let find = |name| candidates(name).into_iter().find_map(|name| ids.get(name.as_str()).copied());
        for name in ["busybox", "docker.io/library/busybox", "docker.io/busybox:latest", "sha256:a", "a"] {
            assert_eq!(find(name), Some("sha256:a"), "{name}");
        }
        assert_eq!(find("busybox:2"), None);
    }

    #[test]
    fn moments_have_nine_digits_behind_the_point() {
        assert_eq!(moment(0), "0.000000000");
        assert_eq!(moment(1_795_289_794_000_000_005), "1795289794.000000005");
    }
}
