//! Room for a pull that was refused for lack of disk space.

use async_trait::async_trait;

use super::puller::PullerError;
use crate::backend::{BackendError, CallErrorKind, ReclaimBytes};
use crate::go_format;
use crate::hint::Hint;
use crate::image_service::PullAttemptsError;

/// How often one pull has room made for it: what one round frees another pull may take.
pub(super) const ROUNDS: u32 = 3;

/// Frees disk space for pulls.
#[async_trait]
pub trait RoomMaker: Send + Sync {
    /// Removes images that retention allows until the likely bytes are free in addition to those free now, or as many
    /// as can be. Removes none if that is less than the least.
    async fn make_room(&self, bytes: ReclaimBytes) -> RoomOutcome;
}

/// The outcome of making room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoomOutcome {
    /// The likely bytes were freed, or at least the least.
    Made,
    /// Retention does not allow to free the least, or it failed. Nothing was removed, or less than was planned.
    NotEnough {
        /// The bytes that a round may free now, if that is known.
        reclaimable: Option<u64>,
    },
    /// Nothing is removed here unless a user asks for it; then as much can be freed.
    NotTried {
        /// The bytes that a round may free now.
        reclaimable: u64,
    },
}

/// The bytes that a refused pull lacks; `None` if garbage collection would not help.
pub(super) fn missing_bytes(error: &PullerError) -> Option<ReclaimBytes> {
    let PullerError::Failed(failed) = error else { return None };
    failed.causes().last().and_then(BackendError::kind).and_then(CallErrorKind::reclaim_bytes)
}

/// The error of a pull for which no room was made, with what a round may free now. Where that is not enough, the next
/// step is no further collection.
pub(super) fn without_room(error: PullerError, outcome: RoomOutcome) -> PullerError {
    let PullerError::Failed(failed) = error else { return error };
    let with_reclaimable = |cause: &BackendError| shortage(cause, outcome).unwrap_or_else(|| cause.clone());
    PullerError::Failed(failed.causes().iter().map(with_reclaimable).collect::<PullAttemptsError>())
}

fn shortage(cause: &BackendError, outcome: RoomOutcome) -> Option<BackendError> {
    let BackendError::Call { kind, message, hint, .. } = cause else { return None };
    let lacking = kind.reclaim_bytes()?.likely;
    let reclaimable = |bytes: u64| format!("{message}; {} are reclaimable now", go_format::bytes(bytes));
    match outcome {
        RoomOutcome::Made => None,
        RoomOutcome::NotTried { reclaimable: bytes } => {
            Some(BackendError::call(*kind, reclaimable(bytes)).with_hint(hint.clone()))
        }
        RoomOutcome::NotEnough { reclaimable: bytes } => {
            let kind = CallErrorKind::InsufficientSpace { reclaim_bytes: None };
            let free = format!("{}MB", lacking.div_ceil(1_000_000));
            let dry_run = ["gc".to_owned(), "--dry-run".to_owned(), "--free".to_owned(), free];
            let hint = Hint::new().command(dry_run).text(" says why each image is retained");
            let message = bytes.map_or_else(|| message.clone(), reclaimable);
            Some(BackendError::call(kind, message).with_hint(hint))
        }
    }
}
