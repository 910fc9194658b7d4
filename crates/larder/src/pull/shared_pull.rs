//! One pull per image at a time, however many callers want it.
//!
//! An in-flight pull is a future that all its callers poll. Canceling one caller does not affect the others; when the
//! last caller is canceled, the future is dropped, which cancels the pull.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, WeakShared};

use tracing::Span;
use tracing::instrument::Instrumented;

use super::priority_semaphore::QueuePriority;
use super::puller::{CredentialOwner, PullJob, PullOutcome};
use crate::credentials::Credential;
use crate::reference::ImageName;

/// What makes two pulls the same: the name as sent to the runtime, and the runtime handler.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct SharedPullKey {
    pub(super) image: ImageName,
    pub(super) runtime_handler: String,
}

/// The outcome of an in-flight pull, for all its callers.
#[derive(Debug)]
pub(super) struct SharedPullResult {
    pub(super) result: PullOutcome,
    /// The credentials that were tried, in order.
    tried: Vec<Credential>,
    /// Their owner.
    credential_owner: CredentialOwner,
    /// The back-off keys for which this outcome was counted.
    counted: Mutex<HashSet<String>>,
}

impl SharedPullResult {
    pub(super) fn new(result: PullOutcome, job: PullJob) -> Self {
        SharedPullResult {
            result,
            tried: job.credentials,
            credential_owner: job.credential_owner,
            counted: Mutex::default(),
        }
    }

    /// Whether a failure is new to this back-off key. Containers of a pod that request the same image share a key and
    /// an in-flight pull; one failed pull is one failure.
    pub(super) fn counts_for(&self, backoff_key: &str) -> bool {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner).insert(backoff_key.to_owned())
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
    /// A success applies to callers that could have achieved it: all if it was anonymous or used the node's credential,
    /// else those with the credential that worked. A failure applies to callers with exactly the same candidates.
    pub(super) fn applies_to(&self, candidates: &[Credential]) -> bool {
        match &self.result.pulled {
            Ok(pulled) => pulled.credential.as_ref().is_none_or(|used| {
                self.is_of_node(used) || candidates.iter().any(|candidate| same_login(candidate, used))
            }),
            Err(_) => {
                self.tried.len() == candidates.len()
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
    outcome: WeakShared<BoxFuture<'static, Arc<SharedPullResult>>>,
    urgency: QueuePriority,
    span: Span,
}

/// The in-flight pulls.
#[derive(Debug, Default)]
pub(super) struct SharedPulls {
    ongoing_pulls: OngoingPulls,
    started: AtomicU64,
}

impl SharedPulls {
    /// Joins the in-flight pull of this key and raises its priority, or starts one with `pull`. Also returns whether
    /// this call started it.
    pub(super) fn join(
        &self,
        key: SharedPullKey,
        urgency: &QueuePriority,
        pull: impl FnOnce() -> Instrumented<BoxFuture<'static, SharedPullResult>>,
    ) -> (SharedPullFuture, bool) {
        let mut ongoing_pulls = self.ongoing_pulls.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ongoing) = ongoing_pulls.get(&key)
            && let Some(outcome) = ongoing.outcome.upgrade()
        {
            ongoing.urgency.raise_to(urgency);
            // It is in the trace of the first caller: the others' traces and it refer to each other.
            let caller = Span::current();
            caller.follows_from(&ongoing.span);
            ongoing.span.follows_from(&caller);
            return (outcome, false);
        }
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let guard = OngoingPullGuard { ongoing_pulls: self.ongoing_pulls.clone(), key: key.clone(), number };
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
            ongoing_pulls.insert(key, OngoingPull { number, outcome: weak, urgency: urgency.clone(), span });
        }
        (outcome, true)
    }
}

/// An in-flight pull's entry in the list; removed when the pull ends or is abandoned.
struct OngoingPullGuard {
    ongoing_pulls: OngoingPulls,
    key: SharedPullKey,
    number: u64,
}

impl Drop for OngoingPullGuard {
    fn drop(&mut self) {
        let mut ongoing_pulls = self.ongoing_pulls.lock().unwrap_or_else(PoisonError::into_inner);
        // The next in-flight pull of this key may already be listed.
        if ongoing_pulls.get(&self.key).is_some_and(|ongoing| ongoing.number == self.number) {
            ongoing_pulls.remove(&self.key);
        }
    }
}
