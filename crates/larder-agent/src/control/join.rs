//! Whether a client with settings of its own can work through this process.

use larder_api::v1alpha1::SettingValue;

use super::Process;
use crate::config::{self, BackendAt, Config};
use crate::error::Error;

/// Settings that concern only the process that has them, and those by which the client came here.
const OWN: [&str; 7] =
    ["listen.", "metrics.", "log.", "events.", "root", "backend", "containerRuntimeEndpoint"];

/// Fails where a setting that the client was given has another value here, and names all of them. A client works through
/// a daemon nevertheless, and warns.
pub(super) fn check(config: &Config, process: &Process, theirs: &[SettingValue]) -> Result<(), Error> {
    let differences: Vec<String> = theirs
        .iter()
        .filter(|setting| !OWN.iter().any(|section| setting.key.starts_with(section)))
        // A runtime's images are found by the state directory.
        .filter(|setting| setting.key != "state" || matches!(config.backend, BackendAt::Store))
        .filter_map(|setting| {
            let here = config::value_of(config, &setting.key)?.to_string();
            let SettingValue { key, value, origin } = setting;
            (here != *value).then(|| format!("{key} is {value} ({origin}), and {here} there"))
        })
        .collect();
    if differences.is_empty() {
        return Ok(());
    }
    let differences = differences.join("; ");
    Err(match process {
        Process::Command => Error::failed(format!(
            "another larder command has these images open with other settings: {differences}"
        ))
        .hint("rerun the command when the other one has ended, or give both the same settings"),
        Process::Daemon(_) => {
            Error::failed(format!("settings without effect, the daemon has its own: {differences}"))
                .hint("change the settings of the daemon instead")
        }
    })
}
