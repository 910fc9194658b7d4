//! Archives that mean harm. Each is refused or contained, says so in its own way, and touches nothing outside.

mod bombs;
mod bytes;
mod damaged;
mod nonsense;
mod ways_out;

use larder_store::unpack::{
    EntryRefusal, UnpackError, UnpackLimits, UnpackOptions, UnpackThreads, UnpackedLayer,
};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};

use crate::support::UnpackDir;

type LayerAssertion = fn(&UnpackDir, &UnpackedLayer);

enum ExpectedResult {
    Refused(EntryRefusal),
    Limit(&'static str),
    /// The text says this about the archive.
    Damaged(&'static str),
    Decompress,
    Foreign,
    /// Unpacked, inside; and this holds.
    Contained(LayerAssertion),
}

use ExpectedResult::{Contained, Damaged, Decompress, Foreign, Limit, Refused};

struct HostileArchive {
    name: &'static str,
    compressed: Vec<u8>,
    plain: Vec<u8>,
    options: UnpackOptions,
    outcome: ExpectedResult,
}

fn case(name: &'static str, archive: Vec<u8>, outcome: ExpectedResult) -> HostileArchive {
    HostileArchive {
        name,
        compressed: archive.clone(),
        plain: archive,
        options: UnpackOptions::default(),
        outcome,
    }
}

fn entries(entries: impl IntoIterator<Item = TarBuilderEntry>) -> Vec<u8> {
    TarBuilder::new().extend(entries).finish()
}

fn limited(
    name: &'static str,
    archive: Vec<u8>,
    limits: UnpackLimits,
    outcome: ExpectedResult,
) -> HostileArchive {
    HostileArchive {
        options: UnpackOptions { limits, ..UnpackOptions::default() },
        ..case(name, archive, outcome)
    }
}

fn run(case: &HostileArchive, layer: &UnpackDir, threads: UnpackThreads) {
    let options = UnpackOptions { threads, ..case.options.clone() };
    let result = layer.unpack_with(&case.compressed, &case.plain, &options);
    let name = case.name;
    match (&case.outcome, &result) {
        (Refused(expected), Err(UnpackError::Refused { reason, .. })) if reason == expected => {}
        (Limit(expected), Err(UnpackError::Limit { what, .. })) if what == expected => {}
        (Damaged(expected), Err(UnpackError::Archive { problem, .. })) if problem.contains(expected) => {}
        (Decompress, Err(UnpackError::Decompress { .. }))
        | (Foreign, Err(UnpackError::ForeignCompression(_))) => {}
        (Contained(check), Ok(unpacked)) => {
            if layer.is_mounted() {
                check(layer, unpacked);
            }
        }
        _ => panic!("{name}: {result:?}"),
    }
    layer.assert_contained();
}

fn run_all(cases: impl Fn(&UnpackDir) -> Vec<HostileArchive>) {
    let count = cases(&UnpackDir::new()).len();
    for at in 0..count {
        for threads in [UnpackThreads::One, UnpackThreads::Two] {
            let layer = UnpackDir::new();
            run(&cases(&layer)[at], &layer, threads);
        }
    }
}

/// All archives, for other readers of archives.
pub(crate) fn hostile_archives(outside: &str) -> Vec<(&'static str, Vec<u8>)> {
    let cases = [ways_out::ways_out(outside), nonsense::nonsense(), damaged::damaged()];
    cases.into_iter().flatten().map(|case| (case.name, case.plain)).collect()
}

#[test]
fn nothing_gets_out_of_the_layer() {
    run_all(|layer| ways_out::ways_out(layer.outside().to_str().unwrap()));
}

#[test]
fn nonsense_is_refused_or_contained() {
    run_all(|_| nonsense::nonsense());
}

#[test]
fn bombs_are_bounded() {
    run_all(|_| bombs::bombs());
}

#[test]
fn damaged_archives_are_named_as_such() {
    run_all(|_| damaged::damaged());
}
