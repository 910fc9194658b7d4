//! Feeds untrusted input to the code that reads it: each target takes any bytes and must neither panic nor hang nor
//! leave its directory.
//!
//! `cargo test -p larder-testkit-peers --test fuzz` runs the corpus (`fuzz/corpus/TARGET/*`) and some thousand mutations of
//! it; `larder-fuzz TARGET --seconds N` runs for a given time; `fuzz/` has the same targets for cargo-fuzz.

mod mutate;
mod targets;

use std::io;
use std::path::{Path, PathBuf};

pub use mutate::Mutator;
pub use targets::{FuzzTarget, TARGETS};

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
