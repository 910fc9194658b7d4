//! A short run of every fuzz target: the committed corpus, and mutations of it, the same each time.
//!
//! `LARDER_FUZZ_RUNS=N` sets how many mutations of each.

use larder_testkit_peers::fuzz::{FuzzTarget, Mutator, TARGETS, corpus, seeds, target};

/// Mutations of each target; those that make files get fewer.
fn runs(target: &FuzzTarget) -> usize {
    let asked = std::env::var("LARDER_FUZZ_RUNS").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or(match target.name {
        "layer" | "import" => 1500,
        "hosts" => 1000,
        _ => 5000,
    })
}

fn smoke(name: &str) {
    let target = target(name).expect("a target");
    let seeds = seeds(&corpus(), target).expect("a corpus");
    assert!(seeds.len() >= 5, "{name} has a corpus of some breadth");
    for (file, seed) in &seeds {
        eprintln!("fuzz/corpus/{name}/{file}");
        (target.fuzz_one)(seed);
    }
    let seeds: Vec<Vec<u8>> = seeds.into_iter().map(|(_, seed)| seed).collect();
    let mut mutator = Mutator::new(1);
    for _ in 0..runs(target) {
        let input = mutator.next(&seeds);
        let caught = std::panic::catch_unwind(|| (target.fuzz_one)(&input));
        if caught.is_err() {
            let file = std::env::temp_dir().join(format!("larder-fuzz-{name}-{}", std::process::id()));
            fs_err::write(&file, &input).expect("a file");
            panic!("{name} fails on the input that is kept as {}", file.display());
        }
    }
}

#[test]
fn layers() {
    smoke("layer");
}

#[test]
fn manifests_and_configs() {
    smoke("manifest");
}

#[test]
fn challenges() {
    smoke("challenge");
}

#[test]
fn hosts_files() {
    smoke("hosts");
}

#[test]
fn references() {
    smoke("reference");
}

#[test]
fn docker_configs() {
    smoke("docker_config");
}

#[test]
fn archives_to_load() {
    smoke("import");
}

#[test]
fn no_target_is_forgotten() {
    assert_eq!(TARGETS.len(), 7, "add a test of the new target above");
}
