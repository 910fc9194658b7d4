//! `larder load`: images out of archives and layouts into the embedded store.

use std::path::Path;

use larder::hint::Hint;
use larder::reference::{ImageId, Reference};
use larder_agent::client::{Client, Upload};
use larder_agent::control::base_name;
use larder_api::v1alpha1::LoadedImage;
use serde::Serialize;

use crate::args::LoadArgs;
use crate::exit::Outcome;
use crate::failure::{Failure, Report as _};
use crate::out::Out;
use crate::output;
use crate::session::{Need, Session};

pub(super) async fn run(args: &LoadArgs, session: &Session) -> Result<Outcome, Failure> {
    let out = &session.out;
    let name = args.name.as_deref();
    let base = name.map(base_name).transpose().map_err(|failure| failure.about("--name"))?;
    let client = session.open(Need::use_images().of_store().creating()).await?;
    let mut outcome = Outcome::Done;
    let mut loaded = Vec::new();
    for file in &args.files {
        match send(&client, file, name).await {
            Ok(images) => {
                tell_of_names(file, base.as_ref(), &images, out);
                loaded.extend(images.into_iter().map(Loaded::from));
            }
            Err(failure) => {
                let ended = failure.about(file.display()).print(out);
                outcome = outcome.max(ended);
                // The rest has no better chance.
                if ended == Outcome::Unreachable {
                    break;
                }
            }
        }
    }
    match args.output {
        Some(format) => output::data(out, format, &loaded),
        None => loaded.iter().for_each(|image| image.tell(out)),
    }
    Ok(outcome)
}

async fn send(client: &Client, file: &Path, name: Option<&str>) -> Result<Vec<LoadedImage>, Failure> {
    let (upload, problem) = Upload::of(file, name.unwrap_or_default());
    let answer = client.wait(async |mut calls| calls.load(upload).await).await;
    // What was not read was not sent, and then the answer is about half an archive.
    problem.trouble().map_or(answer.map(|answer| answer.images), |error| {
        Err(Failure::bad_input(format!("could not be read: {error}")))
    })
}

/// Tells of names that lead nowhere: tags of no repository, and a repository that nothing is of.
fn tell_of_names(file: &Path, name: Option<&Reference>, images: &[LoadedImage], out: &Out) {
    let file = file.display();
    let tags: Vec<&str> = images.iter().flat_map(|image| &image.bare_tags).map(String::as_str).collect();
    if let Some(tag) = tags.first() {
        out.note(format_args!(
            "note: {file}: its names are tags only ({}), which name no image here",
            tags.join(", ")
        ));
        let load = ["load", "--name", "REPOSITORY"].map(str::to_owned).into_iter().chain([file.to_string()]);
        out.hint(Hint::new().command(load).text(format!(" names it REPOSITORY:{tag}")));
    }
    let is_of = |image: &LoadedImage, name: &Reference| {
        let mut named = image.repo_tags.iter().filter_map(|tag| Reference::parse(tag).ok());
        named.any(|tag| tag.name() == name.name())
    };
    if let Some(name) = name.filter(|name| !images.iter().any(|image| is_of(image, name))) {
        out.note(format_args!("note: {file}: its images have names in full; none was named {name}"));
    }
}

/// One image. The shape of `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Loaded {
    id: ImageId,
    repo_tags: Vec<String>,
    repo_digests: Vec<String>,
}

impl From<LoadedImage> for Loaded {
    fn from(image: LoadedImage) -> Self {
        let LoadedImage { id, repo_tags, repo_digests, .. } = image;
        Loaded { id: id.into(), repo_tags, repo_digests }
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
