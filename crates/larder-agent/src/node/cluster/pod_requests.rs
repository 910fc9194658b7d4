//! Which images are ensured for the pods of the node. Pure.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use larder::credentials::PullSecret;
use larder::pod::{ObjectRef, SandboxConfig};
use larder::pull::{EnsureRequest, Priority, PullPolicy};
use larder_kube::{BoundPod, PodImage};

use crate::node::pods::desired::DesiredKey;

/// How soon what a pod needs is read again after its first failure, and at most: as kubelet's back-off of pulls, but
/// not as soon.
const READ_AGAIN: Duration = Duration::from_secs(30);
const MAX_READ_AGAIN: Duration = Duration::from_secs(300);

/// Context that the pulls of a pod need besides the pod.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct PullContext {
    /// In the pod's order.
    pub(super) secrets: Vec<PullSecret>,
    pub(super) runtime_handler: String,
}

impl PullContext {
    /// Takes these secrets over from what was known, in the order of the pod.
    fn keep_secrets(&mut self, known: &PullContext, names: &BTreeSet<String>, order: &[String]) {
        let kept = known.secrets.iter().filter(|secret| names.contains(&secret.coordinates.name));
        self.secrets.extend(kept.cloned());
        self.secrets.sort_by_key(|secret| order.iter().position(|name| *name == secret.coordinates.name));
    }
}

/// A read of what a pod needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContextRead {
    pub(super) pod: BoundPod,
    /// Only the latest one of a pod counts.
    number: u64,
    /// How long to wait before it.
    pub(super) after: Duration,
}

/// The pods of the node, by uid.
#[derive(Default)]
pub(super) struct PodRequests {
    pods: BTreeMap<String, PodEntry>,
}

struct PodEntry {
    pod: BoundPod,
    /// `None` until it is known.
    context: Option<PullContext>,
    /// Problems of the last reading.
    problems: Vec<String>,
    /// Number of the latest read, and whether it is not done yet.
    number: u64,
    is_reading: bool,
    /// How soon it is read again after the next failure.
    read_again: Duration,
    /// Whether a read has ended.
    is_read: bool,
    /// Counts contexts: requests with another one are new requests.
    version: u64,
}

impl PodRequests {
    /// From now on these are the pods. Returns the reads of those that are new or changed.
    pub(super) fn set_pods<'a>(&mut self, pods: impl Iterator<Item = &'a BoundPod>) -> Vec<ContextRead> {
        let (mut reads, mut bound) = (Vec::new(), BTreeSet::new());
        for pod in pods {
            bound.insert(pod.pod.key());
            let entry = match self.pods.entry(pod.pod.key()) {
                Entry::Occupied(known) if has_same_context(&known.get().pod, pod) => {
                    known.into_mut().change_pod(pod);
                    continue;
                }
                // It continues with what it had until the context of its change is known.
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(entry) => entry.insert(PodEntry::of(pod)),
            };
            entry.pod.clone_from(pod);
            entry.read_again = READ_AGAIN;
            reads.push(entry.begin_read(Duration::ZERO));
        }
        self.pods.retain(|key, _| bound.contains(key));
        reads
    }

    /// A pull of the pod failed, or its context could not be determined: the next read, if the pod is still bound and
    /// may need one. Any number of failures before it ends have one read.
    pub(super) fn read_again(&mut self, key: &str) -> Option<ContextRead> {
        let entry = self.pods.get_mut(key)?;
        let may_differ = !entry.pod.pull_secrets.is_empty() || entry.context.is_none();
        if entry.is_reading || !may_differ {
            return None;
        }
        let after = entry.read_again;
        entry.read_again = (after * 2).min(MAX_READ_AGAIN);
        Some(entry.begin_read(after))
    }

    /// The context of a pod was read; `None` if it could not be determined. Secrets in `kept` stay as they are known.
    /// Returns the problems that are new.
    pub(super) fn set_context(
        &mut self,
        read: &ContextRead,
        mut context: Option<PullContext>,
        kept: &BTreeSet<String>,
        problems: Vec<String>,
    ) -> Vec<String> {
        let entry = self.pods.get_mut(&read.pod.pod.key());
        let Some(entry) = entry.filter(|entry| entry.number == read.number) else { return Vec::new() };
        (entry.is_reading, entry.is_read) = (false, true);
        if let (Some(new), Some(known)) = (&mut context, &entry.context) {
            new.keep_secrets(known, kept, &entry.pod.pull_secrets);
        }
        if context.is_some() && entry.context != context {
            entry.version += u64::from(entry.context.is_some());
            (entry.context, entry.read_again) = (context, READ_AGAIN);
        }
        let known = std::mem::replace(&mut entry.problems, problems.clone());
        problems.into_iter().filter(|problem| !known.contains(problem)).collect()
    }

    /// Whether what each pod needs has been read, or could not be.
    pub(super) fn are_read(&self) -> bool {
        self.pods.values().all(|entry| entry.is_read)
    }

    pub(super) fn len(&self) -> usize {
        self.pods.len()
    }

    /// The requests of the pods whose context is known.
    pub(super) fn requests(&self) -> BTreeMap<DesiredKey, EnsureRequest> {
        let entries = self.pods.values();
        let known = entries.filter_map(|entry| Some((entry, entry.context.as_ref()?)));
        known
            .flat_map(|(entry, context)| {
                entry.pod.images.iter().map(move |image| request(&entry.pod, image, context, entry.version))
            })
            .collect()
    }
}

