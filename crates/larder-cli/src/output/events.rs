//! Events as they happen: printed in the columns of `kubectl get events`, kept for the summary.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::SystemTime;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use larder::events::{Event, EventReason, EventSink};
use parking_lot::Mutex;
use serde::Serialize;

use crate::printer::Printer;

/// Heads of the columns.
const HEADS: [&str; 5] = ["TIME", "TYPE", "REASON", "OBJECT", "MESSAGE"];
/// Widths of the first three columns: the longest type and reason there are, and a gap.
const WIDTHS: [usize; 3] = [8 + 3, 7 + 3, 17 + 3];

/// Takes events from the image manager.
pub(crate) struct EventPrinterSink {
    out: Arc<Printer>,
    look: EventStyle,
    /// Printed name of each pod, by UID.
    labels: HashMap<String, String>,
    object_width: usize,
    seen: Mutex<PrintedEvents>,
}

/// How events are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventStyle {
    /// Not at all; they are only kept.
    Silent,
    /// Time of day, and the pod.
    Short,
    /// Date and time, and the part of the pod.
    Wide,
}

#[derive(Default)]
struct PrintedEvents {
    kept: Vec<EventRecord>,
    /// Back-off messages already printed, by UID and part, since another message was printed for them. Kubelet
    /// repeats it at every sync, and kubectl folds it into one line with a count.
    printed_backoff: HashSet<(String, String, String)>,
}

/// An event, as `-o json` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct EventRecord {
    time: String,
    #[serde(rename = "type")]
    event_type: String,
    reason: String,
    object: String,
    #[serde(serialize_with = "larder_api::or_null")]
    namespace: String,
    #[serde(serialize_with = "larder_api::or_null")]
    field: String,
    message: String,
}

impl EventPrinterSink {
    /// A log of events about the pods in `labels` (uid to name).
    pub(crate) fn new(out: Arc<Printer>, look: EventStyle, labels: HashMap<String, String>) -> Self {
        let object_width = labels.values().map(|label| label.chars().count()).max().unwrap_or(0);
        let object_width = object_width.max(HEADS[3].len()) + 3;
        EventPrinterSink { out, look, labels, object_width, seen: Mutex::default() }
    }

    /// Everything that happened, in order.
    pub(crate) fn records(&self) -> Vec<EventRecord> {
        self.seen.lock().kept.clone()
    }

    fn columns(&self, time: &str, kind: &str, reason: &str, object: &str, message: &str) -> String {
        let [time_width, kind_width, reason_width] = WIDTHS;
        let time_width = if self.look == EventStyle::Wide { 25 + 3 } else { time_width };
        let object_width = self.object_width;
        format!(
            "{time:<time_width$}{kind:<kind_width$}{reason:<reason_width$}{object:<object_width$}{message}"
        )
    }
}

impl EventSink for EventPrinterSink {
    fn record(&self, event: Event) {
        let Event { time, event_type, reason, object, message, .. } = event;
        let label = self.labels.get(&object.uid).cloned().unwrap_or_else(|| object.to_string());
        let mut seen = self.seen.lock();
        if reason == EventReason::BackOff || message == "Error: ImagePullBackOff" {
            let key = (object.uid.clone(), object.field_path.clone(), message.clone());
            if !seen.printed_backoff.insert(key) {
                return;
            }
        } else {
            seen.printed_backoff.retain(|(uid, part, _)| (uid, part) != (&object.uid, &object.field_path));
        }
        if self.look != EventStyle::Silent {
            let first = seen.kept.is_empty();
            let shown_time =
                if self.look == EventStyle::Wide { date_and_time(time) } else { time_of_day(time) };
            let message = match object.field_path.as_str() {
                field if self.look == EventStyle::Wide && !field.is_empty() => format!("{field}: {message}"),
                _ => message.clone(),
            };
            let line =
                self.columns(&shown_time, &event_type.to_string(), &reason.to_string(), &label, &message);
            if first {
                let [time, kind, reason, object, message] = HEADS;
                self.out.line(self.columns(time, kind, reason, object, message));
            }
            self.out.line(line);
        }
        seen.kept.push(EventRecord {
            time: larder_api::convert::time(time),
            event_type: event_type.to_string(),
            reason: reason.to_string(),
            object: label,
            namespace: object.namespace,
            field: object.field_path,
            message,
        });
    }
}

fn time_of_day(time: SystemTime) -> String {
    zoned(time, "%H:%M:%S")
}

fn date_and_time(time: SystemTime) -> String {
    zoned(time, "%Y-%m-%dT%H:%M:%S%:z")
}

fn zoned(time: SystemTime, format: &str) -> String {
    match Timestamp::try_from(time) {
        Ok(time) => time.to_zoned(TimeZone::system()).strftime(format).to_string(),
        Err(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use larder::events::EventType;
    use larder::pod::{ObjectRef, Pod};

    use super::*;
    use crate::printer::tests::TestWriter;

    fn event(reason: EventReason, message: &str) -> Event {
        let pod = Pod { uid: "u".into(), namespace: "default".into(), name: "api".into(), ..Pod::default() };
        Event {
            time: SystemTime::UNIX_EPOCH + Duration::from_secs(1),
            event_type: EventType::Normal,
            reason,
            object: ObjectRef::new(&pod, "spec.containers{api}"),
            message: message.into(),
            requester: String::new(),
        }
    }

    fn log(look: EventStyle) -> (EventPrinterSink, TestWriter) {
        let page = TestWriter::default();
        let out = Arc::new(Printer::to(Box::new(page.clone()), Box::new(std::io::sink())));
        let labels = HashMap::from([("u".to_owned(), "deployment/api".to_owned())]);
        (EventPrinterSink::new(out, look, labels), page)
    }

    #[test]
    fn an_event_names_the_object_that_the_user_knows() {
        let (events, page) = log(EventStyle::Short);
        events.record(event(EventReason::Pulling, "Pulling image \"a:1\""));
        let text = page.text();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "TIME       TYPE      REASON              OBJECT           MESSAGE");
        assert!(
            lines[1].ends_with("   Normal    Pulling             deployment/api   Pulling image \"a:1\"")
        );
        assert_eq!(events.records().len(), 1);
    }

    #[test]
    fn back_off_is_printed_once_until_something_else_happens() {
        let (events, page) = log(EventStyle::Short);
        let sync = || {
            events.record(event(EventReason::BackOff, "Back-off pulling image \"a:1\""));
            events.record(event(EventReason::Failed, "Error: ImagePullBackOff"));
        };
        sync();
        sync();
        assert_eq!(page.text().matches("Back-off").count(), 1);
        assert_eq!(page.text().matches("Error: ImagePullBackOff").count(), 1);
        events.record(event(EventReason::Pulling, "Pulling image \"a:1\""));
        sync();
        assert_eq!(page.text().matches("Back-off").count(), 2);
    }

    #[test]
    fn a_silent_log_keeps_what_it_does_not_print() {
        let (events, page) = log(EventStyle::Silent);
        events.record(event(EventReason::Pulled, "x"));
        assert_eq!(page.text(), "");
        assert_eq!(events.records()[0].object, "deployment/api");
        assert_eq!(events.records()[0].time, "1970-01-01T00:00:01Z");
    }
}
