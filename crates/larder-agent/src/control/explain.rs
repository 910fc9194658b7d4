//! Why an image is kept or would be removed, what uses it, and what removing it frees.

use std::collections::HashSet;

use larder::backend::Backend;
use larder::credentials::{SecretCoordinates, ServiceAccountCoordinates};
use larder::gc::{
    Collector, DiskSpace, GcDecision, GcGoal, GcPolicy, GcSnapshot, ImageDecision, RetainReason, plan,
    plan_round,
};
use larder::hidden::HiddenImages;
use larder::records::{ImagePullCredentials, PullRecordStore};
use larder::reference::ImageId;
use larder_api::convert::millis;
use larder_api::v1::{Explanation, PulledRecord};

use super::find::find;
use super::images::absent;
use super::{gc, report};
use crate::error::Error;

/// What there is to say of an image, and the disk usage of all its layers if that is known.
pub(super) async fn explain(
    name: &str,
    backend: &dyn Backend,
    collector: &Collector,
    policy: &GcPolicy,
    records: Option<&PullRecordStore>,
    hidden: Option<&HiddenImages>,
) -> Result<(Explanation, Option<DiskSpace>), Error> {
    let image = find(name, backend).await?.image;
    let scene = gc::read_snapshot(collector, policy).await?;
    let now = plan_round(&scene, policy);
    let last = plan(&scene, policy, GcGoal::AllUnused);
    let of = |verdicts: &[ImageDecision]| verdicts.iter().find(|verdict| verdict.id == image.id).cloned();
    let (Some(now), Some(last)) = (of(&now.decisions), of(&last.decisions)) else {
        return Err(absent(name));
    };
    let since = |stamp| millis(scene.now.since(stamp));
    let pulled_records = pulled_records(records, &image.id).await;
    let unrecorded_access = match records {
        Some(records) if pulled_records.is_empty() => Some(records.allows_unrecorded(&name.into()).await),
        _ => None,
    };
    let total = scene.layers.size_of(&image.id);
    let explanation = Explanation {
        verdict: Some(report::image(&now, policy)),
        shared_bytes: shared(&scene, &image.id),
        removable: matches!(last.verdict, GcDecision::Remove(_)),
        under_pressure: under_pressure(&now.verdict, &last.verdict),
        milliseconds_since_first_seen: since(now.first_seen),
        milliseconds_since_last_used: now.last_used.map(since),
        pulled_records,
        unrecorded_access,
        hidden: hidden.is_some_and(|hidden| hidden.hides(&image)),
    };
    Ok((explanation, total))
}

/// What becomes of it when room is needed, where that is not what becomes of it now.
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

/// What its layers take that other images have as well.
fn shared(scene: &GcSnapshot, id: &ImageId) -> Option<u64> {
    let mine = &scene.layers.layers_of(id)?.layers;
    let others = scene.images.iter().filter(|image| image.id != *id);
    let others: HashSet<u32> = others
        .filter_map(|image| scene.layers.layers_of(&image.id))
        .flat_map(|known| known.layers.clone())
        .collect();
    let all = scene.layers.all();
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
