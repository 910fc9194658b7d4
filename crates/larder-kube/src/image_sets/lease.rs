//! The election of the agent that counts: one `Lease`, by the rules of client-go's leader election.
//!
//! Clocks of nodes are never compared: a candidate takes a lease over when it has seen no renewal for the time that the
//! lease names, by its own clock. The holder stops before that time has passed.

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

/// What to do about the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeaseStep {
    /// Write it with this number of transitions.
    Take { transitions: i32, is_renewal: bool },
    /// Another agent holds it.
    Wait,
}

/// A candidate, or the holder.
pub(super) struct Election {
    cluster: Cluster,
    namespace: String,
    duration: Duration,
    /// What the lease was when it last changed, and when that was seen.
    seen: Option<(LeaseSpec, Instant)>,
}

impl Election {
    pub(super) fn new(cluster: &Cluster, namespace: &str, duration: Duration) -> Election {
        Election { cluster: cluster.clone(), namespace: namespace.to_owned(), duration, seen: None }
    }

    /// Reads the lease, and takes or renews it if that is due. Whether this node holds it now.
    pub(super) async fn attempt(&mut self, wall: Timestamp) -> Result<bool, ClusterError> {
        let leases: Api<Lease> = Api::namespaced(self.cluster.client.clone(), &self.namespace);
        let what = format!("lease {}/{LEASE}", self.namespace);
        let found = match self.cluster.call(what.clone(), leases.get_with(LEASE, &GetParams::any())).await {
            Ok(found) => Some(found),
            Err(ClusterError::NotFound { .. }) => None,
            Err(error) => return Err(error),
        };
        let spec = found.as_ref().map(|lease| lease.spec.clone().unwrap_or_default());
        let step = self.decide(spec.as_ref(), Instant::now());
        let LeaseStep::Take { transitions, is_renewal } = step else { return Ok(false) };
        let acquired = spec.and_then(|spec| spec.acquire_time).filter(|_| is_renewal);
        let spec = LeaseSpec {
            holder_identity: Some(self.cluster.node.clone()),
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
            self.cluster.call(what, leases.replace(LEASE, &params, &lease)).await
        } else {
            let metadata = ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() };
            self.cluster.call(what, leases.create(&params, &Lease { metadata, spec: Some(spec) })).await
        };
        match written {
            Ok(lease) => {
                self.seen = lease.spec.map(|spec| (spec, Instant::now()));
                Ok(true)
            }
            // Another candidate was faster.
            Err(ClusterError::Conflict { message }) => {
                tracing::debug!("lease {}/{LEASE} not taken: {message}", self.namespace);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// What to do about a lease as it was just read; `None` if it does not exist.
    fn decide(&mut self, found: Option<&LeaseSpec>, now: Instant) -> LeaseStep {
        let Some(found) = found else {
            return LeaseStep::Take { transitions: 0, is_renewal: false };
        };
        let transitions = found.lease_transitions.unwrap_or_default();
        let holder = found.holder_identity.as_deref().unwrap_or_default();
        if holder == self.cluster.node {
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

/// A lease that this node holds. Dropping it gives it up, if it is still held: another agent need not wait for its end.
pub(super) struct HeldLease {
    pub(super) cluster: Cluster,
    pub(super) namespace: String,
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        let Ok(runtime) = Handle::try_current() else { return };
        let (cluster, namespace) = (self.cluster.clone(), std::mem::take(&mut self.namespace));
        cluster.releases.send_modify(|releases| *releases += 1);
        runtime.spawn(async move {
            let released = time::timeout(RELEASE_TIME, release(&cluster, &namespace)).await;
            if let Ok(Err(error)) = released {
                tracing::debug!("lease {namespace}/{LEASE} not released, it expires: {error}");
            }
            cluster.releases.send_modify(|releases| *releases -= 1);
        });
    }
}

async fn release(cluster: &Cluster, namespace: &str) -> Result<(), ClusterError> {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), namespace);
    let what = format!("lease {namespace}/{LEASE}");
    let mut lease = cluster.call(what.clone(), leases.get(LEASE)).await?;
    if let Some(spec) = &mut lease.spec
        && spec.holder_identity.as_deref() == Some(cluster.node.as_str())
    {
        spec.holder_identity = None;
        cluster.call(what, leases.replace(LEASE, &PostParams::default(), &lease)).await?;
    }
    Ok(())
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
        let start = Instant::now();
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
            (121, Some(lease("me", 0)), take(4, true)),
            (122, Some(lease("", 0)), take(5, false)),
        ];
        for (seconds, found, step) in steps {
            assert_eq!(election.decide(found.as_ref(), at(seconds)), step, "{seconds} {found:?}");
        }
    }
}
