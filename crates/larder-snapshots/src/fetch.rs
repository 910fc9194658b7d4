//! Layers that the store lacks, fetched with all others of their image because containerd is about to.
//!
//! ```text
//! Prepare(layer 1) --> fetch of the image --+--> snapshots of its layers
//! Prepare(layer 2) --> the same fetch ------+--> or containerd's own way, if it failed
//! ```
//!
//! A fetch ends when none of the calls that wait for it is left. Its outcome is remembered for a time: containerd asks
//! for one layer after another.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use larder::reference::{Digest, Reference};
use larder_store::pull::{FetchedImage, FetchedLayer};
use larder_store::store::ImageRecord;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::{Instant, timeout};
use tonic::async_trait;

use crate::labels::AnnouncedLayer;

/// How long one call may wait for a layer. Until it returns, containerd collects no garbage, and if it wants to, no
/// other call to its snapshots begins.
pub(crate) const WAIT: Duration = Duration::from_secs(20);

/// How long it is remembered that an image was fetched.
const FETCHED: Duration = Duration::from_secs(300);

/// How long an image is left to containerd after its fetch failed, from the last layer that containerd asked for.
const FAILED: Duration = Duration::from_secs(600);

/// Fetches the layers of images for containerd, and says who may have those that the store has.
#[async_trait]
pub trait LayerFetcher: Send + Sync {
    /// Whether layers are fetched for containerd.
    fn is_enabled(&self) -> bool;

    /// Fetches all layers of an image into the store, with no other credentials than the node's. Returns the reason if
    /// it cannot.
    async fn fetch(&self, image: &Reference) -> Result<FetchedImage, String>;

    /// Waits for the pull that will make the layer with this chain ID present. Returns whether there was one.
    async fn wait_for_layer(&self, chain: &Digest) -> bool;

    /// Whether every namespace of containerd may have the layers that these images share: whether one of them can be
    /// pulled without a pod's credentials. Takes some seconds at most.
    async fn is_one_accessible(&self, images: &[ImageRecord]) -> bool;
}

/// Fetches by image.
pub(crate) struct ImageFetches {
    fetcher: Arc<dyn LayerFetcher>,
    states: Arc<FetchStates>,
}

type FetchOutcome = Option<Arc<FetchedImage>>;
type SharedFetch = Shared<BoxFuture<'static, FetchOutcome>>;

#[derive(Default)]
struct FetchStates(Mutex<HashMap<Reference, ImageFetchState>>);

enum ImageFetchState {
    Running(WeakShared<BoxFuture<'static, FetchOutcome>>),
    Ended { outcome: FetchOutcome, until: Instant },
}

impl FetchStates {
    fn lock(&self) -> MutexGuard<'_, HashMap<Reference, ImageFetchState>> {
        self.0.lock()
    }

    fn end(&self, image: Reference, outcome: FetchOutcome, now: Instant) {
        let until = now + if outcome.is_some() { FETCHED } else { FAILED };
        self.lock().insert(image, ImageFetchState::Ended { outcome, until });
    }
}

impl ImageFetches {
    pub(crate) fn new(fetcher: Arc<dyn LayerFetcher>) -> ImageFetches {
        ImageFetches { fetcher, states: Arc::default() }
    }

    pub(crate) fn fetcher(&self) -> &dyn LayerFetcher {
        &*self.fetcher
    }

    /// The layer, after its image was fetched; `None` if it cannot be fetched in time, or is not what was announced.
    pub(crate) async fn layer(
        &self,
        chain: &Digest,
        announced: &AnnouncedLayer,
        now: Instant,
    ) -> Option<(Arc<FetchedImage>, FetchedLayer)> {
        let Ok(fetched) = timeout(WAIT, self.fetch_of(&announced.image, now)).await else {
            tracing::info!(image = %announced.image, "not fetched within {} s, left to containerd", WAIT.as_secs());
            self.states.end(announced.image.clone(), None, Instant::now());
            return None;
        };
        let image = fetched?;
        let found = image.layers.iter().find(|layer| layer.chain_id == *chain);
        let Some(found) = found.filter(|layer| layer.archive == announced.archive).cloned() else {
            tracing::info!(image = %announced.image, layer = %announced.archive, "not a layer of the image in this place");
            return None;
        };
        Some((image, found))
    }

    /// Forgets an image that was fetched: it is fetched again when containerd asks for one of its layers.
    pub(crate) fn forget(&self, image: &Reference) {
        self.states.lock().remove(image);
    }

    /// The fetch that is running, that has ended, or that begins.
    fn fetch_of(&self, image: &Reference, now: Instant) -> SharedFetch {
        let mut states = self.states.lock();
        states.retain(|_, state| match state {
            ImageFetchState::Running(fetch) => fetch.upgrade().is_some(),
            ImageFetchState::Ended { until, .. } => *until > now,
        });
        match states.get_mut(image) {
            Some(ImageFetchState::Running(fetch)) => {
                if let Some(fetch) = fetch.upgrade() {
                    return fetch;
                }
            }
            Some(ImageFetchState::Ended { outcome, until }) => {
                if outcome.is_none() {
                    *until = now + FAILED;
                }
                return futures_util::future::ready(outcome.clone()).boxed().shared();
            }
            None => {}
        }
        let fetch = self.begin(image.clone()).boxed().shared();
        if let Some(running) = fetch.downgrade() {
            states.insert(image.clone(), ImageFetchState::Running(running));
        }
        fetch
    }

