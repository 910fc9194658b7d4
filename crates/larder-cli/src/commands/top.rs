//! `larder top`: the view of larder-top on the images of this session.

use async_trait::async_trait;
use larder::hint::Hint;
use larder_agent::client::{Client, ControlCalls};
use larder_api::v1 as api;
use larder_top::{Ended, NodeCalls, run as show};
use tokio::sync::Mutex;
use tokio::time;
use tonic::{Response, Status};

use super::explain;
use crate::exit::CommandOutcome;
use crate::failure::{ErrorKind, Failure};
use crate::interrupt::InterruptSignals;
use crate::session::{CommandSession, ImageAccess};

/// How long a call may take that removes nothing. The view asks again.
const WITHIN: time::Duration = time::Duration::from_secs(20);

pub(super) async fn run(
    session: &CommandSession,
    interrupt: InterruptSignals,
) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    if !out.is_terminal() || !rustix::termios::isatty(std::io::stdin()) {
        return Err(Failure::bad_input("larder top requires a terminal on standard input and output").hint(
            Hint::new()
                .command(["status"])
                .text(" prints the same state once, ")
                .command(["status", "-w", "-o", "json"])
                .text(" as JSON every two seconds"),
        ));
    }
    let node =
        SessionCalls { session, client: Mutex::new(Some(session.open(&ImageAccess::collect()).await?)) };
    let interrupt = interrupt.handle();
    let held = out.hold_notes();
    let ended = show(&node, out.style().colors, interrupt.interrupted()).await;
    drop(held);
    match ended {
        Ok(Ended::Quit) => Ok(CommandOutcome::Done),
        Ok(Ended::Stopped) => Ok(CommandOutcome::Interrupted),
        Err(error) => Err(Failure::failed(format!("cannot use the terminal: {error}"))),
    }
}

/// The calls of the view. After the end of another command that had the images open, they are opened again.
struct SessionCalls<'a> {
    session: &'a CommandSession,
    client: Mutex<Option<Client>>,
}

impl SessionCalls<'_> {
    async fn client(&self) -> Result<Client, Failure> {
        let mut client = self.client.lock().await;
        match &*client {
            Some(known) => Ok(known.clone()),
            None => Ok(client.insert(self.session.open(&ImageAccess::collect()).await?).clone()),
        }
    }

    async fn call<T>(
        &self,
        call: impl AsyncFnOnce(ControlCalls) -> Result<Response<T>, Status>,
    ) -> Result<T, Failure> {
        let client = self.client().await?;
        let answer = client.wait(call).await;
        // A daemon that restarts finds its images as it left them: they are not opened here in between.
        let is_lost = answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unavailable);
        if is_lost && client.is_joined() {
            *self.client.lock().await = None;
        }
        answer
    }

    /// Calls the daemon for an answer that comes soon.
    async fn ask<T>(
        &self,
        call: impl AsyncFnOnce(ControlCalls) -> Result<Response<T>, Status>,
    ) -> Result<T, Failure> {
        let silent = |_| Failure::unreachable(format!("no answer within {}s", WITHIN.as_secs()));
        time::timeout(WITHIN, self.call(call)).await.unwrap_or_else(|elapsed| Err(silent(elapsed)))
    }
}

#[async_trait(?Send)]
impl NodeCalls for SessionCalls<'_> {
    async fn status(&self) -> Result<api::StatusResponse, Failure> {
        self.ask(async |mut calls| calls.status(api::StatusRequest { look: false }).await).await
    }

    async fn images(&self) -> Result<api::ImagesResponse, Failure> {
        let request = api::ImagesRequest { details: true, without_configs: true, ..Default::default() };
        self.ask(async |mut calls| calls.images(request).await).await
    }

    async fn history(&self, newest: u32) -> Result<api::HistoryResponse, Failure> {
        self.ask(async |mut calls| calls.history(api::HistoryRequest { newest }).await).await
    }

    async fn explain(&self, image: &str) -> Result<Vec<String>, Failure> {
        let request = api::ExplainRequest { image: image.to_owned(), ..api::ExplainRequest::default() };
        let explanation = self.ask(async |mut calls| calls.explain(request).await).await?;
        Ok(explain::lines::lines(image, &explanation, ""))
    }

    async fn remove(&self, id: &str, images: Vec<String>) -> Result<api::RemoveResponse, Failure> {
        let image_id = id.to_owned();
        let request = api::RemoveRequest { images, image_id, ..api::RemoveRequest::default() };
        self.call(async |mut calls| calls.remove(request).await).await
    }

    async fn keep(&self, request: api::KeepRequest) -> Result<api::KeepResponse, Failure> {
        self.ask(async |mut calls| calls.keep(request).await).await
    }

    fn hints(&self, error: &Failure) -> Vec<String> {
        error.next_steps().iter().map(|hint| self.session.out.hinted(hint)).collect()
    }
}
