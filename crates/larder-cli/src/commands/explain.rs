//! `larder explain`: the GC decision on one image, or access to it.

pub(super) mod access;
pub(super) mod lines;
mod pull_record_lines;

use larder_api::v1::{self as api, ExplainRequest, Explanation};
use serde::Serialize;

use super::inspect::names_and_ids;
use crate::args::{ExplainArgs, ExplainSubcommand};
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &ExplainArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    if let Some(ExplainSubcommand::Access(args)) = &args.what {
        return access::run(args, session).await;
    }
    let (names, outcome) = names_and_ids(args.image.as_slice(), out);
    let [name] = names[..] else { return Ok(outcome) };
    let request = ExplainRequest { image: name.to_owned(), limits: Some(args.limits.request()) };
    let client = session.open(&ImageAccess::collect()).await?;
    let explanation = client.ask(async |mut calls| calls.explain(request).await).await?;
    match args.output.data() {
        Some(format) => output::data(out, format, &ExplainRecord::new(&explanation)),
        None => lines::lines(name, &explanation).iter().for_each(|line| out.line(line)),
    }
    Ok(CommandOutcome::Done)
}

/// The shape of `-o json`: the image as in `larder gc -o json`, and more.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ExplainRecord<'a> {
    #[serde(flatten)]
    image: Option<&'a api::ImageDecision>,
    /// Layers that other images share; `null` if the backend reports no layers.
    shared_bytes: Option<u64>,
    /// Whether GC may remove it to remove all unused images.
    removable: bool,
    /// Pods that may use it without asking the registry; empty without a record of a pull.
    pulled_records: &'a [api::PulledRecord],
    /// Without a record: whether every pod may use it; `null` with one, or where no records are kept.
    unrecorded_access: Option<bool>,
    hidden: bool,
    /// Mounts of it from larder's own store.
    mounts: &'a [api::Mount],
}

impl ExplainRecord<'_> {
    fn new(explanation: &Explanation) -> ExplainRecord<'_> {
        ExplainRecord {
            image: explanation.decision.as_ref(),
            shared_bytes: explanation.shared_bytes,
            removable: explanation.removable,
            pulled_records: &explanation.pulled_records,
            unrecorded_access: explanation.unrecorded_access,
            hidden: explanation.hidden,
            mounts: &explanation.mounts,
        }
    }
}
