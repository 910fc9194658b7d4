//! Events about image sets. The elected agent sends them when a condition changes: a thousand nodes that each send
//! their own would say less, and cost more.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Resource as _;
use tokio::time::Instant;

use super::resource::{ImageSet, ImageSetStatus};
use super::rollout::{FAILED_TO_RETRIEVE, NO_MATCHING_NODES, PULL_SECRETS_MISSING};
use crate::cluster::Cluster;
use crate::error::ErrorLog;
use crate::event_recorder::{EventRecorder, ObjectEvent};
use crate::node_events::EventRateLimit;

/// Sends events about image sets.
pub(super) struct SetEvents {
    recorder: EventRecorder,
    log: ErrorLog,
}

impl SetEvents {
    pub(super) fn new(cluster: &Cluster) -> SetEvents {
        SetEvents { recorder: EventRecorder::new(cluster), log: ErrorLog::default() }
    }

    /// Sends what has happened between the last status of a set and this one, as far as the set's limit admits it.
    pub(super) async fn send(
        &mut self,
        set: &ImageSet,
        status: &ImageSetStatus,
        limit: &mut EventRateLimit,
        now: Instant,
    ) {
        for (is_warning, reason, note) in events_of(set.status.as_ref(), status) {
            if !limit.admits(now) {
                continue;
            }
            let regarding = set.object_ref(&());
            let (reason, action) = (reason.to_owned(), "Pulling".to_owned());
            let outcome =
                self.recorder.send(ObjectEvent { regarding, is_warning, reason, action, note }).await;
            self.log.note("events of image sets", outcome);
        }
    }
}

/// Whether each is a warning, its reason and its text.
fn events_of(old: Option<&ImageSetStatus>, new: &ImageSetStatus) -> Vec<(bool, &'static str, String)> {
    let is_new_generation = old.is_none_or(|old| old.observed_generation != new.observed_generation);
    let begins = |kind: &str| {
        let is_true =
            |status: &ImageSetStatus| find(status, kind).is_some_and(|found| found.status == "True");
        is_true(new) && (is_new_generation || !old.is_some_and(is_true))
    };
    let message = |kind| find(new, kind).map(|found| found.message.clone()).unwrap_or_default();
    let on_nodes =
        |verb: &str| format!("{} {verb} {}", counted(new.images, "image"), counted(new.desired, "node"));
    let mut events = Vec::new();
    if begins("Progressing") {
        events.push((false, "Pulling", format!("Pulling {}", on_nodes("on"))));
    }
    if begins("Failing") {
        events.push((true, "Failed", message("Failing")));
    }
    let is_reason = |reason| find(new, "Ready").is_some_and(|found| found.reason == reason);
    if begins("Ready") && is_reason(NO_MATCHING_NODES) {
        events.push((true, NO_MATCHING_NODES, message("Ready")));
    } else if begins("Ready") {
        events.push((false, "Pulled", on_nodes("present on")));
    }
    if begins(PULL_SECRETS_MISSING) {
        events.push((true, FAILED_TO_RETRIEVE, message(PULL_SECRETS_MISSING)));
    }
    events
}

fn counted(count: u32, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn find<'a>(status: &'a ImageSetStatus, kind: &str) -> Option<&'a Condition> {
    status.conditions.iter().find(|condition| condition.type_ == kind)
}

#[cfg(test)]
mod tests {
    use larder_testkit::kube_api::{ADMINISTRATOR, KubeApi};
    use serde_json::json;

    use super::*;
    use crate::ClusterOptions;

    fn status(generation: i64, truths: [bool; 3]) -> ImageSetStatus {
        let kinds = ["Ready", "Progressing", "Failing"];
        let condition = |(kind, is_true): (&str, bool)| {
            let status = if is_true { "True" } else { "False" };
            json!({
                "type": kind, "status": status, "reason": "R", "message": format!("{kind} text"),
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            })
        };
        let conditions: Vec<_> = kinds.into_iter().zip(truths).map(condition).collect();
        let status = json!({
            "observedGeneration": generation, "images": 2, "desired": 3, "conditions": conditions,
        });
        serde_json::from_value(status).expect("a status")
    }

    #[test]
    fn an_event_is_sent_when_a_condition_begins_and_for_each_generation() {
        let pulling = status(1, [false, true, false]);
        let failing = status(1, [false, true, true]);
        let ready = status(1, [true, false, false]);
        let cases = [
            (None, &pulling, vec!["Pulling: Pulling 2 images on 3 nodes"]),
            (Some(&pulling), &pulling, vec![]),
            (Some(&pulling), &failing, vec!["Failed: Failing text"]),
            (Some(&failing), &ready, vec!["Pulled: 2 images present on 3 nodes"]),
            (Some(&ready), &status(2, [true, false, false]), vec!["Pulled: 2 images present on 3 nodes"]),
        ];
        for (old, new, expected) in cases {
            let found = events_of(old, new);
            let found: Vec<_> = found.iter().map(|(_, reason, note)| format!("{reason}: {note}")).collect();
            assert_eq!(found, expected);
        }
    }

    #[tokio::test]
    async fn what_happens_again_is_a_series_and_another_text_is_an_event() {
        let api = KubeApi::start();
        let options = ClusterOptions { kubeconfig: Some(api.kubeconfig(ADMINISTRATOR)), node: "n1".into() };
        let mut events = SetEvents::new(&Cluster::open(&options));
        let mut set = ImageSet::new("web", serde_json::from_value(json!({ "images": [] })).expect("a spec"));
        set.metadata.uid = Some("u".into());
        let now = Instant::now();
        let mut limit = EventRateLimit::new(now);
        for images in [2, 2, 3] {
            let status = ImageSetStatus { images, ..status(1, [false, true, false]) };
            events.send(&set, &status, &mut limit, now).await;
        }
        while limit.admits(now) {}
        let status = ImageSetStatus { images: 4, ..status(1, [false, true, false]) };
        events.send(&set, &status, &mut limit, now).await;
        let found = api.get("/apis/events.k8s.io/v1/namespaces/default/events");
        let found = found["items"].as_array().expect("a list").iter();
        let found = found.filter(|event| event["reportingController"] == "larder");
        let mut counts: Vec<_> =
            found.map(|event| (event["note"].as_str(), event["series"]["count"].as_i64())).collect();
        counts.sort_unstable();
        let (two, three) = (Some("Pulling 2 images on 3 nodes"), Some("Pulling 3 images on 3 nodes"));
        assert_eq!(counts, [(two, Some(2)), (three, None)]);
    }
}
