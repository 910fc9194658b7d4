//! Scripts of the fake's pulls.

use std::collections::VecDeque;
use std::time::Duration;

use larder::backend::{BackendError, ByteProgress, Image};
use larder::reference::ImageId;
use tokio::sync::oneshot;

use super::{error, image};

/// The script of one pull.
#[derive(Debug)]
pub struct ScriptedPull {
    pub(super) steps: VecDeque<PullStepScript>,
    pub(super) outcome: Result<Image, BackendError>,
    pub(super) status_error: Option<BackendError>,
}

#[derive(Debug)]
pub(super) enum PullStepScript {
    Progress(ByteProgress),
    Sleep(Duration),
    Held(oneshot::Receiver<()>),
}

impl ScriptedPull {
    /// Succeeds: the image gets this id and size and is present under the name that was pulled.
    pub fn ok(image_ref: impl Into<ImageId>, size: u64) -> ScriptedPull {
        ScriptedPull::with_outcome(Ok(image(image_ref, size)))
    }

    /// Fails with this text.
    pub fn fails(text: impl Into<String>) -> ScriptedPull {
        ScriptedPull::with_outcome(Err(error(text)))
    }

    /// Ends like this.
    pub fn with_outcome(outcome: Result<Image, BackendError>) -> ScriptedPull {
        ScriptedPull { steps: VecDeque::new(), outcome, status_error: None }
    }

    /// Reports progress before it continues.
    #[must_use]
    pub fn progress(mut self, done: u64, total: Option<u64>) -> ScriptedPull {
        self.steps.push_back(PullStepScript::Progress(ByteProgress { done, total }));
        self
    }

    /// Sleeps on tokio's clock before it continues.
    #[must_use]
    pub fn after(mut self, time: Duration) -> ScriptedPull {
        self.steps.push_back(PullStepScript::Sleep(time));
        self
    }

    /// Waits for the handle before it continues. A handle that is dropped unused leaves the pull hanging.
    #[must_use]
    pub fn held(mut self) -> (ScriptedPull, PullHold) {
        let (sender, receiver) = oneshot::channel();
        self.steps.push_back(PullStepScript::Held(receiver));
        (self, PullHold(sender))
    }

    /// Once it has succeeded, the next status call fails with this text.
    #[must_use]
    pub fn then_status_fails(mut self, text: impl Into<String>) -> ScriptedPull {
        self.status_error = Some(error(text));
        self
    }
}

/// Continues one held pull.
#[derive(Debug)]
pub struct PullHold(oneshot::Sender<()>);

impl PullHold {
    /// Continues the pull. No effect if the pull was canceled in between.
    pub fn release(self) {
        let _ = self.0.send(());
    }
}
