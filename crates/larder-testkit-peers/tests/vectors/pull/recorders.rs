//! Recorders of the output of a manager in a case: events, metrics, times, and calls to the records.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder::credentials::LazyCredentialLookup;
use larder::events::{Event, EventReason, EventSink};
use larder::pull::{EnsureLabels, PullMetrics, PullTimeRecorder};
use larder::records::{PullRecords, RecordedCredentials, RecordsError};
use larder::reference::{ImageId, ImageName};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
pub(super) struct EventRecorder(Mutex<Vec<Event>>);

impl EventRecorder {
    pub(super) fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *locked(&self.0))
    }
}

impl EventSink for EventRecorder {
    fn record(&self, event: Event) {
        // A case compares the events of ensure itself; none of them is the caller's `BoxError: Error: ...`.
        assert!(event.reason != EventReason::Failed || !event.message.starts_with("Error:"));
        locked(&self.0).push(event);
    }
}

#[derive(Default)]
pub(super) struct LabelRecorder(Mutex<Vec<EnsureLabels>>);

impl LabelRecorder {
    /// The labels of the one call since the last time; null if it was not one.
    pub(super) fn take(&self) -> Value {
        match std::mem::take(&mut *locked(&self.0)).as_slice() {
            [one] => json!({
                "pull_policy": one.pull_policy,
                "present_locally": one.present_locally.to_string(),
                "pull_required": one.pull_required.to_string(),
            }),
            _ => Value::Null,
        }
    }
}

impl PullMetrics for LabelRecorder {
    fn ensure_requested(&self, labels: &EnsureLabels) {
        locked(&self.0).push(labels.clone());
    }

    fn image_pulled(&self, _size_bytes: u64, _duration: Duration) {}

    fn image_downloaded(&self, _size_bytes: u64) {}
}

/// Counts started and finished marks.
#[derive(Default)]
pub(super) struct PullTimeCounter(Mutex<[usize; 2]>);

impl PullTimeCounter {
    pub(super) fn take(&self) -> [usize; 2] {
        std::mem::take(&mut *locked(&self.0))
    }
}

impl PullTimeRecorder for PullTimeCounter {
    fn started_pulling(&self, _pod_uid: &str, _now: Instant) {
        locked(&self.0)[0] += 1;
    }

    fn finished_pulling(&self, _pod_uid: &str, _now: Instant) {
        locked(&self.0)[1] += 1;
    }
}

/// A record check with the answers of the case, which records its calls.
#[derive(Default)]
pub(super) struct ScriptedRecords {
    answers: Mutex<(MustAttemptPullAnswer, Option<String>)>,
    calls: Mutex<Vec<Value>>,
}

impl ScriptedRecords {
    pub(super) fn answer(
        &self,
        must_attempt_pull: Option<MustAttemptPullAnswer>,
        intent_error: Option<String>,
    ) {
        *locked(&self.answers) = (must_attempt_pull.unwrap_or_default(), intent_error);
    }

    pub(super) fn take(&self) -> Vec<Value> {
        std::mem::take(&mut *locked(&self.calls))
    }

    fn note(&self, call: Value) {
        locked(&self.calls).push(call);
    }
}

#[async_trait::async_trait]
impl PullRecords for ScriptedRecords {
    async fn must_attempt_pull(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        _credentials: &mut LazyCredentialLookup<'_>,
    ) -> Result<bool, RecordsError> {
        self.note(json!({"call": "MustAttemptImagePull", "image": image, "image_ref": image_ref}));
        let (answer, _) = &*locked(&self.answers);
        match &answer.error {
            Some(text) => Err(RecordsError::other(text.clone())),
            None => Ok(answer.required),
        }
    }

    async fn record_pull_intent(&self, image: &ImageName) -> Result<(), RecordsError> {
        self.note(json!({"call": "RecordPullIntent", "image": image}));
        let (_, error) = &*locked(&self.answers);
        error.clone().map_or(Ok(()), |text| Err(RecordsError::other(text)))
    }

    async fn record_image_pulled(
        &self,
        image: &ImageName,
        image_ref: &ImageId,
        credentials: &RecordedCredentials,
    ) {
        let credentials = match credentials {
            RecordedCredentials::NotRecorded => json!({}),
            RecordedCredentials::NodePodsAccessible => json!({"nodePodsAccessible": true}),
            RecordedCredentials::Secret(at, hash) => json!({"kubernetesSecrets": [
                {"uid": at.uid, "namespace": at.namespace, "name": at.name, "credentialHash": hash}]}),
            RecordedCredentials::ServiceAccount(at) => json!({"kubernetesServiceAccounts": [
                {"uid": at.uid, "namespace": at.namespace, "name": at.name}]}),
        };
        self.note(json!({"call": "RecordImagePulled", "image": image, "image_ref": image_ref,
                         "credentials": credentials}));
    }

    fn record_image_pull_failed(&self, image: &ImageName) {
        self.note(json!({"call": "RecordImagePullFailed", "image": image}));
    }
}

/// Answer of the records in one attempt.
#[derive(Deserialize, Clone, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct MustAttemptPullAnswer {
    #[serde(default)]
    required: bool,
    error: Option<String>,
}
