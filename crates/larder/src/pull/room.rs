//! Room for a pull that was refused for lack of disk space.

use async_trait::async_trait;

use super::puller::PullerError;
use crate::backend::{BackendError, CallErrorKind};
use crate::hint::Hint;
use crate::image_service::PullAttemptsError;

/// How often one pull has room made for it: what one round frees another pull may take.
pub(super) const ROUNDS: u32 = 3;

/// Frees disk space for pulls.
#[async_trait]
pub trait RoomMaker: Send + Sync {
    /// Removes images that retention allows until this many bytes are free in addition to those free now; none if that
    /// cannot be reached.
    async fn make_room(&self, bytes: u64) -> RoomOutcome;
}

/// The outcome of making room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoomOutcome {
    /// So many bytes were freed.
    Made,
    /// Retention does not allow to free as much, or it failed. Nothing was removed, or less than was planned.
    NotEnough,
    /// Nothing is removed here unless a user asks for it.
    NotTried,
}

/// The bytes that a refused pull lacks; `None` if garbage collection would not help.
pub(super) fn missing_bytes(error: &PullerError) -> Option<u64> {
    let PullerError::Failed(failed) = error else { return None };
    failed.causes().last().and_then(BackendError::kind).and_then(CallErrorKind::reclaim_bytes)
}

/// The error of a pull for which no room could be made: its next step is no further collection.
pub(super) fn cannot_fit(error: PullerError) -> PullerError {
    let PullerError::Failed(failed) = error else { return error };
    let without_collection = |cause: &BackendError| match cause {
        BackendError::Call { kind, message, .. } if kind.reclaim_bytes().is_some() => {
            let kind = CallErrorKind::InsufficientSpace { reclaim_bytes: None };
            let message = format!("{message}; garbage collection cannot free as much now");
            BackendError::call(kind, message)
                .with_hint(Hint::new().command(["gc", "--dry-run"]).text(" says why each image is retained"))
        }
        other => other.clone(),
    };
    PullerError::Failed(failed.causes().iter().map(without_collection).collect::<PullAttemptsError>())
}
