//! Feeds untrusted input to the code that reads it: each target takes any bytes and must neither panic nor hang nor
//! leave its directory.
//!
//! `cargo test -p larder-testkit-peers --test fuzz` runs the corpus (`fuzz/corpus/TARGET/*`) and some thousand
//! mutations of it, or as many as fit in `LARDER_FUZZ_SECONDS`; `fuzz/` has the same targets for cargo-fuzz.

mod answers;
mod mutate;
mod tables;
mod targets;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use mutate::Mutator;
pub use targets::{FuzzTarget, TARGETS};
use tokio::time::Instant;

/// An input that takes longer than this is as bad as one that panics.
const HANG: Duration = Duration::from_secs(20);

/// Feeds all seeds to `fuzz_one`, then `runs` mutations of them, or as many as `LARDER_FUZZ_SECONDS` have time for.
/// `LARDER_FUZZ_SEED` selects other mutations; an input that fails is kept in a file.
///
/// # Panics
/// If `fuzz_one` panics, or takes 20 seconds for one input.
pub fn run(name: &str, seeds: &[Vec<u8>], runs: usize, fuzz_one: impl Fn(&[u8])) {
    let number = |variable: &str| std::env::var(variable).ok().and_then(|text| text.parse::<u64>().ok());
    let length = number("LARDER_FUZZ_SECONDS").map(Duration::from_secs);
    let mut mutator = Mutator::new(number("LARDER_FUZZ_SEED").unwrap_or(1));
    let (start, mut count, mut slowest) = (Instant::now(), 0, Duration::ZERO);
    let is_over = |mutations: usize| length.map_or(mutations >= runs, |length| start.elapsed() >= length);
    while count < seeds.len() || !is_over(count - seeds.len()) {
        let input = seeds.get(count).cloned().unwrap_or_else(|| mutator.next(seeds));
        let begun = Instant::now();
        let panicked = catch_unwind(AssertUnwindSafe(|| fuzz_one(&input))).is_err();
        slowest = slowest.max(begun.elapsed());
        if panicked || begun.elapsed() > HANG {
            let file = std::env::temp_dir().join(format!("larder-fuzz-{name}-{}", std::process::id()));
            fs_err::write(&file, &input).expect("a file");
            panic!("{name} fails on input {count}, kept as {}", file.display());
        }
        count += 1;
    }
    eprintln!("{name}: {count} inputs in {:?}, slowest {slowest:?}", start.elapsed());
}

/// The target of this name.
pub fn target(name: &str) -> Option<&'static FuzzTarget> {
    TARGETS.iter().find(|target| target.name == name)
}

/// The directory of the committed corpus, as it was when this was built.
pub fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

/// The seeds of a target, sorted by name.
pub fn seeds(corpus: &Path, target: &FuzzTarget) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut seeds = Vec::new();
    for entry in fs_err::read_dir(corpus.join(target.name))? {
        let entry = entry?;
        seeds.push((entry.file_name().to_string_lossy().into_owned(), fs_err::read(entry.path())?));
    }
    seeds.sort();
    Ok(seeds)
}
