//! What makes images present for `ensure` and `pull`: a manager in this process, or the daemon.

use std::sync::Arc;

use larder::backend::{Backend, Image, ImageSpec};
use larder::events::EventSink;
use larder::pull::{EnsureError, EnsureRequest, Ensured, Manager, PullConfig, PullStatus};
use tokio::task::spawn_blocking;

use crate::args::Pulling;
use crate::collect::{Notes, Spares};
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
        /// The same for each image at once.
        spares: Option<Spares>,
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
            Reached::Own { backend, notes, spares, records } => {
                let manager = Manager::builder(Arc::clone(&backend))
                    .config(config)
                    .credentials(credentials.sources)
                    .records(records)
                    .events(events)
                    .build();
                Worker::Own { manager: Box::new(manager), backend, notes: Some(notes), spares }
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

    /// As [`Manager::ensure`]. From its end on a collection by another process leaves the image alone.
    pub(super) async fn ensure(&self, request: &EnsureRequest) -> Result<Ensured, EnsureError> {
        match self {
            Worker::Own { manager, backend, spares: Some(spares), .. } => {
                let ensured = manager.ensure(request).await?;
                spares.add(&ensured.image_ref).await;
                if !is_gone(&**backend, request, &ensured).await {
                    return Ok(ensured);
                }
                let again = manager.ensure(request).await?;
                spares.add(&again.image_ref).await;
                Ok(again)
            }
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
    pub(in crate::commands) async fn ensured(&mut self, ids: &[&str], out: &Arc<Out>) {
        if let Worker::Own { notes, .. } = self
            && let Some(notes) = notes.take()
        {
            let (ids, told): (Vec<_>, _) = (ids.iter().map(|id| (*id).to_owned()).collect(), Arc::clone(out));
            // Another command may have the files; it waits for them.
            let noted = spawn_blocking(move || {
                let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
                notes.ensured(&ids, &told);
            });
            if let Err(error) = noted.await {
                out.warning(format_args!("not noted that the images were wanted: {error}"));
            }
        }
    }
}

/// Whether a collection that had looked before the image was noted has removed it meanwhile. A backend that does not
/// say so has not.
async fn is_gone(backend: &dyn Backend, request: &EnsureRequest, ensured: &Ensured) -> bool {
    let runtime_handler = request.runtime_handler.clone();
    let spec = ImageSpec { runtime_handler, ..ImageSpec::named(ensured.image_ref.as_str()) };
    matches!(backend.look(&spec).await, Ok(None))
}
