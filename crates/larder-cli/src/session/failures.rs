//! Failures to reach images, and which flag or variable led there.

use std::io;
use std::path::{Path, PathBuf};

use larder::hint::Hint;
use larder_agent::NodeOpenError;
use larder_agent::backend::target::{CRI, DOCKER, PODMAN, STORE};
use larder_agent::backend::{BackendTarget, docker};
use larder_agent::client::ControlServerAddress;
use larder_agent::environment::variable;
use larder_api::v1::StatusRequest;

use super::CommandSession;
use crate::args::settings::{BACKEND_VARIABLE, IMAGE_VARIABLE, RUNTIME_VARIABLE};
use crate::exit::CommandOutcome;
use crate::failure::{ErrorKind, ExitReport as _, Failure};

/// The process of a daemon; unknown if it has ended or does not answer.
pub(super) struct DaemonProcess {
    pid: Option<i32>,
}

impl DaemonProcess {
    pub(super) fn pid(&self) -> Option<u32> {
        self.pid.and_then(|pid| u32::try_from(pid).ok())
    }

    /// Returns the command that stops the daemon: that of its systemd unit, if it runs in one.
    pub(super) fn stop_command(&self) -> Option<String> {
        let pid = self.pid?;
        let unit = unit_of(&Path::new("/proc").join(pid.to_string()));
        Some(unit.map_or_else(|| format!("kill {pid}"), |unit| format!("systemctl {unit}")))
    }
}

/// The process of a daemon that has the store open and does not serve it: it starts, or it stops.
pub(super) fn unready_daemon(target: &BackendTarget) -> Option<u32> {
    let BackendTarget::Store(root) = target else { return None };
    let lock = root.join("lock").canonicalize().ok()?;
    let process: u32 = fs_err::read_to_string(&lock).ok()?.trim().parse().ok()?;
    // The file names the last process that had the store open; another one may have its number now.
    let mut files = fs_err::read_dir(format!("/proc/{process}/fd")).ok()?.flatten();
    if !files.any(|file| fs_err::read_link(file.path()).is_ok_and(|open| open == lock)) {
        return None;
    }
    let arguments = fs_err::read(format!("/proc/{process}/cmdline")).ok()?;
    arguments.split(|byte| *byte == 0).skip(1).any(|word| word == b"serve").then_some(process)
}

/// The failure to look for a daemon in a store that this user may not search.
pub(super) fn hidden_store(target: &BackendTarget) -> Option<Failure> {
    let BackendTarget::Store(root) = target else { return None };
    let error = fs_err::symlink_metadata(root.join("daemon")).err()?;
    (error.kind() == io::ErrorKind::PermissionDenied).then(|| {
        Failure::unreachable(format!(
            "cannot determine whether a daemon is running: {}: permission denied",
            root.display()
        ))
        .hint("run as the user who owns the store, or as root, or select the daemon with --daemon SOCKET")
    })
}

/// Returns `stop UNIT`, or `--user stop UNIT`, for a process that systemd has started as a service.
fn unit_of(process: &Path) -> Option<String> {
    let read = |path: PathBuf| fs_err::read_to_string(path).ok();
    // `PID (COMMAND) STATE PARENT ...`, where the command may contain anything.
    let stat = read(process.join("stat"))?;
    let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.to_owned();
    // Services of another manager, and processes that a service started, are not stopped by a unit of their own.
    let manager = read(process.parent()?.join(parent).join("comm"))?;
    if manager.trim_end() != "systemd" {
        return None;
    }
    let cgroup = read(process.join("cgroup"))?;
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::"))?;
    let unit = path.rsplit('/').next().filter(|name| name.ends_with(".service"))?;
    let user = if path.contains("/user@") { "--user " } else { "" };
    Some(format!("{user}stop {unit}"))
}

impl CommandSession {
    /// Returns the process of the daemon at this socket.
    pub(super) async fn daemon_process(&self, socket: PathBuf) -> DaemonProcess {
        let client = self.client(ControlServerAddress::Daemon(socket));
        let status = client.ask(async |mut calls| calls.status(StatusRequest { look: false }).await).await;
        DaemonProcess { pid: status.ok().map(|status| status.pid) }
    }

