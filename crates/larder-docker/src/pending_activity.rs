//! Images added and used since the last report. One time for each image and kind, however many events there are.
//!
//! An event names most images as the user wrote them, and a name may have been moved to another image since. So a name
//! counts only where it certainly means the same image: a container's recorded image precedes the name it was created
//! from, the last pull of a name added the image that has it now, and no image was used before it was added.

use std::collections::HashMap;
use std::sync::Arc;

use larder::backend::Image;
use larder::gc::{ActivityKind, ImageActivity, UnixMillis};
use larder::reference::ImageId;

use crate::api::EventMessage;
use crate::events::{EngineImageEvent, adds_image, life, moved, nanos, parse_event, stamp};
use crate::inspect_cache::InspectedImage;
use crate::names::familiar;

/// Unreported activity, by image ID.
#[derive(Debug, Default)]
pub(crate) struct PendingActivity {
    /// When the image was first named by ID since its last deletion.
    added_at: HashMap<ImageId, UnixMillis>,
    /// When the image was last pulled by a name that it has now.
    pulled: HashMap<ImageId, UnixMillis>,
    /// When the image was last used.
    used: HashMap<ImageId, UnixMillis>,
}

/// The engine's present state of the subjects of some events.
#[derive(Debug, Default)]
pub(crate) struct EngineState {
    /// The image of each container, by container ID. Lacks removed containers that were never inspected.
    pub(crate) containers: HashMap<String, ImageId>,
    /// The image ID of each name.
    pub(crate) names: HashMap<String, ImageId>,
    /// Latest possible time of an image's addition, by ID.
    pub(crate) added_at: HashMap<ImageId, UnixMillis>,
}

impl PendingActivity {
    /// Processes events, in the order in which they happened.
    pub(crate) fn add_events(&mut self, events: &[EventMessage], now: &EngineState) {
        let times = EventTimes::of(events);
        for event in events {
            let at = stamp(nanos(event));
            match parse_event(event) {
                Some(EngineImageEvent::Added(id)) => _ = self.added_at.entry(id.into()).or_insert(at),
                Some(EngineImageEvent::Pulled(name)) => {
                    if let Some(id) = now.names.get(name).filter(|_| times.moved(name) <= nanos(event)) {
                        self.pulled.insert(id.clone(), at);
                    }
                }
                Some(EngineImageEvent::Deleted(id)) => {
                    for reported in [&mut self.added_at, &mut self.pulled, &mut self.used] {
                        reported.remove(id);
                    }
                }
                Some(EngineImageEvent::Used { container, image }) => {
                    let own = now.containers.get(container);
                    if let Some(id) = own.or_else(|| times.image_of(container, image, now)) {
                        let last = self.used.entry(id.clone()).or_insert(at);
                        *last = at.max(*last);
                    }
                }
                None => {}
            }
        }
    }

    /// Takes the activity of these images, once; that of others is kept, because they may just have been added.
    pub(crate) fn drain(
        &mut self,
        images: &[Image],
        facts: &HashMap<ImageId, Arc<InspectedImage>>,
    ) -> Vec<ImageActivity> {
        let mut sightings = Vec::new();
        for Image { id, .. } in images {
            let (by_id, by_name) = (self.added_at.remove(id), self.pulled.remove(id));
            // If the engine has forgotten the event of the addition, the image's own times count.
            let itself = facts.get(id).and_then(|facts| facts.added_at);
            let added_at = by_id.into_iter().chain(itself).min().or(by_name);
            let used = self.used.remove(id);
            for (what, at) in [(ActivityKind::Added, added_at), (ActivityKind::Used, used)] {
                sightings.extend(at.map(|at| ImageActivity { image: id.clone(), at, what }));
            }
        }
        sightings
    }
}

/// When names moved, images were added and containers created, in nanoseconds since 1970.
struct EventTimes<'a> {
    moved: HashMap<String, i64>,
    /// Images whose first event since their last deletion is an addition.
    brought: HashMap<&'a str, i64>,
    created: HashMap<&'a str, i64>,
    /// Just before all of these events.
    before: i64,
}

