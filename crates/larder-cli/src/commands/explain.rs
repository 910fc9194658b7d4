//! `larder explain`: one image, and what garbage collection makes of it, or who may pull it.

mod access;
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
        None => tell(name, &explanation, out),
    }
    Ok(CommandOutcome::Done)
}

/// The shape of `-o json`: the image as in `larder gc -o json`, and more.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ExplainRecord<'a> {
    #[serde(flatten)]
    image: Option<&'a api::ImageVerdict>,
    /// Layers that other images have as well; `null` where layers are not known.
    shared_bytes: Option<u64>,
    /// Whether it may go at all, when all that is unused has to.
    removable: bool,
    /// Who may use it without asking the registry; empty where no pull is on record.
    pull_records: &'a [api::PullRecord],
}

impl ExplainRecord<'_> {
    fn new(explanation: &Explanation) -> ExplainRecord<'_> {
        ExplainRecord {
            image: explanation.verdict.as_ref(),
            shared_bytes: explanation.shared_bytes,
            removable: explanation.removable,
            pull_records: &explanation.pull_records,
        }
    }
}

fn tell(asked: &str, explanation: &Explanation, out: &Printer) {
    let Some(image) = &explanation.verdict else { return };
    let head = asked_of(asked, &image.names);
    out.line(head.unwrap_or(&image.id));
    for name in image.names.iter().filter(|name| Some(*name) != head) {
        out.line(format_args!("  also named: {name}"));
    }
    out.line(format_args!("  id:         {}", image.id));
    let goes = if image.goes { "goes" } else { "stays" };
    out.line(format_args!("  now:        it {goes}: {}.", image.why));
    if !explanation.under_pressure.is_empty() {
        out.line(format_args!("  under pressure: {}.", explanation.under_pressure));
    }
    for by in &image.used_by {
        out.line(format_args!("  used by:    {by}"));
    }
    let ago = |milliseconds: u64, time: &Option<String>| {
        let since = go_format::duration(Duration::from_secs(milliseconds / 1000));
        format!("{since} ago ({})", time.as_deref().unwrap_or_default())
    };
    record::tell(&explanation.pull_records, out);
    let first_seen = ago(explanation.milliseconds_since_first_seen, &image.first_seen);
    out.line(format_args!("  first seen: {first_seen}"));
    let last_used = explanation.milliseconds_since_last_used.map(|since| ago(since, &image.last_used));
    out.line(format_args!("  last used:  {}", last_used.unwrap_or_else(|| "never".to_owned())));
    out.line(format_args!("  size:       {}", size::bytes(image.size_bytes)));
    let shared =
        explanation.shared_bytes.map(|bytes| format!("; {} stay with other images", size::bytes(bytes)));
    let frees = size::bytes(image.unique_bytes);
    out.line(format_args!("  removing it frees {frees}{}", shared.unwrap_or_default()));
}

/// The name that was asked for, as the image has it, else its first one.
fn asked_of<'a>(asked: &str, names: &'a [String]) -> Option<&'a String> {
    let parsed = Reference::parse(asked).ok();
    let is_it =
        |name: &&String| *name == asked || (parsed.is_some() && Reference::parse(name).ok() == parsed);
    names.iter().find(is_it).or(names.first())
}
