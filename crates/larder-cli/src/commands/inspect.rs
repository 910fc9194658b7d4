//! `larder inspect`.

mod layers;
mod referrers;

use std::collections::BTreeMap;

use larder::reference::ImageName;
use larder_agent::image_name::{self, InvalidImageName};
use larder_agent::manifest::{InputPlace, InputProblem};
use larder_api::v1::{Image, ImagesResponse, InspectRequest, InspectResponse};
use serde::Serialize;
use serde_json::Value;

use crate::args::{ExistsArgs, InspectArgs};
use crate::exit::CommandOutcome;
use crate::failure::{ErrorKind, ExitReport as _, Failure};
use crate::output::{self, size};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

use super::images;
use layers::LayerRecord;

pub(super) async fn run(args: &InspectArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    if args.referrers {
        return referrers::run(args, session).await;
    }
    let out = &session.out;
    let (names, mut outcome) = names_and_ids(&args.images, out);
    if names.is_empty() {
        return Ok(outcome);
    }
    let client = if args.layers {
        images::open(session, true).await?.ok_or_else(|| Failure::failed("no images pulled yet"))?
    } else {
        session.open(&ImageAccess::read()).await?
    };
    let listed = if args.layers { Some(client.detailed_images(Vec::new()).await?) } else { None };
    let mut found = Vec::new();
    for name in names {
        let request = InspectRequest { image: name.to_owned(), exact: false };
        match client.ask(async |mut calls| calls.inspect(request).await).await {
            Ok(details) => found.push(InspectRecord::new(details, listed.as_ref())),
            Err(failure) if failure.outcome() == CommandOutcome::Unreachable => return Err(failure),
            Err(failure) => outcome = outcome.max(failure.print(out)),
        }
    }
    match args.output {
        None if args.layers => {
            for image in &found {
                layers::print(&image.title(), image.layers.as_deref(), out);
            }
        }
        format => output::data(out, format.unwrap_or_default(), &found),
    }
    Ok(outcome)
}

/// `larder image exists`: the outcome says whether the image is present.
pub(super) async fn exists(args: &ExistsArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let (names, outcome) = names_and_ids(std::slice::from_ref(&args.image), &session.out);
    let [name] = names[..] else { return Ok(outcome) };
    let Some(client) = session.open_to_list(&ImageAccess::read()).await? else {
        return Ok(CommandOutcome::Failed);
    };
    let request = InspectRequest { image: name.to_owned(), exact: true };
    match client.ask(async |mut calls| calls.inspect(request).await).await {
        Ok(_) => Ok(CommandOutcome::Done),
        Err(failure) if failure.kind() == ErrorKind::NotFound => Ok(CommandOutcome::Failed),
        Err(failure) => Err(failure),
    }
}

/// The arguments that may name an image, and whether all of them do.
pub(super) fn names_and_ids<'a>(arguments: &'a [ImageName], out: &Printer) -> (Vec<&'a str>, CommandOutcome) {
    checked_names(arguments, image_name::check_name_or_id, out)
}

/// The arguments that pass a check, and whether all of them do.
fn checked_names<'a>(
    arguments: &'a [ImageName],
    check: fn(&str) -> Result<(), InvalidImageName>,
    out: &Printer,
) -> (Vec<&'a str>, CommandOutcome) {
    let mut outcome = CommandOutcome::Done;
    let mut names = Vec::new();
    for name in arguments {
        match check(name.as_str()) {
            Ok(()) => names.push(name.as_str()),
            Err(bad) => {
                let problem =
                    InputPlace::file("argument").locate(InputProblem::new(bad.message).hints(bad.hints));
                out.error(&problem, problem.hints());
                outcome = CommandOutcome::BadInput;
            }
        }
    }
    (names, outcome)
}

/// An image with all that is known of it. The shape of the output.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectRecord {
    #[serde(flatten)]
    image: Image,
    /// Details that the runtime adds in its own shape; JSON texts become JSON.
    info: BTreeMap<String, Value>,
    /// With `--layers`, the lowest first; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    layers: Option<Vec<LayerRecord>>,
}

impl InspectRecord {
    fn new(InspectResponse { image, info }: InspectResponse, listed: Option<&ImagesResponse>) -> Self {
        let image = image.unwrap_or_default();
        let info = info.into_iter().map(|(key, text)| {
            let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
            (key, value)
        });
        let info = info.collect();
        InspectRecord { layers: listed.and_then(|listed| layers::of(&image.id, listed, &info)), image, info }
    }

    /// Its names, else its ID, and its size.
    fn title(&self) -> String {
        let Image { id, repo_tags, repo_digests, size_bytes, .. } = &self.image;
        let names = if repo_tags.is_empty() { repo_digests } else { repo_tags };
        let name = if names.is_empty() { id.clone() } else { names.join(", ") };
        format!("{name}   {}", size::bytes(*size_bytes))
    }
}
