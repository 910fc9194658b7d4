//! A typed client of the control API: of a daemon, of another command, or of the node in this process.

mod calls;
mod download;
mod ensure_calls;
mod server_discovery;
mod upload;

use std::error::Error as _;
use std::path::Path;
use std::time::Duration;

use larder::backend::{EndpointFailure, Image};
use larder::go_format;
use larder::hint::Hint;
use larder_api::convert;
use larder_api::v1::{
    CredentialPrograms, ImagesRequest, ImagesResponse, JoinRequest, SettingValue, StatusRequest,
};
use larder_cri::Endpoint;
use larder_cri::channel::{ConnectionBroken, CriChannel, EndpointUnavailable};
use serde_json::Value;
use tokio::time;
use tonic::{Code, Response, Status};

use crate::config::{self, Config, SettingOrigin};
use crate::control::ControlApi;
use crate::environment::DefaultPaths;
use crate::error::{Error, ErrorKind};

pub use calls::{ControlCalls, ResponseStream};
pub use download::ArchiveDownload;
pub use ensure_calls::EnsureCalls;
pub use server_discovery::{ControlServerAddress, find_server, is_listening, socket_path};
pub(crate) use server_discovery::{command_socket, daemon_file};
pub use upload::{ArchiveReadError, ArchiveUpload};

/// How long a call may take that does not wait for a pull or a removal, unless the caller says otherwise.
const ANSWER_WITHIN: Duration = Duration::from_secs(120);
/// How long a daemon may take to compare settings. The result is only a warning.
const COMPARE_WITHIN: Duration = Duration::from_secs(2);
/// How long the connection may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// The settings that a process with this configuration insists on when it joins another one.
pub(crate) fn insisted_on(config: &Config, depends_on: impl Fn(&str) -> bool) -> Vec<SettingValue> {
    values(config::join_settings(config).filter(|(key, ..)| depends_on(key)))
}

fn values<'a>(given: impl Iterator<Item = (&'static str, Value, &'a SettingOrigin)>) -> Vec<SettingValue> {
    given
        // The time that a client waits for answers concerns only the client.
        .filter(|(_, _, origin)| **origin != SettingOrigin::Flag("--timeout"))
        .map(|(key, value, origin)| SettingValue {
            key: key.to_owned(),
            value: value.to_string(),
            origin: origin.to_string(),
        })
        .collect()
}

/// The process that answers a client.
#[derive(Debug, Clone)]
enum ControlPeer {
    ThisProcess,
    Other(ControlServerAddress),
}

/// A client of the control API. A socket is connected to by the first call.
#[derive(Clone)]
pub struct Client {
    calls: ControlCalls,
    peer: ControlPeer,
    /// `None` is no limit.
    within: Option<Duration>,
}

impl Client {
    /// A client of the process that listens here. `within` bounds calls that are answered soon.
    pub fn of(server: ControlServerAddress, within: Option<Duration>) -> Client {
        let within = within.unwrap_or(ANSWER_WITHIN);
        let channel = CriChannel::new(Endpoint::at(server.socket()), CONNECT_WITHIN.min(within));
        Client { calls: ControlCalls::over(channel), peer: ControlPeer::Other(server), within: Some(within) }
    }

    /// A client of the service in this process.
    pub fn in_process(service: ControlApi) -> Client {
        Client { calls: ControlCalls::InProcess(service), peer: ControlPeer::ThisProcess, within: None }
    }

    /// The socket, if the node is in another process.
    pub fn socket(&self) -> Option<&Path> {
        match &self.peer {
            ControlPeer::ThisProcess => None,
            ControlPeer::Other(server) => Some(server.socket()),
        }
    }

    /// The socket, if a daemon listens there.
    pub fn daemon(&self) -> Option<&Path> {
        self.socket().filter(|_| !self.is_joined())
    }

    /// Whether the node is in another command.
    pub fn is_joined(&self) -> bool {
        matches!(self.peer, ControlPeer::Other(ControlServerAddress::Command(_)))
    }

