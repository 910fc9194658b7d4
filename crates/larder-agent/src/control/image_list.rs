//! Lists images, on request with their age, use and layers, and the labels that the request names.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use larder::backend::{Image, ImageDetails, ImageSpec};
use larder::gc::{GcGoal, GcImage, GcPolicy, GcSnapshot, ImageDecision, ImageLabels, MeasuredLayer, plan};
use larder::reference::{Digest, ImageId};
use larder::retention::RetentionClass;
use larder_api::convert;
use larder_api::v1 as api;
use larder_store::store::Store;
use serde::Deserialize;
use tokio::task::spawn_blocking;
use tokio::time;

use super::gc::failure;
use super::report;
use crate::error::Error;
use crate::node::Storage;
use crate::node::collection::Collection;
use crate::node::pulls::Pulls;

/// Number of concurrent calls. Each may have a config of some megabytes in memory.
const CALLS_AT_ONCE: usize = 4;
/// How long a list waits for its details, such as from a container service that hangs.
const DETAILS_WITHIN: Duration = Duration::from_secs(5);

/// The parts of an image's config that a list shows.
#[derive(Debug, Default, Deserialize)]
struct ListedConfig {
    created: Option<String>,
    #[serde(default)]
    rootfs: ListedRootFs,
}

#[derive(Debug, Default, Deserialize)]
struct ListedRootFs {
    #[serde(default)]
    diff_ids: Vec<String>,
}

/// The form in which containerd and CRI-O wrap a config.
#[derive(Deserialize)]
struct WrappedConfig {
    #[serde(rename = "imageSpec")]
    image_spec: ListedConfig,
}

/// All images. Details that cannot be determined are left out, with a warning.
pub(super) async fn list(
    storage: &Storage,
    collection: &Collection,
    pulls: &Pulls,
    request: &api::ImagesRequest,
) -> Result<api::ImagesResponse, Error> {
    let images = storage.backend().list().await.map_err(Error::from)?;
    let mut answer = api::ImagesResponse {
        images: images
            .iter()
            .map(|image| api::Image { hidden: pulls.hides(image), ..convert::image(image) })
            .collect(),
        ..api::ImagesResponse::default()
    };
    if !request.details || images.is_empty() {
        return Ok(answer);
    }
    let collector = collection.unchecked_collector();
    let policy = collector.policy();
    let configured = if request.without_configs { &[][..] } else { &images };
    let timeout = || format!("timed out after {}s", DETAILS_WITHIN.as_secs());
    let keys: BTreeSet<String> = request.label_keys.iter().cloned().collect();
    let ((configs, are_all), snapshot, labels) = tokio::join!(
        configs(configured, storage),
        time::timeout(DETAILS_WITHIN, collector.snapshot(&policy)),
        time::timeout(DETAILS_WITHIN, collector.labels(&images, &keys))
    );
    if !are_all {
        answer.warnings.push(format!("the creation time of some images is unknown: {}", timeout()));
    }
    let snapshot = snapshot.map_err(|_| timeout());
    let snapshot = snapshot.and_then(|read| read.map_err(|error| failure(error).message().to_owned()));
    if let Err(why) = &snapshot {
        answer.warnings.push(format!("use and layers are unknown: {why}"));
    }
    let labels = labels.map_err(|_| timeout()).and_then(|read| read.map_err(|error| error.to_string()));
    let mut labels = labels.unwrap_or_else(|why| {
        answer.warnings.push(format!("labels are unknown: {why}"));
        ImageLabels::new()
    });
    let snapshot = snapshot.ok();
    describe(&mut answer, snapshot.as_ref(), &configs, &policy);
    for image in &mut answer.images {
        if let (Some(details), Some(labels)) = (&mut image.details, labels.remove(&*image.id)) {
            details.labels = labels.into_iter().collect();
        }
    }
    if let Some(snapshot) = snapshot.filter(|_| storage.store().is_some()) {
        for image in &mut answer.images {
            // As df and the removal of an image count it: with config and manifests in whole blocks.
            image.size_bytes = snapshot.layers.size_of(&image.id).map_or(image.size_bytes, |size| size.bytes);
        }
    }
    Ok(answer)
}

