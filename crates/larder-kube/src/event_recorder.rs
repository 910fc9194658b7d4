//! Events of cluster-scoped objects. Repetitions are a series, as in client-go, but only with the same text: kube's
//! recorder keeps the first text whatever the next one is.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::error::ClusterError;

/// How long after its last repetition a series has ended: as in client-go.
const SERIES_WITHIN: Duration = Duration::from_secs(360);
/// In bytes: the API server refuses more.
const LONGEST_NOTE: usize = 1024;
const LONGEST_INSTANCE: usize = 128;
/// As much of an object's name as leaves room for the time in the name of an event.
const LONGEST_OBJECT_NAME: usize = 230;

/// An event about an object.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ObjectEvent {
    pub(crate) regarding: ObjectReference,
    pub(crate) is_warning: bool,
    pub(crate) reason: String,
    pub(crate) action: String,
    pub(crate) note: String,
}

/// Sends events, and knows those of the last minutes.
pub(crate) struct EventRecorder {
    cluster: Cluster,
    recent: Vec<SentEvent>,
}

struct SentEvent {
    event: ObjectEvent,
    /// Of the object that the server has.
    name: String,
    count: i32,
    last: Instant,
}

impl EventRecorder {
    pub(crate) fn new(cluster: &Cluster) -> EventRecorder {
        EventRecorder { cluster: cluster.clone(), recent: Vec::new() }
    }

    /// Sends an event, or that one of the last minutes has happened again.
    pub(crate) async fn send(&mut self, event: ObjectEvent) -> Result<(), ClusterError> {
        let (now, wall) = (Instant::now(), Timestamp::now());
        let events: Api<Event> = Api::namespaced(self.cluster.client.clone(), "default");
        let what = format!("event {}", event.reason);
        self.recent.retain(|sent| sent.last + SERIES_WITHIN > now);
        if let Some(at) = self.recent.iter().position(|sent| sent.event == event) {
            let sent = &mut self.recent[at];
            let count = sent.count.saturating_add(1);
            let series = EventSeries { count, last_observed_time: MicroTime(wall) };
            let (params, patch) = (PatchParams::default(), Patch::Merge(json!({ "series": series })));
            let patched = self.cluster.call(what.clone(), events.patch(&sent.name, &params, &patch)).await;
            match patched {
                Ok(_) => (sent.count, sent.last) = (count, now),
                // It was deleted, so this one begins a series.
                Err(ClusterError::NotFound { .. }) => _ = self.recent.remove(at),
                Err(_) => {}
            }
            if !matches!(patched, Err(ClusterError::NotFound { .. })) {
                return patched.map(drop);
            }
        }
        let object = object(&event, &self.cluster.node, wall);
        self.cluster.call(what, events.create(&PostParams::default(), &object)).await?;
        self.recent.push(SentEvent { event, name: object.name_any(), count: 1, last: now });
        Ok(())
    }
}

fn object(event: &ObjectEvent, node: &str, wall: Timestamp) -> Event {
    let about = cut(event.regarding.name.as_deref().unwrap_or_default(), LONGEST_OBJECT_NAME, "");
    // A name of an object has no dot or dash before a dot.
    let name = format!("{}.{:x}", about.trim_end_matches(['.', '-']), wall.as_nanosecond());
    Event {
        metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() },
        event_time: Some(MicroTime(wall)),
        type_: Some(if event.is_warning { "Warning" } else { "Normal" }.to_owned()),
        reason: Some(event.reason.clone()),
        action: Some(event.action.clone()),
        note: Some(cut(&event.note, LONGEST_NOTE, "...")),
        regarding: Some(event.regarding.clone()),
        reporting_controller: Some("larder".to_owned()),
        reporting_instance: Some(cut(node, LONGEST_INSTANCE, "")),
        ..Event::default()
    }
}

/// The text in at most so many bytes; one that was longer ends with `ellipsis`.
pub(crate) fn cut(text: &str, longest: usize, ellipsis: &str) -> String {
    if text.len() <= longest {
        return text.to_owned();
    }
    let mut end = longest.saturating_sub(ellipsis.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{ellipsis}", &text[..end])
}

#[cfg(test)]
mod tests {
    use larder_testkit::kube_api::{ADMINISTRATOR, KubeApi};
    use serde_json::Value;
    use tokio::time;

    use super::*;
    use crate::ClusterOptions;

    const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/default/events";

    fn event(note: &str) -> ObjectEvent {
        let name = format!("{}.example", "n".repeat(240));
        ObjectEvent {
            regarding: ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Node".into()),
                name: Some(name.clone()),
                uid: Some(name),
                ..ObjectReference::default()
            },
            is_warning: true,
            reason: "Failed".into(),
            action: "Pulling".into(),
            note: note.into(),
        }
    }

    /// Note and count of each event.
    fn sent(api: &KubeApi) -> Vec<(String, i64)> {
        let list = api.get(EVENTS);
        let count = |event: &Value| event["series"]["count"].as_i64().unwrap_or(1);
        // A real server has events of its own.
        let events = list["items"].as_array().expect("a list").iter();
        let events = events.filter(|event| event["reportingController"] == "larder");
        let mut sent: Vec<_> = events
            .map(|event| (event["note"].as_str().unwrap_or_default().to_owned(), count(event)))
            .collect();
        sent.sort();
        sent
    }

    #[tokio::test]
    async fn repetitions_with_the_same_text_are_a_series_of_six_minutes_and_others_are_events() {
        let api = KubeApi::start();
        let options =
            ClusterOptions { kubeconfig: Some(api.kubeconfig(ADMINISTRATOR)), node: "n".repeat(253) };
        let mut recorder = EventRecorder::new(&Cluster::open(&options));
        for note in ["a", "a", "b", "a"] {
            recorder.send(event(note)).await.expect("the server takes it");
        }
        assert_eq!(sent(&api), [("a".into(), 3), ("b".into(), 1)]);
        let list = api.get(EVENTS);
        let named_a = list["items"].as_array().expect("a list").iter().find(|event| event["note"] == "a");
        let name = named_a.expect("it was sent")["metadata"]["name"].as_str().expect("a name");
        api.delete(&format!("{EVENTS}/{name}"));
        recorder.send(event("a")).await.expect("one that was deleted begins a series");
        assert_eq!(sent(&api), [("a".into(), 1), ("b".into(), 1)]);
        time::pause();
        time::advance(SERIES_WITHIN).await;
        time::resume();
        recorder.send(event("a")).await.expect("the server takes it");
        assert_eq!(sent(&api).len(), 3, "{:?}", sent(&api));
    }

    #[test]
    fn a_text_is_cut_between_characters() {
        assert_eq!(cut("short", 5, "..."), "short");
        assert_eq!(cut("longer", 5, "..."), "lo...");
        let long = cut(&format!("x{}", "é".repeat(600)), LONGEST_NOTE, "...");
        assert!(long.len() <= LONGEST_NOTE && long.ends_with("é..."), "{} bytes", long.len());
    }
}
