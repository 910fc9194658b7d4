//! The pods that are bound to this node, as they change.

use std::collections::BTreeMap;

use futures_util::{Stream, StreamExt as _};
use kube::runtime::watcher::{Event, watcher};
use kube::{Api, ResourceExt as _};

use crate::cluster::Cluster;
use crate::error::ClusterError;
use crate::pod_images::{BoundPod, PodObject, bound_pod};
use crate::watched::{from_cache, watch_events};

/// The pods of a node that need images, by uid.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BoundPods {
    pods: BTreeMap<String, BoundPod>,
    /// Pods of the list that is being read; `None` between lists.
    listed: Option<BTreeMap<String, BoundPod>>,
}

impl BoundPods {
    /// The pods, by uid.
    pub fn pods(&self) -> impl Iterator<Item = &BoundPod> {
        self.pods.values()
    }

    /// Takes one event of a watch in. Whether the pods changed: a list counts when it is complete, so that no pod is
    /// missing in between.
    fn apply(&mut self, event: Event<PodObject>) -> bool {
        match event {
            Event::Init => {
                self.listed = Some(BTreeMap::new());
                false
            }
            Event::InitApply(pod) => {
                let needed = bound_pod(&pod);
                self.listed.get_or_insert_default().extend(needed.map(|needed| (uid(&pod), needed)));
                false
            }
            Event::InitDone => {
                let listed = self.listed.take().unwrap_or_default();
                std::mem::replace(&mut self.pods, listed) != self.pods
            }
            Event::Apply(pod) => match bound_pod(&pod) {
                Some(needed) => self.pods.insert(uid(&pod), needed.clone()).as_ref() != Some(&needed),
                None => self.pods.remove(&uid(&pod)).is_some(),
            },
            Event::Delete(pod) => self.pods.remove(&uid(&pod)).is_some(),
        }
    }
}

fn uid(pod: &PodObject) -> String {
    pod.uid().unwrap_or_default()
}

/// The pods of the node after each change, from the first complete list on, and why they are not known while they are
/// not. It never ends: a watch that breaks is resumed from its last version, with back-off.
pub fn watch_bound_pods(cluster: &Cluster) -> impl Stream<Item = Result<BoundPods, ClusterError>> + use<> {
    let pods: Api<PodObject> = Api::all(cluster.client.clone());
    let of_node = from_cache().fields(&format!("spec.nodeName={}", cluster.node));
    let mut is_first = true;
    let events = watch_events(cluster, "the list of pods", watcher(pods, of_node));
    let changes = events.scan(BoundPods::default(), move |known, event| {
        let next = match event {
            Ok(event) => {
                let is_complete = matches!(event, Event::InitDone);
                let changed = known.apply(event);
                let is_news = changed || (is_complete && std::mem::take(&mut is_first));
                is_news.then(|| Ok(known.clone()))
            }
            Err(error) => Some(Err(error)),
        };
        std::future::ready(Some(next))
    });
    changes.filter_map(std::future::ready)
}