/// The readable configs of these images, and whether the backend answered for all of them in time. larder's own store has in its
/// records what a list shows; a config may have megabytes.
async fn configs(images: &[Image], storage: &Storage) -> (HashMap<ImageId, ListedConfig>, bool) {
    if let Some(store) = storage.store() {
        let (store, ids) = (store.store().clone(), images.iter().map(|image| image.id.clone()));
        let ids: Vec<ImageId> = ids.collect();
        let read =
            move || ids.into_iter().filter_map(|id| Some((id.clone(), recorded(&store, &id)?))).collect();
        return (spawn_blocking(read).await.unwrap_or_default(), true);
    }
    let backend = &**storage.backend();
    let calls = images.iter().map(|image| async move {
        let details = backend.inspect(&ImageSpec::named(&image.id)).await.ok().flatten()?;
        Some((image.id.clone(), config_of(&details)?))
    });
    let answers = stream::iter(calls.collect::<Vec<_>>()).buffer_unordered(CALLS_AT_ONCE);
    let answers: Vec<_> = answers.take_until(time::sleep(DETAILS_WITHIN)).collect().await;
    let are_all = answers.len() == images.len();
    (answers.into_iter().flatten().collect(), are_all)
}

fn recorded(store: &Store, id: &ImageId) -> Option<ListedConfig> {
    let record = store.image(id).ok().flatten()?;
    let diff_ids = record.layers.iter().map(|layer| layer.diff_id.to_string()).collect();
    let created = Some(record.created).filter(|created| !created.is_empty());
    Some(ListedConfig { created, rootfs: ListedRootFs { diff_ids } })
}

fn config_of(details: &ImageDetails) -> Option<ListedConfig> {
    let wrapped = details.info.get("info").and_then(|text| serde_json::from_str::<WrappedConfig>(text).ok());
    let bare = || details.info.get("config").and_then(|text| serde_json::from_str(text).ok());
    wrapped.map(|wrapped| wrapped.image_spec).or_else(bare)
}

/// Adds the details of each image.
fn describe(
    answer: &mut api::ImagesResponse,
    snapshot: Option<&GcSnapshot>,
    configs: &HashMap<ImageId, ListedConfig>,
    policy: &GcPolicy,
) {
    let layers = snapshot.map_or(&[][..], |snapshot| snapshot.layers.all());
    answer.layers = layers.iter().map(of_layer).collect();
    let planned = snapshot.map(|snapshot| plan(snapshot, policy, GcGoal::AllUnused));
    let decisions = planned.iter().flat_map(|plan| &plan.decisions);
    // An image has one decision for each of its runtime handlers: the strongest reason counts.
    let mut strongest: HashMap<&str, &ImageDecision> = HashMap::new();
    for decision in decisions {
        let known = strongest.entry(decision.id.as_str()).or_insert(decision);
        if decision.decision.class() < known.decision.class() {
            *known = decision;
        }
    }
    let mut uses: HashMap<&str, Vec<&GcImage>> = HashMap::new();
    for image in snapshot.iter().flat_map(|snapshot| &snapshot.images) {
        uses.entry(image.id.as_str()).or_default().push(image);
    }
    for image in &mut answer.images {
        let config = configs.get(image.id.as_str());
        let mut details = api::ImageListDetails {
            created: config.and_then(|config| config.created.clone()),
            ..api::ImageListDetails::default()
        };
        if let Some(decision) = strongest.get(image.id.as_str()) {
            details.unique_bytes = Some(decision.alone.bytes);
            let (reason, why) = report::reason(&decision.decision);
            details.set_reason(reason);
            details.why = why;
        }
        for known in uses.get(image.id.as_str()).into_iter().flatten() {
            add_use(&mut details, known);
        }
        if let Some(known) = snapshot.and_then(|snapshot| snapshot.layers.layers_of(&image.id)) {
            let diff_ids = config.map_or(&[][..], |config| &config.rootfs.diff_ids);
            details.layers = ordered(&known.layers, layers, diff_ids);
        }
        image.details = Some(details);
    }
}

fn of_layer(layer: &MeasuredLayer) -> api::ImageLayer {
    api::ImageLayer { id: layer.id.to_string(), size_bytes: layer.amount.bytes, estimated: layer.estimated }
}

fn add_use(details: &mut api::ImageListDetails, image: &GcImage) {
    details.last_used = image.last_used.and_then(report::time);
    details.in_use |= image.retained_by.iter().any(|reason| reason.class() == RetentionClass::InUse);
}

