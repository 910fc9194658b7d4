//! Objects that are watched: their present state, and when it changes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::stream::{self, BoxStream};
use futures_util::{Stream, StreamExt as _};
use kube::runtime::utils::Backoff as _;
use kube::runtime::watcher::{self, DefaultBackoff, Event};
use kube::{Resource, ResourceExt as _};
use tokio::time::{self, Instant};

use crate::cluster::Cluster;
use crate::error::{ClusterError, ErrorLog, chain};
use crate::image_sets::ImageSet;

/// The objects of a watch, by name. A list counts when it is complete, so that no object is missing in between.
pub(crate) struct Watched<K> {
    what: &'static str,
    events: WatchEvents<K>,
    objects: BTreeMap<String, K>,
    /// Objects of the list that is being read.
    listed: BTreeMap<String, K>,
    is_known: bool,
    log: ErrorLog,
}

impl<K: Resource<DynamicType = ()> + Send + 'static> Watched<K> {
    /// The objects of a stream of events, which errors call `what`.
    pub(crate) fn new(
        cluster: &Cluster,
        what: &'static str,
        events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
    ) -> Watched<K> {
        Watched {
            what,
            events: watch_events(cluster, what, events),
            objects: BTreeMap::new(),
            listed: BTreeMap::new(),
            is_known: false,
            log: ErrorLog::default(),
        }
    }

    /// The objects; empty before the first complete list.
    pub(crate) fn objects(&self) -> &BTreeMap<String, K> {
        &self.objects
    }

    /// Whether a first list is complete.
    pub(crate) fn is_known(&self) -> bool {
        self.is_known
    }

    /// Waits until the objects may have changed, or the watch fails, which it logs. The future can be dropped at any
    /// time.
    pub(crate) async fn changed(&mut self) -> Result<(), ClusterError> {
        let outcome = loop {
            match self.events.next().await {
                Some(Ok(event)) => {
                    if self.apply(event) {
                        break Ok(());
                    }
                }
                Some(Err(error)) => break Err(error),
                // A watcher never ends.
                None => std::future::pending().await,
            }
        };
        self.log.note(self.what, outcome.clone());
        outcome
    }

    fn apply(&mut self, event: Event<K>) -> bool {
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(object) => _ = self.listed.insert(object.name_any(), object),
            Event::InitDone => {
                self.objects = std::mem::take(&mut self.listed);
                self.is_known = true;
                return true;
            }
            Event::Apply(object) => {
                self.objects.insert(object.name_any(), object);
                return true;
            }
            Event::Delete(object) => return self.objects.remove(&object.name_any()).is_some(),
        }
        false
    }
}

/// A watch that lists from the API server's cache, as kubelet's first list: without a version, etcd may read the pods
/// of all nodes for each. A list may be older than what was seen, which the watch corrects. With a page size, which the
/// cache ignores, kube would send no version.
pub(crate) fn from_cache() -> watcher::Config {
    watcher::Config { page_size: None, ..watcher::Config::default() }.any_semantic()
}

/// Events of a watch, or why it fails.
pub(crate) type WatchEvents<K> = BoxStream<'static, Result<Event<K>, ClusterError>>;

/// The events of a watch, which errors call `what`. A broken watch is resumed with back-off, as is a list that fails; a
/// version that the server has forgotten is no error, unless that happens again and again.
pub(crate) fn watch_events<K: Resource<DynamicType = ()> + Send + 'static>(
    cluster: &Cluster,
    what: &'static str,
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
) -> WatchEvents<K> {
    let source = WatchSource {
        events: events.boxed(),
        relists: Relists::new(cluster, what),
        backoff: DefaultBackoff::default(),
        resume_at: None,
    };
    stream::unfold(source, |mut source| async { Some((source.next().await?, source)) }).boxed()
}

struct WatchSource<K> {
    events: BoxStream<'static, watcher::Result<Event<K>>>,
    relists: Relists,
    backoff: DefaultBackoff,
    /// After an error, when to retry the request.
    resume_at: Option<Instant>,
}

