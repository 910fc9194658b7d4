//! `larder bundle`: one archive for a bug report.

use std::path::PathBuf;
use std::time::Duration;

use larder::go_format;
use larder_agent::config::SettingsSource;
use larder_bundle::{BundleError, BundleFile, BundleOptions, write_bundle};

use crate::args::settings::SettingFlags;
use crate::args::{BundleArgs, GlobalFlags};
use crate::exit::CommandOutcome;
use crate::failure::{Failure, error_chain};
use crate::output::table::TextTable;
use crate::printer::Printer;

/// Time limit of each part.
const PART_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit of all parts together.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The cargo features that this program is built with.
const FEATURES: [(&str, bool); 5] = [
    ("dashboard", cfg!(feature = "dashboard")),
    ("docker", cfg!(feature = "docker")),
    ("kube", cfg!(feature = "kube")),
    ("top", cfg!(feature = "top")),
    ("traces", cfg!(feature = "traces")),
];

pub(super) async fn run(
    args: &BundleArgs,
    connection: &GlobalFlags,
    out: &Printer,
) -> Result<CommandOutcome, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::failed(format!("cannot find this program: {error}")))?;
    let written = write_bundle(BundleOptions {
        program,
        arguments: connection.arguments(),
        settings_file: settings_file(connection),
        output: args.output.clone(),
        since: args.since,
        part_timeout: connection.timeout.unwrap_or(PART_TIMEOUT),
        timeout: TIMEOUT,
        about: about(),
    });
    let bundle = written.await.map_err(|error| match &error {
        BundleError::Exists(_) => {
            Failure::failed(error.to_string()).hint("name another file with --output, or remove this one")
        }
        BundleError::NoDirectory(_) => Failure::bad_input(error.to_string())
            .hint("create the directory, or name another file with --output"),
        BundleError::Directory(_) => Failure::bad_input(error.to_string())
            .hint("name a file with --output, such as larder.tar.gz in it"),
        BundleError::Terminal => Failure::bad_input(error.to_string())
            .hint("write a file with --output FILE, or pipe the output to another command"),
        BundleError::Write(_) => Failure::failed(error_chain(&error)),
    })?;
    let Some(path) = &bundle.path else { return Ok(CommandOutcome::Done) };
    let mut table = TextTable::new(["FILE", "SIZE", "CONTENT"]);
    for BundleFile { name, about, text, error } in &bundle.files {
        let failed = error.as_ref().map_or("", |_| "; failed, see its .error file");
        table.row([name.clone(), go_format::bytes(text.len() as u64), format!("{about}{failed}")]);
    }
    out.table(&table);
    out.line(format_args!("wrote {}; read it before you make it public", path.display()));
    Ok(CommandOutcome::Done)
}

/// The settings file that is named, or the default one if it exists.
fn settings_file(connection: &GlobalFlags) -> Option<PathBuf> {
    let sources = SettingFlags::default().sources(connection);
    sources.layers.into_iter().find_map(|layer| match layer {
        SettingsSource::File { path, required } => (required || path.exists()).then_some(path),
        _ => None,
    })
}

fn about() -> String {
    let features: Vec<&str> = FEATURES.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    let (os, machine) = (std::env::consts::OS, std::env::consts::ARCH);
    let version = env!("CARGO_PKG_VERSION");
    format!("larder {version}\nfeatures: {}\nplatform: {os} {machine}\n", features.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_features_are_those_of_published_programs() {
        let manifest = include_str!("../../Cargo.toml");
        let full = manifest.lines().find_map(|line| line.strip_prefix("full = ")).unwrap();
        let full: Vec<&str> = serde_json::from_str(full).unwrap();
        assert_eq!(FEATURES.map(|(name, _)| name), *full);
    }
}