    fn shown(&self) -> String {
        match &self.peer {
            ControlPeer::ThisProcess => "this process".to_owned(),
            ControlPeer::Other(ControlServerAddress::Daemon(socket)) => {
                format!("the daemon at {}", socket.display())
            }
            ControlPeer::Other(ControlServerAddress::Command(socket)) => {
                format!("the larder command at {}", socket.display())
            }
        }
    }

    /// Fails unless the command that has the images open has these settings of this process, as far as the caller
    /// depends on them. A process that pulls names the [programs](larder::credentials::NodeKeyring::programs) that it
    /// would run for credentials.
    pub async fn join(
        &self,
        config: &Config,
        depends_on: impl Fn(&str) -> bool,
        programs: Option<Vec<String>>,
    ) -> Result<(), Error> {
        let settings = insisted_on(config, depends_on);
        let credential_programs = programs.map(|programs| CredentialPrograms { programs });
        let request = JoinRequest { settings, credential_programs };
        self.ask(async |mut calls| calls.join(request).await).await.map(drop)
    }

    /// The error that names settings of this process which the daemon does not have, as far as the caller depends on
    /// them. `None` for a daemon that is too old to compare settings, or that does not answer soon.
    pub async fn ignored(&self, config: &Config, depends_on: impl Fn(&str) -> bool) -> Option<Error> {
        let given: Vec<_> = config::explicit_settings(config).filter(|(key, ..)| depends_on(key)).collect();
        if given.is_empty() {
            return None;
        }
        let request = JoinRequest { settings: values(given.into_iter()), credential_programs: None };
        // Any other failure is reported by the call that follows.
        let answer = time::timeout(COMPARE_WITHIN, self.calls().join(request)).await.ok()?;
        let status = answer.err().filter(|status| status.code() != Code::Unimplemented)?;
        Some(self.error(&status)).filter(|error| error.kind() == ErrorKind::Failed)
    }

    /// Makes a call that is answered soon.
    pub async fn ask<T>(
        &self,
        call: impl AsyncFnOnce(ControlCalls) -> Result<Response<T>, Status>,
    ) -> Result<T, Error> {
        let Some(within) = self.within else { return self.wait(call).await };
        match time::timeout(within, self.wait(call)).await {
            Ok(answer) => answer,
            Err(_) => Err(self.silent(within)),
        }
    }

    /// Makes a call that may take any time.
    pub async fn wait<T>(
        &self,
        call: impl AsyncFnOnce(ControlCalls) -> Result<Response<T>, Status>,
    ) -> Result<T, Error> {
        let answer = call(self.calls()).await;
        answer.map(Response::into_inner).map_err(|status| self.error(&status))
    }

    /// The images that are present, as a backend lists them.
    pub async fn images(&self) -> Result<Vec<Image>, Error> {
        let found = self.ask(async |mut calls| calls.images(ImagesRequest::default()).await).await?;
        Ok(found.images.into_iter().map(convert::image_from).collect())
    }

    /// Lists the images with their age, use and layers, and their labels with these keys.
    pub async fn detailed_images(&self, label_keys: Vec<String>) -> Result<ImagesResponse, Error> {
        let request = ImagesRequest { details: true, label_keys, ..Default::default() };
        self.ask(async |mut calls| calls.images(request).await).await
    }

    /// Fails if the backend did not answer the last periodic check.
    pub async fn check_backend_health(&self) -> Result<(), Error> {
        // A command does not check its backend periodically.
        self.backend_status(self.is_joined()).await
    }

    /// Asks the backend now; fails if it does not answer.
    pub async fn check_backend(&self) -> Result<(), Error> {
        self.backend_status(true).await
    }

    async fn backend_status(&self, look: bool) -> Result<(), Error> {
        let status = self.ask(async |mut calls| calls.status(StatusRequest { look }).await).await?;
        if status.backend_available {
            return Ok(());
        }
        let retried = self.daemon().map(|_| format!("{} keeps retrying", self.shown()));
        Err(Error::unreachable(status.backend_message).hints(retried))
    }

