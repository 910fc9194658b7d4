//! `larder rm`.

use larder::reference::ImageId;
use larder_api::v1::{self as api, RemoveRequest, RemoveResponse, removed};
use serde::Serialize;

use super::inspect::names_and_ids;
use crate::args::RmArgs;
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::output::{self, DataFormat};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &RmArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let (names, outcome) = names_and_ids(&args.images, out);
    let request = RemoveRequest {
        images: names.into_iter().map(str::to_owned).collect(),
        ignore_not_found: args.ignore_not_found,
        force: args.force,
        ..RemoveRequest::default()
    };
    let answer = if request.images.is_empty() {
        Ok(RemoveResponse::default())
    } else {
        let client = session.open(&ImageAccess::write()).await?;
        client.wait(async |mut calls| calls.remove(request).await).await
    };
    let outcome = outcome
        .max(answer.as_ref().map_or(CommandOutcome::Done, |answer| print_all(answer, args.output, out)));
    if let Some(format) = args.output {
        let results = answer.iter().flat_map(|answer| &answer.results);
        let removed: Vec<_> = results.filter_map(RmRecord::of).collect();
        output::data(out, format, &removed);
    }
    match answer?.error {
        Some(error) => Err(error.into()),
        None => Ok(outcome),
    }
}

/// Prints the result for each image.
pub(super) fn print_all(
    answer: &RemoveResponse,
    format: Option<DataFormat>,
    out: &Printer,
) -> CommandOutcome {
    let mut outcome = CommandOutcome::Done;
    for result in &answer.results {
        if let Some(removed::Result::Refused(refused)) = &result.result {
            outcome = outcome.max(Failure::from(refused.clone()).print(out));
        }
        if !result.note.is_empty() {
            out.info(&result.note);
        }
        if let (None, Some(record)) = (format, RmRecord::of(result)) {
            print(&record, out);
        }
    }
    for warning in &answer.warnings {
        out.warning(warning);
    }
    outcome
}

/// Removed image, or removed names of one. The shape of `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RmRecord {
    id: ImageId,
    /// Whether the image was removed with its last name.
    removed: bool,
    repo_tags: Vec<String>,
    repo_digests: Vec<String>,
}

impl RmRecord {
    fn of(result: &api::Removed) -> Option<RmRecord> {
        match &result.result {
            Some(removed::Result::Removed(image)) => Some(RmRecord {
                id: image.id.clone().into(),
                removed: true,
                repo_tags: image.repo_tags.clone(),
                repo_digests: image.repo_digests.clone(),
            }),
            Some(removed::Result::Untagged(untagged)) => {
                let names = untagged.names.iter().cloned();
                let (repo_digests, repo_tags) = names.partition(|name| name.contains('@'));
                Some(RmRecord { id: untagged.id.clone().into(), removed: false, repo_tags, repo_digests })
            }
            _ => None,
        }
    }
}

/// Prints removed names and images as docker does: the names, then the ID of a removed image.
fn print(record: &RmRecord, out: &Printer) {
    for name in record.repo_tags.iter().chain(&record.repo_digests) {
        out.line(format_args!("Untagged: {name}"));
    }
    if record.removed {
        out.line(format_args!("Deleted: {}", record.id));
    }
}
