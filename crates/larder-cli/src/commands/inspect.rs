//! `larder inspect`.

use std::collections::BTreeMap;

use larder::backend::{BackendError, ImageDetails, ImageSpec};
use serde::Serialize;
use serde_json::Value;

use crate::args::{Connection, InspectArgs};
use crate::connect;
use crate::exit::Outcome;
use crate::failure::{Failure, is_gone};
use crate::image_name;
use crate::manifest::{Place, Problem};
use crate::out::Out;
use crate::output;

pub(super) async fn run(args: &InspectArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let (names, mut outcome) = names_and_ids(&args.images, out);
    if names.is_empty() {
        return Ok(outcome);
    }
    let backend = connect::backend(connection)?;
    let mut found = Vec::new();
    for name in names {
        match backend.inspect(&ImageSpec::named(name)).await {
            Ok(Some(details)) => found.push(Inspected::from(details)),
            Ok(None) => outcome = outcome.max(absent(name).print(out)),
            Err(error) => outcome = outcome.max(trouble_with(name, error)?.print(out)),
        }
    }
    output::data(out, args.output, &found);
    Ok(outcome)
}

/// The arguments that may name an image, and whether all of them do.
pub(super) fn names_and_ids<'a>(arguments: &'a [String], out: &Out) -> (Vec<&'a str>, Outcome) {
    let mut outcome = Outcome::Done;
    let mut names = Vec::new();
    for name in arguments {
        match image_name::check_name_or_id(name) {
            Ok(()) => names.push(name.as_str()),
            Err(bad) => {
                let problem = Place::file("argument").holds(Problem::new(bad.message).hints(bad.hints));
                out.error(&problem, problem.hints());
                outcome = Outcome::BadInput;
            }
        }
    }
    (names, outcome)
}

/// The trouble with one image. A backend that is gone is the end of all.
pub(super) fn trouble_with(name: &str, error: BackendError) -> Result<Failure, Failure> {
    if is_gone(&error) {
        return Err(error.into());
    }
    let failure = Failure::failed(format!("{name}: {error}"));
    Ok(match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    })
}

/// An image that was asked for and is not there.
pub(super) fn absent(image: &str) -> Failure {
    Failure::failed(format!("{image}: no such image")).hint("larder images lists those that are here")
}

/// An image with all that is known of it. The shape of the output.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Inspected {
    id: String,
    repo_tags: Vec<String>,
    repo_digests: Vec<String>,
    size_bytes: u64,
    pinned: bool,
    uid: Option<i64>,
    #[serde(serialize_with = "output::or_null")]
    username: String,
    /// What the runtime adds in its own shape; JSON texts become JSON.
    info: BTreeMap<String, Value>,
}

impl From<ImageDetails> for Inspected {
    fn from(ImageDetails { image, info }: ImageDetails) -> Self {
        let info = info.into_iter().map(|(key, text)| {
            let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
            (key, value)
        });
        Inspected {
            id: image.id,
            repo_tags: image.repo_tags,
            repo_digests: image.repo_digests,
            size_bytes: image.size,
            pinned: image.pinned,
            uid: image.uid,
            username: image.username,
            info: info.collect(),
        }
    }
}
