//! What came of it: a table and a count, or data.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use larder::pull::{Ensured, Outcome as Pulled};
use serde::Serialize;

use super::gather::{Gathered, Job};
use crate::commands::work::Verdict;
use crate::exit::Outcome;
use crate::manifest::BadInput;
use crate::out::Out;
use crate::output::events::EventRecord;
use crate::output::table::Table;
use crate::output::{self, Format, size};

/// Everything that happened. The shape of `-o json`; documented in docs/output.md.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Summary {
    images: Vec<Row>,
    events: Vec<EventRecord>,
    bad_input: Vec<BadInput>,
    #[serde(rename = "summary")]
    counts: Counts,
}

/// One image that was wanted.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    image: String,
    policy: String,
    object: String,
    namespace: String,
    part: String,
    field: String,
    /// `Present`, `Pulled`, `Failed`, `Unfinished`.
    result: &'static str,
    /// Such as `ErrImagePull`; empty unless failed.
    reason: String,
    message: String,
    id: Option<String>,
    size_bytes: Option<u64>,
    pull_seconds: Option<f64>,
    total_seconds: Option<f64>,
    retry_in_seconds: Option<f64>,
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Counts {
    present: usize,
    pulled: usize,
    failed: usize,
    unfinished: usize,
}

impl Summary {
    /// Joins what was wanted with what became of it.
    pub(super) fn new(gathered: &Gathered, verdicts: &[Verdict], events: Vec<EventRecord>) -> Self {
        let images: Vec<_> =
            gathered.jobs.iter().zip(verdicts).map(|(job, verdict)| row(job, verdict)).collect();
        let count = |result| images.iter().filter(|row| row.result == result).count();
        let counts = Counts {
            present: count("Present"),
            pulled: count("Pulled"),
            failed: count("Failed"),
            unfinished: count("Unfinished"),
        };
        let bad_input = gathered.problems.iter().map(crate::manifest::Located::as_data).collect();
        Summary { images, events, bad_input, counts }
    }

    /// How it ended, as far as images that were tried go.
    pub(super) fn outcome(&self) -> Outcome {
        if self.has_failed() { Outcome::Failed } else { Outcome::Done }
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
        self.images.iter().filter(|row| row.result == "Unfinished").map(|row| row.image.as_str())
    }

    /// Prints it.
    pub(super) fn show(&self, format: Format, retry_for: Duration, out: &Out) {
        if let Some(format) = format.data() {
            output::data(out, format, self);
        } else {
            out.line(format_args!("\n{}\n\n{}", self.table(format.is_wide()), self.count_line()));
        }
        if let Some(hint) = self.retry_hint(retry_for) {
            out.note(format_args!("hint: {hint}"));
        }
    }

    fn table(&self, wide: bool) -> Table {
        let heads = ["IMAGE", "OBJECT", "PART", "RESULT", "SIZE", "TIME"];
        let more = ["POLICY", "IMAGE ID"].into_iter().filter(|_| wide);
        let mut table = Table::new(heads.into_iter().chain(more));
        for row in &self.images {
            let cells = [
                row.image.clone(),
                row.object.clone(),
                row.part.clone(),
                if row.reason.is_empty() { row.result.to_owned() } else { row.reason.clone() },
                row.size_bytes.map(size::bytes).unwrap_or_default(),
                row.total_seconds
                    .map(|seconds| size::duration(Duration::from_secs_f64(seconds)))
                    .unwrap_or_default(),
            ];
            let more = [row.policy.clone(), row.id.clone().unwrap_or_default()].into_iter().filter(|_| wide);
            table.row(cells.into_iter().chain(more));
        }
        table
    }

    fn count_line(&self) -> String {
        let Counts { present, pulled, failed, unfinished } = self.counts;
        let mut text = format!("{present} present, {pulled} pulled, {failed} failed");
        if unfinished > 0 {
            let _ = write!(text, ", {unfinished} unfinished"); // writing to a text does not fail
        }
        text
    }

    /// When the back-off would allow the next try of what failed.
    fn retry_hint(&self, retry_for: Duration) -> Option<String> {
        let mut waits: BTreeMap<Duration, Vec<&str>> = BTreeMap::new();
        for row in &self.images {
            if let Some(seconds) = row.retry_in_seconds {
                let images = waits.entry(Duration::from_secs_f64(seconds.ceil())).or_default();
                if !images.contains(&row.image.as_str()) {
                    images.push(&row.image);
                }
            }
        }
        if waits.is_empty() {
            return None;
        }
        let waits = waits.iter().map(|(wait, images)| {
            format!("back-off {} for {}", size::whole_seconds(*wait), images.join(", "))
        });
        let longer = if retry_for.is_zero() { "; --retry-for 5m keeps trying" } else { "" };
        Some(format!("{}{longer}", waits.collect::<Vec<_>>().join("; ")))
    }
}

fn row(job: &Job, verdict: &Verdict) -> Row {
    let request = &job.request;
    let row = Row {
        image: request.image.clone(),
        policy: request.policy.to_string(),
        object: job.label.clone(),
        namespace: request.pod.namespace.clone(),
        part: job.part.clone(),
        field: request.target.as_ref().map(|target| target.field_path.clone()).unwrap_or_default(),
        result: "Unfinished",
        reason: String::new(),
        message: String::new(),
        id: None,
        size_bytes: None,
        pull_seconds: None,
        total_seconds: None,
        retry_in_seconds: None,
    };
    match verdict {
        Verdict::Unfinished => row,
        Verdict::Failed(error) => Row {
            result: "Failed",
            reason: error.reason.to_string(),
            message: error.message.clone(),
            retry_in_seconds: error.retry_in.map(|wait| wait.as_secs_f64()),
            ..row
        },
        Verdict::Ensured(Ensured { image_ref, message, outcome }) => {
            let row = Row { id: Some(image_ref.clone()), message: message.clone(), ..row };
            match *outcome {
                Pulled::Present => Row { result: "Present", ..row },
                Pulled::Pulled { size_bytes, pull_duration, total_duration } => Row {
                    result: "Pulled",
                    size_bytes: Some(size_bytes).filter(|size| *size > 0),
                    pull_seconds: Some(pull_duration.as_secs_f64()),
                    total_seconds: Some(total_duration.as_secs_f64()),
                    ..row
                },
            }
        }
    }
}
