//! The elected agent: counts what the nodes report, admits nodes, and writes the status of the sets.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher;
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{self, Instant};

use super::ImageSetOptions;
use super::lease::Election;
use super::node_images::NodeImages;
use super::resource::{ImageSet, ImageSetStatus};
use super::rollout::{
    Nodes, Reports, SelectedNodes, SetFindings, UnfinishedNode, admitted_up_to, status_of, write_cost,
};
use super::set_events::SetEvents;
use super::set_secrets::SetSecrets;
use super::tasks::random;
use super::wanted::generation_of;
use crate::cluster::Cluster;
use crate::error::{ClusterError, ErrorLog};
use crate::node_events::EventRateLimit;
use crate::watched::{Watched, from_cache};

/// Takes part in the election while there are sets, and counts while elected. Never ends.
pub(super) async fn campaign(
    cluster: Cluster,
    options: ImageSetOptions,
    mut has_sets: watch::Receiver<bool>,
) {
    let mut election = Election::new(&cluster, &options.namespace, options.lease);
    let mut log = ErrorLog::default();
    loop {
        // It ends only with the node's part, which never ends.
        _ = has_sets.wait_for(|has_sets| *has_sets).await;
        time::sleep(options.first_attempt.mul_f64(random())).await;
        while *has_sets.borrow() {
            let attempt = election.attempt(Timestamp::now()).await;
            let is_elected = matches!(attempt, Ok(true));
            // The lease may be free once the API server answers again: it was not when the agent did not get it.
            let is_soon = is_elected || attempt.as_ref().is_err_and(ClusterError::is_temporary);
            log.note("election for image sets", attempt.map(drop));
            if is_elected {
                lead(&cluster, &options, &mut election, &mut has_sets, &mut log).await;
            }
            let wait = if is_soon { options.retry } else { options.candidate_interval };
            tokio::select! {
                () = time::sleep(wait.mul_f64(1.0 + random())) => {}
                // The next set is not to wait as long as a candidate does.
                _ = has_sets.wait_for(|has_sets| !has_sets) => {}
            }
        }
        cluster.forget(&ELECTION_ACTIONS);
    }
}

/// Counts until the lease is lost or there are no sets.
async fn lead(
    cluster: &Cluster,
    options: &ImageSetOptions,
    election: &mut Election,
    has_sets: &mut watch::Receiver<bool>,
    log: &mut ErrorLog,
) {
    tracing::info!("{}: elected to write the status of image sets", cluster.node);
    let _lease = election.held_lease();
    let counting = async {
        let mut aggregator = Aggregator::new(cluster, options);
        aggregator.run().await;
    };
    tokio::select! {
        () = counting => {}
        () = hold(election, options, log) => {}
        _ = has_sets.wait_for(|has_sets| !has_sets) => {}
    }
    tracing::info!("{}: no longer writes the status of image sets", cluster.node);
}

/// Renews the lease; returns when it is lost, or before another agent may take it.
async fn hold(election: &mut Election, options: &ImageSetOptions, log: &mut ErrorLog) {
    let mut renewed = Instant::now();
    loop {
        time::sleep(options.lease / 4).await;
        let started = Instant::now();
        let latest = renewed + options.lease * 2 / 3;
        match time::timeout_at(latest, election.attempt(Timestamp::now())).await {
            Ok(Ok(true)) => renewed = started,
            Ok(Ok(false)) | Err(_) => return,
            Ok(Err(error)) => log.note("election for image sets", Err(error)),
        }
        if Instant::now() >= latest {
            return;
        }
    }
}

struct Aggregator {
    cluster: Cluster,
    options: ImageSetOptions,
    sets: Watched<ImageSet>,
    nodes: Watched<PartialObjectMeta<Node>>,
    reports: Watched<NodeImages>,
    writes: BTreeMap<String, StatusWrites>,
    /// Until when the API server is busy with sending what was written to the watches, at the rate that they may cost.
    busy_until: Instant,
    stalls: Stalls,
    secrets: SetSecrets,
    events: SetEvents,
}

/// How much of the time that writes cost may be ahead: many small ones are written at once.
const BURST: Duration = Duration::from_secs(1);

/// Writes of the status of one set.
struct StatusWrites {
    /// When the next one may be.
    next: Instant,
    log: ErrorLog,
    events: EventRateLimit,
}

