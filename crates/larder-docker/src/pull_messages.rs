//! Converts the engine's pull messages to larder's progress.

use larder::backend::{ByteProgress, LayerPhase, LayerProgress, PullDetail, PullStep, PullWait};
use larder::reference::LayerId;

use crate::api::{PullMessage, count};

/// The state of a pull.
#[derive(Debug, Clone, Default)]
pub(crate) struct PullMessageTracker {
    step: PullStep,
    /// The missing layers, as the engine announced them: from the bottom up.
    layers: Vec<LayerProgress>,
}

impl PullMessageTracker {
    /// Processes one message. Unknown messages of other engine versions are ignored.
    pub(crate) fn note(&mut self, message: &PullMessage) {
        if message.status.starts_with("Digest:") {
            self.step = PullStep::Committing;
        }
        if message.status.starts_with("Retrying in") {
            let layer = self.layer(&message.id);
            // The engine sends one message for each second of the countdown.
            let reason = message.status.replacen("Retrying", "the engine retries", 1);
            layer.waiting = Some(PullWait { reason, until: None });
            return;
        }
        let phase = match message.status.as_str() {
            "Pulling fs layer" | "Waiting" => LayerPhase::Queued,
            "Downloading" => LayerPhase::Fetching,
            "Verifying Checksum" | "Download complete" | "Extracting" | "Unpacking" => LayerPhase::Unpacking,
            "Pull complete" => LayerPhase::Done,
            _ => return,
        };
        self.step = PullStep::Layers;
        let layer = self.layer(&message.id);
        (layer.phase, layer.waiting) = (phase, None);
        let detail = &message.progress_detail;
        match phase {
            LayerPhase::Fetching => {
                layer.bytes.done = count(detail.current);
                layer.bytes.total = Some(count(detail.total)).filter(|total| *total > 0);
            }
            LayerPhase::Unpacking | LayerPhase::Done => {
                // Small layers are never reported while they are fetched; the unpack messages have their size.
                if message.status == "Extracting" && layer.bytes.total.is_none() && detail.units.is_empty() {
                    layer.bytes.total = Some(count(detail.total)).filter(|total| *total > 0);
                }
                layer.bytes.done = layer.bytes.total.unwrap_or(layer.bytes.done);
            }
            _ => {}
        }
    }

    fn layer(&mut self, id: &LayerId) -> &mut LayerProgress {
        let at = self.layers.iter().position(|layer| layer.digest == *id).unwrap_or_else(|| {
            let (bytes, rate, waiting) = (ByteProgress::default(), None, None);
            self.layers.push(LayerProgress {
                digest: id.clone(),
                phase: LayerPhase::Queued,
                bytes,
                rate,
                waiting,
            });
            self.layers.len() - 1
        });
        &mut self.layers[at]
    }

    /// Bytes of all layers; the total is known once that of each layer is.
    pub(crate) fn bytes(&self) -> ByteProgress {
        let done = self.layers.iter().map(|layer| layer.bytes.done).sum();
        let settled = |layer: &LayerProgress| {
            layer.bytes.total.or_else(|| (layer.phase == LayerPhase::Done).then_some(layer.bytes.done))
        };
        let total = self.layers.iter().map(settled).sum::<Option<u64>>();
        ByteProgress { done, total: total.filter(|_| !self.layers.is_empty()) }
    }

    /// The present step.
    pub(crate) fn detail(&self) -> PullDetail {
        PullDetail { step: self.step, waiting: None, rate: None, layers: self.layers.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(messages: &[&str]) -> PullMessageTracker {
        let mut course = PullMessageTracker::default();
        for message in messages {
            course.note(&serde_json::from_str(message).unwrap());
        }
        course
    }

    #[test]
    fn layers_are_followed_from_their_announcement_to_their_end() {
        let begun = [
            r#"{"status":"Pulling from library/x","id":"1"}"#,
            r#"{"status":"Already exists","progressDetail":{},"id":"000"}"#,
            r#"{"status":"Pulling fs layer","progressDetail":{},"id":"aaa"}"#,
            r#"{"status":"Pulling fs layer","progressDetail":{},"id":"bbb"}"#,
            r#"{"status":"Downloading","progressDetail":{"current":30,"total":100},"progress":"[=>  ]","id":"aaa"}"#,
        ];
        let course = after(&begun);
        assert_eq!(course.bytes(), ByteProgress { done: 30, total: None }, "the second is not known yet");
        let detail = course.detail();
        let phases: Vec<_> = detail.layers.iter().map(|layer| (layer.digest.as_str(), layer.phase)).collect();
        assert_eq!(phases, [("aaa", LayerPhase::Fetching), ("bbb", LayerPhase::Queued)]);
        let ended = [
            r#"{"status":"Download complete","progressDetail":{},"id":"aaa"}"#,
            r#"{"status":"Extracting","progressDetail":{"current":5,"total":7},"id":"bbb"}"#,
            r#"{"status":"Pull complete","progressDetail":{},"id":"aaa"}"#,
            r#"{"status":"Pull complete","progressDetail":{},"id":"bbb"}"#,
            r#"{"status":"Digest: sha256:ff"}"#,
            r#"{"status":"Status: Downloaded newer image for x:1"}"#,
        ];
        let course = after(&[&begun[..], &ended[..]].concat());
        assert_eq!(course.bytes(), ByteProgress { done: 107, total: Some(107) });
        assert_eq!(course.detail().step, PullStep::Committing);
        assert!(course.detail().layers.iter().all(|layer| layer.phase == LayerPhase::Done));
    }

    #[test]
    fn a_retried_layer_is_shown_as_retrying_until_it_progresses() {
        let retrying = r#"{"status":"Retrying in 5 seconds","progressDetail":{},"id":"aaa"}"#;
        let course = after(&[retrying]);
        let waiting = course.detail().layers[0].waiting.clone().unwrap();
        assert_eq!(waiting.reason, "the engine retries in 5 seconds");
        let going_on = r#"{"status":"Downloading","progressDetail":{"current":1,"total":2},"id":"aaa"}"#;
        assert_eq!(after(&[retrying, going_on]).detail().layers[0].waiting, None);
    }

    #[test]
    fn seconds_are_no_bytes_and_strange_messages_change_nothing() {
        // With containerd's store, the unpacker reports seconds.
        let seconds =
            r#"{"status":"Extracting","progressDetail":{"current":3,"total":9,"units":"s"},"id":"a"}"#;
        assert_eq!(after(&[seconds]).bytes().done, 0);
        let strange = r#"{"status":"Dancing","progressDetail":null,"id":"a","aux":{"x":1}}"#;
        assert_eq!(after(&[strange]).bytes(), ByteProgress::default());
    }
}
