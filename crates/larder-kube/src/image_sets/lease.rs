//! The election of the agent that counts: one `Lease`, by the rules of client-go's leader election.
//!
//! Clocks of nodes are never compared: a candidate takes a lease over when it has seen no renewal for the time that the
//! lease names, by its own clock. The holder stops before that time has passed.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{GetParams, ObjectMeta, PostParams};
use tokio::runtime::Handle;
use tokio::time::{self, Instant};

use crate::cluster::Cluster;
use crate::error::ClusterError;

/// Name of the lease, in the namespace of larder.
pub const LEASE: &str = "larder-image-sets";

/// A daemon that stops does not wait longer for the API server.
const RELEASE_TIME: Duration = Duration::from_secs(2);

/// Next step of a candidate for the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeaseStep {
    /// Write it with this number of transitions.
    Take { transitions: i32, is_renewal: bool },
    /// Another agent holds it.
    Wait,
}

/// One process that may hold the lease.
#[derive(Clone)]
struct Candidate {
    cluster: Cluster,
    namespace: String,
    /// `NODE_ID`, as in client-go: a second process that was given the same node name is another candidate.
    identity: String,
}

impl Candidate {
    fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.cluster.client.clone(), &self.namespace)
    }

    fn lease_name(&self) -> String {
        format!("lease {}/{LEASE}", self.namespace)
    }

    async fn release(&self) -> Result<(), ClusterError> {
        let mut lease = self.cluster.call(self.lease_name(), self.leases().get(LEASE)).await?;
        if let Some(spec) = &mut lease.spec
            && spec.holder_identity.as_ref() == Some(&self.identity)
        {
            spec.holder_identity = None;
            let params = PostParams::default();
            self.cluster.call(self.lease_name(), self.leases().replace(LEASE, &params, &lease)).await?;
        }
        Ok(())
    }
}

/// A candidate and what it has seen of the lease.
pub(super) struct Election {
    candidate: Candidate,
    duration: Duration,
    /// Lease as of its last change, and when that change was seen.
    seen: Option<(LeaseSpec, Instant)>,
}

impl Election {
    pub(super) fn new(cluster: &Cluster, namespace: &str, duration: Duration) -> Election {
        let identity = format!("{}_{:016x}", cluster.node, RandomState::new().hash_one(0));
        let candidate = Candidate { cluster: cluster.clone(), namespace: namespace.to_owned(), identity };
        Election { candidate, duration, seen: None }
    }

    /// The lease, which an attempt has just taken.
    pub(super) fn held_lease(&self) -> HeldLease {
        HeldLease(self.candidate.clone())
    }

