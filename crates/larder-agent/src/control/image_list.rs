//! Lists images, on request with their age, use and layers, and the labels that the request names.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use larder::backend::{Image, ImageDetails, ImageSpec};
use larder::gc::{GcError, GcGoal, GcImage, GcPolicy, GcSnapshot, ImageLabels, MeasuredLayer, plan};
use larder::reference::{Digest, ImageId};
use larder::retention::RetentionClass;
use larder_api::convert;
use larder_api::v1 as api;
use larder_store::store::Store;
use serde::Deserialize;
use tokio::task::spawn_blocking;
use tokio::time;

use super::gc::failure;
use super::{report, unanswered};
use crate::error::Error;
use crate::node::Storage;
use crate::node::collection::Collection;
use crate::node::pulls::Pulls;

/// Number of lists in memory, unless a caller does not read its list. One of 10,000 images takes tens of megabytes.
pub(super) const AT_ONCE: usize = 1;
/// How long a list waits until the others are sent.
pub(super) const SLOT_WITHIN: Duration = Duration::from_secs(5);
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

/// Details of an image, taken from a snapshot.
#[derive(Clone, Default)]
struct DescribedImage {
    details: api::ImageListDetails,
    /// As df and the removal of an image count it: with config and manifests in whole blocks.
    size_bytes: Option<u64>,
}

/// All images. Details that cannot be determined are left out, with a warning.
pub(super) async fn list(
    storage: &Storage,
    collection: &Collection,
    pulls: &Pulls,
    request: &api::ImagesRequest,
) -> Result<api::ImagesResponse, Error> {
    let listed = |image: Image| api::Image { hidden: pulls.hides(&image), ..convert::image(image) };
    let mut answer = api::ImagesResponse::default();
    if !request.details {
        answer.images = storage.backend().list().await?.into_iter().map(listed).collect();
        return Ok(answer);
    }
    let collector = collection.unchecked_collector();
    let policy = collector.policy();
    // Before the list is read: a snapshot and a list have all names each.
    let described = match time::timeout(DETAILS_WITHIN, collector.snapshot(&policy)).await {
        Ok(Ok(snapshot)) if snapshot.images.is_empty() => return Ok(answer),
        Ok(Ok(snapshot)) => Ok(describe(snapshot, &policy)),
        Ok(Err(GcError::List(error))) => return Err(error.into()),
        Ok(Err(error)) => Err(failure(error).message().to_owned()),
        Err(_) => Err(timeout()),
    };
    let images = storage.backend().list().await?;
    let described = described.map(|(images, layers)| {
        answer.layers = layers;
        images
    });
    let described = described.unwrap_or_else(|why| {
        answer.warnings.push(format!("use and layers are unknown: {why}"));
        HashMap::new()
    });
    let damaged: HashSet<ImageId> =
        storage.damaged_images().await.into_iter().map(|image| image.id.into()).collect();
    let keys: BTreeSet<String> = request.label_keys.iter().cloned().collect();
    let labels = time::timeout(DETAILS_WITHIN, collector.labels(&images, &keys)).await;
    let labels = labels.map_err(|_| timeout()).and_then(|read| read.map_err(|error| error.to_string()));
    let mut labels = labels.unwrap_or_else(|why| {
        answer.warnings.push(format!("labels are unknown: {why}"));
        ImageLabels::new()
    });
    let detailed = |image: Image| {
        let labels = labels.remove(&image.id).unwrap_or_default().into_iter().collect();
        let DescribedImage { details, size_bytes } = described.get(&image.id).cloned().unwrap_or_default();
        let damaged = damaged.contains(&image.id);
        let mut image = listed(image);
        image.details = Some(api::ImageListDetails { labels, damaged, ..details });
        if storage.store().is_some() {
            image.size_bytes = size_bytes.unwrap_or(image.size_bytes);
        }
        image
    };
    answer.images = images.into_iter().map(detailed).collect();
    if request.without_configs { Ok(answer) } else { add_configs(answer, storage).await }
}

fn timeout() -> String {
    format!("timed out after {}s", DETAILS_WITHIN.as_secs())
}

