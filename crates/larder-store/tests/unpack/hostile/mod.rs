//! Archives that mean harm. Each is refused or contained, says so in its own way, and touches nothing outside.

mod bombs;
mod bytes;
mod damaged;
mod nonsense;
mod ways_out;

use larder_store::unpack::{Limits, Options, Refusal, Threads, UnpackError, Unpacked};
use larder_testkit::archive::{Archive, Entry};

use crate::support::Layer;

type Check = fn(&Layer, &Unpacked);

enum Outcome {
    Refused(Refusal),
    Limit(&'static str),
    /// The text says this about the archive.
    Damaged(&'static str),
    Decompress,
    Foreign,
    /// Unpacked, inside; and this holds.
    Contained(Check),
}

use Outcome::{Contained, Damaged, Decompress, Foreign, Limit, Refused};

struct Case {
    name: &'static str,
    compressed: Vec<u8>,
    plain: Vec<u8>,
    options: Options,
    outcome: Outcome,
}

fn case(name: &'static str, archive: Vec<u8>, outcome: Outcome) -> Case {
    Case { name, compressed: archive.clone(), plain: archive, options: Options::default(), outcome }
}

fn entries(entries: impl IntoIterator<Item = Entry>) -> Vec<u8> {
    Archive::new().extend(entries).finish()
}

fn limited(name: &'static str, archive: Vec<u8>, limits: Limits, outcome: Outcome) -> Case {
    Case { options: Options { limits, ..Options::default() }, ..case(name, archive, outcome) }
}

fn run(case: &Case, layer: &Layer, threads: Threads) {
    let options = Options { threads, ..case.options.clone() };
    let result = layer.unpack_with(&case.compressed, &case.plain, &options);
    let name = case.name;
    match (&case.outcome, &result) {
        (Refused(expected), Err(UnpackError::Refused { reason, .. })) if reason == expected => {}
        (Limit(expected), Err(UnpackError::Limit { what, .. })) if what == expected => {}
        (Damaged(expected), Err(UnpackError::Archive { problem, .. })) if problem.contains(expected) => {}
        (Decompress, Err(UnpackError::Decompress { .. }))
        | (Foreign, Err(UnpackError::ForeignCompression(_))) => {}
        (Contained(check), Ok(unpacked)) => {
            assert_eq!(layer.damage(), [], "{name}");
            assert_eq!(unpacked.usage, layer.usage_on_disk(), "{name}");
            check(layer, unpacked);
        }
        _ => panic!("{name}: {result:?}"),
    }
    layer.assert_contained();
}

fn run_all(cases: impl Fn(&Layer) -> Vec<Case>) {
    let count = cases(&Layer::new()).len();
    for at in 0..count {
        for threads in [Threads::One, Threads::Two, Threads::Many] {
            let layer = Layer::new();
            run(&cases(&layer)[at], &layer, threads);
        }
    }
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
