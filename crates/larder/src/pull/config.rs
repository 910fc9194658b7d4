//! Settings of pulls. Names and meanings are those of `KubeletConfiguration` where it has them.

use std::num::NonZeroU32;
use std::time::Duration;

/// How pulls are queued, throttled, merged and retried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullConfig {
    /// One pull at a time, first in first out. Default false; kubelet: true.
    pub serialize_image_pulls: bool,
    /// How many pulls may run at once; `None` is no bound. Without effect when pulls are serialised. Default 4;
    /// kubelet: none.
    pub max_parallel_image_pulls: Option<NonZeroU32>,
    /// Pulls started per second, on average; 0 is no throttle. Default 5.
    pub registry_pull_qps: u32,
    /// Pulls started at once before the rate limit applies. Default 10.
    pub registry_burst: u32,
    /// How a pull over that rate is handled. Default [`RateLimitAction::Wait`]; kubelet: [`RateLimitAction::Refuse`].
    pub over_rate: RateLimitAction,
    /// How a request for an image that is already being pulled is handled. Default [`DuplicatePullPolicy::Coalesce`];
    /// kubelet: [`DuplicatePullPolicy::EachRequest`].
    pub same_image: DuplicatePullPolicy,
    /// How a request with new credentials during back-off is handled. Default [`NewCredentialsPolicy::PullAtOnce`];
    /// kubelet: [`NewCredentialsPolicy::Wait`].
    pub new_credentials: NewCredentialsPolicy,
    /// Time limit of a pull, without its time in the queue; after it, the pull is canceled and fails. Default none, as
    /// in kubelet.
    pub pull_timeout: Option<Duration>,
    /// Back-off after the first failure. Default 10 s.
    pub backoff_initial: Duration,
    /// The longest back-off. Default 300 s.
    pub backoff_max: Duration,
}

/// How a pull above the rate limit is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RateLimitAction {
    /// It waits, first come first served. A burst of 0 counts as 1, since nothing could ever start otherwise.
    Wait,
    /// It fails with `pull QPS exceeded`, which counts as a failed pull.
    Refuse,
}

/// How a request for an image that is already being pulled is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DuplicatePullPolicy {
    /// The request joins the running pull, if its credentials would give the same result.
    Coalesce,
    /// Each request starts its own pull.
    EachRequest,
}

/// How a request with new credentials during back-off is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewCredentialsPolicy {
    /// It is pulled at once. Only pull secrets and docker configs count: programs may give a new token each time.
    PullAtOnce,
    /// It waits for the back-off.
    Wait,
}

impl Default for PullConfig {
    fn default() -> Self {
        PullConfig {
            serialize_image_pulls: false,
            max_parallel_image_pulls: NonZeroU32::new(4),
            over_rate: RateLimitAction::Wait,
            same_image: DuplicatePullPolicy::Coalesce,
            new_credentials: NewCredentialsPolicy::PullAtOnce,
            ..PullConfig::kubelet()
        }
    }
}

impl PullConfig {
    /// The bound of kubelet's `maxParallelImagePulls`: below 1 is none, as if it is unset.
    pub fn parallel_bound(written: Option<i32>) -> Option<NonZeroU32> {
        written.and_then(|bound| u32::try_from(bound).ok()).and_then(NonZeroU32::new)
    }

    /// Kubelet's own behaviour, with kubelet's defaults.
    pub fn kubelet() -> Self {
        PullConfig {
            serialize_image_pulls: true,
            max_parallel_image_pulls: None,
            registry_pull_qps: 5,
            registry_burst: 10,
            over_rate: RateLimitAction::Refuse,
            same_image: DuplicatePullPolicy::EachRequest,
            new_credentials: NewCredentialsPolicy::Wait,
            pull_timeout: None,
            backoff_initial: Duration::from_secs(10),
            backoff_max: Duration::from_secs(300),
        }
    }
}
