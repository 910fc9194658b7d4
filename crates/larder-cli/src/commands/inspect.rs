//! `larder inspect`.

use std::collections::BTreeMap;

use larder::backend::{Backend, ImageDetails, ImageSpec};
use serde::Serialize;
use serde_json::Value;

use crate::args::InspectArgs;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output;

pub(super) async fn run(args: &InspectArgs, backend: &dyn Backend, out: &Out) -> Result<Outcome, Failure> {
    let mut outcome = Outcome::Done;
    let mut found = Vec::new();
    for image in &args.images {
        match backend.inspect(&ImageSpec::named(image)).await? {
            Some(details) => found.push(Inspected::from(details)),
            None => outcome = outcome.max(absent(image).print(out)),
        }
    }
    output::data(out, args.output, &found);
    Ok(outcome)
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
