//! `larder load`: images out of archives and layouts into larder's own store.

use std::path::Path;

use larder::reference::Reference;
use larder_store::pull::{Loaded as Brought, PullError};
use larder_store::store::ImageRecord;
use larder_store::store::import::{ImportError, ImportFrom};
use serde::Serialize;

use crate::args::{Connection, LoadArgs};
use crate::collect::Notes;
use crate::connect::{self, Chosen};
use crate::exit::Outcome;
use crate::failure::{Failure, chain};
use crate::image_name;
use crate::out::Out;
use crate::output;

pub(super) async fn run(args: &LoadArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let name = args.name.as_deref().map(base_name).transpose()?;
    let store = connect::store_to_fill(connection)?;
    let notes = Notes::of(connection, &Chosen::Store(store.clone()))?;
    let mut outcome = Outcome::Done;
    let mut loaded = Vec::new();
    for file in &args.files {
        match store.puller().load(source(file), name.clone()).await {
            Ok(images) => {
                tell_of_names(file, name.as_ref(), &images, out);
                loaded.extend(images.iter().map(|loaded| Loaded::new(&loaded.image)));
            }
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

/// The repository, or the name, for images that have none.
fn base_name(text: &str) -> Result<Reference, Failure> {
    let bad = |message: String| Failure::bad_input(format!("--name {message}"));
    image_name::check(text).map_err(|name| bad(name.message).hints(name.hints))?;
    let name = Reference::parse(text).map_err(|error| bad(error.to_string()))?;
    if name.digest().is_some() {
        return Err(
            bad(format!("{text}: a digest is no name to give")).hint("write REPOSITORY or REPOSITORY:TAG")
        );
    }
    Ok(name)
}

/// Tells of names that lead nowhere: tags of no repository, and a repository that nothing is of.
fn tell_of_names(file: &Path, name: Option<&Reference>, images: &[Brought], out: &Out) {
    let file = file.display();
    let tags: Vec<&str> = images.iter().flat_map(|loaded| &loaded.bare_tags).map(String::as_str).collect();
    if let Some(tag) = tags.first() {
        out.note(format_args!(
            "note: {file}: its names are but tags ({}), which name no image here; \
             larder load --name REPOSITORY {file} makes REPOSITORY:{tag} of it",
            tags.join(", ")
        ));
    }
    let is_of = |image: &ImageRecord, name: &Reference| {
        image.tags.iter().filter_map(|tag| Reference::parse(tag).ok()).any(|tag| tag.name() == name.name())
    };
    if let Some(name) = name.filter(|name| !images.iter().any(|loaded| is_of(&loaded.image, name))) {
        out.note(format_args!("note: {file}: its images have names in full; none was named {name}"));
    }
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