impl PodEntry {
    fn of(pod: &BoundPod) -> PodEntry {
        PodEntry {
            pod: pod.clone(),
            context: None,
            problems: Vec::new(),
            number: 0,
            is_reading: false,
            read_again: READ_AGAIN,
            is_read: false,
            version: 0,
        }
    }

    /// Takes a change over that needs no other context. That the pod runs now changes no request.
    fn change_pod(&mut self, pod: &BoundPod) {
        let is_running = if self.pod.images == pod.images { self.pod.is_running } else { pod.is_running };
        self.pod = BoundPod { is_running, ..pod.clone() };
    }

    fn begin_read(&mut self, after: Duration) -> ContextRead {
        (self.number, self.is_reading) = (self.number + 1, true);
        ContextRead { pod: self.pod.clone(), number: self.number, after }
    }
}

/// Whether a change of the pod, such as one of its annotations, needs no other secrets and runtime handler.
fn has_same_context(known: &BoundPod, pod: &BoundPod) -> bool {
    known.pull_secrets == pod.pull_secrets && known.runtime_class == pod.runtime_class
}

fn request(
    BoundPod { pod, is_running, .. }: &BoundPod,
    image: &PodImage,
    context: &PullContext,
    version: u64,
) -> (DesiredKey, EnsureRequest) {
    // kubelet itself refreshes an image when it starts a container. One that runs when larder starts is not refreshed.
    let policy = if *is_running { PullPolicy::IfNotPresent } else { image.policy.clone() };
    let key = DesiredKey {
        owner: format!("pod {}/{}", pod.namespace, pod.name),
        part: format!("{}/{}/{version}", pod.uid, image.part),
        image: image.image.clone(),
        policy: policy.to_string(),
        // kubelet knows its own pods.
        is_pinned: false,
    };
    let request = EnsureRequest {
        target: Some(ObjectRef::new(pod, &image.field_path)),
        sandbox: Some(SandboxConfig::of(pod)),
        secrets: context.secrets.clone(),
        runtime_handler: context.runtime_handler.clone(),
        // kubelet's own request for the image raises it.
        priority: Priority::Prefetch,
        ..EnsureRequest::new(image.image.clone(), policy, pod.clone())
    };
    (key, request)
}

#[cfg(test)]
mod tests {
    use larder::credentials::SecretCoordinates;
    use larder::pod::Pod;

