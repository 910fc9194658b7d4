//! `larder fsck`: is everything in larder's own store as it was put there?

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use larder::credentials::Tokens;
use larder::pod::Pod;
use larder::pull::{EnsureRequest, Manager, PullPolicy};
use larder_store::backend::StoreBackend;
use larder_store::fsck::{CheckUnpacked, FsckOptions, FsckReport, Refetch};
use larder_store::store::{Store, StoreConfig, StoreError};

use super::trouble::Trouble;
use crate::args::{Connection, FsckArgs};
use crate::connect;
use crate::credentials::{self, Credentials};
use crate::exit::Outcome;
use crate::failure::{Failure, chain};
use crate::out::Out;
use crate::output::size;
use crate::store;

pub(super) async fn run(args: &FsckArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let given = args.credentials.authfile.is_some() || args.credentials.username.is_some();
    if given && !args.repair {
        return Err(Failure::bad_input("credentials are for --repair, which fetches; a check asks nobody"));
    }
    let root = &connect::store_root(connection)?;
    if args.rebuild {
        let rebuilt = Store::rebuild(root, StoreConfig::default(), &CheckUnpacked)
            .map_err(|error| store::cannot_open(&error))?;
        if let Some(old) = rebuilt.1.old {
            out.note(format_args!("note: the old database is kept as {}", old.display()));
        }
    }
    let backend = connect::store(connection)?;
    if args.repair {
        backend.store().finish_deletion();
    }
    let mut report = check(args, backend.store(), root)?;
    tell(&report, out);
    if args.repair && !report.refetch.is_empty() {
        report.refetch = refetch(&backend, args, &report.refetch, root, out).await?;
    }
    Ok(verdict(&report, out))
}

fn check(args: &FsckArgs, store: &Store, root: &Path) -> Result<FsckReport, Failure> {
    let options = FsckOptions { contents: !args.quick, repair: args.repair, ..FsckOptions::default() };
    store.fsck(&options).map_err(|error| failed(root, &error))
}

/// The check itself came to no end.
fn failed(root: &Path, error: &StoreError) -> Failure {
    let failure =
        Failure::failed(format!("could not check the store in {}: {}", root.display(), chain(error)));
    failure.hint(error.hint().unwrap_or("larder fsck --rebuild makes the database anew from what is on disk"))
}

fn tell(report: &FsckReport, out: &Out) {
    let mut hints: Vec<&str> = Vec::new();
    for problem in &report.problems {
        out.line(problem);
        let hint = problem.found.hint();
        if !problem.repaired && !hints.contains(&hint) {
            hints.push(hint);
        }
    }
    for hint in hints {
        out.note(format_args!("hint: {hint}"));
    }
    out.line(format_args!("{} images and {} layers checked", report.images, report.layers));
    // The folder itself is one.
    if report.trash.inodes > 1 {
        out.line(format_args!(
            "{} of what was removed are still being deleted",
            size::bytes(report.trash.bytes)
        ));
    }
}

/// Pulls the images that lack something: only what they lack is fetched. Each is pulled by its digest, since its tag may
/// stand for another image by now. Returns what still lacks.
async fn refetch(
    backend: &StoreBackend,
    args: &FsckArgs,
    lacking: &[Refetch],
    root: &Path,
    out: &Out,
) -> Result<Vec<Refetch>, Failure> {
    let images = lacking.iter().flat_map(digests).map(String::as_str);
    let Credentials { sources: credentials, candidates, .. } =
        credentials::gather(&args.credentials, Tokens::Keep, images, out)?;
    let manager = Manager::builder(Arc::new(backend.clone())).credentials(credentials).build();
    let mut tried = BTreeSet::new();
    loop {
        // Looked at anew after each pull: images share what they lack.
        let missing = missing(backend.store(), root)?;
        let Some(next) = missing.iter().find(|lacking| !tried.contains(&lacking.image)) else {
            return Ok(missing);
        };
        tried.insert(next.image.clone());
        for digest in digests(next) {
            let request = EnsureRequest::new(digest.as_str(), PullPolicy::Always, Pod::default());
            if let Err(error) = manager.ensure(&request).await {
                Failure::failed(format!("could not pull {digest}: {error}"))
                    .hints(Trouble::advice(&error, || candidates.advice(digest, &[])))
                    .print(out);
            } else if self::missing(backend.store(), root)?.iter().all(|still| still.image != next.image) {
                out.line(format_args!("{}: what was missing is back", shown(next)));
                break;
            }
        }
    }
}

fn missing(store: &Store, root: &Path) -> Result<Vec<Refetch>, Failure> {
    store.missing().map_err(|error| failed(root, &error))
}

/// The names that stand for this very image for ever; none if it was loaded from an archive.
fn digests(lacking: &Refetch) -> impl Iterator<Item = &String> {
    lacking.names.iter().filter(|name| name.contains('@'))
}

/// The image as a user knows it.
fn shown(lacking: &Refetch) -> String {
    lacking.names.first().map_or_else(|| lacking.image.to_string(), Clone::clone)
}

/// What to do for an image that lacks something. Its tag is not to be pulled: it may have moved.
fn next_step(lacking: &Refetch) -> String {
    let image = shown(lacking);
    match digests(lacking).next() {
        Some(digest) => format!("{image} lacks something; larder pull {digest} brings it back"),
        None => {
            format!("{image} lacks something, and no registry is known that has it; larder load it again")
        }
    }
}

fn verdict(report: &FsckReport, out: &Out) -> Outcome {
    if report.is_sound() {
        out.line("the store is sound");
        return Outcome::Done;
    }
    for lacking in &report.refetch {
        out.note(format_args!("hint: {}", next_step(lacking)));
    }
    Outcome::Failed
}

#[cfg(test)]
mod tests {
    use std::io;

    use larder::reference::Digest;
    use larder_store::fsck::Lacking;

    use super::*;

    #[test]
    fn a_tag_that_may_have_moved_is_nothing_to_pull() {
        let digest = Digest::parse(&format!("sha256:{}", "a".repeat(64))).unwrap();
        let lacking = |names: &[&str]| Refetch {
            image: digest.clone(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            lacks: Lacking::Blob(digest.clone()),
        };
        let by_digest = format!("r.example/a@{digest}");
        assert!(
            next_step(&lacking(&["r.example/a:1", &by_digest]))
                .contains(&format!("larder pull {by_digest} "))
        );
        let loaded = next_step(&lacking(&["r.example/a:1"]));
        assert!(loaded.starts_with("r.example/a:1 ") && loaded.contains("larder load"), "{loaded}");
        assert!(!loaded.contains("larder pull"), "{loaded}");
    }

    #[test]
    fn a_check_that_fails_names_the_folder_and_the_next_step() {
        for cause in [io::ErrorKind::Other, io::ErrorKind::StorageFull] {
            let error = StoreError::Io { doing: "measure the trash", cause: cause.into() };
            let told = format!("{:?}", failed("/images".as_ref(), &error));
            assert!(
                told.contains("in /images: could not measure the trash") && !told.contains("hints: []"),
                "{told}"
            );
        }
    }
}
