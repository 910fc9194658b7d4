//! Why an image is kept or would be removed, what uses it, and what removing it frees.

use std::collections::HashSet;

use larder::credentials::{SecretCoordinates, ServiceAccountCoordinates};
use larder::gc::{
    Collector, DryRun, GcDecision, GcError, GcGoal, GcPlan, GcPolicy, GcSnapshot, RetainReason, plan,
};
use larder::records::{ImagePullCredentials, PullRecordStore};
use larder::reference::ImageId;
use larder_api::convert::{self, millis};
use larder_api::v1::{Explanation, PulledRecord};

use super::find::find_to_describe;
use super::images::absent;
use super::{gc, report};
use crate::backend::published_layers::bytes_in_containerd;
use crate::error::Error;
use crate::node::Storage;
use crate::node::pulls::Pulls;

/// Explains an image.
pub(super) async fn explain(
    name: &str,
    storage: &Storage,
    collector: &Collector,
    pulls: &Pulls,
    policy: &GcPolicy,
) -> Result<Explanation, Error> {
    let image = find_to_describe(name, &**storage.backend()).await?.image;
    let run = match dry_run(collector, policy).await {
        Ok(run) => run,
        Err(error) => return Err(gc::failure_of(collector, error).await),
    };
    let decision_in = |plan: &GcPlan| plan.decisions.iter().find(|found| found.id == image.id).cloned();
    let snapshot = &run.snapshot;
    let all_unused = plan(snapshot, policy, GcGoal::AllUnused);
    let (Some(now), Some(last)) = (run.plan().and_then(decision_in), decision_in(&all_unused)) else {
        return Err(absent(name));
    };
    let since = |stamp| millis(snapshot.now.since(stamp));
    let records = pulls.records();
    let pulled_records = pulled_records(records, &image.id).await;
    let unrecorded_access = match records {
        Some(records) if pulled_records.is_empty() => {
            Some(records.allows_unrecorded(&name.into(), &image.id).await)
        }
        _ => None,
    };
    let mut decision = report::image(&now);
    if storage.store().is_some()
        && let Some(total) = snapshot.layers.size_of(&image.id)
    {
        decision.size_bytes = total.bytes;
    }
    let damaged =
        storage.damaged_images().await.into_iter().find(|damaged| image.id.as_str() == damaged.id.as_str());
    let damaged_layers = damaged.into_iter().flat_map(|damaged| damaged.layers).map(String::from);
    Ok(Explanation {
        decision: Some(decision),
        shared_bytes: shared(snapshot, &image.id),
        removable: matches!(last.decision, GcDecision::Remove(_)),
        under_pressure: under_pressure(&now.decision, &last.decision),
        milliseconds_since_first_seen: since(now.first_seen),
        milliseconds_since_last_used: now.last_used.map(since),
        pulled_records,
        unrecorded_access,
        hidden: pulls.hides(&image),
        fill: image.fill.map(convert::fill),
        damaged_layers: damaged_layers.collect(),
        mounts: Vec::new(),
        containerd_bytes: match storage.store() {
            Some(_) => bytes_in_containerd(&snapshot.layers, Some(&image.id)),
            None => 0,
        },
    })
}

/// The next round, with unknown disk usage if the filesystem cannot be measured.
async fn dry_run(collector: &Collector, policy: &GcPolicy) -> Result<DryRun, GcError> {
    match collector.dry_run(policy.scheduled_goal(), policy, &[]).await {
        Err(GcError::Disk(error)) => {
            tracing::warn!("cannot determine disk usage: {error}");
            collector.dry_run(GcGoal::Detect, policy, &[]).await
        }
        run => run,
    }
}

/// The decision on an image when space is needed, where that is another one than now; else empty.
fn under_pressure(now: &GcDecision, last: &GcDecision) -> String {
    match (now, last) {
        (
            GcDecision::Retain(
                RetainReason::NotNeeded | RetainReason::FreesNothing | RetainReason::Unreachable(_),
            ),
            GcDecision::Retain(stays),
        ) => {
            format!("retained: {stays}")
        }
        (GcDecision::Retain(_), GcDecision::Remove(_)) => {
            "candidate: removed after images that are unused for longer".to_owned()
        }
        _ => String::new(),
    }
}

/// Returns the bytes of its layers that other images have as well.
fn shared(snapshot: &GcSnapshot, id: &ImageId) -> Option<u64> {
    let mine = &snapshot.layers.layers_of(id)?.layers;
    let others = snapshot.images.iter().filter(|image| image.id != *id);
    let others: HashSet<u32> = others
        .filter_map(|image| snapshot.layers.layers_of(&image.id))
        .flat_map(|known| known.layers.clone())
        .collect();
    let all = snapshot.layers.all();
    Some(
        mine.iter()
            .filter(|layer| others.contains(layer))
            .map(|&layer| all[layer as usize].amount.bytes)
            .sum(),
    )
}

/// The pulled records of an image, by its id. An unreadable record is logged and ignored: it grants no access.
async fn pulled_records(records: Option<&PullRecordStore>, image_ref: &ImageId) -> Vec<PulledRecord> {
    let Some(records) = records else { return Vec::new() };
    match records.record(image_ref).await {
        Ok(record) => record.into_iter().flat_map(|record| record.names).map(of_name).collect(),
        Err(error) => {
            tracing::warn!("cannot read the pull record of {image_ref}: {error}");
            Vec::new()
        }
    }
}

fn of_name((name, access): (String, ImagePullCredentials)) -> PulledRecord {
    PulledRecord {
        name,
        every_pod: access.node_pods,
        secrets: access.secrets.iter().map(|secret| of_secret(&secret.at)).collect(),
        service_accounts: access.service_accounts.iter().map(of_account).collect(),
    }
}

/// A login that a user brought along has no namespace.
fn of_secret(at: &SecretCoordinates) -> String {
    if at.namespace.is_empty() { at.name.clone() } else { at.to_string() }
}

fn of_account(ServiceAccountCoordinates { namespace, name, .. }: &ServiceAccountCoordinates) -> String {
    format!("{namespace}/{name}")
}
