//! The daemon, as the command line sees it: found, asked, and understood.

pub(crate) mod convert;
mod find;
mod parcel;
mod pulls;
mod refusal;

use std::error::Error as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder::backend::{Image, Unreachable};
use larder::gotext;
use larder_control::MAX_MESSAGE_BYTES;
use larder_control::v1alpha1::control_client::ControlClient;
use larder_control::v1alpha1::{ImagesRequest, StatusRequest};
use larder_cri::Endpoint;
use larder_cri::channel::{Channel, Lost, NothingThere};
use tokio::time;
use tonic::codegen::http::Uri;
use tonic::{Code, Response, Status};

use crate::args::Connection;
use crate::failure::Failure;

pub(crate) use find::note_of_store;
pub(crate) use parcel::Parcel;
pub(crate) use pulls::Pulls;

/// How long a call may take that does not wait for a pull or a removal, unless the user says otherwise.
const ANSWER_WITHIN: Duration = Duration::from_secs(120);
/// How long the connection may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// HTTP/2 wants one; to a Unix socket it means nothing.
const ORIGIN: &str = "http://localhost";

/// A client of the control API.
pub(crate) type Client = ControlClient<Channel>;

/// A daemon, spoken to by the first call.
#[derive(Clone)]
pub(crate) struct Daemon {
    socket: PathBuf,
    channel: Channel,
    within: Duration,
}

impl Daemon {
    /// The daemon that does the work of this command; `None` if the command works on the images itself. `-v` says which.
    pub(crate) fn find(connection: &Connection) -> Result<Option<Daemon>, Failure> {
        Ok(Daemon::told(find::find(connection)?, connection))
    }

    /// The same for commands that work on nothing but larder's own store.
    pub(crate) fn find_of_store(connection: &Connection) -> Result<Option<Daemon>, Failure> {
        Ok(Daemon::told(find::find_of_store(connection)?, connection))
    }

    fn told(socket: Option<PathBuf>, connection: &Connection) -> Option<Daemon> {
        let Some(socket) = socket else {
            tracing::info!("no daemon: working on the images itself");
            return None;
        };
        tracing::info!("asking the daemon at {}", socket.display());
        Some(Daemon::at(socket, connection))
    }

    /// The daemon, for commands that are about nothing else.
    pub(crate) fn required(connection: &Connection) -> Result<Daemon, Failure> {
        Daemon::find(connection)?.ok_or_else(|| {
            Failure::unreachable("no daemon runs here").hint("start it with larder serve").hint(
                "one that listens elsewhere is named with --daemon SOCKET, or by its --root or --backend",
            )
        })
    }

    /// Refuses what only works without a daemon while one has these images.
    pub(crate) fn forbidden(connection: &Connection, command: &str) -> Result<(), Failure> {
        let Some(socket) = find::listening_of_store(connection)? else { return Ok(()) };
        Err(Failure::failed(format!(
            "larder {command} works on the store itself, and the daemon at {} has it",
            socket.display()
        ))
        .hint("stop the daemon first (systemctl stop larder, or end larder serve), and start it again after"))
    }

    fn at(socket: PathBuf, connection: &Connection) -> Daemon {
        let within = connection.timeout.unwrap_or(ANSWER_WITHIN);
        let channel = Channel::new(Endpoint::at(&socket), CONNECT_WITHIN.min(within));
        Daemon { socket, channel, within }
    }

    /// Where it listens.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks it something that it answers soon.
    pub(crate) async fn ask<T>(
        &self,
        call: impl AsyncFnOnce(Client) -> Result<Response<T>, Status>,
    ) -> Result<T, Failure> {
        match time::timeout(self.within, self.wait(call)).await {
            Ok(answer) => answer,
            Err(_) => Err(self.silent(self.within)),
        }
    }

    /// Asks it something that may take any time.
    pub(crate) async fn wait<T>(
        &self,
        call: impl AsyncFnOnce(Client) -> Result<Response<T>, Status>,
    ) -> Result<T, Failure> {
        let answer = call(self.client()).await;
        answer.map(Response::into_inner).map_err(|status| self.failure(&status))
    }

    /// The images that are present, as a backend lists them.
    pub(crate) async fn images(&self) -> Result<Vec<Image>, Failure> {
        let found = self.ask(async |mut client| client.images(ImagesRequest {}).await).await?;
        Ok(found.images.into_iter().map(convert::image_from).collect())
    }

    /// Whether its backend answered when it was last asked, which is not long ago.
    pub(crate) async fn answered(&self) -> Result<(), Failure> {
        self.backend_answers(false).await
    }

    /// Whether its backend answers now.
    pub(crate) async fn answers(&self) -> Result<(), Failure> {
        self.backend_answers(true).await
    }

    async fn backend_answers(&self, look: bool) -> Result<(), Failure> {
        let status = self.ask(async |mut client| client.status(StatusRequest { look }).await).await?;
        if status.backend_answers {
            return Ok(());
        }
        Err(Failure::unreachable(status.backend_message)
            .hint(format!("the daemon at {} tries it again and again", self.socket.display())))
    }

    /// A client of its API.
    pub(crate) fn client(&self) -> Client {
        Client::with_origin(self.channel.clone(), Uri::from_static(ORIGIN))
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Why a call failed.
    pub(crate) fn failure(&self, status: &Status) -> Failure {
        let socket = self.socket.display();
        if let Some(NothingThere(found)) = status.source().and_then(|source| source.downcast_ref()) {
            return self.nothing_there(found);
        }
        if let Some(Lost(how)) = status.source().and_then(|source| source.downcast_ref()) {
            // How a connection breaks says nothing to whom it happens.
            tracing::debug!("the connection to {socket} broke: {how}");
            return Failure::unreachable(format!("the daemon at {socket} went away before it had answered"))
                .hint("its log says why; what it was doing is done again by the same command");
        }
        if status.code() == Code::Unimplemented {
            return Failure::failed(format!(
                "the daemon at {socket} does not know this: {}",
                status.message()
            ))
            .hint("it is of another version, or no larder at all: larder status tells");
        }
        refusal::answered(status)
    }

    fn nothing_there(&self, found: &Unreachable) -> Failure {
        let socket = self.socket.display();
        match found {
            Unreachable::Denied => find::denied(&self.socket),
            Unreachable::Silent { after } => self.silent(*after),
            Unreachable::Missing | Unreachable::Refused | Unreachable::NotASocket => {
                Failure::unreachable(format!("no daemon at {socket}: {found}"))
                    .hint("start it with larder serve, or leave it out with --daemon none")
            }
            other => Failure::unreachable(format!("what listens at {socket} is no larder: {other}"))
                .hint("name the daemon's socket with --daemon SOCKET"),
        }
    }

    fn silent(&self, after: Duration) -> Failure {
        let after = gotext::duration(after);
        Failure::unreachable(format!("the daemon at {} gave no answer within {after}", self.socket.display()))
            .hint("it hangs, or has too much to do: see its log; --timeout says how long to wait")
    }
}
