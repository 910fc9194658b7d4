//! The result of `ensure`: a table and a count, or data.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::time::Duration;

use larder::backend::Image;
use larder::reference::ImageId;
use serde::Serialize;

use super::inputs::{EnsureInputs, EnsureJob, JobRecord};
use crate::args::EnsureArgs;
use crate::commands::ensure_runner::{EnsureOutcomeRecord, EnsureResult};
use crate::commands::pull_failure;
use crate::exit::CommandOutcome;
use crate::output::events::EventRecord;
use crate::output::progress_timeline::ProgressChange;
use crate::output::table::TextTable;
use crate::output::{self, size};
use crate::printer::Printer;
use larder_agent::manifest::InputProblemRecord;

/// Everything that happened. The shape of `-o json`; documented in docs/output.md.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EnsureSummary {
    images: Vec<EnsureRow>,
    events: Vec<EventRecord>,
    progress: Vec<ProgressChange>,
    bad_input: Vec<InputProblemRecord>,
    skipped: Vec<SkippedObjects>,
    #[serde(rename = "summary")]
    counts: EnsureCounts,
}

/// Objects of a kind that wants no images.
#[derive(Debug, Serialize)]
struct SkippedObjects {
    kind: String,
    count: usize,
}

/// One image that was wanted.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct EnsureRow {
    #[serde(flatten)]
    job: JobRecord,
    #[serde(serialize_with = "larder_api::or_null")]
    field: String,
    #[serde(flatten)]
    outcome: EnsureOutcomeRecord,
    retry_in_seconds: Option<f64>,
    /// Whether the same may succeed later.
    #[serde(skip)]
    time_helps: bool,
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct EnsureCounts {
    present: usize,
    pulled: usize,
    failed: usize,
    unfinished: usize,
}

impl EnsureSummary {
    /// Joins what was wanted with what became of it.
    pub(super) fn new(gathered: &EnsureInputs, results: &[EnsureResult], events: Vec<EventRecord>) -> Self {
        let images: Vec<_> =
            gathered.jobs.iter().zip(results).map(|(job, result)| row(job, result)).collect();
        let count = |result| images.iter().filter(|row| row.outcome.result == result).count();
        let counts = EnsureCounts {
            present: count("Present"),
            pulled: count("Pulled"),
            failed: count("Failed"),
            unfinished: count("Unfinished"),
        };
        let bad_input =
            gathered.problems.iter().map(larder_agent::manifest::LocatedProblem::as_data).collect();
        let skipped = gathered
            .skipped
            .iter()
            .map(|(kind, count)| SkippedObjects { kind: kind.clone(), count: *count })
            .collect();
        EnsureSummary { images, events, progress: Vec::new(), bad_input, skipped, counts }
    }

    /// Adds the progress of the pulls.
    #[must_use]
    pub(super) fn with_progress(self, progress: Vec<ProgressChange>) -> Self {
        EnsureSummary { progress, ..self }
    }

    /// How it ended, as far as images that were tried go.
    pub(super) fn outcome(&self) -> CommandOutcome {
        if self.has_failed() { CommandOutcome::Failed } else { CommandOutcome::Done }
    }

    /// Whether an image could not be made present.
    pub(super) fn has_failed(&self) -> bool {
        self.counts.failed > 0
    }

    /// Whether the run ended before all was known.
    pub(super) fn has_unfinished(&self) -> bool {
        self.counts.unfinished > 0
    }

    /// The images that were wanted when the run ended early.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = &str> {
        self.images.iter().filter(|row| row.outcome.result == "Unfinished").map(|row| row.job.image.as_str())
    }

    /// Whether a present image is without its size.
    pub(super) fn lacks_sizes(&self) -> bool {
        self.images.iter().any(EnsureRow::lacks_size)
    }

    /// Fills in the sizes of present images.
    pub(super) fn fill_sizes(&mut self, images: &[Image]) {
        let sizes: HashMap<_, _> = images.iter().map(|image| (&image.id, image.size)).collect();
        for row in self.images.iter_mut().filter(|row| row.lacks_size()) {
            let size = row.outcome.id.as_ref().and_then(|id| sizes.get(id)).copied();
            row.outcome.size_bytes = size.filter(|size| *size > 0);
        }
    }

    /// Prints it.
    pub(super) fn show(&self, args: &EnsureArgs, out: &Printer) {
        let EnsureArgs { output: format, retry_for, quiet, .. } = *args;
        if let Some(format) = format.data() {
            output::data(out, format, self);
        } else if quiet {
            for EnsureRow { job, outcome, .. } in
                self.images.iter().filter(|row| row.outcome.result == "Failed")
            {
                let (reason, message) = (outcome.reason.as_deref(), outcome.message.as_deref());
                let text: Vec<_> = reason.into_iter().chain(message).collect();
                out.error(format_args!("cannot pull {}: {}", job.image, text.join(": ")), &[]);
            }
        } else {
            out.line("");
            out.table(&self.table(format.is_wide()));
            out.line("");
            out.heading(self.count_line());
        }
        if let Some(hint) = self.retry_hint(retry_for) {
            out.info(format_args!("hint: {hint}"));
        }
    }

    fn table(&self, wide: bool) -> TextTable {
        let heads = ["IMAGE", "OBJECT", "CONTAINER", "RESULT", "SIZE", "DURATION"];
        let more = ["POLICY", "IMAGE ID"].into_iter().filter(|_| wide);
        let mut table = TextTable::new(heads.into_iter().chain(more));
        for EnsureRow { job, outcome, .. } in &self.images {
            let cells = [
                job.image.to_string(),
                job.object.clone(),
                job.container.clone(),
                outcome.reason.clone().unwrap_or_else(|| outcome.result.to_owned()),
                outcome.size_bytes.map(size::bytes).unwrap_or_default(),
                outcome
                    .total_seconds
                    .map(|seconds| size::duration(Duration::from_secs_f64(seconds)))
                    .unwrap_or_default(),
            ];
            let more = [job.policy.clone(), outcome.id.as_ref().map(ImageId::to_string).unwrap_or_default()]
                .into_iter()
                .filter(|_| wide);
            table.row(cells.into_iter().chain(more));
        }
        table
    }

    fn count_line(&self) -> String {
        let EnsureCounts { present, pulled, failed, unfinished } = self.counts;
        let mut text = format!("{present} present, {pulled} pulled, {failed} failed");
        if unfinished > 0 {
            let _ = write!(text, ", {unfinished} unfinished"); // writing to a text does not fail
        }
        text
    }

    /// Whether a retry may help. Back-off ends with the run, so it is named only with `retry_for`.
    fn retry_hint(&self, retry_for: Duration) -> Option<String> {
        if retry_for.is_zero() {
            let time_helps = self.images.iter().any(|row| row.time_helps);
            return time_helps.then(|| "the failure may be temporary: retry with --retry-for 5m".to_owned());
        }
        let mut wait_of: BTreeMap<&str, Duration> = BTreeMap::new();
        for row in &self.images {
            if let Some(seconds) = row.retry_in_seconds {
                let wait = Duration::from_secs_f64(seconds.ceil());
                let longest = wait_of.entry(row.job.image.as_str()).or_default();
                *longest = wait.max(*longest);
            }
        }
        if wait_of.is_empty() {
            return None;
        }
        let mut waits: BTreeMap<Duration, Vec<&str>> = BTreeMap::new();
        for (image, wait) in wait_of {
            waits.entry(wait).or_default().push(image);
        }
        let attempts = waits.iter().map(|(wait, images)| {
            let (wait, images) = (size::whole_seconds(*wait), images.join(", "));
            format!("next attempt for {images} in {wait}")
        });
        let attempts = attempts.collect::<Vec<_>>().join("; ");
        Some(format!("{attempts}, after --retry-for {}", size::whole_seconds(retry_for)))
    }
}

