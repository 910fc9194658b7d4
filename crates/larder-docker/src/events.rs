//! Parses events of the engine.

use larder::gc::UnixMillis;

use crate::api::EventMessage;

/// The meaning of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineImageEvent<'a> {
    /// An image was added or tagged; identified by ID.
    Added(&'a str),
    /// An image was pulled; identified by the name that points at it from then on.
    Pulled(&'a str),
    /// An image was deleted; identified by ID.
    Deleted(&'a str),
    /// A container of an image started or ended.
    Used {
        /// Its id.
        container: &'a str,
        /// The image as named by the user.
        image: &'a str,
    },
}

/// Returns the meaning of an event for the use of images, or `None` if it has none.
pub(crate) fn parse_event(event: &EventMessage) -> Option<EngineImageEvent<'_>> {
    let actor = &event.actor;
    match (event.kind.as_str(), event.action.as_str()) {
        // The end of a container is the end of a use.
        ("container", "create" | "start" | "die" | "destroy") => {
            Some(EngineImageEvent::Used { container: &actor.id, image: actor.attributes.get("image")? })
        }
        ("image", "pull" | "load" | "import" | "tag") if is_id(&actor.id) => {
            Some(EngineImageEvent::Added(&actor.id))
        }
        ("image", "pull") => Some(EngineImageEvent::Pulled(&actor.id)),
        ("image", "delete") => Some(EngineImageEvent::Deleted(&actor.id)),
        _ => None,
    }
}

/// The name that the event moves to its image.
pub(crate) fn moved(event: &EventMessage) -> Option<&str> {
    match (event.kind.as_str(), event.action.as_str()) {
        ("image", "pull") if !is_id(&event.actor.id) => Some(&event.actor.id),
        ("image", "pull" | "tag") => event.actor.attributes.get("name").map(String::as_str),
        _ => None,
    }
}

/// Whether this event adds an image, not only a name. The event omits which names it takes from other images.
pub(crate) fn adds_image(event: &EventMessage) -> bool {
    event.kind == "image" && matches!(event.action.as_str(), "load" | "import")
}

/// The container that this event creates or destroys.
pub(crate) fn life<'a>(event: &'a EventMessage, action: &str) -> Option<&'a str> {
    (event.kind == "container" && event.action == action).then_some(event.actor.id.as_str())
}

/// Whether this is a full ID, not a name or a prefix.
pub(crate) fn is_id(text: &str) -> bool {
    let digits = text.strip_prefix("sha256:").unwrap_or_default();
    digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Time of the event, in nanoseconds since 1970.
pub(crate) fn nanos(event: &EventMessage) -> i64 {
    if event.time_nano > 0 { event.time_nano } else { event.time.saturating_mul(1_000_000_000) }
}

pub(crate) fn stamp(nanos: i64) -> UnixMillis {
    UnixMillis(nanos / 1_000_000)
}

/// A time as the engine writes it: seconds and nanoseconds.
pub(crate) fn moment(nanos: i64) -> String {
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
        assert_eq!(parse_event(&create), Some(EngineImageEvent::Used { container: "c", image: "busybox" }));
        assert_eq!((life(&create, "create"), life(&create, "destroy")), (Some("c"), None));
        assert_eq!(stamp(nanos(&create)), UnixMillis(7000));
        let image = |action: &str, id: &str| {
            event(json!({"Type": "image", "Action": action, "timeNano": 5_000_000,
                "Actor": {"ID": id, "Attributes": {"name": "other:1"}}}))
        };
        let id = format!("sha256:{}", "a".repeat(64));
        let (pull, tag, delete) = (image("pull", "busybox:1"), image("tag", &id), image("delete", &id));
        assert_eq!(
            (parse_event(&pull), moved(&pull)),
            (Some(EngineImageEvent::Pulled("busybox:1")), Some("busybox:1"))
        );
        assert_eq!((parse_event(&tag), moved(&tag)), (Some(EngineImageEvent::Added(&id)), Some("other:1")));
        assert_eq!((parse_event(&delete), moved(&delete)), (Some(EngineImageEvent::Deleted(&id)), None));
        assert_eq!(
            parse_event(&image("pull", "sha256:6985")),
            Some(EngineImageEvent::Pulled("sha256:6985")),
            "no whole id"
        );
        assert_eq!(stamp(nanos(&pull)), UnixMillis(5));
        for (kind, action) in [("container", "exec_start: sh"), ("image", "untag"), ("network", "create")] {
            assert_eq!(parse_event(&event(json!({"Type": kind, "Action": action}))), None);
        }
    }

    #[test]
    fn moments_have_nine_digits_behind_the_point() {
        assert_eq!(moment(0), "0.000000000");
        assert_eq!(moment(1_795_289_794_000_000_005), "1795289794.000000005");
    }
}
