//! `larder load`: images out of archives and layouts into larder's own store.

use std::path::Path;

use larder_store::pull::PullError;
use larder_store::store::ImageRecord;
use larder_store::store::import::{ImportError, ImportFrom};
use serde::Serialize;

use crate::args::{Connection, LoadArgs};
use crate::collect::Notes;
use crate::connect::{self, Chosen};
use crate::exit::Outcome;
use crate::failure::{Failure, chain};
use crate::out::Out;
use crate::output;

pub(super) async fn run(args: &LoadArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let store = connect::store_to_fill(connection)?;
    let notes = Notes::of(connection, &Chosen::Store(store.clone()))?;
    let mut outcome = Outcome::Done;
    let mut loaded = Vec::new();
    for file in &args.files {
        match store.puller().load(source(file), args.name.clone()).await {
            Ok(images) => loaded.extend(images.iter().map(Loaded::new)),
            Err(error) => outcome = outcome.max(failed(file, &error).print(out)),
        }
    }
    let ids: Vec<&str> = loaded.iter().map(|image| image.id.as_str()).collect();
    notes.ensured(&ids, out);
    match args.output {
        Some(format) => output::data(out, format, &loaded),
        None => loaded.iter().for_each(|image| image.tell(out)),
    }
    Ok(outcome)
}

fn source(file: &Path) -> ImportFrom {
    if file == Path::new("-") {
        return ImportFrom::Stream(Box::new(std::io::stdin()));
    }
    ImportFrom::Path(file.to_owned())
}

/// What cannot be read is bad input; a full disk, say, is not.
fn failed(file: &Path, error: &PullError) -> Failure {
    let message = format!("{}: {}", file.display(), chain(error));
    let failure = match error {
        PullError::Import(ImportError::Store(_)) => Failure::failed(message),
        PullError::Import(_) => Failure::bad_input(message),
        _ => Failure::failed(message),
    };
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// One image. The shape of `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Loaded {
    id: String,
    repo_tags: Vec<String>,
    repo_digests: Vec<String>,
}

impl Loaded {
    fn new(image: &ImageRecord) -> Self {
        Loaded {
            id: image.id.to_string(),
            repo_tags: image.tags.clone(),
            repo_digests: image.digests.clone(),
        }
    }

    /// As docker tells it.
    fn tell(&self, out: &Out) {
        if self.repo_tags.is_empty() {
            out.line(format_args!("Loaded image ID: {}", self.id));
        }
        for name in &self.repo_tags {
            out.line(format_args!("Loaded image: {name}"));
        }
    }
}
