//! The right to fetch a layer: one pull has it, and others wait for the layer.
//!
//! A waiting pull takes the right over if the fetch makes no real progress: one slow registry must not delay all images
//! that share a layer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder::reference::Digest;
use tokio::sync::watch;
use tokio::time::Instant;

use super::blob_source::BlobSource;
use super::fetch_progress::{FetchProgress, FetchSource};
use super::records::LayerKey;

/// A fetched layer.
pub(super) trait KeyedLayer: Clone {
    /// Returns true if the layer is what this request is for.
    fn is_requested(&self, request: &ClaimRequest) -> bool;
}

/// The layer that a claim is for.
#[derive(Debug, Clone)]
pub(super) struct ClaimRequest {
    /// The blob with the layer.
    pub(super) source: BlobSource,
    /// Digest of its plain archive.
    pub(super) diff_id: Digest,
    /// Keys under which the layer is acceptable.
    pub(super) keys: [LayerKey; 2],
}

impl ClaimRequest {
    /// Names the fetch. A pull that asserts the same diff ID of another blob, or asks another registry or with another
    /// credential, is another fetch: it may be slow, or never end.
    fn fetch(&self) -> FetchId {
        (self.source.fetch(), self.diff_id.clone())
    }
}

/// Fetch of the blob, and diff ID.
type FetchId = (Digest, Digest);

/// In-flight fetches. Clones share them.
#[derive(Debug)]
pub(super) struct LayerClaims<L>(Arc<Mutex<FetchMap<L>>>);

type FetchMap<L> = HashMap<FetchId, ClaimedLayer<L>>;
type ClaimedLayer<L> = Arc<watch::Sender<ClaimState<L>>>;

/// State that the owner and the waiting pulls of a layer share.
#[derive(Debug)]
struct ClaimState<L> {
    /// Increases with each takeover.
    owner: u64,
    progress: Arc<FetchProgress>,
    layer: Option<L>,
    given_up: bool,
}

impl<L> Clone for LayerClaims<L> {
    fn clone(&self) -> Self {
        LayerClaims(Arc::clone(&self.0))
    }
}

impl<L> Default for LayerClaims<L> {
    fn default() -> Self {
        LayerClaims(Arc::default())
    }
}

/// How the claim of a layer was answered: `C` is a claim, `W` a wait, `L` a layer.
#[derive(Debug)]
pub enum Claimed<C, W, L> {
    /// The layer is present.
    Present(L),
    /// The caller must fetch it.
    Fetch(C),
    /// Another pull of this process fetches it.
    Wait(W),
}

impl<L> LayerClaims<L> {
    fn lock(&self) -> MutexGuard<'_, FetchMap<L>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims a layer unless `present` finds it.
    ///
    /// `present` may wait for the disk and is called without the lock, which claims take on async threads, too. It is called
    /// again once the layer is claimed: another fetch may have ended since the first search, and none does after it.
    pub(super) fn claim<E>(
        &self,
        request: &ClaimRequest,
        progress: FetchProgress,
        present: impl Fn(&ClaimRequest) -> Result<Option<L>, E>,
    ) -> Result<Claimed<LayerClaim<L>, LayerWait<L>, L>, E>
    where
        L: Clone + Send + Sync + 'static,
    {
        if let Some(layer) = present(request)? {
            return Ok(Claimed::Present(layer));
        }
        let claim = match self.claim_or_wait(request, progress) {
            Ok(claim) => claim,
            Err(wait) => return Ok(Claimed::Wait(wait)),
        };
        Ok(match present(request)? {
            Some(layer) => {
                claim.done(&layer);
                Claimed::Present(layer)
            }
            None => Claimed::Fetch(claim),
        })
    }

    /// The claim of a layer that no other pull fetches; else the wait for that pull.
    fn claim_or_wait(
        &self,
        request: &ClaimRequest,
        progress: FetchProgress,
    ) -> Result<LayerClaim<L>, LayerWait<L>> {
        let mut fetches = self.lock();
        let (claims, fetch) = (self.clone(), request.fetch());
        if let Some(shared) = fetches.get(&fetch) {
            let shared = Arc::clone(shared);
            return Err(LayerWait { claims, shared, request: Box::new(request.clone()) });
        }
        let progress = Arc::new(progress);
        let state = ClaimState { owner: 0, progress: Arc::clone(&progress), layer: None, given_up: false };
        let shared = Arc::new(watch::Sender::new(state));
        fetches.insert(fetch.clone(), Arc::clone(&shared));
        Ok(LayerClaim { claims, fetch, shared, owner: 0, progress })
    }
}

/// The right to fetch a layer. If it is dropped without [`done`](LayerClaim::done), the next waiter gets it.
#[derive(Debug)]
pub struct LayerClaim<L> {
    claims: LayerClaims<L>,
    fetch: FetchId,
    shared: ClaimedLayer<L>,
    owner: u64,
    progress: Arc<FetchProgress>,
}

