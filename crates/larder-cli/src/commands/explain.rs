//! `larder explain`: one image, and what collection thinks of it, or who may pull it.

mod access;
mod record;

use std::collections::HashSet;
use std::time::Duration;

use larder::backend::{Backend, ImageSpec};
use larder::gc::{
    Collector, GcPolicy, Goal, ImageVerdict, Scene, Stays, Verdict, nearest_names, plan, plan_round,
};
use larder::gotext;
use larder::records::ImageRecords;
use larder::reference::Reference;
use larder_control::v1alpha1::{self as api, ExplainRequest, Explanation};
use serde::Serialize;

use super::gc::report;
use super::inspect::{absent, names_and_ids};
use crate::args::{Connection, ExplainArgs, ExplainWhat};
use crate::collect;
use crate::daemon::Daemon;
use crate::daemon::convert::millis;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output::{self, size};

pub(super) async fn run(args: &ExplainArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    if let Some(ExplainWhat::Access(args)) = &args.what {
        return access::run(args, connection, out).await;
    }
    let (names, outcome) = names_and_ids(args.image.as_slice(), out);
    let [name] = names[..] else { return Ok(outcome) };
    let limits = args.limits.request();
    let explanation = if let Some(daemon) = Daemon::find(connection)? {
        let request = ExplainRequest { image: name.to_owned(), limits: Some(limits) };
        daemon.ask(async |mut client| client.explain(request).await).await?
    } else {
        let collecting = collect::collecting(connection, &limits, out)?;
        let policy = collecting.collector.policy();
        let records = collecting.records.as_deref();
        explain(name, &*collecting.backend, &collecting.collector, &policy, records).await?
    };
    match args.output.data() {
        Some(format) => output::data(out, format, &Shown::new(&explanation)),
        None => tell(name, &explanation, out),
    }
    Ok(Outcome::Done)
}

/// What there is to say of an image.
pub(crate) async fn explain(
    name: &str,
    backend: &dyn Backend,
    collector: &Collector,
    policy: &GcPolicy,
    records: Option<&ImageRecords>,
) -> Result<Explanation, Failure> {
    let found = backend.status(&ImageSpec::named(name)).await?;
    let scene = collect::scene(collector).await?;
    let Some(image) = found else { return Err(unknown(name, &scene)) };
    let now = plan_round(&scene, policy);
    let last = plan(&scene, policy, Goal::AllUnused);
    let of = |verdicts: &[ImageVerdict]| verdicts.iter().find(|verdict| verdict.id == image.id).cloned();
    let (Some(now), Some(last)) = (of(&now.verdicts), of(&last.verdicts)) else {
        return Err(unknown(name, &scene));
    };
    let since = |stamp| millis(scene.now.since(stamp));
    Ok(Explanation {
        verdict: Some(report::image(&now, policy)),
        shared_bytes: shared(&scene, &image.id),
        removable: matches!(last.verdict, Verdict::Goes(_)),
        under_pressure: under_pressure(&now.verdict, &last.verdict),
        milliseconds_since_first_seen: since(now.first_seen),
        milliseconds_since_last_used: now.last_used.map(since),
        pull_records: record::of(records, &image.id).await,
    })
}

/// What becomes of it when room is needed, where that is not what becomes of it now.
fn under_pressure(now: &Verdict, last: &Verdict) -> String {
    match (now, last) {
        (Verdict::Stays(Stays::NotNeeded | Stays::FreesNothing), Verdict::Stays(stays)) => {
            format!("it stays: {stays}")
        }
        (Verdict::Stays(_), Verdict::Goes(_)) => {
            "it may go, when images unused for longer are not enough".to_owned()
        }
        _ => String::new(),
    }
}

/// The shape of `-o json`: the image as in `larder gc -o json`, and more.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown<'a> {
    #[serde(flatten)]
    image: Option<&'a api::ImageVerdict>,
    /// Layers that other images have as well; `null` where layers are not known.
    shared_bytes: Option<u64>,
    /// Whether it may go at all, when all that is unused has to.
    removable: bool,
    /// Who may use it without asking the registry; empty where no pull is on record.
    pull_records: &'a [api::PullRecord],
}

impl Shown<'_> {
    fn new(explanation: &Explanation) -> Shown<'_> {
        Shown {
            image: explanation.verdict.as_ref(),
            shared_bytes: explanation.shared_bytes,
            removable: explanation.removable,
            pull_records: &explanation.pull_records,
        }
    }
}

fn tell(asked: &str, explanation: &Explanation, out: &Out) {
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
        let since = gotext::duration(Duration::from_secs(milliseconds / 1000));
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

/// What its layers take that other images have as well.
fn shared(scene: &Scene, id: &str) -> Option<u64> {
    let mine = &scene.layers.of(id)?.layers;
    let others = scene.images.iter().filter(|image| image.id != id);
    let others: HashSet<u32> = others
        .filter_map(|image| scene.layers.of(&image.id))
        .flat_map(|known| known.layers.clone())
        .collect();
    let all = scene.layers.all();
    Some(
        mine.iter()
            .filter(|layer| others.contains(layer))
            .map(|&layer| all[layer as usize].amount.bytes)
            .sum(),
    )
}

/// There is no such image; perhaps another name was meant.
fn unknown(name: &str, scene: &Scene) -> Failure {
    let near = nearest_names(name, scene.images.iter().flat_map(|image| &image.names));
    match near.as_slice() {
        [] => absent(name),
        near => absent(name).hint(format!("present and similar: {}", near.join(", "))),
    }
}
