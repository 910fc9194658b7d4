//! What one pull of the fake does, step by step.

use std::collections::VecDeque;
use std::time::Duration;

use larder::backend::{BackendError, Bytes, Image};
use larder::reference::ImageId;
use tokio::sync::oneshot;

use super::{error, image};

/// What one pull does.
#[derive(Debug)]
pub struct Pull {
    pub(super) steps: VecDeque<Step>,
    pub(super) outcome: Result<Image, BackendError>,
    pub(super) status_error: Option<BackendError>,
}

#[derive(Debug)]
pub(super) enum Step {
    Progress(Bytes),
    Sleep(Duration),
    Held(oneshot::Receiver<()>),
}

impl Pull {
    /// Succeeds: the image gets this id and size and is present under the name that was pulled.
    pub fn ok(image_ref: impl Into<ImageId>, size: u64) -> Pull {
        Pull::ends(Ok(image(image_ref, size)))
    }

    /// Fails with this text.
    pub fn fails(text: impl Into<String>) -> Pull {
        Pull::ends(Err(error(text)))
    }

    /// Ends like this.
    pub fn ends(outcome: Result<Image, BackendError>) -> Pull {
        Pull { steps: VecDeque::new(), outcome, status_error: None }
    }

    /// Reports progress before it goes on.
    #[must_use]
    pub fn progress(mut self, done: u64, total: Option<u64>) -> Pull {
        self.steps.push_back(Step::Progress(Bytes { done, total }));
        self
    }

    /// Sleeps on tokio's clock before it goes on.
    #[must_use]
    pub fn after(mut self, time: Duration) -> Pull {
        self.steps.push_back(Step::Sleep(time));
        self
    }

    /// Waits for the handle before it goes on. A handle that is dropped unused leaves the pull hanging for good.
    #[must_use]
    pub fn held(mut self) -> (Pull, Release) {
        let (sender, receiver) = oneshot::channel();
        self.steps.push_back(Step::Held(receiver));
        (self, Release(sender))
    }

    /// Once it has succeeded, the next status call fails with this text.
    #[must_use]
    pub fn then_status_fails(mut self, text: impl Into<String>) -> Pull {
        self.status_error = Some(error(text));
        self
    }
}

/// Lets one held pull go on.
#[derive(Debug)]
pub struct Release(oneshot::Sender<()>);

impl Release {
    /// Lets it go on. Nothing happens if the pull was cancelled meanwhile.
    pub fn release(self) {
        let _ = self.0.send(());
    }
}
