//! `larder load`: images out of archives and layouts into larder's own store.

use std::path::Path;

use larder::reference::Reference;
use larder_control::v1alpha1::LoadedImage;
use larder_store::backend::StoreBackend;
use larder_store::pull::{Loaded as Brought, PullError};
use larder_store::store::import::{ImportError, ImportFrom};
use larder_store::unpack::UnpackError;
use serde::Serialize;

use crate::args::{Connection, LoadArgs};
use crate::collect::Notes;
use crate::connect::{self, Chosen};
use crate::daemon::{Daemon, Parcel};
use crate::exit::Outcome;
use crate::failure::{Failure, chain};
use crate::image_name;
use crate::out::Out;
use crate::output;

/// Where the images go.
enum Target {
    Daemon(Daemon),
    Store(StoreBackend),
}

pub(super) async fn run(args: &LoadArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let name = args.name.as_deref();
    let base = name.map(base_name).transpose()?;
    let target = match Daemon::find_of_store(connection)? {
        Some(daemon) => Target::Daemon(daemon),
        None => Target::Store(connect::store_to_fill(connection)?),
    };
    let mut outcome = Outcome::Done;
    let mut loaded = Vec::new();
    for file in &args.files {
        let brought = match &target {
            Target::Daemon(daemon) => send(daemon, file, name).await,
            Target::Store(store) => load(store, source(file), base.clone()).await,
        };
        match brought {
            Ok(images) => {
                tell_of_names(file, base.as_ref(), &images, out);
                loaded.extend(images.into_iter().map(Loaded::from));
            }
            Err(failure) => {
                let ended = failure.about(file.display()).print(out);
                outcome = outcome.max(ended);
                // Without a daemon the rest has no better chance.
                if ended == Outcome::Unreachable {
                    break;
                }
            }
        }
    }
    if let Target::Store(store) = target {
        let ids: Vec<&str> = loaded.iter().map(|image| image.id.as_str()).collect();
        Notes::of(connection, &Chosen::Store(store))?.ensured(&ids, out);
    }
    match args.output {
        Some(format) => output::data(out, format, &loaded),
        None => loaded.iter().for_each(|image| image.tell(out)),
    }
    Ok(outcome)
}

/// Loads what `from` holds; what is told does not name it.
pub(crate) async fn load(
    store: &StoreBackend,
    from: ImportFrom,
    base_name: Option<Reference>,
) -> Result<Vec<LoadedImage>, Failure> {
    let brought = store.puller().load(from, base_name).await.map_err(|error| failed(&error))?;
    Ok(brought.into_iter().map(found).collect())
}

/// The repository, or the name, for images that have none.
pub(crate) fn base_name(text: &str) -> Result<Reference, Failure> {
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

async fn send(daemon: &Daemon, file: &Path, name: Option<&str>) -> Result<Vec<LoadedImage>, Failure> {
    let (parcel, packing) = Parcel::of(file, name.unwrap_or_default());
    let answer = daemon.wait(async |mut client| client.load(parcel).await).await;
    // What was not read was not sent, and then the daemon's answer is about half an archive.
    packing.trouble().map_or(answer.map(|answer| answer.images), |error| {
        Err(Failure::bad_input(format!("could not be read: {error}")))
    })
}

/// Tells of names that lead nowhere: tags of no repository, and a repository that nothing is of.
fn tell_of_names(file: &Path, name: Option<&Reference>, images: &[LoadedImage], out: &Out) {
    let file = file.display();
    let tags: Vec<&str> = images.iter().flat_map(|image| &image.bare_tags).map(String::as_str).collect();
    if let Some(tag) = tags.first() {
        out.note(format_args!(
            "note: {file}: its names are but tags ({}), which name no image here; \
             larder load --name REPOSITORY {file} makes REPOSITORY:{tag} of it",
            tags.join(", ")
        ));
    }
    let is_of = |image: &LoadedImage, name: &Reference| {
        let mut named = image.repo_tags.iter().filter_map(|tag| Reference::parse(tag).ok());
        named.any(|tag| tag.name() == name.name())
    };
    if let Some(name) = name.filter(|name| !images.iter().any(|image| is_of(image, name))) {
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
fn failed(error: &PullError) -> Failure {
    // What a registry would be asked about: here it is the file.
    if let PullError::Unpack { cause, .. } = error
        && is_damage(cause)
    {
        return Failure::bad_input(chain(error))
            .hint("the file is damaged: copy it, or save the image, again");
    }
    let failure = match error {
        PullError::Import(ImportError::Store(_)) => Failure::failed(chain(error)),
        PullError::Import(_) => Failure::bad_input(chain(error)),
        _ => Failure::failed(chain(error)),
    };
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// Whether the bytes are not those of a layer.
fn is_damage(cause: &UnpackError) -> bool {
    matches!(
        cause,
        UnpackError::Digest { .. }
            | UnpackError::Size { .. }
            | UnpackError::Decompress { .. }
            | UnpackError::Archive { .. }
            | UnpackError::ForeignCompression(_)
    )
}

fn found(Brought { image, tags, digests, bare_tags, .. }: Brought) -> LoadedImage {
    LoadedImage { id: image.id.to_string(), repo_tags: tags, repo_digests: digests, bare_tags }
}

/// One image. The shape of `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Loaded {
    id: String,
    repo_tags: Vec<String>,
    repo_digests: Vec<String>,
}

impl From<LoadedImage> for Loaded {
    fn from(image: LoadedImage) -> Self {
        let LoadedImage { id, repo_tags, repo_digests, .. } = image;
        Loaded { id, repo_tags, repo_digests }
    }
}

impl Loaded {
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
