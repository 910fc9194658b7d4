//! The layers that a pull settles others on, opened. Each image among them is a mount, so they stay open as long as the bound
//! on open files permits: else settling 200 layers would mount 20,000.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::store::{LayerHandle, LayerKey};
use crate::unpack::UnpackError;

/// What one pull has open until its end. Clones are one.
#[derive(Debug, Clone, Default)]
pub(super) struct LowerRoots(Arc<Mutex<LowerRootsState>>);

#[derive(Debug, Default)]
struct LowerRootsState {
    open: HashMap<LayerKey, Arc<OwnedFd>>,
    permit: Option<OwnedSemaphorePermit>,
}

/// The right to open layers.
#[derive(Debug)]
pub(super) struct LowerRootsPermit {
    pub(super) roots: LowerRoots,
    /// Ends with this, unless the layers may be kept.
    pub(super) waited: Option<OwnedSemaphorePermit>,
}

impl LowerRootsPermit {
    /// The files of the layers below, the nearest first.
    pub(super) fn open(&self, below: &[LayerHandle]) -> Result<Vec<Arc<OwnedFd>>, UnpackError> {
        self.roots.open(below, self.waited.is_none(), LayerHandle::key, open_root)
    }
}

impl LowerRoots {
    /// Whether so many files may be open until the end of the pull. Does not wait for other pulls.
    pub(super) fn may_keep(&self, files: u32, bound: &Arc<Semaphore>) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let has = state.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = files.saturating_sub(u32::try_from(has).unwrap_or(u32::MAX));
        let Ok(permit) = Arc::clone(bound).try_acquire_many_owned(more) else { return false };
        match &mut state.permit {
            Some(permits) => permits.merge(permit),
            none => *none = Some(permit),
        }
        true
    }

    /// The roots of layers, the last one first. Those that are not open yet are opened.
    fn open<L, E>(
        &self,
        below: &[L],
        keep: bool,
        key: impl Fn(&L) -> &LayerKey,
        open: impl Fn(&L) -> Result<OwnedFd, E>,
    ) -> Result<Vec<Arc<OwnedFd>>, E> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut root = |layer: &L| {
            if let Some(root) = state.open.get(key(layer)) {
                return Ok(Arc::clone(root));
            }
            let root = Arc::new(open(layer)?);
            if keep {
                state.open.insert(key(layer).clone(), Arc::clone(&root));
            }
            Ok(root)
        };
        below.iter().rev().map(&mut root).collect()
    }
}

pub(super) fn open_root(layer: &LayerHandle) -> Result<OwnedFd, UnpackError> {
    layer.open_root().map_err(|error| UnpackError::file("open the layer", layer.path(), error))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use larder::reference::Digest;

    use super::*;

    /// How many layers are opened while each of `layers` is settled on those below it.
    fn opened(roots: &LowerRoots, layers: usize, bound: &Arc<Semaphore>) -> usize {
        let keys: Vec<LayerKey> =
            (0..layers).map(|layer| LayerKey::from(&Digest::sha256(layer.to_string()))).collect();
        let count = Cell::new(0);
        let open = |_: &LayerKey| {
            count.set(count.get() + 1);
            fs_err::File::open("/").map(OwnedFd::from)
        };
        for at in 1..layers {
            let keep = roots.may_keep(u32::try_from(at + 2).unwrap(), bound);
            assert_eq!(roots.open(&keys[..at], keep, |key| key, open).unwrap().len(), at);
        }
        count.get()
    }

    #[test]
    fn each_layer_is_opened_once_for_all_that_are_settled_on_it() {
        let bound = Arc::new(Semaphore::new(512));
        let roots = LowerRoots::default();
        assert_eq!(opened(&roots, 200, &bound), 199);
        assert_eq!(bound.available_permits(), 512 - 201);
        drop(roots);
        assert_eq!(bound.available_permits(), 512);
    }

    #[test]
    fn layers_beyond_the_bound_are_not_kept_open() {
        let bound = Arc::new(Semaphore::new(12));
        let (first, second) = (LowerRoots::default(), LowerRoots::default());
        assert_eq!(opened(&first, 13, &bound), 10 + 1 + 2, "10 are kept");
        assert_eq!(first.0.lock().unwrap().open.len(), 10);
        assert_eq!(opened(&second, 4, &bound), 1 + 2 + 3, "another pull has all");
        assert!(second.0.lock().unwrap().open.is_empty());
    }
}
