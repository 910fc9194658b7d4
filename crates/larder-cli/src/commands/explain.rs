//! `larder explain`: one image, and what collection thinks of it.

use larder::backend::ImageSpec;
use larder::gc::{Goal, ImageVerdict, Scene, Stays, Verdict, nearest_names, plan, plan_round};
use serde::Serialize;

use super::gc::report::{ImageReport, time};
use super::inspect::{absent, names_and_ids};
use crate::args::{Connection, ExplainArgs};
use crate::collect;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output::{self, size};

pub(super) async fn run(args: &ExplainArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let (names, outcome) = names_and_ids(std::slice::from_ref(&args.image), out);
    let [name] = names[..] else { return Ok(outcome) };
    let collecting = collect::collecting(connection, &args.limits, out)?;
    let collector = &collecting.collector;
    let found = collecting.backend.status(&ImageSpec::named(name)).await?;
    let scene = collect::scene(collector).await?;
    let Some(image) = found else { return Err(unknown(name, &scene)) };
    let now = plan_round(&scene, &collector.policy());
    let of = |verdicts: &[ImageVerdict]| verdicts.iter().find(|verdict| verdict.id == image.id).cloned();
    let (Some(verdict), Some(last)) =
        (of(&now.verdicts), of(&plan(&scene, &collector.policy(), Goal::AllUnused).verdicts))
    else {
        return Err(unknown(name, &scene));
    };
    let explained = Explained {
        shared_bytes: shared(&scene, &image.id),
        removable: matches!(last.verdict, Verdict::Goes(_)),
        image: ImageReport::from(&verdict),
    };
    match args.output.data() {
        Some(format) => output::data(out, format, &explained),
        None => explained.tell(&verdict, &last, &scene, out),
    }
    Ok(Outcome::Done)
}

/// The shape of `-o json`: the image as in `larder gc -o json`, and more.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Explained {
    #[serde(flatten)]
    image: ImageReport,
    /// Layers that other images have as well; `null` where layers are not known.
    shared_bytes: Option<u64>,
    /// Whether it may go at all, when all that is unused has to.
    removable: bool,
}

impl Explained {
    fn tell(&self, now: &ImageVerdict, last: &ImageVerdict, scene: &Scene, out: &Out) {
        let image = &self.image;
        out.line(image.names.first().unwrap_or(&image.id));
        for name in image.names.iter().skip(1) {
            out.line(format_args!("  also named: {name}"));
        }
        out.line(format_args!("  id:         {}", image.id));
        out.line(format_args!("  now:        it {}.", now.verdict));
        if let (Verdict::Stays(Stays::NotNeeded | Stays::FreesNothing), Verdict::Stays(stays)) =
            (&now.verdict, &last.verdict)
        {
            out.line(format_args!("  under pressure: it stays: {stays}."));
        } else if matches!(now.verdict, Verdict::Stays(_)) && self.removable {
            out.line("  under pressure: it may go, when images unused for longer are not enough.");
        }
        for by in &image.used_by {
            out.line(format_args!("  used by:    {by}"));
        }
        let ago = |stamp: larder::gc::Stamp| {
            let since = std::time::Duration::from_secs(scene.now.since(stamp).as_secs());
            format!("{} ago ({})", larder::gotext::duration(since), time(stamp).unwrap_or_default())
        };
        out.line(format_args!("  first seen: {}", ago(now.first_seen)));
        out.line(format_args!("  last used:  {}", now.last_used.map_or("never".to_owned(), ago)));
        out.line(format_args!("  size:       {}", size::bytes(image.size_bytes)));
        let shared =
            self.shared_bytes.map(|bytes| format!("; {} stay with other images", size::bytes(bytes)));
        let frees = size::bytes(image.unique_bytes);
        out.line(format_args!("  removing it frees {frees}{}", shared.unwrap_or_default()));
    }
}

/// What its layers take that other images have as well.
fn shared(scene: &Scene, id: &str) -> Option<u64> {
    let mine = &scene.layers.of(id)?.layers;
    let others = scene.images.iter().filter(|image| image.id != id);
    let others: std::collections::HashSet<u32> = others
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
