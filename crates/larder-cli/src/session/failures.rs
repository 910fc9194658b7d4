//! Failures to reach images, and which flag or variable led there.

use std::path::PathBuf;

use larder::hint::Hint;
use larder_agent::NodeOpenError;
use larder_agent::backend::docker;
use larder_agent::backend::target::{CRI, DOCKER, PODMAN, STORE};
use larder_agent::client::ControlServerAddress;
use larder_agent::environment::variable;
use larder_api::v1::StatusRequest;

use super::CommandSession;
use crate::args::settings::{BACKEND_VARIABLE, IMAGE_VARIABLE, RUNTIME_VARIABLE};
use crate::exit::CommandOutcome;
use crate::failure::{ErrorKind, ExitReport as _, Failure};

impl CommandSession {
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