impl<'a> EventTimes<'a> {
    fn of(events: &'a [EventMessage]) -> EventTimes<'a> {
        let (names, brought, created) = (HashMap::new(), HashMap::new(), HashMap::new());
        let mut times = EventTimes { moved: names, brought, created, before: i64::MAX };
        for event in events {
            let at = nanos(event);
            times.before = times.before.min(at - 1);
            if let Some(name) = moved(event) {
                times.moved.insert(familiar(name), at);
            }
            match parse_event(event) {
                // An image that was only tagged existed before, since an unknown time.
                Some(EngineImageEvent::Added(id)) => {
                    times.brought.entry(id).or_insert(if adds_image(event) { at } else { i64::MIN });
                }
                Some(EngineImageEvent::Deleted(id)) => _ = times.brought.remove(id),
                _ => {}
            }
            if let Some(container) = life(event, "create") {
                times.created.insert(container, at);
            }
        }
        times
    }

    /// When an image last got this name; the distant past without an event.
    fn moved(&self, name: &str) -> i64 {
        self.moved.get(&familiar(name)).copied().unwrap_or(i64::MIN)
    }

    /// When an image was added; the distant past without an event.
    fn brought(&self, id: &str) -> i64 {
        self.brought.get(id).copied().unwrap_or(i64::MIN)
    }

    /// The image of a removed container: the one that has the name now, unless it was added after the container.
    fn image_of<'b>(&self, container: &str, name: &str, now: &'b EngineState) -> Option<&'b ImageId> {
        let id = now.names.get(name)?;
        let created = self.created.get(container).copied().unwrap_or(self.before);
        let was_here = || now.added_at.get(id).is_some_and(|added_at| *added_at <= stamp(created));
        let is_older = self.moved(name) <= created && self.brought(id.as_str()) <= created;
        (is_older || was_here()).then_some(id)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const DAY: i64 = 86_400;

    /// Seconds, kind, action, id of the actor, and the name of an image.
    fn event((time, kind, action, id, name): (i64, &str, &str, &str, &str)) -> EventMessage {
        let attributes = json!({"name": name, "image": name});
        let actor = json!({"ID": id, "Attributes": attributes});
        serde_json::from_value(json!({"Type": kind, "Action": action, "Actor": actor, "time": time})).unwrap()
    }

    fn events(all: &[(i64, &str, &str, &str, &str)]) -> Vec<EventMessage> {
        all.iter().copied().map(event).collect()
    }

    fn id(letter: &str) -> String {
        format!("sha256:{}", letter.repeat(64))
    }