impl<K: Resource<DynamicType = ()>> WatchSource<K> {
    async fn next(&mut self) -> Option<Result<Event<K>, ClusterError>> {
        loop {
            if let Some(at) = self.resume_at.take() {
                time::sleep_until(at).await;
            }
            let over = self.relists.over_at();
            let next = tokio::select! {
                next = self.events.next() => next?,
                () = time::sleep_until(over.unwrap_or_else(Instant::now)), if over.is_some() => {
                    self.relists.forget();
                    continue;
                }
            };
            let error = match next {
                Ok(event) => {
                    // Each attempt to list begins with `Init`, also one that fails.
                    let is_answer = !matches!(event, Event::Init | Event::InitApply(_));
                    if is_answer && !self.relists.are_endless() {
                        self.backoff.reset();
                    }
                    return Some(Ok(event));
                }
                Err(error) => error,
            };
            self.resume_at = self.backoff.next().map(|wait| Instant::now() + wait);
            let what = self.relists.what;
            if !is_expired(&error) {
                return Some(Err(failed::<K>(what, &error)));
            }
            tracing::debug!("{what}: the API server has forgotten its version (410): listing again");
            if let Some(error) = self.relists.note(Instant::now()) {
                return Some(Err(error));
            }
        }
    }
}

/// So many lists that are outdated at once are reported, until there was none for so long. The longest back-off is
/// shorter.
const ENDLESS: u32 = 3;
const QUIET: Duration = Duration::from_secs(120);

/// How often the server has forgotten the version of a list lately. What it reported is forgotten with it.
struct Relists {
    cluster: Cluster,
    what: &'static str,
    /// Two watches of the same objects have problems of their own.
    action: String,
    count: u32,
    last: Option<Instant>,
}

impl Relists {
    fn new(cluster: &Cluster, what: &'static str) -> Relists {
        static WATCHES: AtomicU64 = AtomicU64::new(0);
        let action = format!("relist {what} ({})", WATCHES.fetch_add(1, Ordering::Relaxed));
        Relists { cluster: cluster.clone(), what, action, count: 0, last: None }
    }

    /// Notes one more, and reports it if that is too often.
    fn note(&mut self, now: Instant) -> Option<ClusterError> {
        let is_recent = self.last.is_some_and(|last| now < last + QUIET);
        self.count = if is_recent { self.count + 1 } else { 1 };
        self.last = Some(now);
        if !self.are_endless() {
            return None;
        }
        let error = ClusterError::Relisting { what: self.what.to_owned() };
        self.cluster.observe(&self.action, Err(error.clone()));
        Some(error)
    }

    fn are_endless(&self) -> bool {
        self.count >= ENDLESS
    }

    /// Until when they are reported.
    fn over_at(&self) -> Option<Instant> {
        self.last.filter(|_| self.are_endless()).map(|last| last + QUIET)
    }

    fn forget(&mut self) {
        (self.count, self.last) = (0, None);
        if let Some(observer) = self.cluster.observer() {
            observer.forget(&self.action);
        }
    }
}

impl Drop for Relists {
    fn drop(&mut self) {
        self.forget();
    }
}

/// Whether the server has forgotten the version that the watch was resumed from: the watcher lists again.
fn is_expired(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchError(status) if status.code == 410)
}

