//! Ensures the images of the pods that are bound to the node.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use larder::credentials::{PullSecret, TokenPolicy};
use larder::events::{Event, EventSink};
use larder::go_format;
use larder::pod::Pod;
use larder_kube::{BoundPods, ClusterError, PullSecrets, RuntimeClasses, UnreadSecret, watch_bound_pods};
use tokio::sync::mpsc;
use tokio::time;

use super::pod_requests::{ContextRead, PodRequests, PullContext};
use super::{ClusterIdentity, NodeCluster};
use crate::node::pods::desired::{DesiredImages, FirstScan};

/// Pods that are bound together share one read of a secret. Must be shorter than any wait before another read.
const SECRETS_SHARED_FOR: Duration = Duration::from_secs(5);
/// Pods whose secrets wait to be read again; more are read after their next failure.
const WAITING_PODS: usize = 1000;

/// Ensures the images of the pods of the node until dropped. `first` is released once those of the first list have been
/// looked for, or once the list has failed.
pub(in crate::node) async fn run_pods(
    cluster: &NodeCluster,
    identity: &ClusterIdentity,
    desired: DesiredImages,
    uses_runtime_handlers: bool,
    first: Option<FirstScan>,
) {
    let (failures, mut failed) = mpsc::channel(WAITING_PODS);
    let desired = desired.with_events(Arc::new(FailedPods(failures)));
    let requests = PodRequests::default();
    let mut images = NodePodImages { cluster, requests, desired, first, is_listed: false };
    let reader = ContextReader::of(identity, uses_runtime_handlers);
    let (mut changes, mut reading) = (pin!(watch_bound_pods(&identity.cluster)), FuturesUnordered::new());
    loop {
        let reads = tokio::select! {
            Some(pods) = changes.next() => images.set_pods(pods),
            Some(outcome) = reading.next() => images.set_context(outcome),
            Some(key) = failed.recv() => images.requests.read_again(&key).into_iter().collect(),
        };
        reading.extend(reads.into_iter().map(|read| reader.read(read)));
    }
}

/// The images of the pods of the node, as they are ensured now.
struct NodePodImages<'a> {
    cluster: &'a NodeCluster,
    requests: PodRequests,
    desired: DesiredImages,
    first: Option<FirstScan>,
    /// Whether the first list is complete.
    is_listed: bool,
}

impl NodePodImages<'_> {
    /// Returns the next reads.
    fn set_pods(&mut self, pods: Result<BoundPods, ClusterError>) -> Vec<ContextRead> {
        match pods {
            Ok(pods) => {
                let reads = self.requests.set_pods(pods.pods());
                self.cluster.pods.store(self.requests.len(), Ordering::Relaxed);
                self.is_listed = true;
                self.ensure();
                reads
            }
            Err(error) => {
                // The connection reports requests that fail.
                tracing::debug!("kubernetes: {error}");
                self.first = None;
                Vec::new()
            }
        }
    }

    /// Returns the next reads.
    fn set_context(&mut self, outcome: ReadOutcome) -> Vec<ContextRead> {
        let ReadOutcome { read, context, kept_secrets, problems } = outcome;
        let is_known = context.is_some();
        for problem in self.requests.set_context(&read, context, &kept_secrets, problems) {
            tracing::warn!("kubernetes: {problem}");
        }
        self.ensure();
        let again = if is_known { None } else { self.requests.read_again(&read.pod.pod.key()) };
        again.into_iter().collect()
    }

    fn ensure(&mut self) {
        self.desired.set(self.requests.requests(), self.first.as_ref());
        if self.is_listed && self.requests.are_read() {
            self.first = None;
        }
    }
}

/// The context of a pod as it was read.
struct ReadOutcome {
    read: ContextRead,
    /// `None` without its runtime handler: an image of another handler is of no use.
    context: Option<PullContext>,
    /// Names of secrets that stay as they were: the API server is unavailable.
    kept_secrets: BTreeSet<String>,
    problems: Vec<String>,
}

/// Reads what the pulls of pods need.
struct ContextReader {
    secrets: PullSecrets,
    /// `None` where pulls have no runtime handler.
    classes: Option<RuntimeClasses>,
}

impl ContextReader {
    fn of(identity: &ClusterIdentity, uses_runtime_handlers: bool) -> ContextReader {
        ContextReader {
            secrets: PullSecrets::of(&identity.cluster, SECRETS_SHARED_FOR, Duration::ZERO),
            classes: uses_runtime_handlers.then(|| RuntimeClasses::of(&identity.cluster)),
        }
    }

    /// Secrets that cannot be read are left out, as in kubelet.
    async fn read(&self, read: ContextRead) -> ReadOutcome {
        time::sleep(read.after).await;
        let pod = &read.pod;
        let (namespace, name) = (&pod.pod.namespace, &pod.pod.name);
        let about = |problem: String| format!("pod {namespace}/{name}: {problem}");
        let (secrets, unread) = self.secrets.of_pod(namespace, &pod.pull_secrets).await;
        let missing = |unread: &UnreadSecret| format!("images are pulled without a pull secret: {unread}");
        let is_temporary = |unread: &&UnreadSecret| unread.error.is_temporary();
        let kept_secrets = unread.iter().filter(is_temporary).map(|unread| unread.name.clone()).collect();
        let mut problems: Vec<String> = unread.iter().map(|unread| about(missing(unread))).collect();
        problems.extend(secrets.iter().filter_map(unusable).map(about));
        let handler = match &self.classes {
            Some(classes) => classes.handler(&pod.runtime_class).await,
            None => Ok(String::new()),
        };
        let context = match handler {
            Ok(runtime_handler) => Some(PullContext { secrets, runtime_handler }),
            Err(error) => {
                problems.push(about(format!("images are not pulled yet: {error}")));
                None
            }
        };
        ReadOutcome { read, context, kept_secrets, problems }
    }
}

/// Why a secret gives no credentials. kubelet ignores it, too.
pub(super) fn unusable(secret: &PullSecret) -> Option<String> {
    let has_none = matches!(secret.docker_config(TokenPolicy::Keep), Ok(None));
    has_none.then(|| {
        let PullSecret { coordinates, kind, .. } = secret;
        format!("secret {coordinates}: no pull secret: type {} without its key", go_format::quote(kind))
    })
}

/// Passes on which pods have images that failed.
struct FailedPods(mpsc::Sender<String>);

impl EventSink for FailedPods {
    fn record(&self, event: Event) {
        let Event { object, .. } = event;
        let pod = Pod { uid: object.uid, namespace: object.namespace, name: object.name, ..Pod::default() };
        // One that finds no room fails again.
        let _ = self.0.try_send(pod.key());
    }
}