    fn map(pairs: &[(&str, &str)]) -> HashMap<String, ImageId> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), id(value).into())).collect()
    }

    /// The reported activity of image `a`, in seconds: when it was added, and when it was last used.
    fn of_a(events: &[EventMessage], now: &EngineState) -> (Option<i64>, Option<i64>) {
        let mut gathered = PendingActivity::default();
        gathered.add_events(events, now);
        let reported = gathered.drain(&[Image { id: id("a").into(), ..Image::default() }], &HashMap::new());
        let at = |what| {
            reported.iter().find(|activity| activity.what == what).map(|activity| activity.at.0 / 1000)
        };
        (at(ActivityKind::Added), at(ActivityKind::Used))
    }

    #[test]
    fn of_pulls_under_one_name_only_the_last_brought_what_has_it_now() {
        let now = EngineState { names: map(&[("app:latest", "a")]), ..EngineState::default() };
        let pulls =
            [(DAY, "image", "pull", "app:latest", "app"), (2 * DAY, "image", "pull", "app:latest", "app")];
        assert_eq!(of_a(&events(&pulls), &now), (Some(2 * DAY), None));
        // The name was given away after the pull, so what was pulled is another image.
        let tagged = [pulls[0], (3 * DAY, "image", "tag", &id("a"), "app:latest")];
        assert_eq!(of_a(&events(&tagged), &now), (Some(3 * DAY), None));
    }

    #[test]
    fn a_use_by_id_takes_precedence_over_a_use_by_name_until_it_is_removed() {
        let now = EngineState { names: map(&[("app:latest", "a")]), ..EngineState::default() };
        let a = id("a");
        let loaded = [(DAY, "image", "pull", "app:latest", "app"), (2 * DAY, "image", "load", &a, &a)];
        assert_eq!(of_a(&events(&loaded), &now).0, Some(2 * DAY));
        let again = [
            (DAY, "image", "load", a.as_str(), a.as_str()),
            (DAY, "container", "create", "c", &a),
            (2 * DAY, "image", "delete", &a, &a),
            (3 * DAY, "image", "load", &a, &a),
            (4 * DAY, "image", "tag", &a, "app:latest"),
        ];
        let now = EngineState { containers: map(&[("c", "a")]), ..now };
        assert_eq!(of_a(&events(&again), &now), (Some(3 * DAY), None));
    }

    #[test]
    fn a_container_that_is_older_than_the_name_s_image_used_another() {
        let containers = |destroyed| {
            [
                (DAY, "container", "create", "c", "web:2"),
                (2 * DAY, "image", "pull", "web:2", "web"),
                (destroyed, "container", "destroy", "c", "web:2"),
            ]
        };
        let names = map(&[("web:2", "a")]);
        let now = EngineState { names: names.clone(), ..EngineState::default() };
        assert_eq!(of_a(&events(&containers(3 * DAY)), &now), (Some(2 * DAY), None));
        assert_eq!(of_a(&events(&containers(3 * DAY)[1..]), &now).1, None, "made before all that is known");
        let here = EngineState {
            names: names.clone(),
            added_at: [(id("a").into(), UnixMillis(0))].into(),
            ..EngineState::default()
        };
        assert_eq!(
            of_a(&events(&containers(3 * DAY)), &here).1,
            Some(3 * DAY),
            "the pull brought nothing new"
        );
        let own = EngineState { names, containers: map(&[("c", "a")]), ..EngineState::default() };
        assert_eq!(of_a(&events(&containers(3 * DAY)), &own).1, Some(3 * DAY), "the container's own image");
        let after = [(2 * DAY, "image", "pull", "web:2", "web"), (3 * DAY, "container", "die", "c", "web:2")];
        let made = [(2 * DAY + 1, "container", "create", "c", "web:2")];
        assert_eq!(of_a(&events(&[&after[..1], &made, &after[1..]].concat()), &now).1, Some(3 * DAY));
    }

    #[test]
    fn a_container_that_is_older_than_the_load_of_the_name_s_image_used_another() {
        let a = id("a");
        let loaded = |extra: &[(i64, &str, &str, &str, &str)]| {
            let load = [
                (2 * DAY, "container", "create", "c", "app:1"),
                (3 * DAY, "image", "load", &a, &a),
                (4 * DAY, "container", "destroy", "c", "app:1"),
            ];
            events(&[extra, &load].concat())
        };
        let names = map(&[("app:1", "a")]);
        let now = EngineState { names: names.clone(), ..EngineState::default() };
        assert_eq!(of_a(&loaded(&[]), &now), (Some(3 * DAY), None), "a load moves names without an event");
        assert_eq!(of_a(&loaded(&[])[1..], &now).1, None, "made before all that is known");
        let here = EngineState {
            names,
            added_at: [(a.as_str().into(), UnixMillis(DAY * 1000))].into(),
            ..EngineState::default()
        };
        assert_eq!(of_a(&loaded(&[]), &here).1, Some(4 * DAY), "it was loaded once more");
        let added_at = (DAY, "image", "load", &*a, &*a);
        assert_eq!(of_a(&loaded(&[added_at]), &now).1, Some(4 * DAY), "it was here by then");
        let went = (DAY, "image", "delete", &*a, &*a);
        assert_eq!(of_a(&loaded(&[added_at, went]), &now).1, None);
        let tagged = [
            (2 * DAY, "container", "create", "c", "app:1"),
            (3 * DAY, "image", "tag", &*a, "other:1"),
            (4 * DAY, "container", "destroy", "c", "app:1"),
        ];
        assert_eq!(of_a(&events(&tagged), &now).1, Some(4 * DAY), "a name more does not bring it");
    }

    #[test]
    fn the_latest_use_is_kept_after_any_number_of_events() {
        let now = EngineState { containers: map(&[("c", "a")]), ..EngineState::default() };
        let mut gathered = PendingActivity::default();
        for hundred in 0..2_000 {
            let starts = (1..=100).map(|n| event((hundred * 100 + n, "container", "start", "c", "web:2")));
            gathered.add_events(&starts.collect::<Vec<_>>(), &now);
        }
        assert_eq!(gathered.used, HashMap::from([(id("a").into(), UnixMillis(200_000_000))]));
    }

    #[test]
    fn the_use_of_an_image_is_reported_once_it_is_listed() {
        let now = EngineState { containers: map(&[("c", "a")]), ..EngineState::default() };
        let mut gathered = PendingActivity::default();
        gathered.add_events(&events(&[(DAY, "container", "create", "c", "web:2")]), &now);
        assert_eq!(gathered.drain(&[], &HashMap::new()), []);
        let listed = [Image { id: id("a").into(), ..Image::default() }];
        assert_eq!(gathered.drain(&listed, &HashMap::new()).len(), 1);
        assert_eq!(gathered.drain(&listed, &HashMap::new()), [], "once");
    }
}