    use super::*;

    fn pod(name: &str, image: &str, is_running: bool) -> BoundPod {
        let identity =
            Pod { uid: format!("uid-{name}"), namespace: "shop".into(), name: name.into(), ..Pod::default() };
        let image = PodImage {
            image: image.into(),
            policy: PullPolicy::Always,
            field_path: "spec.containers{app}".into(),
            part: "app".into(),
        };
        BoundPod {
            pod: identity,
            pull_secrets: Vec::new(),
            images: vec![image],
            runtime_class: String::new(),
            is_running,
        }
    }

    fn shown(requests: &PodRequests) -> Vec<String> {
        let shown = |(key, request): (DesiredKey, EnsureRequest)| {
            format!("{} {} {} {}", key.owner, key.part, request.image, request.policy)
        };
        requests.requests().into_iter().map(shown).collect()
    }

    fn known(requests: &mut PodRequests, read: &ContextRead, handler: &str) {
        let context = PullContext { runtime_handler: handler.into(), ..PullContext::default() };
        requests.set_context(read, Some(context), &BTreeSet::new(), Vec::new());
    }

    /// The read of one pod that is new or changed.
    fn set(requests: &mut PodRequests, pod: &BoundPod) -> ContextRead {
        let mut reads = requests.set_pods([pod].into_iter());
        assert_eq!(reads.len(), 1);
        reads.remove(0)
    }

    #[test]
    fn a_pod_has_requests_from_its_context_on_until_it_is_unbound() {
        let mut requests = PodRequests::default();
        assert!(requests.are_read(), "no pods");
        let read = set(&mut requests, &pod("web", "a:1", false));
        assert!(shown(&requests).is_empty() && !requests.are_read(), "its secrets are not known yet");
        known(&mut requests, &read, "");
        let first = ["pod shop/web uid-web/app/0 a:1 Always"];
        assert_eq!(shown(&requests), first);
        assert!(requests.are_read());
        known(&mut requests, &read, "");
        assert!(requests.set_pods([&pod("web", "a:1", true)].into_iter()).is_empty());
        assert_eq!(shown(&requests), first, "that it runs changes nothing");
        known(&mut requests, &read, "kata");
        assert_eq!(shown(&requests), ["pod shop/web uid-web/app/1 a:1 Always"], "a new request");
        assert!(requests.requests().keys().all(|key| !key.is_pinned), "kubelet knows its pods");
        requests.set_pods([].into_iter());
        known(&mut requests, &read, "");
        assert!(shown(&requests).is_empty(), "it is not bound any more");
    }

    #[test]
    fn an_image_of_a_running_pod_is_not_refreshed_and_one_of_a_changed_pod_is() {
        let mut requests = PodRequests::default();
        let read = set(&mut requests, &pod("web", "a:1", true));
        known(&mut requests, &read, "");
        assert_eq!(shown(&requests), ["pod shop/web uid-web/app/0 a:1 IfNotPresent"]);
        let changed = pod("web", "a:2", false);
        assert!(requests.set_pods([&changed].into_iter()).is_empty(), "its secrets are the same");
        assert_eq!(shown(&requests), ["pod shop/web uid-web/app/0 a:2 Always"]);
    }

    #[test]
    fn secrets_are_read_again_once_for_many_failures_and_each_problem_is_reported_once() {
        let mut requests = PodRequests::default();
        let web = BoundPod { pull_secrets: vec!["s".into()], ..pod("web", "a:1", false) };
        let first = set(&mut requests, &web);
        let missing = || vec!["secret shop/s does not exist".to_owned()];
        let end = |requests: &mut PodRequests, read: &ContextRead| {
            requests.set_context(read, Some(PullContext::default()), &BTreeSet::new(), missing())
        };
        assert_eq!(end(&mut requests, &first), missing());
        let again = requests.read_again("uid-web").unwrap();
        assert_eq!(requests.read_again("uid-web"), None);
        assert!(end(&mut requests, &again).is_empty(), "the same problem");
        assert!(requests.read_again("uid-web").is_some());
        assert_eq!(requests.read_again("other"), None);
        let read = set(&mut requests, &pod("public", "a:1", false));
        known(&mut requests, &read, "");
        assert_eq!(requests.read_again("uid-public"), None, "it has no secrets");
    }