/// The layers of an image in the order of its config, where their identifiers are diff IDs or chain IDs.
fn ordered(indices: &[u32], layers: &[MeasuredLayer], diff_ids: &[String]) -> Vec<u32> {
    let mut position: HashMap<String, usize> = HashMap::new();
    let mut chain: Option<String> = None;
    for (at, diff_id) in diff_ids.iter().enumerate() {
        let id = match chain {
            None => diff_id.clone(),
            Some(below) => Digest::sha256(format!("{below} {diff_id}")).as_str().to_owned(),
        };
        // larder's own store names layers without the algorithm.
        for name in [diff_id, &id] {
            let hex = name.split_once(':').map_or(name.as_str(), |(_, hex)| hex);
            position.entry(name.clone()).or_insert(at);
            position.entry(hex.to_owned()).or_insert(at);
        }
        chain = Some(id);
    }
    let mut indices = indices.to_vec();
    indices.sort_by_key(|&index| {
        layers.get(index as usize).and_then(|layer| position.get(layer.id.as_str())).copied()
    });
    indices
}

#[cfg(test)]
mod tests {
    use larder::gc::DiskSpace;
    use larder_api::v1::DecisionReason;
    use larder_testkit::fake_backend::{BackendCall, BackendOp, FakeBackend, image};

    use super::*;
    use crate::node::testing;

    #[tokio::test(start_paused = true)]
    async fn a_service_that_hangs_delays_the_list_by_seconds() {
        for (op, unknown) in
            [(BackendOp::InUse, "use and layers are"), (BackendOp::Inspect, "the creation time")]
        {
            let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
            backend.add_image("a:1", image("sha256:a", 1));
            backend.hang(op);
            let node = testing::node(&backend, dir.path(), None, |_| ());
            let request = api::ImagesRequest { details: true, ..Default::default() };
            let listed = time::timeout(
                DETAILS_WITHIN * 2,
                list(&node.storage, &node.collection, &node.pulls, &request),
            )
            .await
            .unwrap()
            .unwrap();
            assert_eq!(listed.images[0].id, "sha256:a");
            let [warning] = &listed.warnings[..] else { panic!("{:?}", listed.warnings) };
            assert!(warning.starts_with(unknown) && warning.ends_with(": timed out after 5s"), "{warning}");
        }
    }

    #[tokio::test]
    async fn a_list_without_configs_has_uses_and_reasons_and_inspects_nothing() {
        let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
        backend.add_image("a:1", image("sha256:a", 1));
        backend.add_image("b:1", Image { pinned: true, ..image("sha256:b", 2) });
        let node = testing::node(&backend, dir.path(), None, |_| ());
        let request = api::ImagesRequest { details: true, without_configs: true, ..Default::default() };
        let listed = list(&node.storage, &node.collection, &node.pulls, &request).await.unwrap();
        let details = |index: usize| listed.images[index].details.clone().unwrap();
        assert_eq!((details(0).reason(), &*details(0).why), (DecisionReason::Unused, "unused"));
        assert_eq!(
            (details(1).reason(), &*details(1).why),
            (DecisionReason::Pinned, "pinned by the runtime")
        );
        assert!(!details(0).in_use && listed.warnings.is_empty(), "{listed:?}");
        let inspected = |call: &BackendCall| matches!(call, BackendCall::Inspect { .. });
        assert!(!backend.calls().iter().any(inspected), "{:?}", backend.calls());
    }

    fn layer(id: &str) -> MeasuredLayer {
        MeasuredLayer { id: id.into(), amount: DiskSpace::ZERO, estimated: false, referenced_by: None }
    }

    #[test]
    fn layers_are_in_the_order_of_the_config() {
        let diff_ids = ["sha256:z".to_owned(), "sha256:a".to_owned()];
        let chain = Digest::sha256("sha256:z sha256:a");
        for top in ["sha256:a", chain.as_str()] {
            assert_eq!(ordered(&[0, 1], &[layer(top), layer("sha256:z")], &diff_ids), [1, 0], "{top}");
        }
        assert_eq!(ordered(&[0, 1], &[layer("x"), layer("y")], &diff_ids), [0, 1]);
        assert_eq!(ordered(&[0, 1], &[layer("a"), layer("z")], &diff_ids), [1, 0], "as the store names them");
    }

    #[test]
    fn configs_are_read_as_runtimes_wrap_them() {
        let config = r#"{"created":"2024-01-02T03:04:05Z","rootfs":{"diff_ids":["sha256:a"]}}"#;
        let wrapped = format!(r#"{{"imageSpec":{config}}}"#);
        for (key, text) in [("config", config), ("info", wrapped.as_str())] {
            let info = [(key.to_owned(), text.to_owned())].into();
            let found = config_of(&ImageDetails { info, ..ImageDetails::default() }).unwrap();
            assert_eq!(found.created.as_deref(), Some("2024-01-02T03:04:05Z"));
            assert_eq!(found.rootfs.diff_ids, ["sha256:a"]);
        }
    }
}
