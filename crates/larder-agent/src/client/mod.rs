//! A typed client of the control API: of a daemon, of another command, or of the node in this process.

mod find;
mod pulls;
mod transport;
mod upload;

use std::error::Error as _;
use std::path::Path;
use std::time::Duration;

use larder::backend::{Image, Unreachable};
use larder::gotext;
use larder_api::v1alpha1::control_client::ControlClient;
use larder_api::v1alpha1::control_server::ControlServer;
use larder_api::v1alpha1::{CredentialPrograms, ImagesRequest, JoinRequest, SettingValue, StatusRequest};
use larder_api::{MAX_MESSAGE_BYTES, convert};
use larder_cri::Endpoint;
use larder_cri::channel::{Channel, Lost, NothingThere};
use tokio::time;
use tonic::codegen::http::Uri;
use tonic::{Code, Response, Status};

use crate::config::{self, Config, Origin};
use crate::control;
use crate::error::Error;

pub use find::{Server, is_listening, server_of, socket_path};
pub(crate) use find::{command_socket, daemon_file};
pub use pulls::Pulls;
pub use transport::Transport;
pub use upload::{Upload, UploadProblem};

/// How long a call may take that does not wait for a pull or a removal, unless the caller says otherwise.
const ANSWER_WITHIN: Duration = Duration::from_secs(120);
/// How long the connection may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// The settings that a process with this configuration insists on when it joins another one.
pub(crate) fn insisted_on(config: &Config) -> Vec<SettingValue> {
    config::joining(config)
        // How long a client waits for answers is its own affair.
        .filter(|(_, _, origin)| **origin != Origin::Flag("--timeout"))
        .map(|(key, value, origin)| SettingValue {
            key: key.to_owned(),
            value: value.to_string(),
            origin: origin.to_string(),
        })
        .collect()
}

/// HTTP/2 wants one; to a Unix socket it means nothing.
const ORIGIN: &str = "http://localhost";

/// The generated client.
pub type Calls = ControlClient<Transport>;

/// The process that answers a client.
#[derive(Debug, Clone)]
enum Peer {
    ThisProcess,
    Other(Server),
}

/// A client of the control API. A socket is connected to by the first call.
#[derive(Clone)]
pub struct Client {
    transport: Transport,
    peer: Peer,
    /// `None` is no bound.
    within: Option<Duration>,
}

impl Client {
    /// A client of the process that listens here. `within` bounds calls that are answered soon.
    pub fn of(server: Server, within: Option<Duration>) -> Client {
        let within = within.unwrap_or(ANSWER_WITHIN);
        let channel = Channel::new(Endpoint::at(server.socket()), CONNECT_WITHIN.min(within));
        Client { transport: Transport::Socket(channel), peer: Peer::Other(server), within: Some(within) }
    }

    /// A client of the service in this process.
    pub fn local(service: ControlServer<control::Service>) -> Client {
        Client { transport: Transport::Local(service), peer: Peer::ThisProcess, within: None }
    }

    /// The socket, if the node is in another process.
    pub fn socket(&self) -> Option<&Path> {
        match &self.peer {
            Peer::ThisProcess => None,
            Peer::Other(server) => Some(server.socket()),
        }
    }

    /// The socket, if a daemon listens there.
    pub fn daemon(&self) -> Option<&Path> {
        self.socket().filter(|_| !self.is_joined())
    }

    /// Whether the node is in another command.
    pub fn is_joined(&self) -> bool {
        matches!(self.peer, Peer::Other(Server::Command(_)))
    }

    fn shown(&self) -> String {
        match &self.peer {
            Peer::ThisProcess => "this process".to_owned(),
            Peer::Other(Server::Daemon(socket)) => format!("the daemon at {}", socket.display()),
            Peer::Other(Server::Command(socket)) => format!("the larder command at {}", socket.display()),
        }
    }

    /// Asks a command that has the images open whether this process can work through it with these settings; with `None`,
    /// whether it is there: who only looks depends on no settings. A process that pulls names the
    /// [programs](larder::credentials::Sources::programs) that it would ask for credentials.
    pub async fn join(&self, config: Option<&Config>, programs: Option<Vec<String>>) -> Result<(), Error> {
        let settings = config.map(insisted_on).unwrap_or_default();
        let credential_programs = programs.map(|programs| CredentialPrograms { programs });
        let request = JoinRequest { settings, credential_programs };
        self.ask(async |mut calls| calls.join(request).await).await.map(drop)
    }

