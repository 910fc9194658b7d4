//! The right to fetch a layer: one pull has it, and others wait for the layer.
//!
//! A waiting pull of another repository fetches the layer itself if the fetch is slow: one slow repository must not
//! delay all images that share a layer.

use std::collections::HashMap;
use std::sync::Arc;

use larder::reference::Digest;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::time::Instant;

use super::blob_source::BlobSource;
use super::fetch_progress::FetchProgress;
use super::records::LayerKey;

/// A fetched layer.
pub(super) trait KeyedLayer: Clone {
    /// Returns true if the layer is what this request is for.
    fn is_requested(&self, request: &ClaimRequest) -> bool;
}

/// The layer that a claim is for.
#[derive(Debug, Clone)]
pub(crate) struct ClaimRequest {
    /// The blob with the layer.
    source: BlobSource,
    /// Digest of its plain archive.
    diff_id: Digest,
    /// Keys under which the layer is acceptable.
    keys: Vec<LayerKey>,
    /// Whether to wait only for fetches from the same repository.
    same_repository: bool,
}

impl ClaimRequest {
    /// `chain_id` is that of the layers up to this one; it names the layer where its content depends on them.
    pub(crate) fn new(source: BlobSource, diff_id: Digest, chain_id: &Digest) -> ClaimRequest {
        let keys = vec![LayerKey::from(chain_id), LayerKey::from(&diff_id)];
        ClaimRequest { source, diff_id, keys, same_repository: false }
    }

    /// Accepts only a layer for this chain: the one that is kept under the diff ID does not fit on the layers below.
    pub(crate) fn require_chain(&mut self) {
        self.keys.truncate(1);
    }

    /// Waits no longer for fetches from other repositories, which are slow.
    pub(crate) fn require_repository(&mut self) {
        self.same_repository = true;
    }

    pub(crate) fn source(&self) -> &BlobSource {
        &self.source
    }

    pub(crate) fn keys(&self) -> &[LayerKey] {
        &self.keys
    }

    /// Names the fetch. A pull that asserts the same diff ID of another blob, or asks another registry or with another
    /// credential, is another fetch: it may be slow, or never end.
    fn fetch(&self) -> FetchId {
        let blob =
            if self.same_repository { self.source.ingest_id().digest().clone() } else { self.source.fetch() };
        (blob, self.diff_id.clone())
    }
}

/// Fetch of the blob, and diff ID.
type FetchId = (Digest, Digest);

/// In-flight fetches. Clones share them.
#[derive(Debug)]
pub(super) struct LayerClaims<L>(Arc<Mutex<FetchMap<L>>>);

type FetchMap<L> = HashMap<FetchId, ClaimedLayer<L>>;
type ClaimedLayer<L> = Arc<ClaimedFetch<L>>;

/// A fetch that its owner and the waiting pulls share.
#[derive(Debug)]
struct ClaimedFetch<L> {
    repository: String,
    progress: Arc<FetchProgress>,
    end: watch::Sender<FetchEnd<L>>,
}

/// How a fetch ended.
#[derive(Debug)]
enum FetchEnd<L> {
    /// It has not.
    Running,
    Done(L),
    GivenUp,
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
        self.0.lock()
    }

    /// Claims a layer unless `present` finds it.
    ///
    /// `present` may wait for the disk and is called without the lock, which claims take on async threads, too. It is
    /// called again once the layer is claimed: another fetch may have ended since the first search, and none does after
    /// it.
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
            shared.progress.callers().add(progress.callers());
            return Err(LayerWait { shared, request: Box::new(request.clone()) });
        }
        let (repository, progress) = (request.source.repository.clone(), Arc::new(progress));
        let shared =
            Arc::new(ClaimedFetch { repository, progress, end: watch::Sender::new(FetchEnd::Running) });
        fetches.insert(fetch.clone(), Arc::clone(&shared));
        Ok(LayerClaim { claims, fetch, shared })
    }
}

/// The right to fetch a layer. If it is dropped without [`done`](LayerClaim::done), the next waiter gets it.
#[derive(Debug)]
pub struct LayerClaim<L> {
    claims: LayerClaims<L>,
    fetch: FetchId,
    shared: ClaimedLayer<L>,
}

impl<L: Clone> LayerClaim<L> {
    /// Passes the layer to all waiters.
    pub fn done(self, layer: &L) {
        self.shared.end.send_replace(FetchEnd::Done(layer.clone()));
    }

    /// Progress of the fetch, which decides whether waiting pulls fetch the layer themselves.
    pub(crate) fn progress(&self) -> &Arc<FetchProgress> {
        &self.shared.progress
    }
}

impl<L> Drop for LayerClaim<L> {
    fn drop(&mut self) {
        self.claims.lock().remove(&self.fetch);
        self.shared.end.send_if_modified(|end| {
            let gives_up = matches!(end, FetchEnd::Running);
            if gives_up {
                *end = FetchEnd::GivenUp;
            }
            gives_up
        });
    }
}

/// A layer that another pull fetches.
#[derive(Debug)]
pub struct LayerWait<L> {
    shared: ClaimedLayer<L>,
    request: Box<ClaimRequest>,
}

#[expect(private_bounds, reason = "only handles of layers are claimed")]
impl<L: KeyedLayer> LayerWait<L> {
    /// Ends when the other pull has ended, with the layer. `None` if it gave up, or the layer does not fit here: claim
    /// it again.
    pub fn ended(&self) -> impl Future<Output = Option<L>> + Send + use<L>
    where
        L: Send + Sync + 'static,
    {
        let (mut end, request) = (self.shared.end.subscribe(), self.request.clone());
        async move {
            let ended = end.wait_for(|end| !matches!(end, FetchEnd::Running)).await;
            match ended.as_deref() {
                Ok(FetchEnd::Done(layer)) if layer.is_requested(&request) => Some(layer.clone()),
                _ => None,
            }
        }
    }

    /// Returns true if this pull should fetch the layer itself: the fetch is slow, and from another repository, which
    /// may be the reason.
    pub(crate) fn is_slow(&self, now: Instant) -> bool {
        self.shared.repository != self.request.source.repository && self.shared.progress.is_slow(now)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use larder::backend::MinimumRate;
    use larder::scheduler::Callers;

    use super::*;

    fn claim(
        claims: &LayerClaims<u8>,
        layer: &str,
        present: impl Fn() -> Option<u8>,
    ) -> Claimed<LayerClaim<u8>, LayerWait<u8>, u8> {
        let diff_id = Digest::sha256(layer);
        let request = ClaimRequest::new(BlobSource::archive(diff_id.clone(), 1), diff_id.clone(), &diff_id);
        let progress = FetchProgress::new(MinimumRate::default(), &Callers::new(""), Instant::now());
        claims.claim::<Infallible>(&request, progress, |_| Ok(present())).expect("no error")
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
                    disk.lock().recv().expect("an answer")
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
            let mut calls = calls.lock();
            *calls += 1;
            if *calls == 2 {
                let Claimed::Wait(wait) = claim(&claims, "a", || None) else { panic!("it is claimed") };
                *waiting.lock() = Some(wait);
            }
            (*calls == 2).then_some(7)
        });
        assert!(matches!(found, Claimed::Present(7)));
        let waiting = waiting.into_inner().expect("a waiting pull");
        assert!(matches!(*waiting.shared.end.borrow(), FetchEnd::Done(7)));
        assert!(matches!(claim(&claims, "a", || None), Claimed::Fetch(_)), "the claim ended");
    }
}
