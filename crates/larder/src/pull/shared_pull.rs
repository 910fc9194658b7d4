//! One pull per image at a time, however many callers want it.
//!
//! A flight is a future that all its callers poll together. It lives as long as one of them waits: a caller that goes
//! away changes nothing for the others, and when the last one goes, the flight is dropped, which cancels the pull.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, WeakShared};

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

/// How a flight ended, for everybody aboard.
#[derive(Debug)]
pub(super) struct SharedPullResult {
    pub(super) result: PullOutcome,
    /// The credentials that were tried, in order.
    tried: Vec<Credential>,
    /// Whose they are.
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

    /// Whether a failure is new to this back-off key. Several containers of a pod that want one image share a key and
    /// a flight; one pull that failed is one failure.
    pub(super) fn counts_for(&self, backoff_key: &str) -> bool {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner).insert(backoff_key.to_owned())
    }

    /// Whether a credential that was used belongs to the node, and so to everybody on it.
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
    /// A success serves who could have had it: everybody if it was anonymous or with the node's own credential, else
    /// those who hold the credential that worked. A failure serves those who would have tried exactly the same.
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

/// Whether a registry could not tell the two apart.
fn same_login(a: &Credential, b: &Credential) -> bool {
    a.username == b.username
        && a.password == b.password
        && a.identity_token == b.identity_token
        && a.registry_token == b.registry_token
}

type SharedPullFuture = Shared<BoxFuture<'static, Arc<SharedPullResult>>>;
type OngoingPulls = Arc<Mutex<HashMap<SharedPullKey, OngoingPull>>>;

/// A flight under way.
#[derive(Debug)]
struct OngoingPull {
    number: u64,
    flight: WeakShared<BoxFuture<'static, Arc<SharedPullResult>>>,
    urgency: QueuePriority,
}

/// The flights under way.
#[derive(Debug, Default)]
pub(super) struct SharedPulls {
    under_way: OngoingPulls,
    departed: AtomicU64,
}

impl SharedPulls {
    /// Joins the flight of this key, which becomes as urgent as this, or starts one with `pull`. Also says whether it was
    /// started here.
    pub(super) fn join(
        &self,
        key: SharedPullKey,
        urgency: &QueuePriority,
        pull: impl FnOnce() -> BoxFuture<'static, SharedPullResult>,
    ) -> (SharedPullFuture, bool) {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(departed) = under_way.get(&key)
            && let Some(flight) = departed.flight.upgrade()
        {
            departed.urgency.raise_to(urgency);
            return (flight, false);
        }
        let number = self.departed.fetch_add(1, Ordering::Relaxed);
        let listed = OngoingPullGuard { under_way: self.under_way.clone(), key: key.clone(), number };
        let pull = pull();
        let flight = async move {
            let listed = listed;
            let landed = pull.await;
            // Off the list before anybody hears of it: whoever comes now starts a new flight.
            drop(listed);
            Arc::new(landed)
        }
        .boxed()
        .shared();
        if let Some(weak) = flight.downgrade() {
            under_way.insert(key, OngoingPull { number, flight: weak, urgency: urgency.clone() });
        }
        (flight, true)
    }
}

/// A flight's entry in the list; it goes when the flight lands or is abandoned.
struct OngoingPullGuard {
    under_way: OngoingPulls,
    key: SharedPullKey,
    number: u64,
}

impl Drop for OngoingPullGuard {
    fn drop(&mut self) {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        // The next flight of this key may be listed already.
        if under_way.get(&self.key).is_some_and(|departed| departed.number == self.number) {
            under_way.remove(&self.key);
        }
    }
}
