//! `larder fsck`: checks and repairs larder's own store.

mod offline_store;

use std::collections::BTreeSet;

use larder::credentials::TokenPolicy;
use larder::hint::Hint;
use larder::pod::Pod;
use larder::pull::{EnsureRequest, PullPolicy};
use larder_store::fsck::{FsckReport, IncompleteImage, RepairState};

use super::pull_failure;
use crate::args::FsckArgs;
use crate::credential_setup::{self, CredentialSetup};
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::output::size;
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess, StoreWait};
use offline_store::OfflineStore;

pub(super) async fn run(args: &FsckArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let given = args.credentials.authfile.is_some() || args.credentials.username.is_some();
    if given && !args.repair {
        return Err(Failure::bad_input("--username and --authfile require --repair"));
    }
    let (_, config) = session.config(&ImageAccess::read().of_store())?;
    if args.rebuild {
        let rebuilt = || OfflineStore::rebuild(&config);
        out.info(format_args!("note: {}", session.open_alone(wait_of(args), &config, rebuilt).await?));
    }
    let opened = || OfflineStore::open(&config, args.repair);
    let store = session.open_alone(wait_of(args), &config, opened).await?;
    if args.repair {
        store.finish_deletion();
    }
    let mut report = store.check(args.quick, args.repair)?;
    print(&report, out);
    if args.repair && !report.refetch.is_empty() {
        report.refetch = refetch(&store, args, &report.refetch, out).await?;
    }
    Ok(outcome(&report, out))
}

/// How long to wait for other processes of the store.
fn wait_of(args: &FsckArgs) -> StoreWait {
    match (args.wait, args.no_wait) {
        (true, _) => StoreWait::Unlimited,
        (false, true) => StoreWait::Never,
        (false, false) => StoreWait::Default,
    }
}

fn print(report: &FsckReport, out: &Printer) {
    let mut hints: Vec<Hint> = Vec::new();
    for problem in &report.problems {
        out.line(problem);
        let hint = problem.found.hint();
        if problem.repair == RepairState::Open && !hints.contains(&hint) {
            hints.push(hint);
        }
    }
    for hint in hints {
        out.hint(hint);
    }
    let [images, layers, remnants] =
        [(report.images, "image"), (report.layers, "layer"), (report.remnants, "remnant")]
            .map(|(number, thing)| size::count(number, thing));
    if report.remnants == 0 {
        out.line(format_args!("{images} and {layers} checked"));
    } else {
        out.line(format_args!("{images}, {layers} and {remnants} of removed layers checked"));
    }
    // The directory itself is one.
    if report.trash.inodes > 1 {
        out.line(format_args!("{} of removed data are still being deleted", size::bytes(report.trash.bytes)));
    }
}

/// Pulls incomplete images by digest, since a tag may have moved; only missing content is fetched. Returns the images
/// that are still incomplete.
async fn refetch(
    store: &OfflineStore,
    args: &FsckArgs,
    lacking: &[IncompleteImage],
    out: &Printer,
) -> Result<Vec<IncompleteImage>, Failure> {
    let images = lacking.iter().flat_map(digests).map(String::as_str);
    let CredentialSetup { sources: credentials, candidates, .. } =
        credential_setup::gather(&args.credentials, TokenPolicy::Keep, images, out)?;
    let manager = store.manager(credentials);
    let mut tried = BTreeSet::new();
    loop {
        // Listed again after each pull, because images share missing content.
        let missing = store.missing()?;
        let Some(next) = missing.iter().find(|lacking| !tried.contains(&lacking.image)) else {
            return Ok(missing);
        };
        tried.insert(next.image.clone());
        for digest in digests(next) {
            let request = EnsureRequest::new(digest.as_str(), PullPolicy::Always, Pod::default());
            if let Err(error) = manager.ensure(&request).await {
                Failure::failed(format!("cannot pull {digest}: {error}"))
                    .hints(pull_failure::next_step(&error, || candidates.advice(digest, &[])))
                    .print(out);
            } else if store.missing()?.iter().all(|still| still.image != next.image) {
                out.line(format_args!("{}: repaired", shown(next)));
                break;
            }
        }
    }
}

/// The names with a digest; none if the image was loaded from an archive.
fn digests(lacking: &IncompleteImage) -> impl Iterator<Item = &String> {
    lacking.names.iter().filter(|name| name.contains('@'))
}

/// The image as a user knows it.
fn shown(lacking: &IncompleteImage) -> String {
    lacking.names.first().map_or_else(|| lacking.image.to_string(), Clone::clone)
}

/// The next step for an incomplete image: never a pull by tag, which may have moved.
fn next_step(lacking: &IncompleteImage) -> Hint {
    let image = shown(lacking);
    if let Some(digest) = digests(lacking).next().filter(|_| !lacking.preloaded) {
        return Hint::from(format!("{image} is incomplete; "))
            .command(["pull".to_owned(), digest.clone()])
            .text(" fetches the missing content");
    }
    let why = if lacking.preloaded { "was loaded from an archive" } else { "has no registry" };
    Hint::from(format!("{image} is incomplete and {why}; load it again: ")).command(["load", "FILE"])
}

fn outcome(report: &FsckReport, out: &Printer) -> CommandOutcome {
    if report.is_sound() {
        out.line(if report.has_repairs() { "no damage left" } else { "no damage found" });
        return CommandOutcome::Done;
    }
    for lacking in &report.refetch {
        out.line(format_args!(
            "incomplete image {}: {} is missing or damaged",
            shown(lacking),
            lacking.lacks
        ));
        out.hint(next_step(lacking));
    }
    CommandOutcome::Failed
}

#[cfg(test)]
mod tests {
    use larder::reference::Digest;
    use larder_store::fsck::MissingContent;

    use super::*;

    #[test]
    fn a_tag_that_may_have_moved_is_nothing_to_pull() {
        let digest = Digest::parse(&format!("sha256:{}", "a".repeat(64))).unwrap();
        let lacking = |names: &[&str], preloaded| IncompleteImage {
            image: digest.clone(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            preloaded,
            lacks: MissingContent::Blob(digest.clone()),
        };
        let by_digest = format!("r.example/a@{digest}");
        assert!(
            next_step(&lacking(&["r.example/a:1", &by_digest], false))
                .to_string()
                .contains(&format!("larder pull {by_digest} "))
        );
        for names in [&["r.example/a:1"][..], &["r.example/a:1", &by_digest]] {
            let loaded = next_step(&lacking(names, true)).to_string();
            assert!(loaded.starts_with("r.example/a:1 ") && loaded.contains("larder load"), "{loaded}");
            assert!(!loaded.contains("larder pull"), "{loaded}");
        }
    }
}
