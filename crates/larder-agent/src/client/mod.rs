//! A typed client of the control API: of a daemon, of another command, or of the node in this process.

mod find;
mod pulls;
mod transport;
mod upload;

use std::error::Error as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder::backend::{Image, Unreachable};
use larder::gotext;
use larder_api::v1alpha1::control_client::ControlClient;
use larder_api::v1alpha1::control_server::ControlServer;
use larder_api::v1alpha1::{ImagesRequest, JoinRequest, SettingValue, StatusRequest};
use larder_api::{MAX_MESSAGE_BYTES, convert};
use larder_cri::Endpoint;
use larder_cri::channel::{Channel, Lost, NothingThere};
use tokio::time;
use tonic::codegen::http::Uri;
use tonic::{Code, Response, Status};

use crate::config::{self, Config};
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

/// HTTP/2 wants one; to a Unix socket it means nothing.
const ORIGIN: &str = "http://localhost";

/// The generated client.
pub type Calls = ControlClient<Transport>;

/// A client of the control API. A socket is connected to by the first call.
#[derive(Clone)]
pub struct Client {
    transport: Transport,
    /// `None` in this process.
    socket: Option<PathBuf>,
    /// `None` is no bound.
    within: Option<Duration>,
}

impl Client {
    /// A client of the process that listens here. `within` bounds calls that are answered soon.
    pub fn at(socket: PathBuf, within: Option<Duration>) -> Client {
        let within = within.unwrap_or(ANSWER_WITHIN);
        let channel = Channel::new(Endpoint::at(&socket), CONNECT_WITHIN.min(within));
        Client { transport: Transport::Socket(channel), socket: Some(socket), within: Some(within) }
    }

    /// A client of the service in this process.
    pub fn local(service: ControlServer<control::Service>) -> Client {
        Client { transport: Transport::Local(service), socket: None, within: None }
    }

    /// The socket, if the node is in another process.
    pub fn socket(&self) -> Option<&Path> {
        self.socket.as_deref()
    }

    fn shown(&self) -> String {
        self.socket.as_ref().map_or_else(|| "this process".to_owned(), |path| path.display().to_string())
    }

    /// Asks a command that has the images open whether this process can work through it with these settings.
    pub async fn join(&self, config: &Config) -> Result<(), Error> {
        let settings = config::given(config).map(|(key, value, origin)| SettingValue {
            key: key.to_owned(),
            value: value.to_string(),
            origin: origin.to_string(),
        });
        let request = JoinRequest { settings: settings.collect() };
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
        self.backend_answers(false).await
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
        Err(Error::unreachable(status.backend_message).hints(
            self.socket
                .iter()
                .map(|socket| format!("the daemon at {} tries it again and again", socket.display())),
        ))
    }

    /// The generated client.
    pub fn calls(&self) -> Calls {
        Calls::with_origin(self.transport.clone(), Uri::from_static(ORIGIN))
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Why a call failed.
    pub fn error(&self, status: &Status) -> Error {
        let socket = self.shown();
        if let Some(NothingThere(found)) = status.source().and_then(|source| source.downcast_ref()) {
            return self.nothing_there(found);
        }
        if let Some(Lost(how)) = status.source().and_then(|source| source.downcast_ref()) {
            // How a connection breaks says nothing to whom it happens.
            tracing::debug!("the connection to {socket} broke: {how}");
            return Error::unreachable(format!("the daemon at {socket} went away before it had answered"))
                .hint("its log says why; what it was doing is done again by the same command");
        }
        if status.code() == Code::Unimplemented {
            return Error::failed(format!("the daemon at {socket} does not know this: {}", status.message()))
                .hint("it is of another version, or no larder at all: larder status tells");
        }
        Error::from_status(status)
    }

    fn nothing_there(&self, found: &Unreachable) -> Error {
        let socket = self.shown();
        match found {
            Unreachable::Denied => find::denied(self.socket.as_deref().unwrap_or(Path::new(""))),
            Unreachable::Silent { after } => self.silent(*after),
            Unreachable::Missing | Unreachable::Refused | Unreachable::NotASocket => {
                Error::unreachable(format!("no daemon at {socket}: {found}"))
                    .hint("start it with larder serve, or leave it out with --daemon none")
            }
            other => Error::unreachable(format!("what listens at {socket} is no larder: {other}"))
                .hint("name the daemon's socket with --daemon SOCKET"),
        }
    }

    fn silent(&self, after: Duration) -> Error {
        let after = gotext::duration(after);
        Error::unreachable(format!("the daemon at {} gave no answer within {after}", self.shown()))
            .hint("it hangs, or has too much to do: see its log; --timeout says how long to wait")
    }
}