/// Since when admitted nodes have got no further image, and with how many of them, by set, generation and node.
#[derive(Default)]
struct Stalls(BTreeMap<(String, i64, String), Stall>);

#[derive(Clone, Copy)]
struct Stall {
    since: Instant,
    node: UnfinishedNode,
}

impl Stalls {
    /// Forgets the sets that do not exist any more.
    fn retain(&mut self, exists: impl Fn(&String) -> bool) {
        self.0.retain(|(name, ..), _| exists(name));
    }

    /// Finds the unfinished nodes of a set that have got no further image for too long.
    fn of(
        &mut self,
        set: &ImageSet,
        unfinished: &BTreeMap<&str, UnfinishedNode>,
        now: Instant,
    ) -> BTreeSet<String> {
        let (name, generation) = (set.name_any(), generation_of(set));
        self.0.retain(|(of, at, node), stall| {
            let found = unfinished.get(node.as_str());
            *of != name || (*at == generation && found == Some(&stall.node))
        });
        let is_stalled = |(node, found): &(&&str, &UnfinishedNode)| {
            let key = (name.clone(), generation, (**node).to_owned());
            let stall = self.0.entry(key).or_insert(Stall { since: now, node: **found });
            stall.since + found.stalls_after <= now
        };
        unfinished.iter().filter(is_stalled).map(|(node, _)| (*node).to_owned()).collect()
    }
}

impl Aggregator {
    fn new(cluster: &Cluster, options: &ImageSetOptions) -> Aggregator {
        let client = || cluster.client.clone();
        let sets = watcher(Api::<ImageSet>::all(client()), watcher::Config::default());
        let nodes = watcher(Api::<PartialObjectMeta<Node>>::all(client()), from_cache());
        let reports = watcher(Api::<NodeImages>::all(client()), watcher::Config::default());
        Aggregator {
            cluster: cluster.clone(),
            options: options.clone(),
            sets: Watched::new(cluster, "the list of image sets", sets),
            nodes: Watched::new(cluster, "the list of nodes", nodes),
            reports: Watched::new(cluster, "the list of nodeimages", reports),
            writes: BTreeMap::new(),
            busy_until: Instant::now(),
            stalls: Stalls::default(),
            secrets: SetSecrets::new(cluster, &options.namespace),
            events: SetEvents::new(cluster),
        }
    }

    async fn run(&mut self) {
        // What changes at once is counted at once.
        let mut count = time::interval(self.options.count_interval);
        count.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        let mut look_at_secrets = time::interval(self.options.secret_interval);
        let mut has_changed = false;
        loop {
            tokio::select! {
                _ = look_at_secrets.tick() => has_changed |= self.has_secrets(),
                result = self.sets.changed() => has_changed |= result.is_ok(),
                result = self.nodes.changed() => has_changed |= result.is_ok(),
                result = self.reports.changed() => has_changed |= result.is_ok(),
                _ = count.tick(), if has_changed => has_changed = self.write_statuses().await,
            }
        }
    }

    fn has_secrets(&self) -> bool {
        self.sets.objects().values().any(|set| !set.spec.pull_secrets.is_empty())
    }

    /// Writes what has changed. Whether to count again soon, because a status may not be written yet.
    async fn write_statuses(&mut self) -> bool {
        if !self.sets.is_known() || !self.nodes.is_known() || !self.reports.is_known() {
            return false;
        }
        self.secrets.read(self.sets.objects().values()).await;
        let labels = |node: &PartialObjectMeta<Node>| node.labels().clone();
        let nodes: Nodes =
            self.nodes.objects().iter().map(|(name, node)| (name.clone(), labels(node))).collect();
        let reports = self.reports.objects().iter();
        let reports: Reports =
            reports.map(|(name, found)| (name.clone(), found.spec.image_sets.clone())).collect();
        self.writes.retain(|name, _| self.sets.objects().contains_key(name));
        self.stalls.retain(|name| self.sets.objects().contains_key(name));
        let (now, mut is_pending) = (Instant::now(), false);
        let mut changed = Vec::new();
        for (name, set) in self.sets.objects() {
            let selected = SelectedNodes::of(set, &nodes, &reports);
            let unfinished = selected.unfinished(admitted_up_to(set));
            let stalled = self.stalls.of(set, &unfinished, now);
            // Time alone makes a node stall.
            is_pending |= stalled.len() < unfinished.len();
            let missing_secrets = self.secrets.missing_of(set);
            let findings = SetFindings { stalled, missing_secrets };
            let status = status_of(set, &selected, &findings, Timestamp::now());
            if set.status.as_ref() != Some(&status) {
                let next = self.writes.get(name).map_or(now, |writes| writes.next);
                changed.push((next, set.clone(), status));
            }
        }
        // The one that has waited longest comes first: all share what may be sent to the watches.
        changed.sort_by_key(|(next, ..)| *next);
        for (next, set, status) in changed {
            let is_written = next <= now
                && self.busy_until <= now + BURST
                && self.write(&set, &status, nodes.len(), now).await;
            is_pending |= !is_written;
        }
        is_pending
    }