    /// The calls themselves, without limits of time.
    pub fn calls(&self) -> ControlCalls {
        self.calls.clone()
    }

    /// Why a call failed.
    pub fn error(&self, status: &Status) -> Error {
        let peer = self.shown();
        if let Some(EndpointUnavailable(found)) = status.source().and_then(|source| source.downcast_ref()) {
            return self.nothing_there(found);
        }
        if let Some(ConnectionBroken(how)) = status.source().and_then(|source| source.downcast_ref()) {
            // The cause of a broken connection does not help the user.
            tracing::debug!("lost the connection to {peer}: {how}");
            if self.is_joined() {
                return self.ended();
            }
            return Error::unreachable(format!("{peer} closed the connection before its response"))
                .hint("check its log; rerun the command to retry");
        }
        if status.code() == Code::Unimplemented {
            return Error::failed(format!("{peer} does not support this call: {}", status.message())).hint(
                Hint::from("it is another version of larder, or another program; ")
                    .command(["status"])
                    .text(" shows which"),
            );
        }
        Error::from_status(status)
    }

    /// The command that this one worked through has ended.
    fn ended(&self) -> Error {
        Error::unreachable(format!("{} ended before its response", self.shown()))
            .hint("rerun the command to retry")
    }

    fn nothing_there(&self, found: &EndpointFailure) -> Error {
        let socket = self.socket().unwrap_or(Path::new(""));
        match found {
            EndpointFailure::Denied if self.is_joined() => {
                server_discovery::denied(socket, "another larder command's")
            }
            EndpointFailure::Denied => server_discovery::denied(socket, "the daemon's"),
            EndpointFailure::Silent { after } => self.silent(*after),
            EndpointFailure::Missing | EndpointFailure::Refused | EndpointFailure::ConnectionLost { .. }
                if self.is_joined() =>
            {
                self.ended()
            }
            EndpointFailure::Missing | EndpointFailure::Refused | EndpointFailure::NotASocket => {
                Error::unreachable(format!("no daemon at {}: {found}", socket.display()))
                    .hint(Hint::from("start it: ").command(serve_at(socket)))
                    .hint(Hint::from("or work without a daemon: ").setting("daemon", "none"))
            }
            other => Error::unreachable(format!("{} does not serve larder's API: {other}", socket.display()))
                .hint(Hint::from("name the daemon's socket: ").setting("daemon", "SOCKET")),
        }
    }

    fn silent(&self, after: Duration) -> Error {
        let after = go_format::duration(after);
        Error::unreachable(format!("{}: no answer within {after}", self.shown())).hint(
            Hint::from("it hangs or is overloaded: check its log, or wait longer with ")
                .setting("timeout", ""),
        )
    }
}

/// The arguments of the command that starts a daemon at this socket.
fn serve_at(socket: &Path) -> Vec<String> {
    let mut args = vec!["serve".to_owned()];
    if DefaultPaths::current().socket.as_deref() != Some(socket) {
        args.extend(["--socket".to_owned(), socket.display().to_string()]);
    }
    args
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;
    use tokio::time::Instant;

    use super::*;
    use crate::config::{SettingsSource, SettingsSources};

    #[tokio::test(start_paused = true)]
    async fn a_silent_daemon_delays_the_comparison_of_settings_only_for_its_own_limit() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let _listener = UnixListener::bind(&socket).unwrap();
        let given = SettingsSource::Given {
            by: SettingOrigin::Flag("--state"),
            key: "state",
            value: dir.path().display().to_string(),
        };
        let sources = SettingsSources { places: DefaultPaths::of(true, |_| None), layers: vec![given] };
        let config = config::load(&sources).unwrap();
        let client = Client::of(ControlServerAddress::Daemon(socket), None);
        let started = Instant::now();
        assert!(client.ignored(&config, |key| key == "state").await.is_none());
        assert_eq!(started.elapsed(), COMPARE_WITHIN);
    }
}
