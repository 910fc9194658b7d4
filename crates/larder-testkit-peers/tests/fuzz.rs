//! A short run of every fuzz target: the committed corpus, and mutations of it, the same each time.

use larder_testkit_peers::fuzz::{TARGETS, corpus, run, seeds, target};

fn smoke(name: &str) {
    let target = target(name).expect("a target");
    let seeds = seeds(&corpus(), target).expect("a corpus");
    assert!(seeds.len() >= 5, "{name} has a corpus of some breadth");
    let seeds: Vec<Vec<u8>> = seeds.into_iter().map(|(_, seed)| seed).collect();
    // Those that make files or connections get fewer.
    let runs = match name {
        "layer" | "import" => 1500,
        "hosts" | "answers" | "table" | "soci" => 1000,
        _ => 5000,
    };
    run(name, &seeds, runs, target.fuzz_one);
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
fn answers_of_registries() {
    smoke("answers");
}

#[test]
fn tables_of_contents() {
    smoke("table");
}

#[test]
fn soci_indexes_and_ztocs() {
    smoke("soci");
}

#[test]
fn no_target_is_forgotten() {
    assert_eq!(TARGETS.len(), 10, "add a test of the new target above");
}
