//! Runs one fuzz target on mutations of its corpus: `larder-fuzz TARGET [--seconds N] [--seed N]`.
//!
//! The process ends at the first input that panics, and keeps it in a file.

#![allow(clippy::disallowed_macros, reason = "a tool for developers")]

use std::process::ExitCode;
use std::time::Duration;

use larder_testkit_peers::fuzz::{Mutator, TARGETS, corpus, seeds, target};
use tokio::time::Instant;

/// An input that takes longer than this is as bad as one that panics.
const HANG: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(target) = arguments.first().and_then(|name| target(name)) else {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("usage: larder-fuzz TARGET [--seconds N] [--seed N]\ntargets: {}", names.join(", "));
        return ExitCode::from(2);
    };
    let number = |flag: &str, default: u64| {
        let at = arguments.iter().position(|argument| argument == flag);
        at.and_then(|at| arguments.get(at + 1)?.parse().ok()).unwrap_or(default)
    };
    let (length, seed) = (Duration::from_secs(number("--seconds", 60)), number("--seed", 1));
    let known = match seeds(&corpus(), target) {
        Ok(known) => known.into_iter().map(|(_, seed)| seed).collect::<Vec<_>>(),
        Err(error) => {
            eprintln!("cannot read the corpus of {}: {error}", target.name);
            return ExitCode::from(2);
        }
    };
    let (start, mut mutator, mut runs, mut slowest) =
        (Instant::now(), Mutator::new(seed), 0_u64, Duration::ZERO);
    while start.elapsed() < length {
        let input = mutator.next(&known);
        let begun = Instant::now();
        let panicked = std::panic::catch_unwind(|| (target.fuzz_one)(&input)).is_err();
        slowest = slowest.max(begun.elapsed());
        runs += 1;
        if panicked || begun.elapsed() > HANG {
            let file = std::env::temp_dir().join(format!("larder-fuzz-{}-{seed}-{runs}", target.name));
            let kept = fs_err::write(&file, &input);
            eprintln!("{}: bad input after {runs} runs, kept as {} ({kept:?})", target.name, file.display());
            return ExitCode::FAILURE;
        }
    }
    eprintln!("{}: {runs} runs in {:?}, slowest {slowest:?}", target.name, start.elapsed());
    ExitCode::SUCCESS
}