    /// No daemon serves the images: `command` has them open, or the settings have this error.
    pub(super) async fn no_daemon(
        &self,
        command: Option<PathBuf>,
        settings: Option<NodeOpenError>,
    ) -> Failure {
        let mut message = "no daemon is running".to_owned();
        match (settings.map(Failure::from), command) {
            (Some(error), _) if error.kind() == ErrorKind::InvalidInput => {
                return error
                    .hint("a running daemon is selected with --daemon SOCKET, whatever the settings");
            }
            (None, Some(command)) => {
                if let Some(process) = self.process_of(command).await {
                    message = format!("{message}: {process} has the images open");
                }
            }
            _ => {}
        }
        Failure::unreachable(message)
            .hint(Hint::from("start it with ").command(["serve"]))
            .hint("or select one with --daemon SOCKET, --root or --backend")
    }

    /// The process of the command that serves images at this socket, with its arguments; `None` if it has ended.
    pub(super) async fn process_of(&self, socket: PathBuf) -> Option<String> {
        let client = self.client(ControlServerAddress::Command(socket));
        let status = client.ask(async |mut calls| calls.status(StatusRequest { look: false }).await);
        let process = status.await.ok()?.pid;
        let words = fs_err::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).trim_end_matches('\0').replace('\0', " ");
        Some(if words.is_empty() {
            format!("process {process}")
        } else {
            format!("process {process} ({words})")
        })
    }

    /// Adds to a failure which variable selected the backend that cannot be reached.
    pub(crate) fn explain(&self, failure: Failure, of_store: bool) -> Failure {
        let connection = &self.connection;
        let named = variable(BACKEND_VARIABLE);
        if of_store {
            let by_default = connection.root.is_none() && connection.backend.is_none();
            return match named.filter(|named| by_default && named != STORE) {
                Some(named) => failure.hint(format!(
                    "{BACKEND_VARIABLE}={named} has no effect: this command requires larder's own store"
                )),
                None => failure,
            };
        }
        if failure.outcome() != CommandOutcome::Unreachable || connection.root.is_some() {
            return failure;
        }
        let (text, by_variable) = match (&connection.backend, named) {
            (Some(text), _) => (text.clone(), false),
            (None, Some(text)) => (text, true),
            (None, None) => return failure,
        };
        let name = match text.as_str() {
            STORE => None,
            CRI => {
                let set =
                    [RUNTIME_VARIABLE, IMAGE_VARIABLE].into_iter().find(|name| variable(name).is_some());
                set.map(str::to_owned)
            }
            DOCKER => docker::engine_variable(variable),
            PODMAN => variable(docker::PODMAN_HOST).map(|_| docker::PODMAN_HOST.to_owned()),
            _ if by_variable => Some(BACKEND_VARIABLE.to_owned()),
            _ => None,
        };
        match name {
            Some(name) => failure.hint(format!("the socket is set by {name}")),
            None => failure,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_of_systemd_is_stopped_by_its_unit_and_another_one_by_its_pid() {
        let proc = tempfile::tempdir().unwrap();
        let process = |manager: &str, cgroup: &str| {
            for (path, text) in
                [("7/stat", "7 (a) b) S 1 7 7 0"), ("7/cgroup", cgroup), ("1/comm", &format!("{manager}\n"))]
            {
                let path = proc.path().join(path);
                fs_err::create_dir_all(path.parent().unwrap()).unwrap();
                fs_err::write(path, text).unwrap();
            }
            unit_of(&proc.path().join("7"))
        };
        let unit = |cgroup| process("systemd", cgroup);
        assert_eq!(unit("0::/system.slice/larder.service\n").unwrap(), "stop larder.service");
        let of_user = "0::/user.slice/user-1.slice/user@1.service/app.slice/larder.service\n";
        assert_eq!(unit(of_user).unwrap(), "--user stop larder.service");
        assert_eq!(unit("0::/user.slice/user-1.slice/session-2.scope\n"), None);
        assert_eq!(unit("0::/\n"), None);
        assert_eq!(process("bash", "0::/system.slice/cron.service\n"), None);
        let unknown = DaemonProcess { pid: None };
        assert_eq!(unknown.stop_command(), None);
    }
}