    /// Writes the status of a set, and sends its events. Whether it was written.
    async fn write(&mut self, set: &ImageSet, status: &ImageSetStatus, nodes: usize, now: Instant) -> bool {
        let name = set.name_any();
        let writes = self.writes.entry(name.clone()).or_insert_with(|| StatusWrites {
            next: now,
            log: ErrorLog::default(),
            events: EventRateLimit::new(now),
        });
        let bytes = serde_json::to_vec(set).map_or(0, |text| text.len());
        writes.next = now + self.options.status_interval;
        let written = write_status(&self.cluster, &name, status).await;
        let is_written = written.is_ok();
        if is_written {
            self.busy_until = self.busy_until.max(now) + write_cost(nodes, bytes);
        }
        if is_written && self.options.events.load(Ordering::Relaxed) {
            self.events.send(set, status, &mut writes.events, now).await;
        }
        writes.log.note(&format!("status of imageset {name}"), written);
        is_written
    }
}

/// Requests of candidates.
const ELECTION_ACTIONS: [&str; 3] = ["get leases", "post leases", "put leases"];
/// Requests that only the elected agent sends.
const ACTIONS: [&str; 3] = ["list nodeimages", "watch nodeimages", "patch imagesets/status"];

impl Drop for Aggregator {
    fn drop(&mut self) {
        self.cluster.forget(&ACTIONS);
    }
}

async fn write_status(cluster: &Cluster, name: &str, status: &ImageSetStatus) -> Result<(), ClusterError> {
    let api: Api<ImageSet> = Api::all(cluster.client.clone());
    let mut fields = json!({ "status": status });
    if status.admitted_up_to.is_none() {
        // A merge patch keeps what it does not name.
        fields["status"]["admittedUpTo"] = json!(null);
    }
    let what = format!("status of imageset {name}");
    let (params, patch) = (PatchParams::default(), Patch::Merge(&fields));
    match cluster.call(what, api.patch_status(name, &params, &patch)).await {
        // It was just removed.
        Ok(_) | Err(ClusterError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image_sets::wanted::tests::set;

    #[test]
    fn a_node_has_stalled_after_its_time_without_a_further_image_of_this_generation() {
        let (start, mut stalls) = (Instant::now(), Stalls::default());
        let mut set = set("s", json!({ "images": [{ "image": "a:1" }] }));
        let stalls_after = Duration::from_secs(300);
        let mut stalled = |set: &ImageSet, nodes: &[(&str, u32)], seconds| {
            let unfinished = |&(node, ready)| (node, UnfinishedNode { ready, stalls_after });
            let unfinished = nodes.iter().map(unfinished).collect();
            stalls.of(set, &unfinished, start + Duration::from_secs(seconds)).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(stalled(&set, &[("n1", 0), ("n2", 0), ("n3", 0)], 0), [""; 0]);
        assert_eq!(stalled(&set, &[("n1", 0), ("n3", 1)], 200), [""; 0], "n2 is ready, n3 has an image");
        assert_eq!(stalled(&set, &[("n1", 0), ("n2", 0), ("n3", 1)], 300), ["n1"]);
        assert_eq!(stalled(&set, &[("n1", 0), ("n2", 0), ("n3", 1)], 500), ["n1", "n3"]);
        set.metadata.generation = Some(2);
        assert_eq!(stalled(&set, &[("n1", 0), ("n2", 0)], 900), [""; 0]);
        stalls.retain(|name| name != "s");
        assert!(stalls.0.is_empty(), "the set was deleted");
    }
}