    /// Reads the lease, and takes or renews it if that is due. Whether this candidate holds it now.
    pub(super) async fn attempt(&mut self, wall: Timestamp) -> Result<bool, ClusterError> {
        let (cluster, leases) = (self.candidate.cluster.clone(), self.candidate.leases());
        let what = self.candidate.lease_name();
        let found = match cluster.call(what.clone(), leases.get_with(LEASE, &GetParams::any())).await {
            Ok(found) => Some(found),
            Err(ClusterError::NotFound { .. }) => None,
            Err(error) => return Err(error),
        };
        let spec = found.as_ref().map(|lease| lease.spec.clone().unwrap_or_default());
        let step = self.decide(spec.as_ref(), Instant::now());
        let LeaseStep::Take { transitions, is_renewal } = step else { return Ok(false) };
        let acquired = spec.and_then(|spec| spec.acquire_time).filter(|_| is_renewal);
        let spec = LeaseSpec {
            holder_identity: Some(self.candidate.identity.clone()),
            lease_duration_seconds: i32::try_from(self.duration.as_secs().max(1)).ok(),
            acquire_time: acquired.or(Some(MicroTime(wall))),
            renew_time: Some(MicroTime(wall)),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        };
        let params = PostParams::default();
        let written = if let Some(found) = found {
            // With the version that was read: a candidate that was faster makes this a conflict.
            let lease = Lease { metadata: found.metadata, spec: Some(spec) };
            cluster.call(what, leases.replace(LEASE, &params, &lease)).await
        } else {
            let metadata = ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() };
            cluster.call(what, leases.create(&params, &Lease { metadata, spec: Some(spec) })).await
        };
        match written {
            Ok(lease) => {
                self.seen = lease.spec.map(|spec| (spec, Instant::now()));
                Ok(true)
            }
            // Another candidate was faster.
            Err(ClusterError::Conflict { message }) => {
                tracing::debug!("lease {}/{LEASE} not taken: {message}", self.candidate.namespace);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Decides the next step for a lease as it was just read; `None` if it does not exist.
    fn decide(&mut self, found: Option<&LeaseSpec>, now: Instant) -> LeaseStep {
        let Some(found) = found else {
            return LeaseStep::Take { transitions: 0, is_renewal: false };
        };
        let transitions = found.lease_transitions.unwrap_or_default();
        let holder = found.holder_identity.as_deref().unwrap_or_default();
        if holder == self.candidate.identity {
            return LeaseStep::Take { transitions, is_renewal: true };
        }
        let since = match &self.seen {
            Some((seen, since)) if seen == found => *since,
            _ => {
                self.seen = Some((found.clone(), now));
                now
            }
        };
        let seconds = found.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let duration = seconds.map_or(self.duration, Duration::from_secs);
        if !holder.is_empty() && since + duration > now {
            return LeaseStep::Wait;
        }
        LeaseStep::Take { transitions: transitions.saturating_add(1), is_renewal: false }
    }
}

/// A lease that a candidate holds. Dropping it gives it up, if it is still held: another agent need not wait for its
/// end.
pub(super) struct HeldLease(Candidate);

impl Drop for HeldLease {
    fn drop(&mut self) {
        let Ok(runtime) = Handle::try_current() else { return };
        let candidate = self.0.clone();
        candidate.cluster.releases.send_modify(|releases| *releases += 1);
        runtime.spawn(async move {
            let released = time::timeout(RELEASE_TIME, candidate.release()).await;
            if let Ok(Err(error)) = released {
                tracing::debug!("lease {}/{LEASE} not released, it expires: {error}", candidate.namespace);
            }
            candidate.cluster.releases.send_modify(|releases| *releases -= 1);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: &str, renewed: i64) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(holder.to_owned()),
            lease_duration_seconds: Some(60),
            lease_transitions: Some(4),
            renew_time: Some(MicroTime(Timestamp::from_second(renewed).unwrap())),
            ..LeaseSpec::default()
        }
    }

    #[tokio::test]
    async fn a_lease_is_taken_over_when_no_renewal_was_seen_for_its_time_whatever_the_clocks_say() {
        let cluster = Cluster::at_url("http://127.0.0.1:1", "me", None).unwrap();
        let mut election = Election::new(&cluster, "larder", Duration::from_secs(60));
        let (start, me) = (Instant::now(), election.candidate.identity.clone());
        assert!(me.starts_with("me_") && me.len() == "me_".len() + 16, "{me}");
        let at = |seconds| start + Duration::from_secs(seconds);
        let take = |transitions, is_renewal| LeaseStep::Take { transitions, is_renewal };
        let steps = [
            (0, None, take(0, false)),
            // An hour in the past or in the future: the time in it is never compared with a clock.
            (0, Some(lease("other", -3600)), LeaseStep::Wait),
            (59, Some(lease("other", -3600)), LeaseStep::Wait),
            (60, Some(lease("other", 3600)), LeaseStep::Wait),
            (119, Some(lease("other", 3600)), LeaseStep::Wait),
            (120, Some(lease("other", 3600)), take(5, false)),
            (121, Some(lease(&me, 0)), take(4, true)),
            (122, Some(lease("me_0", 0)), LeaseStep::Wait),
            (122, Some(lease("", 0)), take(5, false)),
        ];
        for (seconds, found, step) in steps {
            assert_eq!(election.decide(found.as_ref(), at(seconds)), step, "{seconds} {found:?}");
        }
    }
}
