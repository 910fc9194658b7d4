//! `larder inspect`.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder::backend::{Backend, BackendError, ImageDetails, ImageSpec};
use larder_control::v1alpha1::InspectRequest;
use serde::Serialize;
use serde_json::Value;

use crate::args::{Connection, InspectArgs};
use crate::connect;
use crate::daemon::{Daemon, convert};
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
    let source = match Daemon::find(connection)? {
        Some(daemon) => Source::Daemon(daemon),
        None => Source::Own(connect::backend(connection)?),
    };
    let mut found = Vec::new();
    for name in names {
        match source.inspect(name).await {
            Ok(details) => found.push(Inspected::from(details)),
            Err(failure) if failure.outcome() == Outcome::Unreachable => return Err(failure),
            Err(failure) => outcome = outcome.max(failure.print(out)),
        }
    }
    output::data(out, args.output, &found);
    Ok(outcome)
}

/// Whom to ask.
enum Source {
    Daemon(Daemon),
    Own(Arc<dyn Backend>),
}

impl Source {
    async fn inspect(&self, name: &str) -> Result<ImageDetails, Failure> {
        match self {
            Source::Own(backend) => inspect(name, &**backend).await,
            Source::Daemon(daemon) => {
                let request = InspectRequest { image: name.to_owned() };
                let answer = daemon.ask(async |mut client| client.inspect(request).await).await;
                answer.map(convert::details_from)
            }
        }
    }
}

/// One image, with all that is known of it.
pub(crate) async fn inspect(name: &str, backend: &dyn Backend) -> Result<ImageDetails, Failure> {
    match backend.inspect(&ImageSpec::named(name)).await {
        Ok(found) => found.ok_or_else(|| absent(name)),
        Err(error) => Err(trouble_with(name, error)),
    }
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

/// The trouble with one image. A backend that is gone is the end of all, and says nothing of the image.
pub(super) fn trouble_with(name: &str, error: BackendError) -> Failure {
    if is_gone(&error) {
        return error.into();
    }
    let failure = Failure::failed(format!("{name}: {error}"));
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// An image that was asked for and is not there.
pub(crate) fn absent(image: &str) -> Failure {
    Failure::missing(format!("{image}: no such image")).hint("larder images lists those that are here")
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
