//! One pull per image at a time, however many callers want it.
//!
//! An in-flight pull is a future that its callers poll. Canceling one caller does not affect the others; when the last
//! caller is canceled, the future is dropped, which cancels the pull. A caller without the pull's credentials waits for
//! its end and does not poll it: it would make an image visible that no caller with these credentials wants any more.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use parking_lot::Mutex;

use tokio::sync::watch;
use tracing::Span;
use tracing::instrument::Instrumented;

use super::puller::{CredentialOwner, PullJob, PullOutcome};
use crate::backend::PullOptions;
use crate::credentials::Credential;
use crate::reference::ImageName;
use crate::scheduler::WorkDemand;

/// Identity of a pull: the name as sent to the runtime, the runtime handler, its options, and whether the image is
/// hidden. Callers that take an artifact share the pulls of those that refuse it: of an image they are the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SharedPullKey {
    image: ImageName,
    runtime_handler: String,
    options: PullOptions,
    hides: bool,
}

impl SharedPullKey {
    fn of(job: &PullJob) -> SharedPullKey {
        SharedPullKey {
            image: job.spec.image.clone(),
            runtime_handler: job.spec.runtime_handler.clone(),
            options: PullOptions { refuse_artifact: false, ..job.spec.options },
            hides: job.hide_in.is_some(),
        }
    }

    /// The pulls that a caller may join. One that has to hide the image joins no other, which would go on for it and
    /// leave the image visible after the caller that would have shown it was canceled.
    fn joinable(&self) -> impl Iterator<Item = SharedPullKey> {
        [self.hides, true].map(|hides| SharedPullKey { hides, ..self.clone() }).into_iter()
    }
}

/// The outcome of an in-flight pull, for all its callers.
#[derive(Debug)]
pub(super) struct SharedPullResult {
    pub(super) result: PullOutcome,
    /// The credentials that were tried, in order.
    tried: Vec<Credential>,
    /// Their owner.
    credential_owner: CredentialOwner,
    /// Whether the pull would fail for an artifact.
    refused_artifact: bool,
    /// The back-off keys for which this outcome was counted.
    counted: Mutex<HashSet<String>>,
}

impl SharedPullResult {
    pub(super) fn new(result: PullOutcome, job: PullJob) -> Self {
        SharedPullResult {
            result,
            tried: job.credentials,
            credential_owner: job.credential_owner,
            refused_artifact: job.spec.options.refuse_artifact,
            counted: Mutex::default(),
        }
    }

    /// Whether a failure is new to this back-off key. Containers of a pod that request the same image share a key and
    /// an in-flight pull; one failed pull is one failure.
    pub(super) fn counts_for(&self, backoff_key: &str) -> bool {
        self.counted.lock().insert(backoff_key.to_owned())
    }

    /// Whether a used credential belongs to the node, and so to every pod on it.
    fn is_of_node(&self, used: &Credential) -> bool {
        self.credential_owner == CredentialOwner::Pod && used.source.is_none()
    }

    /// The credential that worked, as this caller holds it: the same login may come from another pod's secret.
    /// `None` when the pull was anonymous.
    pub(super) fn credential_of<'a>(&'a self, candidates: &'a [Credential]) -> Option<&'a Credential> {
        let used = self.result.pulled.as_ref().ok()?.credential.as_ref()?;
        // Only the node's own credential serves callers that do not hold it.
        Some(candidates.iter().find(|candidate| same_login(candidate, used)).unwrap_or(used))
    }

    /// Whether this outcome is also that of a caller with these credentials.
    ///
    /// A success applies to callers that could have achieved it: all if it was anonymous, all pods if it used the
    /// node's credential, else those with the credential that worked. A failure applies to callers with exactly the
    /// same candidates, and not to one that takes an artifact which the pull may have refused.
    pub(super) fn applies_to(&self, job: &PullJob) -> bool {
        let candidates = &job.credentials;
        let is_pod = job.credential_owner == CredentialOwner::Pod;
        match &self.result.pulled {
            Ok(pulled) => pulled.credential.as_ref().is_none_or(|used| {
                (is_pod && self.is_of_node(used))
                    || candidates.iter().any(|candidate| same_login(candidate, used))
            }),
            Err(_) => {
                (job.spec.options.refuse_artifact || !self.refused_artifact)
                    && self.tried.len() == candidates.len()
                    && self
                        .tried
                        .iter()
                        .zip(candidates)
                        .all(|(tried, candidate)| same_login(tried, candidate))
            }
        }
    }
}