impl EnsureRow {
    fn lacks_size(&self) -> bool {
        self.outcome.result == "Present" && self.outcome.size_bytes.is_none()
    }
}

fn row(job: &EnsureJob, result: &EnsureResult) -> EnsureRow {
    let error = if let EnsureResult::Failed(error) = result { Some(error) } else { None };
    let retry_in = error.and_then(|error| error.retry_in);
    EnsureRow {
        job: job.record(),
        field: job.request.target.as_ref().map(|target| target.field_path.clone()).unwrap_or_default(),
        outcome: EnsureOutcomeRecord::of(result),
        retry_in_seconds: retry_in.map(|wait| wait.as_secs_f64()),
        time_helps: retry_in.is_some() && error.is_some_and(pull_failure::is_transient),
    }
}

#[cfg(test)]
mod tests {
    use larder::backend::CallErrorKind;
    use larder::pod::Pod;
    use larder::pull::{BackendFailure, EnsureError, EnsureReason, EnsureRequest, PullPolicy};

    use super::*;

    /// A summary of failures of an unknown kind: image, message, seconds until the next try.
    fn failures(failures: &[(&str, &str, u64)]) -> EnsureSummary {
        failures_of(None, failures)
    }

    fn failures_of(kind: Option<CallErrorKind>, failures: &[(&str, &str, u64)]) -> EnsureSummary {
        let jobs = failures.iter().map(|(image, ..)| EnsureJob {
            request: EnsureRequest::new(*image, PullPolicy::Always, Pod::default()),
            label: "image".into(),
            part: String::new(),
        });
        let mut gathered = EnsureInputs::default();
        gathered.jobs.extend(jobs);
        let results = failures.iter().map(|(_, message, wait)| {
            EnsureResult::Failed(EnsureError {
                reason: EnsureReason::ErrImagePull,
                message: (*message).to_owned(),
                retry_in: Some(Duration::from_secs(*wait)),
                failure: kind.map(|kind| BackendFailure { kind, hint: None }),
                access_denied: false,
                credentials_withheld: false,
            })
        });
        EnsureSummary::new(&gathered, &results.collect::<Vec<_>>(), Vec::new())
    }

    #[test]
    fn an_image_is_named_once_with_its_longest_wait() {
        let summary = failures(&[("a:1", "no route", 10), ("a:1", "no route", 20), ("b:1", "no route", 10)]);
        let hint = summary.retry_hint(Duration::from_secs(5)).unwrap();
        let (b, a) = ("next attempt for b:1 in 10s", "next attempt for a:1 in 20s");
        assert_eq!(hint, format!("{b}; {a}, after --retry-for 5s"));
    }

    #[test]
    fn a_run_without_retries_has_no_back_off_in_its_hint() {
        let hint = failures(&[("a:1", "no route", 10)]).retry_hint(Duration::ZERO);
        assert_eq!(hint.as_deref(), Some("the failure may be temporary: retry with --retry-for 5m"));
    }

    #[test]
    fn the_next_attempt_after_the_end_of_retries_is_named() {
        let hint = failures(&[("a:1", "no route", 39)]).retry_hint(Duration::from_secs(40));
        assert_eq!(hint.as_deref(), Some("next attempt for a:1 in 39s, after --retry-for 40s"));
    }

    #[test]
    fn denied_and_missing_images_have_no_hint_to_retry() {
        for kind in [CallErrorKind::NotFound, CallErrorKind::Denied] {
            let hint = failures_of(Some(kind), &[("a:1", "no", 10)]).retry_hint(Duration::ZERO);
            assert_eq!(hint, None, "{kind:?}");
        }
    }
}
