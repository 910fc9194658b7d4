//! What makes images present for `ensure` and `pull`: a manager in this process, or the daemon.

use std::sync::Arc;

use larder::backend::{Backend, Image};
use larder::events::EventSink;
use larder::pull::{EnsureError, EnsureRequest, Ensured, Manager, PullConfig, PullStatus};

use crate::args::Pulling;
use crate::collect::Notes;
use crate::connect::Reached;
use crate::credentials::Credentials;
use crate::daemon::Pulls;
use crate::failure::Failure;
use crate::out::Out;

/// Whoever does the work.
pub(in crate::commands) enum Worker {
    /// This process, on a backend of its own.
    Own {
        /// Shared with nobody.
        manager: Box<Manager>,
        /// What it works on.
        backend: Arc<dyn Backend>,
        /// Where it is written down what was ensured.
        notes: Option<Notes>,
    },
    /// The daemon.
    Daemon(Pulls),
}

/// How pulls are to be made, and who hears of them.
pub(in crate::commands) struct Wishes<'a> {
    /// What was said of it.
    pub(in crate::commands) pulling: &'a Pulling,
    /// What that means.
    pub(in crate::commands) config: PullConfig,
    /// The user's own.
    pub(in crate::commands) credentials: Credentials,
    /// Where events go.
    pub(in crate::commands) events: Arc<dyn EventSink>,
    /// Whether anybody wants to know how pulls get on.
    pub(in crate::commands) progress: bool,
}

impl Worker {
    /// Who was reached, set to work.
    pub(in crate::commands) fn new(reached: Reached, wishes: Wishes<'_>, out: &Out) -> Worker {
        let Wishes { pulling, config, credentials, events, progress } = wishes;
        match reached {
            Reached::Own(backend, notes, records) => {
                let manager = Manager::builder(Arc::clone(&backend))
                    .config(config)
                    .credentials(credentials.sources)
                    .records(records)
                    .events(events)
                    .build();
                Worker::Own { manager: Box::new(manager), backend, notes: Some(notes) }
            }
            Reached::Daemon(daemon) => {
                if credentials.candidates.has_programs() {
                    out.warning(
                        "the daemon asks the credential helpers and providers of its own configuration only",
                    );
                }
                if pulling.is_given() {
                    out.warning("the daemon queues pulls as its configuration says, and not as the flags do");
                }
                Worker::Daemon(Pulls::new(daemon, credentials.secret, events, progress))
            }
        }
    }

    /// As [`Manager::ensure`].
    pub(super) async fn ensure(&self, request: &EnsureRequest) -> Result<Ensured, EnsureError> {
        match self {
            Worker::Own { manager, .. } => manager.ensure(request).await,
            Worker::Daemon(pulls) => pulls.ensure(request).await,
        }
    }

    /// The pulls in flight.
    pub(super) fn pulls(&self) -> Vec<PullStatus> {
        match self {
            Worker::Own { manager, .. } => manager.pulls(),
            Worker::Daemon(pulls) => pulls.pulls(),
        }
    }

    /// Done when the work cannot go on.
    pub(super) async fn lost(&self) -> Failure {
        match self {
            Worker::Own { .. } => std::future::pending().await,
            Worker::Daemon(pulls) => pulls.lost().await,
        }
    }

    /// Whether the backend answers.
    pub(super) async fn answers(&self) -> Result<(), Failure> {
        match self {
            Worker::Own { backend, .. } => Ok(backend.info().await.map(drop)?),
            Worker::Daemon(pulls) => pulls.daemon().answers().await,
        }
    }

    /// The images that are present.
    pub(in crate::commands) async fn list(&self) -> Result<Vec<Image>, Failure> {
        match self {
            Worker::Own { backend, .. } => Ok(backend.list().await?),
            Worker::Daemon(pulls) => pulls.daemon().images().await,
        }
    }

    /// Takes note that these images, by id, were just made present. The daemon does so by itself.
    pub(in crate::commands) fn ensured(&mut self, ids: &[&str], out: &Out) {
        if let Worker::Own { notes, .. } = self
            && let Some(notes) = notes.take()
        {
            notes.ensured(ids, out);
        }
    }
}
