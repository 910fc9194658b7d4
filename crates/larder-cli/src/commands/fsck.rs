//! `larder fsck`: is everything in larder's own store as it was put there?

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use larder::credentials::{NodeFiles, SearchPath, Sources};
use larder::pod::Pod;
use larder::pull::{EnsureRequest, Manager, PullPolicy};
use larder_store::backend::StoreBackend;
use larder_store::fsck::{CheckUnpacked, FsckOptions, FsckReport};
use larder_store::store::{Store, StoreConfig};

use crate::args::FsckArgs;
use crate::exit::Outcome;
use crate::failure::{Failure, chain};
use crate::out::Out;
use crate::output::size;
use crate::store;

pub(super) async fn run(args: &FsckArgs, root: &Path, out: &Out) -> Result<Outcome, Failure> {
    if args.rebuild {
        let rebuilt = Store::rebuild(root, StoreConfig::default(), &CheckUnpacked)
            .map_err(|error| Failure::unreachable(chain(&error)))?;
        if let Some(old) = rebuilt.1.old {
            out.note(format_args!("note: the old database is kept as {}", old.display()));
        }
    }
    let backend = store::open(root)?;
    let mut report = check(args, backend.store())?;
    tell(&report, out);
    if args.repair && !report.refetch.is_empty() {
        refetch(&backend, &report, out).await;
        report.refetch = backend.store().missing().map_err(|error| Failure::failed(chain(&error)))?;
    }
    Ok(verdict(&report, out))
}

fn check(args: &FsckArgs, store: &Store) -> Result<FsckReport, Failure> {
    let options = FsckOptions { contents: !args.quick, repair: args.repair, ..FsckOptions::default() };
    store.fsck(&options).map_err(|error| Failure::failed(chain(&error)))
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

/// Pulls the images that lack something: only what they lack is fetched.
async fn refetch(backend: &StoreBackend, report: &FsckReport, out: &Out) {
    let names: BTreeSet<&String> =
        report.refetch.iter().filter_map(|lacking| lacking.names.first()).collect();
    let credentials = Sources::new(NodeFiles::search(SearchPath::user()), Vec::new());
    let manager = Manager::builder(Arc::new(backend.clone())).credentials(credentials).build();
    for name in names {
        let request = EnsureRequest::new(name.as_str(), PullPolicy::Always, Pod::default());
        match manager.ensure(&request).await {
            Ok(_) => out.line(format_args!("{name}: what was missing is back")),
            Err(error) => {
                Failure::failed(format!("{name}: {error}")).print(out);
            }
        }
    }
}

fn verdict(report: &FsckReport, out: &Out) -> Outcome {
    if report.is_sound() {
        out.line("the store is sound");
        return Outcome::Done;
    }
    for lacking in &report.refetch {
        let name = lacking.names.first().map_or_else(|| lacking.image.to_string(), Clone::clone);
        out.note(format_args!("hint: {name} lacks something; larder pull {name} brings it back"));
    }
    Outcome::Failed
}