/// Adds what only the configs of the images have, one config after another: each may have megabytes. larder's own store
/// has it in its records.
async fn add_configs(
    mut answer: api::ImagesResponse,
    storage: &Storage,
) -> Result<api::ImagesResponse, Error> {
    if let Some(store) = storage.store() {
        let store = store.store().clone();
        let add = move || {
            for image in &mut answer.images {
                if let Some(config) = recorded(&store, &image.id.as_str().into()) {
                    add_config(image, config, &answer.layers);
                }
            }
            answer
        };
        return spawn_blocking(add).await.map_err(|error| unanswered("the store", &error));
    }
    let backend = &**storage.backend();
    let ids: Vec<ImageId> = answer.images.iter().map(|image| image.id.as_str().into()).collect();
    let calls = ids.iter().enumerate().map(|(at, id)| async move {
        let details = backend.inspect(&ImageSpec::named(id)).await.ok().flatten()?;
        Some((at, config_of(&details)?))
    });
    let configs = stream::iter(calls.collect::<Vec<_>>()).buffer_unordered(CALLS_AT_ONCE);
    let mut configs = pin!(configs.take_until(time::sleep(DETAILS_WITHIN)));
    let mut answered = 0;
    while let Some(config) = configs.next().await {
        answered += 1;
        if let Some((at, config)) = config {
            add_config(&mut answer.images[at], config, &answer.layers);
        }
    }
    if answered < answer.images.len() {
        answer.warnings.push(format!("the creation time of some images is unknown: {}", timeout()));
    }
    Ok(answer)
}

fn add_config(image: &mut api::Image, config: ListedConfig, layers: &[api::ImageLayer]) {
    let details = image.details.get_or_insert_default();
    details.created = config.created;
    order_layers(&mut details.layers, layers, &config.rootfs.diff_ids);
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

/// Reduces a snapshot to the details of its images and its layers.
fn describe(
    snapshot: GcSnapshot,
    policy: &GcPolicy,
) -> (HashMap<ImageId, DescribedImage>, Vec<api::ImageLayer>) {
    let mut images: HashMap<ImageId, DescribedImage> = HashMap::new();
    for image in &snapshot.images {
        let described = images.entry(image.id.clone()).or_default();
        add_use(&mut described.details, image);
        described.size_bytes = snapshot.layers.size_of(&image.id).map(|size| size.bytes);
        if let Some(known) = snapshot.layers.layers_of(&image.id) {
            described.details.layers.clone_from(&known.layers);
        }
    }
    let mut decisions = plan(&snapshot, policy, GcGoal::AllUnused).decisions;
    // An image has one decision for each of its runtime handlers: the strongest reason counts, and is set last.
    decisions.sort_by_key(|decision| decision.decision.class());
    for decision in decisions.into_iter().rev() {
        let details = &mut images.entry(decision.id).or_default().details;
        details.unique_bytes = Some(decision.alone.bytes);
        let (reason, why) = report::reason(&decision.decision);
        details.set_reason(reason);
        details.why = why;
    }
    (images, snapshot.layers.into_all().into_iter().map(of_layer).collect())
}

fn of_layer(layer: MeasuredLayer) -> api::ImageLayer {
    api::ImageLayer { id: layer.id.into(), size_bytes: layer.amount.bytes, estimated: layer.estimated }
}

fn add_use(details: &mut api::ImageListDetails, image: &GcImage) {
    details.last_used = image.last_used.and_then(report::time);
    details.in_use |= image.retained_by.iter().any(|reason| reason.class() == RetentionClass::InUse);
}

/// Puts the layers of an image in the order of its config, where their identifiers are diff IDs or chain IDs, and
/// others behind them, such as archives.
fn order_layers(indices: &mut [u32], layers: &[api::ImageLayer], diff_ids: &[String]) {
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
    indices.sort_by_key(|&index| {
        let at = layers.get(index as usize).and_then(|layer| position.get(layer.id.as_str()));
        (at.is_none(), at.copied())
    });
}

#[cfg(test)]
mod tests {
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

    fn ordered(layers: [&str; 2], diff_ids: &[String]) -> [u32; 2] {
        let layers = layers.map(|id| api::ImageLayer { id: id.to_owned(), ..Default::default() });
        let mut indices = [0, 1];
        order_layers(&mut indices, &layers, diff_ids);
        indices
    }

    #[test]
    fn layers_are_in_the_order_of_the_config() {
        let diff_ids = ["sha256:z".to_owned(), "sha256:a".to_owned()];
        let chain = Digest::sha256("sha256:z sha256:a");
        for top in ["sha256:a", chain.as_str()] {
            assert_eq!(ordered([top, "sha256:z"], &diff_ids), [1, 0], "{top}");
        }
        assert_eq!(ordered(["x", "y"], &diff_ids), [0, 1]);
        assert_eq!(ordered(["archive sha256:a", "sha256:a"], &diff_ids), [1, 0]);
        assert_eq!(ordered(["a", "z"], &diff_ids), [1, 0], "as the store names them");
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
