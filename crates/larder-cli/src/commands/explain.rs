//! `larder explain`: the GC decision on one image, or access to it.

pub(super) mod access;
mod record;

use std::time::Duration;

use larder::go_format;
use larder::reference::Reference;
use larder_api::v1alpha1::{self as api, ExplainRequest, Explanation};
use serde::Serialize;

use super::inspect::names_and_ids;
use crate::args::{ExplainArgs, ExplainSubcommand};
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::{self, size};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &ExplainArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    if let Some(ExplainSubcommand::Access(args)) = &args.what {
        return access::run(args, session).await;
    }
    let (names, outcome) = names_and_ids(args.image.as_slice(), out);
    let [name] = names[..] else { return Ok(outcome) };
    let request = ExplainRequest { image: name.to_owned(), limits: Some(args.limits.request()) };
    let client = session.open(ImageAccess::collect()).await?;
    let explanation = client.ask(async |mut calls| calls.explain(request).await).await?;
    match args.output.data() {
        Some(format) => output::data(out, format, &ExplainRecord::new(&explanation)),
        None => print(name, &explanation, out),
    }
    Ok(CommandOutcome::Done)
}

/// The shape of `-o json`: the image as in `larder gc -o json`, and more.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ExplainRecord<'a> {
    #[serde(flatten)]
    image: Option<&'a api::ImageVerdict>,
    /// Layers that other images share; `null` if the backend reports no layers.
    shared_bytes: Option<u64>,
    /// Whether GC may remove it to remove all unused images.
    removable: bool,
    /// Pods that may use it without asking the registry; empty without a record of a pull.
    pulled_records: &'a [api::PulledRecord],
    /// Without a record: whether every pod may use it; `null` with one, or where no records are kept.
    unrecorded_access: Option<bool>,
}

impl ExplainRecord<'_> {
    fn new(explanation: &Explanation) -> ExplainRecord<'_> {
        ExplainRecord {
            image: explanation.verdict.as_ref(),
            shared_bytes: explanation.shared_bytes,
            removable: explanation.removable,
            pulled_records: &explanation.pulled_records,
            unrecorded_access: explanation.unrecorded_access,
        }
    }
}

fn print(requested: &str, explanation: &Explanation, out: &Printer) {
    let Some(image) = &explanation.verdict else { return };
    let head = requested_name(requested, &image.names);
    out.line(head.unwrap_or(&image.id));
    for name in image.names.iter().filter(|name| Some(*name) != head) {
        out.line(format_args!("  also named: {name}"));
    }
    out.line(format_args!("  id:         {}", image.id));
    let decision = if image.remove { "remove" } else { "retain" };
    out.line(format_args!("  next GC:    {decision}: {}", image.why));
    if !explanation.under_pressure.is_empty() {
        out.line(format_args!("  under pressure: {}", explanation.under_pressure));
    }
    for by in &image.used_by {
        out.line(format_args!("  used by:    {by}"));
    }
    let ago = |milliseconds: u64, time: &Option<String>| {
        let since = go_format::duration(Duration::from_secs(milliseconds / 1000));
        format!("{since} ago ({})", time.as_deref().unwrap_or_default())
    };
    record::print(&explanation.pulled_records, explanation.unrecorded_access, out);
    let first_seen = ago(explanation.milliseconds_since_first_seen, &image.first_seen);
    out.line(format_args!("  first seen: {first_seen}"));
    let last_used = explanation.milliseconds_since_last_used.map(|since| ago(since, &image.last_used));
    out.line(format_args!("  last used:  {}", last_used.unwrap_or_else(|| "never".to_owned())));
    out.line(format_args!("  size:       {}", size::bytes(image.size_bytes)));
    let shared =
        explanation.shared_bytes.map(|bytes| format!(" ({} shared with other images)", size::bytes(bytes)));
    let frees = size::bytes(image.unique_bytes);
    out.line(format_args!("  removal frees: {frees}{}", shared.unwrap_or_default()));
}

/// The requested name as the image has it, else its first one.
fn requested_name<'a>(requested: &str, names: &'a [String]) -> Option<&'a String> {
    let parsed = Reference::parse(requested).ok();
    let is_same =
        |name: &&String| *name == requested || (parsed.is_some() && Reference::parse(name).ok() == parsed);
    names.iter().find(is_same).or(names.first())
}