/// Whether a registry cannot distinguish the two.
fn same_login(a: &Credential, b: &Credential) -> bool {
    a.username == b.username
        && a.password == b.password
        && a.identity_token == b.identity_token
        && a.registry_token == b.registry_token
}

type SharedPullFuture = Shared<BoxFuture<'static, Arc<SharedPullResult>>>;
type OngoingPulls = Arc<Mutex<HashMap<SharedPullKey, OngoingPull>>>;

/// An in-flight pull.
#[derive(Debug)]
struct OngoingPull {
    number: u64,
    credentials: Vec<Credential>,
    /// Closed at its end.
    ended: watch::Receiver<()>,
    outcome: WeakShared<BoxFuture<'static, Arc<SharedPullResult>>>,
    demand: WorkDemand,
    span: Span,
}

impl OngoingPull {
    /// Whether the pull may go on for a caller with these credentials alone.
    fn is_continued_by(&self, candidates: &[Credential]) -> bool {
        let has = |own: &Credential| candidates.iter().any(|candidate| same_login(candidate, own));
        self.credentials.iter().all(has)
    }
}

/// The pull that serves a caller.
pub(super) enum JoinedPull {
    Started(SharedPullFuture),
    InFlight(SharedPullFuture),
    /// One that ends with the callers that have its credentials.
    OfOthers(watch::Receiver<()>),
}

/// The in-flight pulls.
#[derive(Debug, Default)]
pub(super) struct SharedPulls {
    ongoing_pulls: OngoingPulls,
    started: AtomicU64,
}

impl SharedPulls {
    /// Joins the in-flight pull of this image and adds its demand, or starts one with `pull`.
    pub(super) fn join(
        &self,
        job: &PullJob,
        pull: impl FnOnce() -> Instrumented<BoxFuture<'static, SharedPullResult>>,
    ) -> JoinedPull {
        let key = SharedPullKey::of(job);
        let mut ongoing_pulls = self.ongoing_pulls.lock();
        let joinable = key.joinable().find_map(|key| {
            let ongoing = ongoing_pulls.get(&key)?;
            // An outcome that were held here could be the last one: it ends the pull, which then waits for this lock.
            let joined = if key.hides || ongoing.is_continued_by(&job.credentials) {
                JoinedPull::InFlight(ongoing.outcome.upgrade()?)
            } else {
                JoinedPull::OfOthers(ongoing.ended.clone())
            };
            Some((ongoing, joined))
        });
        if let Some((ongoing, joined)) = joinable {
            ongoing.demand.add(&job.demand);
            // It is in the trace of the first caller: the others' traces and it refer to each other.
            let caller = Span::current();
            caller.follows_from(&ongoing.span);
            ongoing.span.follows_from(&caller);
            return joined;
        }
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let (sender, ended) = watch::channel(());
        let list = Arc::clone(&self.ongoing_pulls);
        let guard = OngoingPullGuard { ongoing_pulls: list, key: key.clone(), number, _ended: sender };
        let pull = pull();
        let span = pull.span().clone();
        let outcome = async move {
            let guard = guard;
            let result = pull.await;
            // Removed from the list before the outcome is published, so that a later request starts a new pull.
            drop(guard);
            Arc::new(result)
        }
        .boxed()
        .shared();
        if let Some(weak) = outcome.downgrade() {
            let (credentials, demand) = (job.credentials.clone(), job.demand.clone());
            let ongoing = OngoingPull { number, credentials, ended, outcome: weak, demand, span };
            ongoing_pulls.insert(key, ongoing);
        }
        JoinedPull::Started(outcome)
    }
}

/// An in-flight pull's entry in the list; removed when the pull ends or is abandoned.
struct OngoingPullGuard {
    ongoing_pulls: OngoingPulls,
    key: SharedPullKey,
    number: u64,
    /// Dropped after the entry is removed.
    _ended: watch::Sender<()>,
}

impl Drop for OngoingPullGuard {
    fn drop(&mut self) {
        let mut ongoing_pulls = self.ongoing_pulls.lock();
        // The next in-flight pull of this key may already be listed.
        if ongoing_pulls.get(&self.key).is_some_and(|ongoing| ongoing.number == self.number) {
            ongoing_pulls.remove(&self.key);
        }
    }
}
