//! Runs every conformance vector of the directory in `LARDER_VECTORS`, by default the project's own `vectors/`.
//!
//! A file is one test, which prints the number of passed and failed cases. An unknown file, op or field is a failure.
//! Each op computes larder's answer to the input of a case; the comparison with kubelet's answer is the same for all.
//! Cases with a runtime run twice: with a fake runtime, and with larder's own store.

mod compare;
mod config;
mod cri_errors;
mod docker_config;
mod gc;
mod keyring;
mod plugin;
mod pull;
mod records;
mod references;
mod runtime_client;
mod runtime_service;
mod secrets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use serde::Deserialize;
use serde_json::Value;

/// Answer of larder to one case, in the form of `expect`; an error if the input is not understood.
type CaseResult = Result<Value, String>;

/// Answers a case if the op is known to the module.
type CaseRunner = fn(op: &str, input: &Value) -> Option<CaseResult>;

const ROOMS: &[CaseRunner] = &[
    config::room,
    cri_errors::room,
    docker_config::room,
    gc::room,
    keyring::room,
    plugin::room,
    pull::room,
    records::room,
    references::room,
    runtime_client::room,
    runtime_service::room,
    secrets::room,
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VectorFile {
    format: u32,
    name: String,
    #[serde(rename = "subject")]
    _subject: String,
    #[serde(rename = "kubernetes_version")]
    _kubernetes_version: String,
    #[serde(rename = "source")]
    _source: Vec<String>,
    cases: Vec<VectorCase>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VectorCase {
    id: String,
    op: String,
    #[serde(default, rename = "note")]
    _note: String,
    #[serde(default, rename = "tags")]
    _tags: Vec<String>,
    #[serde(default)]
    input: Value,
    expect: Value,
}

fn main() -> ExitCode {
    let dir = dir(std::env::var_os("LARDER_VECTORS").map(PathBuf::from));
    let files = match json_files(&dir) {
        Ok(files) => files,
        Err(error) => {
            eprintln!("LARDER_VECTORS: {error}");
            return ExitCode::FAILURE;
        }
    };
    let trials = files.into_iter().map(|path| {
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        Trial::test(name, move || run_file(&path))
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

/// The directory to run. Cargo starts tests in the directory of their crate; a relative path means the workspace's
/// root, where people type.
fn dir(given: Option<PathBuf>) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.join(given.unwrap_or_else(|| "vectors".into()))
}

/// The files to run, sorted. A directory without any is an error: nothing would be tested.
fn json_files(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs_err::read_dir(dir).map_err(|error| error.to_string())?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| error.to_string())?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(format!("no .json files in {}", dir.display()));
    }
    Ok(files)
}

fn run_file(path: &Path) -> Result<(), Failed> {
    let text = fs_err::read_to_string(path)?;
    let file: VectorFile = serde_json::from_str(&text)?;
    if file.format != 1 {
        return Err(format!("format {} is not understood, only 1", file.format).into());
    }
    let (mut failures, mut on_store) = (Vec::new(), 0);
    for case in &file.cases {
        // A panic fails its own case only.
        let answer = catch_unwind(AssertUnwindSafe(|| run_case(case)));
        match answer.unwrap_or_else(|_| Err("panicked, see above".to_owned())) {
            Ok(also_on_store) => on_store += usize::from(also_on_store),
            Err(why) => failures.push(format!("{} ({}): {why}", case.id, case.op)),
        }
    }
    let (passed, failed) = (file.cases.len() - failures.len(), failures.len());
    // Written whole, past the test harness: the line must be seen whatever the harness captures.
    eprintln!(
        "vectors {}: {passed} passed ({on_store} on larder's store as well), {failed} failed",
        file.name
    );
    match failures.as_slice() {
        [] if passed == 0 => Err("the file has no cases".into()),
        [] => Ok(()),
        failures => Err(failures.join("\n").into()),
    }
}

/// Says whether the case was run on larder's store as well.
fn run_case(case: &VectorCase) -> Result<bool, String> {
    let answer = ROOMS.iter().find_map(|room| room(&case.op, &case.input)).ok_or("unknown op")??;
    compare::same(&case.expect, &answer)?;
    let Some(on_store) = pull::on_store(&case.op, &case.input) else { return Ok(false) };
    compare::same(&case.expect, &on_store?).map_err(|why| format!("on larder's store: {why}"))?;
    Ok(true)
}

/// Reads a case's input; unknown fields must be refused by the type.
fn parse<T: serde::de::DeserializeOwned>(input: &Value) -> Result<T, String> {
    serde_json::from_value(input.clone()).map_err(|error| format!("input not understood: {error}"))
}
