//! `larder load`: images out of archives and layouts into larder's own store.

use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder::go_format;
use larder::hint::Hint;
use larder::reference::Reference;
use larder_agent::client::{ArchiveUpload, Client};
use larder_agent::control::base_name;
use larder_api::v1::{LeftOutManifest, LoadRequest, LoadResponse, LoadedImage};

use crate::args::LoadArgs;
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::output;
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &LoadArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let name = args.name.as_deref();
    let base = name.map(base_name).transpose().map_err(|failure| failure.about("--name"))?;
    let request = LoadRequest {
        name: name.unwrap_or_default().to_owned(),
        platform: args.platform.platform.as_ref().map(ToString::to_string).unwrap_or_default(),
        ..LoadRequest::default()
    };
    let mut files: Vec<PathBuf> = args.files.iter().chain(&args.input).cloned().collect();
    if files.is_empty() {
        if io::stdin().is_terminal() {
            return Err(Failure::bad_input("no archive given, and standard input is a terminal")
                .hint(Hint::new().command(["load", "-i", "FILE"])));
        }
        files.push("-".into());
    }
    let client = session.open(&ImageAccess::write().of_store().create_store()).await?;
    let mut outcome = CommandOutcome::Done;
    let mut loaded = Vec::new();
    let mut lease = Duration::ZERO;
    for file in &files {
        match send(&client, file, &request).await {
            Ok(LoadResponse { images, left_out, lease_milliseconds, error }) => {
                lease = Duration::from_millis(lease_milliseconds);
                for LeftOutManifest { digest, reason } in left_out {
                    out.info(format_args!("note: {}: left out {digest}: {reason}", file.display()));
                }
                print_name_notes(file, base.as_ref(), &images, out);
                for image in &images {
                    for warning in &image.warnings {
                        out.warning(format_args!("{}: image {}: {warning}", file.display(), image.id));
                    }
                }
                loaded.extend(images);
                if let Some(error) = error {
                    Failure::from(error).about(name_of(file)).print(out);
                    outcome = outcome.max(CommandOutcome::Failed);
                }
            }
            Err(failure) => {
                let ended = failure.about(name_of(file)).print(out);
                outcome = outcome.max(ended);
                // The rest has no better chance.
                if ended == CommandOutcome::Unreachable {
                    break;
                }
            }
        }
    }
    match args.output {
        Some(format) => output::data(out, format, &loaded),
        None => loaded.iter().for_each(|image| print(image, out)),
    }
    if let Some(image) = loaded.first() {
        let name = image.repo_tags.first().or(image.repo_digests.first()).unwrap_or(&image.id);
        out.info(format_args!(
            "note: GC retains {} for {} or until a container has used it",
            if loaded.len() == 1 { "the image" } else { "each of these images" },
            go_format::duration(lease)
        ));
        out.hint(Hint::new().command(["keep".to_owned(), name.clone()]).text(" keeps it without an end"));
    }
    Ok(outcome)
}

/// How messages name a file.
fn name_of(file: &Path) -> String {
    if file == Path::new("-") { "standard input".to_owned() } else { file.display().to_string() }
}

async fn send(client: &Client, file: &Path, request: &LoadRequest) -> Result<LoadResponse, Failure> {
    let (upload, read_error) = ArchiveUpload::of(file, request.clone());
    let answer = client.wait(async |mut calls| calls.load(upload).await).await;
    // After a read error, the answer is about a truncated archive.
    read_error.take().map_or(answer, |error| {
        Err(match error.kind() {
            io::ErrorKind::NotFound => Failure::bad_input("no such file or directory")
                .hint("pass an archive, a directory with an OCI layout, or - for standard input"),
            _ => Failure::bad_input(format!("cannot read: {error}")),
        })
    })
}

/// Prints notes about tags without a repository, and about a `--name` without effect.
fn print_name_notes(file: &Path, name: Option<&Reference>, images: &[LoadedImage], out: &Printer) {
    let file = file.display();
    let tags: Vec<&str> = images.iter().flat_map(|image| &image.bare_tags).map(String::as_str).collect();
    if let Some(tag) = tags.first() {
        out.info(format_args!("note: {file}: skipped names without a repository: {}", tags.join(", ")));
        let load = ["load", "--name", "REPOSITORY"].map(str::to_owned).into_iter().chain([file.to_string()]);
        out.hint(Hint::new().command(load).text(format!(" adds the name REPOSITORY:{tag}")));
    }
    let is_of = |image: &LoadedImage, name: &Reference| {
        let mut named = image.repo_tags.iter().filter_map(|tag| Reference::parse(tag).ok());
        named.any(|tag| tag.name() == name.name())
    };
    if let Some(name) = name.filter(|name| !images.iter().any(|image| is_of(image, name))) {
        out.info(format_args!("note: {file}: --name {name} has no effect, the images have full names"));
    }
}

/// Prints it as docker does.
fn print(image: &LoadedImage, out: &Printer) {
    if image.repo_tags.is_empty() {
        out.line(format_args!("Loaded image ID: {}", image.id));
    }
    for name in &image.repo_tags {
        out.line(format_args!("Loaded image: {name}"));
    }
}
