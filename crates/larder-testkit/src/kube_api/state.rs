//! Objects and users of the server inside the process.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::ApiRequest;
use super::authorization::Authorization;
use super::fault::InjectedFault;
use super::objects::Objects;
use super::resources::Resource;

#[derive(Debug)]
pub(super) struct SharedState {
    pub(super) state: Mutex<ApiState>,
    /// The latest version, and how many bookmarks were requested: watches wake up.
    pub(super) changed: watch::Sender<(u64, u64)>,
}

#[derive(Debug, Default)]
pub(super) struct ApiState {
    pub(super) objects: Objects,
    pub(super) resources: Vec<Resource>,
    pub(super) authorization: Authorization,
    pub(super) faults: Vec<InjectedFault>,
    pub(super) log: Vec<ApiRequest>,
    pub(super) issued_tokens: u64,
}

impl SharedState {
    pub(super) fn lock(&self) -> MutexGuard<'_, ApiState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets watches see what changed.
    pub(super) fn notify(&self) {
        let version = self.lock().objects.version();
        self.changed.send_if_modified(|(known, _)| std::mem::replace(known, version) != version);
    }
}