    /// Asks it something that it answers soon.
    pub async fn ask<T>(
        &self,
        call: impl AsyncFnOnce(Calls) -> Result<Response<T>, Status>,
    ) -> Result<T, Error> {
        let Some(within) = self.within else { return self.wait(call).await };
        match time::timeout(within, self.wait(call)).await {
            Ok(answer) => answer,
            Err(_) => Err(self.silent(within)),
        }
    }

    /// Asks it something that may take any time.
    pub async fn wait<T>(
        &self,
        call: impl AsyncFnOnce(Calls) -> Result<Response<T>, Status>,
    ) -> Result<T, Error> {
        let answer = call(self.calls()).await;
        answer.map(Response::into_inner).map_err(|status| self.error(&status))
    }

    /// The images that are present, as a backend lists them.
    pub async fn images(&self) -> Result<Vec<Image>, Error> {
        let found = self.ask(async |mut calls| calls.images(ImagesRequest {}).await).await?;
        Ok(found.images.into_iter().map(convert::image_from).collect())
    }

    /// Whether its backend answered when it was last asked, which is not long ago.
    pub async fn answered(&self) -> Result<(), Error> {
        // A command does not ask its backend by itself.
        self.backend_answers(self.is_joined()).await
    }

    /// Whether its backend answers now.
    pub async fn answers(&self) -> Result<(), Error> {
        self.backend_answers(true).await
    }

    async fn backend_answers(&self, look: bool) -> Result<(), Error> {
        let status = self.ask(async |mut calls| calls.status(StatusRequest { look }).await).await?;
        if status.backend_answers {
            return Ok(());
        }
        let retried = self.daemon().map(|_| format!("{} tries it again and again", self.shown()));
        Err(Error::unreachable(status.backend_message).hints(retried))
    }

    /// The generated client.
    pub fn calls(&self) -> Calls {
        Calls::with_origin(self.transport.clone(), Uri::from_static(ORIGIN))
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Why a call failed.
    pub fn error(&self, status: &Status) -> Error {
        let peer = self.shown();
        if let Some(NothingThere(found)) = status.source().and_then(|source| source.downcast_ref()) {
            return self.nothing_there(found);
        }
        if let Some(Lost(how)) = status.source().and_then(|source| source.downcast_ref()) {
            // How a connection breaks says nothing to whom it happens.
            tracing::debug!("the connection to {peer} broke: {how}");
            if self.is_joined() {
                return self.ended();
            }
            return Error::unreachable(format!("{peer} went away before it had answered"))
                .hint("its log says why; what it was doing is done again by the same command");
        }
        if status.code() == Code::Unimplemented {
            return Error::failed(format!("{peer} does not know this: {}", status.message()))
                .hint("it is of another version, or no larder at all: larder status tells");
        }
        Error::from_status(status)
    }

    /// The command that this one worked through has ended.
    fn ended(&self) -> Error {
        Error::unreachable(format!("{} ended before it had answered", self.shown()))
            .hint("rerun the command to retry")
    }

    fn nothing_there(&self, found: &Unreachable) -> Error {
        let socket = self.socket().unwrap_or(Path::new(""));
        match found {
            Unreachable::Denied if self.is_joined() => find::denied(socket, "another larder command's"),
            Unreachable::Denied => find::denied(socket, "the daemon's"),
            Unreachable::Silent { after } => self.silent(*after),
            Unreachable::Missing | Unreachable::Refused | Unreachable::Broken { .. } if self.is_joined() => {
                self.ended()
            }
            Unreachable::Missing | Unreachable::Refused | Unreachable::NotASocket => {
                Error::unreachable(format!("no daemon at {}: {found}", socket.display()))
                    .hint("start it with larder serve, or leave it out with --daemon none")
            }
            other => {
                Error::unreachable(format!("what listens at {} is no larder: {other}", socket.display()))
                    .hint("name the daemon's socket with --daemon SOCKET")
            }
        }
    }

    fn silent(&self, after: Duration) -> Error {
        let after = gotext::duration(after);
        Error::unreachable(format!("{} gave no answer within {after}", self.shown()))
            .hint("it hangs, or has too much to do: see its log; --timeout says how long to wait")
    }
}