impl<L: Send + Sync + 'static> LayerClaim<L> {
    /// Passes the layer to all waiters.
    pub fn done(self, layer: &L)
    where
        L: Clone,
    {
        self.shared.send_modify(|state| state.layer = Some(layer.clone()));
    }

    /// Progress of the fetch, which decides whether a waiting pull takes it over.
    pub(crate) fn progress(&self) -> &Arc<FetchProgress> {
        &self.progress
    }

    /// Ends when a waiting pull has taken the fetch over.
    pub(crate) fn taken_over(&self) -> impl Future<Output = ()> + Send + use<L> {
        let (mut state, owner) = (self.shared.subscribe(), self.owner);
        async move {
            // The sender is dropped only after the claim.
            if state.wait_for(|state| state.owner != owner).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

impl<L> Drop for LayerClaim<L> {
    fn drop(&mut self) {
        let mut fetches = self.claims.lock();
        if self.shared.borrow().owner != self.owner {
            return;
        }
        fetches.remove(&self.fetch);
        self.shared.send_modify(|state| state.given_up = true);
    }
}

/// A layer that another pull fetches.
#[derive(Debug)]
pub struct LayerWait<L> {
    claims: LayerClaims<L>,
    shared: ClaimedLayer<L>,
    request: Box<ClaimRequest>,
}

#[expect(private_bounds, reason = "only handles of layers are claimed")]
impl<L: KeyedLayer> LayerWait<L> {
    /// Ends when the other pull has ended, with the layer. `None` if it gave up, or the layer does not fit here: claim it again.
    pub fn ended(&self) -> impl Future<Output = Option<L>> + Send + use<L>
    where
        L: Send + Sync + 'static,
    {
        let (mut state, request) = (self.shared.subscribe(), self.request.clone());
        async move {
            let ended = state.wait_for(|state| state.given_up || state.layer.is_some()).await;
            let layer = ended.ok().and_then(|state| state.layer.clone());
            layer.filter(|layer| layer.is_requested(&request))
        }
    }

    /// Takes the fetch over if it makes no real progress and `source` may be faster. The waiting pulls then wait for this one.
    pub(crate) fn take_over(&self, source: &FetchSource, now: Instant) -> Option<LayerClaim<L>> {
        let _fetches = self.claims.lock();
        let mut claimed = None;
        self.shared.send_if_modified(|state| {
            let over = state.given_up || state.layer.is_some();
            if over || !state.progress.is_stuck_for(source, now) {
                return false;
            }
            state.owner += 1;
            state.progress = Arc::new(FetchProgress::new(source.clone(), state.progress.minimum(), now));
            claimed = Some((state.owner, Arc::clone(&state.progress)));
            true
        });
        claimed.map(|(owner, progress)| LayerClaim {
            claims: self.claims.clone(),
            fetch: self.request.fetch(),
            shared: Arc::clone(&self.shared),
            owner,
            progress,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    fn claim(
        claims: &LayerClaims<u8>,
        layer: &str,
        present: impl Fn() -> Option<u8>,
    ) -> Claimed<LayerClaim<u8>, LayerWait<u8>, u8> {
        let diff_id = Digest::sha256(layer);
        let keys = [LayerKey::from(&diff_id), LayerKey::from(&diff_id)];
        let request = ClaimRequest { source: BlobSource::archive(diff_id.clone(), 1), diff_id, keys };
        claims.claim::<Infallible>(&request, FetchProgress::default(), |_| Ok(present())).expect("no error")
    }

    #[test]
    fn a_search_that_waits_for_the_disk_blocks_no_other_claim() {
        let claims = LayerClaims::default();
        let Claimed::Fetch(other) = claim(&claims, "other", || None) else { panic!("it is claimed") };
        let ((searching, begun), (answer, disk)) = (mpsc::channel(), mpsc::channel());
        let disk = Mutex::new(disk);
        let (ended, end) = mpsc::channel();
        thread::scope(|scope| {
            let claims = &claims;
            scope.spawn(move || {
                claim(claims, "slow", || {
                    searching.send(()).expect("the test waits");
                    disk.lock().expect("one search at a time").recv().expect("an answer")
                });
            });
            begun.recv().expect("the search begins");
            scope.spawn(move || {
                drop(other); // on an async thread
                ended.send(()).expect("the test waits");
            });
            let dropped = end.recv_timeout(Duration::from_secs(20));
            answer.send(Some(1)).expect("the search waits");
            assert!(dropped.is_ok(), "the claim waits for the disk of another");
        });
    }

    #[tokio::test]
    async fn a_layer_that_another_fetch_completed_after_the_search_is_present_for_all() {
        let claims = LayerClaims::default();
        let calls = Mutex::new(0);
        let waiting = Mutex::new(None);
        let found = claim(&claims, "a", || {
            let mut calls = calls.lock().expect("one thread");
            *calls += 1;
            if *calls == 2 {
                let Claimed::Wait(wait) = claim(&claims, "a", || None) else { panic!("it is claimed") };
                *waiting.lock().expect("one thread") = Some(wait);
            }
            (*calls == 2).then_some(7)
        });
        assert!(matches!(found, Claimed::Present(7)));
        let waiting = waiting.into_inner().expect("one thread").expect("a waiting pull");
        assert_eq!(waiting.shared.borrow().layer, Some(7));
        assert!(matches!(claim(&claims, "a", || None), Claimed::Fetch(_)), "the claim ended");
    }
}