/// Converts the failure of a watch of `what`.
fn failed<K: Resource<DynamicType = ()>>(what: &str, error: &watcher::Error) -> ClusterError {
    use watcher::Error::{InitialListFailed, WatchFailed, WatchStartFailed};
    match error {
        InitialListFailed(kube::Error::Api(status)) | WatchStartFailed(kube::Error::Api(status))
            if status.code == 404 && K::group(&()) == ImageSet::group(&()) =>
        {
            ClusterError::NotInstalled { resource: format!("{}.{}", K::plural(&()), K::group(&())) }
        }
        InitialListFailed(error) | WatchStartFailed(error) | WatchFailed(error) => {
            ClusterError::of_call(what, error)
        }
        watcher::Error::WatchError(status) => ClusterError::of_call(what, &kube::Error::Api(status.clone())),
        watcher::Error::NoResourceVersion => ClusterError::Unavailable { message: chain(error) },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::Pod;
    use kube::core::Status;
    use parking_lot::Mutex;

    use super::*;
    use crate::responses::ResponseObserver;

    /// The problems that are reported now, and how many were.
    #[derive(Default)]
    struct Observed(Mutex<(Vec<(String, ClusterError)>, usize)>);

    impl ResponseObserver for Observed {
        fn observe(&self, action: &str, outcome: Result<(), ClusterError>) {
            let error = outcome.expect_err("a watch reports problems only");
            let (problems, count) = &mut *self.0.lock();
            problems.push((action.to_owned(), error));
            *count += 1;
        }

        fn forget(&self, action: &str) {
            self.0.lock().0.retain(|(known, _)| known != action);
        }
    }

    impl Observed {
        fn problems(&self) -> Vec<ClusterError> {
            self.0.lock().0.iter().map(|(_, error)| error.clone()).collect()
        }
    }

    /// A watch of lists each of which is outdated at once.
    fn relisted(observed: &Arc<Observed>) -> WatchEvents<Pod> {
        let cluster = Cluster::at_url("http://127.0.0.1:1", "n1", None).unwrap();
        let expired = || {
            let status = Status::failure("too old resource version", "Expired").with_code(410);
            Err::<Event<Pod>, _>(watcher::Error::WatchError(status.boxed()))
        };
        let list = move |_| stream::iter([Ok(Event::Init), Ok(Event::InitDone), expired()]);
        let lists = stream::iter(0..3).flat_map(list);
        let never_ends = stream::pending();
        watch_events(&cluster.observed_by(observed.clone()), "the list of pods", lists.chain(never_ends))
    }

    async fn errors_within(events: &mut WatchEvents<Pod>, seconds: u64) {
        let errors = async { while events.next().await.is_some() {} };
        assert!(time::timeout(Duration::from_secs(seconds), errors).await.is_err(), "a watch never ends");
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_forgets_each_version_at_once_is_reported_until_it_does_not() {
        let observed = Arc::<Observed>::default();
        let mut events = relisted(&observed);
        errors_within(&mut events, 100).await;
        let relisting = ClusterError::Relisting { what: "the list of pods".into() };
        assert_eq!(observed.problems(), std::slice::from_ref(&relisting));
        // Another watch of the same objects, which ends first.
        let mut other = relisted(&observed);
        errors_within(&mut other, 10).await;
        assert_eq!(observed.problems(), [relisting.clone(), relisting.clone()]);
        drop(other);
        assert_eq!(observed.problems(), [relisting], "a watch that ended has no problem");
        errors_within(&mut events, 100).await;
        assert_eq!(observed.problems(), [], "quiet");
        assert_eq!(observed.0.lock().1, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn lists_that_fail_are_retried_with_a_back_off_of_up_to_half_a_minute() {
        let cluster = Cluster::at_url("http://127.0.0.1:1", "n1", None).unwrap();
        let refused = || {
            let status = Status::failure("not found", "NotFound").with_code(404);
            Err::<Event<Pod>, _>(watcher::Error::InitialListFailed(kube::Error::Api(status.boxed())))
        };
        let lists = stream::iter(0..).flat_map(move |_| stream::iter([Ok(Event::Init), refused()]));
        let mut events = watch_events(&cluster, "the list of pods", lists);
        let mut errors = 0;
        let hour = time::timeout(Duration::from_secs(3600), async {
            while let Some(event) = events.next().await {
                errors += u32::from(event.is_err());
            }
        });
        assert!(hour.await.is_err(), "a watch never ends");
        // With jitter, a wait of 30 s lasts up to twice as long.
        assert!((60..150).contains(&errors), "{errors} requests in an hour");
    }

    #[test]
    fn only_larders_own_resources_are_missing_without_the_manifests() {
        let not_found = || Box::new(Status::failure("not found", "NotFound").with_code(404));
        for error in [watcher::Error::InitialListFailed, watcher::Error::WatchStartFailed] {
            let error = error(kube::Error::Api(not_found()));
            let missing = ClusterError::NotInstalled { resource: "imagesets.images.larder.dev".into() };
            assert_eq!(failed::<ImageSet>("the list of image sets", &error), missing);
            let pods = ClusterError::NotFound { what: "the list of pods".into() };
            assert_eq!(failed::<Pod>("the list of pods", &error), pods);
        }
    }
}
