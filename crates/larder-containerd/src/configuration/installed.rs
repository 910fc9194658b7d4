//! The containerd of this machine: its version, and the configuration that it reads from files.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::ContainerdInspector;
use larder::backend::BackendError;
use larder::error_chain;
use larder_cri::{CriBackend, Endpoint};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::spawn_blocking;
use toml_edit::{DocumentMut, Item};

use super::edit::{self, SNAPSHOTTER};
use super::version::ContainerdVersion;
use super::{ConfigurationError, LarderSettings};

const DEFAULT_SOCKET: &str = "/run/containerd/containerd.sock";
const PROGRAM: &str = "containerd";
/// Time for a containerd program to print its version or configuration.
const RUN_LIMIT: Duration = Duration::from_secs(30);

/// A containerd that runs, or is installed.
pub(super) struct InstalledContainerd {
    pub(super) version: ContainerdVersion,
    /// Its program or socket, which gave the version.
    pub(super) source: String,
    /// A program of this version.
    pub(super) program: Option<PathBuf>,
    pub(super) cri: CriBackend,
}

impl InstalledContainerd {
    /// The containerd at a socket, or of a program; without either, the one of the settings or at the default socket,
    /// else the one on `PATH`.
    pub(super) async fn find(
        given: Option<&str>,
        settings: &LarderSettings,
    ) -> Result<InstalledContainerd, ConfigurationError> {
        let configured = settings.containerd_socket.clone();
        let socket = match given {
            Some(given) if is_socket(given) => given.to_owned(),
            _ => configured.unwrap_or_else(|| DEFAULT_SOCKET.to_owned()),
        };
        let endpoint =
            Endpoint::parse(&socket).map_err(|error| ConfigurationError::bad_input(error.to_string()))?;
        let cri = CriBackend::new(endpoint.clone(), settings.runtime.clone());
        if let Some(program) = given.filter(|given| !is_socket(given)) {
            let version = program_version(program.into()).await?;
            let (source, program) = (program.to_owned(), Some(program.into()));
            return Ok(InstalledContainerd { version, source, program, cri });
        }
        let on_path = program_version(PROGRAM.into()).await;
        match ContainerdInspector::new(&cri).version().await {
            Ok(text) => {
                let version =
                    ContainerdVersion::find(&text).ok_or_else(|| unknown_version(&socket, &text))?;
                let program = on_path.ok().filter(|known| *known == version).map(|_| PROGRAM.into());
                Ok(InstalledContainerd { version, source: endpoint.to_string(), program, cri })
            }
            Err(error) if given.is_some() => Err(ConfigurationError::unreachable(error_chain(&error))),
            Err(error) => match on_path {
                Ok(version) => Ok(InstalledContainerd {
                    version,
                    source: PROGRAM.into(),
                    program: Some(PROGRAM.into()),
                    cri,
                }),
                Err(missing) => Err(none_found(&error, &missing)),
            },
        }
    }

    /// The snapshotter of CRI in the configuration files as this containerd reads them; `None` without a program to
    /// ask.
    pub(super) async fn dump_snapshotter(&self, main: &Path) -> Result<Option<String>, ConfigurationError> {
        let Some(program) = self.program.clone() else { return Ok(None) };
        let (main, version) = (main.to_owned(), self.version);
        let text = run(program, vec!["--config".into(), main, "config".into(), "dump".into()]).await?;
        let document: DocumentMut =
            text.parse().map_err(|error| ConfigurationError::failed(format!("config dump: {error}")))?;
        let of_cri = ["plugins", "io.containerd.cri.v1.images"];
        let of_v1 = ["plugins", "io.containerd.grpc.v1.cri", "containerd"];
        let path: &[&str] = if version.has_split_cri() { &of_cri } else { &of_v1 };
        let table = edit::find(document.as_table(), path);
        let proxied = edit::find(document.as_table(), &["proxy_plugins", SNAPSHOTTER]).is_some();
        let found =
            table.and_then(|table| table.get("snapshotter")).and_then(Item::as_str).unwrap_or_default();
        if found == SNAPSHOTTER && !proxied {
            return Err(ConfigurationError::failed(
                "containerd does not read the table proxy_plugins.larder",
            ));
        }
        Ok(Some(found.to_owned()))
    }
}

fn is_socket(given: &str) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    given.contains("://") || fs_err::metadata(given).is_ok_and(|found| found.file_type().is_socket())
}

async fn program_version(program: PathBuf) -> Result<ContainerdVersion, ConfigurationError> {
    let text = run(program.clone(), vec!["--version".into()]).await?;
    ContainerdVersion::find(&text).ok_or_else(|| unknown_version(&program.to_string_lossy(), &text))
}

async fn run(program: PathBuf, arguments: Vec<PathBuf>) -> Result<String, ConfigurationError> {
    run_within(RUN_LIMIT, program, arguments).await
}

/// Runs a program to its end, which is forced after the limit; returns what it prints.
async fn run_within(
    limit: Duration,
    program: PathBuf,
    arguments: Vec<PathBuf>,
) -> Result<String, ConfigurationError> {
    let name = program.display().to_string();
    let failed =
        |error: &dyn std::fmt::Display| ConfigurationError::failed(format!("cannot run {name}: {error}"));
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = spawn_blocking(move || command.spawn()).await.map_err(|error| failed(&error))?;
    let child = child.map_err(|error| failed(&error))?;
    let id = Pid::from_child(&child);
    let mut output = spawn_blocking(move || child.wait_with_output());
    let Ok(output) = tokio::time::timeout(limit, &mut output).await else {
        let _ = kill_process(id, Signal::KILL);
        return Err(failed(&format!("no result within {limit:?}")));
    };
    let output = output.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(failed(&text.lines().last().unwrap_or("it fails without a message")))
}

fn unknown_version(source: &str, text: &str) -> ConfigurationError {
    ConfigurationError::failed(format!(
        "cannot determine the version of containerd: {source} answers {:?}",
        text.trim()
    ))
}

fn none_found(socket: &BackendError, program: &ConfigurationError) -> ConfigurationError {
    let what = format!("found no containerd: {}; {}", error_chain(socket), program.message);
    ConfigurationError::unreachable(what).hint("name its program or socket")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_that_does_not_end_is_stopped() {
        let run = run_within(Duration::from_millis(50), "sleep".into(), vec!["600".into()]);
        let error = run.await.expect_err("no result");
        assert_eq!(error.message, "cannot run sleep: no result within 50ms");
        let echo = run_within(RUN_LIMIT, "echo".into(), vec!["2.4.0".into()]).await;
        assert_eq!(echo.expect("a result"), "2.4.0\n");
    }
}