    fn begin(&self, image: Reference) -> impl Future<Output = FetchOutcome> + use<> {
        let (fetcher, states) = (Arc::clone(&self.fetcher), Arc::clone(&self.states));
        async move {
            tracing::info!(%image, "fetching an image that containerd is pulling");
            let result = fetcher.fetch(&image).await;
            if let Err(problem) = &result {
                tracing::warn!(%image, "cannot fetch an image that containerd is pulling, left to containerd: {problem}");
            }
            let outcome = result.ok().map(Arc::new);
            states.end(image, outcome.clone(), Instant::now());
            outcome
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use larder_store::store::LayerKey;
    use tokio::time::sleep;

    use super::*;

    /// A fetch takes a second.
    #[derive(Default)]
    struct FakeFetcher {
        begun: AtomicUsize,
        ended: AtomicUsize,
        fails: bool,
        is_slow: bool,
    }

    #[async_trait]
    impl LayerFetcher for FakeFetcher {
        fn is_enabled(&self) -> bool {
            true
        }

        async fn wait_for_layer(&self, _: &Digest) -> bool {
            false
        }

        async fn is_one_accessible(&self, _: &[ImageRecord]) -> bool {
            false
        }

        async fn fetch(&self, _: &Reference) -> Result<FetchedImage, String> {
            self.begun.fetch_add(1, Ordering::Relaxed);
            sleep(Duration::from_secs(if self.is_slow { 3600 } else { 1 })).await;
            self.ended.fetch_add(1, Ordering::Relaxed);
            if self.fails {
                return Err("registry unavailable".to_owned());
            }
            let layer = |name: &str| FetchedLayer {
                chain_id: Digest::sha256(format!("chain {name}")),
                archive: Digest::sha256(name),
                key: LayerKey::from(&Digest::sha256(name)),
            };
            Ok(FetchedImage { lease: "lease".into(), layers: vec![layer("1"), layer("2")] })
        }
    }

    fn announced(archive: &str) -> (Digest, AnnouncedLayer) {
        let image = Reference::parse("r.example/app:1").unwrap();
        (
            Digest::sha256(format!("chain {archive}")),
            AnnouncedLayer { image, archive: Digest::sha256(archive) },
        )
    }

    async fn fetched(fetches: &ImageFetches, archive: &str) -> bool {
        let (chain, announced) = announced(archive);
        fetches.layer(&chain, &announced, Instant::now()).await.is_some()
    }

    #[tokio::test(start_paused = true)]
    async fn one_fetch_serves_all_layers_of_an_image() {
        let source = Arc::new(FakeFetcher::default());
        let fetches = ImageFetches::new(source.clone());
        let both = tokio::join!(fetched(&fetches, "1"), fetched(&fetches, "2"));
        assert_eq!(both, (true, true));
        assert!(fetched(&fetches, "1").await && !fetched(&fetches, "3").await, "as the image has it");
        let (chain, mut other) = announced("1");
        other.archive = Digest::sha256("2");
        assert!(fetches.layer(&chain, &other, Instant::now()).await.is_none(), "another archive");
        assert_eq!(source.begun.load(Ordering::Relaxed), 1);

        sleep(FETCHED).await;
        assert!(fetched(&fetches, "1").await);
        assert_eq!(source.begun.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_fetch_is_not_repeated_while_containerd_pulls_the_image() {
        let source = Arc::new(FakeFetcher { fails: true, ..FakeFetcher::default() });
        let fetches = ImageFetches::new(source.clone());
        for _ in 0..5 {
            assert!(!fetched(&fetches, "1").await);
            sleep(FAILED / 2).await;
        }
        assert_eq!(source.begun.load(Ordering::Relaxed), 1);
        sleep(FAILED).await;
        assert!(!fetched(&fetches, "1").await);
        assert_eq!(source.begun.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_fetch_that_takes_long_is_left_to_containerd_after_one_wait() {
        let source = Arc::new(FakeFetcher { is_slow: true, ..FakeFetcher::default() });
        let fetches = ImageFetches::new(source.clone());
        let begun = Instant::now();
        assert!(!fetched(&fetches, "1").await && !fetched(&fetches, "2").await);
        assert_eq!(begun.elapsed(), WAIT);
        sleep(Duration::from_secs(3600)).await;
        assert_eq!(source.ended.load(Ordering::Relaxed), 0, "the fetch was canceled");
    }

    #[tokio::test(start_paused = true)]
    async fn a_fetch_ends_with_the_last_call_that_waits_for_it() {
        let source = Arc::new(FakeFetcher::default());
        let fetches = ImageFetches::new(source.clone());
        let short = timeout(Duration::from_millis(100), fetched(&fetches, "1"));
        let (short, long) = tokio::join!(short, fetched(&fetches, "2"));
        assert!(short.is_err() && long);
        fetches.forget(&announced("1").1.image);
        let canceled = timeout(Duration::from_millis(100), fetched(&fetches, "1")).await;
        assert!(canceled.is_err());
        sleep(Duration::from_secs(2)).await;
        assert_eq!(source.ended.load(Ordering::Relaxed), 1, "the second fetch was canceled");
        assert!(fetched(&fetches, "1").await, "it begins again");
    }
}
