//! The course of pulls as data: what an image or a layer did, whenever that changed.

use std::collections::HashMap;
use std::time::SystemTime;

use larder::backend::{ByteProgress, LayerPhase, LayerProgress, PullStep, PullWait};
use larder::pull::{PullPhase, PullStatus};
use larder::reference::{ImageName, LayerId};
use larder_api::convert;
use serde::Serialize;
use tokio::time::Instant;

/// The changes at each sample.
#[derive(Debug, Default)]
pub(crate) struct ProgressTimeline {
    records: Vec<ProgressChange>,
    /// Phase and reason to wait of each image and layer when they were last seen.
    last: HashMap<(ImageName, Option<LayerId>), (String, Option<String>)>,
}

/// A change, as `-o json` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ProgressChange {
    time: String,
    image: ImageName,
    /// `None` for the image as a whole.
    layer: Option<LayerId>,
    phase: String,
    waiting: Option<String>,
    done_bytes: Option<u64>,
    total_bytes: Option<u64>,
}

impl ProgressTimeline {
    /// Keeps what has changed.
    pub(crate) fn note(&mut self, pulls: &[PullStatus], time: SystemTime, now: Instant) {
        for pull in pulls {
            let queued = pull.waiting.as_ref().map(|waiting| format!("waits for {waiting}"));
            // Without the time that is left, which changes all the time.
            let wait = wait_of(pull);
            let reason = queued.clone().or_else(|| wait.map(|wait| wait.reason.clone()));
            let waiting = queued.or_else(|| wait.map(|wait| wait.at(now)));
            self.change((pull.image.clone(), None), phase_of(pull), reason, waiting, pull.bytes, time);
            for layer in pull.detail.iter().flat_map(|detail| &detail.layers) {
                let item = (pull.image.clone(), Some(layer.digest.clone()));
                let reason = layer.waiting.as_ref().map(|wait| wait.reason.clone());
                let waiting = layer.waiting.as_ref().map(|wait| wait.at(now));
                self.change(item, layer.phase.to_string(), reason, waiting, Some(layer.bytes), time);
            }
        }
    }

    fn change(
        &mut self,
        item: (ImageName, Option<LayerId>),
        phase: String,
        reason: Option<String>,
        waiting: Option<String>,
        bytes: Option<ByteProgress>,
        time: SystemTime,
    ) {
        let state = (phase.clone(), reason);
        if self.last.get(&item) == Some(&state) {
            return;
        }
        self.last.insert(item.clone(), state);
        let (image, layer) = item;
        self.records.push(ProgressChange {
            time: convert::time(time),
            image,
            layer,
            phase,
            waiting,
            done_bytes: bytes.map(|bytes| bytes.done),
            total_bytes: bytes.and_then(|bytes| bytes.total),
        });
    }

    /// Everything that was kept, in order.
    pub(crate) fn records(&self) -> Vec<ProgressChange> {
        self.records.clone()
    }
}

/// Returns the phase of a pull as a word.
pub(crate) fn phase_of(pull: &PullStatus) -> String {
    let detail = pull.detail.as_ref().filter(|_| pull.phase == PullPhase::Pulling);
    let Some(detail) = detail else { return pull.phase.to_string() };
    let to_do = || detail.layers.iter().filter(|layer| layer.phase != LayerPhase::Done);
    let unpacking =
        |layer: &LayerProgress| matches!(layer.phase, LayerPhase::Unpacking | LayerPhase::Unpacked);
    if detail.step == PullStep::Layers && to_do().count() > 0 && to_do().all(unpacking) {
        return LayerPhase::Unpacking.to_string();
    }
    detail.step.to_string()
}

/// Why a pull does not get on: what it waits for as a whole, or what each of its layers that is being fetched waits
/// for.
pub(crate) fn wait_of(pull: &PullStatus) -> Option<&PullWait> {
    let detail = pull.detail.as_ref()?;
    if let Some(wait) = &detail.waiting {
        return Some(wait);
    }
    let mut fetching = detail.layers.iter().filter(|layer| layer.phase == LayerPhase::Fetching).peekable();
    let first = fetching.peek()?.waiting.as_ref()?;
    fetching.all(|layer| layer.waiting.is_some()).then_some(first)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use larder::backend::PullDetail;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_changes_are_kept_and_time_that_passes_is_none() {
        let start = Instant::now();
        let wait = PullWait {
            reason: "rate limited by r.example".into(),
            until: Some(start + Duration::from_secs(9)),
        };
        let detail = PullDetail { step: PullStep::Resolving, waiting: Some(wait), ..PullDetail::default() };
        let mut pull = PullStatus {
            image: "r.example/app:1".into(),
            phase: PullPhase::Pulling,
            waiting: None,
            bytes: None,
            detail: Some(detail),
            since: start,
        };
        let mut course = ProgressTimeline::default();
        for seconds in 0..5 {
            course.note(
                std::slice::from_ref(&pull),
                SystemTime::UNIX_EPOCH,
                start + Duration::from_secs(seconds),
            );
        }
        pull.detail = Some(PullDetail { step: PullStep::Committing, ..PullDetail::default() });
        course.note(&[pull], SystemTime::UNIX_EPOCH, start);
        let seen: Vec<_> =
            course.records().into_iter().map(|record| (record.phase, record.waiting)).collect();
        assert_eq!(
            seen,
            [
                ("resolving".into(), Some("rate limited by r.example, 9s left".into())),
                ("committing".into(), None)
            ]
        );
    }
}