    #[test]
    fn secrets_of_a_pod_that_fails_forever_are_read_every_five_minutes() {
        let mut requests = PodRequests::default();
        let web = BoundPod { pull_secrets: vec!["s".into()], ..pod("web", "a:1", false) };
        let first = set(&mut requests, &web);
        known(&mut requests, &first, "");
        let mut fails = |handler: &str| {
            let read = requests.read_again("uid-web").unwrap();
            known(&mut requests, &read, handler);
            read.after.as_secs()
        };
        let waits: Vec<u64> = (0..6).map(|_| fails("")).collect();
        assert_eq!(waits, [30, 60, 120, 240, 300, 300]);
        assert_eq!([fails("new"), fails("new")], [300, 30], "what was read is new");
        let mut annotated = web.clone();
        annotated.pod.annotations.insert("checked".into(), "12:00".into());
        assert!(requests.set_pods([&annotated].into_iter()).is_empty(), "its secrets are the same");
        set(&mut requests, &BoundPod { pull_secrets: vec!["t".into()], ..web });
        let after = requests.read_again("uid-web").map(|read| read.after);
        assert_eq!(after, None, "it is being read");
    }

    #[test]
    fn secrets_that_cannot_be_read_now_stay_as_they_are_known_in_the_order_of_the_pod() {
        let mut requests = PodRequests::default();
        let names = ["a", "b", "c"].map(str::to_owned);
        let web = BoundPod { pull_secrets: names.to_vec(), ..pod("web", "a:1", false) };
        let secret = |name: &str, uid: &str| PullSecret {
            kind: String::new(),
            coordinates: SecretCoordinates { uid: uid.into(), namespace: "shop".into(), name: name.into() },
            data: BTreeMap::new(),
        };
        let read = set(&mut requests, &web);
        let of = |secrets: Vec<PullSecret>| Some(PullContext { secrets, ..PullContext::default() });
        let all = of(vec![secret("a", "1"), secret("b", "1"), secret("c", "1")]);
        requests.set_context(&read, all, &BTreeSet::new(), Vec::new());
        let again = requests.read_again("uid-web").unwrap();
        // The API server answered for `c`, and for none of the others; `a` does not exist any more.
        requests.set_context(&again, of(vec![secret("c", "2")]), &["b".to_owned()].into(), Vec::new());
        let (_, request) = requests.requests().into_iter().next().unwrap();
        let found: Vec<_> =
            request.secrets.iter().map(|found| (&*found.coordinates.name, &*found.coordinates.uid)).collect();
        assert_eq!(found, [("b", "1"), ("c", "2")]);
    }

    #[test]
    fn a_change_of_a_pod_replaces_its_read_and_adds_none() {
        let mut requests = PodRequests::default();
        let failed = |requests: &mut PodRequests, read: &ContextRead| {
            requests.set_context(read, None, &BTreeSet::new(), Vec::new());
            requests.read_again("uid-web")
        };
        let first = set(&mut requests, &pod("web", "a:1", false));
        let waiting = failed(&mut requests, &first).unwrap();
        assert!(requests.are_read(), "its runtime class is unknown");
        let other_secret = BoundPod { pull_secrets: vec!["s".into()], ..pod("web", "a:1", false) };
        let changed = set(&mut requests, &other_secret);
        let next = failed(&mut requests, &changed).unwrap();
        assert_eq!(failed(&mut requests, &waiting), None, "it was replaced");
        known(&mut requests, &waiting, "of an earlier state");
        assert!(shown(&requests).is_empty());
        assert!(failed(&mut requests, &next).is_some());
    }
}
