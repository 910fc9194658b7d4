//! Caches the composition of images. It never changes, so each image costs one call during its life.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::stream::{self, StreamExt as _};
use larder::backend::BackendError;
use larder::gc::UnixMillis;
use larder::reference::{Digest, ImageId, LayerId};
use tokio::sync::Mutex;

use crate::api::{EngineInfo, GraphDriver, ImageInspect};
use crate::engine::EngineClient;
use crate::files::GraphDriverFiles;

/// Number of images inspected concurrently.
pub(crate) const CALLS_AT_ONCE: usize = 8;

/// One image.
#[derive(Debug)]
pub(crate) struct InspectedImage {
    /// IDs of its layers from the bottom up, each with all layers below it: chain IDs. The same layer on another stack
    /// is stored twice.
    pub(crate) chains: Vec<LayerId>,
    /// The directory of each layer, from the bottom up, if the graph driver has one for each.
    pub(crate) dirs: Option<Vec<PathBuf>>,
    /// Latest possible time of its addition: when the engine wrote its config, if that can be read, and its last tag
    /// operation. Pulls and loads are not tag operations.
    pub(crate) added_at: Option<UnixMillis>,
}

/// The cached images of one engine.
pub(crate) struct InspectCache {
    engine: Arc<EngineClient>,
    known: Mutex<HashMap<ImageId, Arc<InspectedImage>>>,
}

impl InspectCache {
    pub(crate) fn new(engine: Arc<EngineClient>) -> InspectCache {
        InspectCache { engine, known: Mutex::default() }
    }

    pub(crate) fn engine(&self) -> &Arc<EngineClient> {
        &self.engine
    }

    /// The composition of these images; skips images that are removed or that the engine fails on.
    pub(crate) async fn of(
        &self,
        ids: &[&ImageId],
    ) -> Result<HashMap<ImageId, Arc<InspectedImage>>, BackendError> {
        let mut known = self.known.lock().await;
        let new: Vec<&ImageId> = ids.iter().copied().filter(|id| !known.contains_key(*id)).collect();
        let calls = new
            .into_iter()
            .map(|id| async move { (id, self.engine.inspect::<ImageInspect>(id.as_str()).await) });
        let mut answers = stream::iter(calls.collect::<Vec<_>>()).buffer_unordered(CALLS_AT_ONCE);
        let mut inspected = Vec::new();
        while let Some((id, answer)) = answers.next().await {
            match answer {
                Ok(Some(found)) => inspected.push((id.clone(), found)),
                Ok(None) => {}
                Err(error @ BackendError::Unreachable { .. }) => return Err(error),
                // One damaged image must not prevent the GC of the others.
                Err(error) => tracing::debug!("cannot list the layers of {id}: {error}"),
            }
        }
        let written = self.written(inspected.iter().map(|(id, _)| id.clone()).collect()).await?;
        for (id, found) in inspected {
            let facts = InspectedImage::of(&found, written.get(&id).copied());
            known.insert(id, Arc::new(facts));
        }
        Ok(ids.iter().filter_map(|id| Some(((*id).clone(), known.get(*id)?.clone()))).collect())
    }

    /// When the engine wrote the configs of these images, if that can be read.
    async fn written(&self, ids: Vec<ImageId>) -> Result<HashMap<ImageId, UnixMillis>, BackendError> {
        if ids.is_empty() {
            return Ok(HashMap::new());
        }
        let info = match self.engine.get::<EngineInfo>("/info", &[]).await {
            Ok(info) => info.unwrap_or_default(),
            Err(error @ BackendError::Unreachable { .. }) => return Err(error),
            Err(_) => EngineInfo::default(),
        };
        let images: Vec<&str> = ids.iter().map(ImageId::as_str).collect();
        let Some(files) = GraphDriverFiles::of(self.engine.host(), &info, &images).await else {
            return Ok(HashMap::new());
        };
        let dates = move || {
            ids.into_iter()
                .filter_map(|id| Some((files.added_at(id.as_str())?, id)))
                .map(|(at, id)| (id, at))
                .collect()
        };
        Ok(tokio::task::spawn_blocking(dates).await.unwrap_or_default())
    }

    /// Forgets an image: the same ID may be added again at a later time.
    pub(crate) async fn forget(&self, id: &str) {
        self.known.lock().await.remove(id);
    }

    /// Forgets all images but these.
    pub(crate) async fn retain(&self, present: &HashMap<ImageId, Arc<InspectedImage>>) {
        self.known.lock().await.retain(|id, _| present.contains_key(id));
    }
}

impl InspectedImage {
    fn of(found: &ImageInspect, written: Option<UnixMillis>) -> InspectedImage {
        let chains = chain_ids(&found.root_fs.layers);
        let dirs = dirs(&found.graph_driver).filter(|dirs| dirs.len() == chains.len());
        let named = found.metadata.last_tag_time.parse::<jiff::Timestamp>().ok();
        let named = named.map(|time| UnixMillis(time.as_millisecond())).filter(|stamp| stamp.0 > 0);
        let added_at = written.into_iter().chain(named).min();
        InspectedImage { chains, dirs, added_at }
    }
}

/// Chain ids of a stack, as OCI defines them.
fn chain_ids(diff_ids: &[LayerId]) -> Vec<LayerId> {
    let mut chains: Vec<LayerId> = Vec::with_capacity(diff_ids.len());
    for diff_id in diff_ids {
        chains.push(match chains.last() {
            None => diff_id.clone(),
            Some(below) => Digest::sha256(format!("{below} {diff_id}")).into(),
        });
    }
    chains
}

/// Directories of layers from the bottom up, as overlay drivers report them: the top in `UpperDir`, others in
/// `LowerDir`.
pub(crate) fn dirs(driver: &GraphDriver) -> Option<Vec<PathBuf>> {
    let of = |text: &str| Some(Path::new(text).parent()?.to_owned());
    let lower = driver.data.get("LowerDir").map_or("", String::as_str);
    let lower = lower.split(':').filter(|path| !path.is_empty()).rev().map(of);
    lower.chain([of(driver.data.get("UpperDir")?)]).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn layers_are_identified_by_all_layers_below_them() {
        let stack = [
            "sha256:8fee94c80dd6de4d75d04bcfa2f346dd414c5a770fc49467962be87e4291fb8d",
            "sha256:64121e9d845f7e14300aebdee70df7c01c4d7ad3e470539cae7535e144f8a15e",
        ]
        .map(LayerId::from);
        let chains = chain_ids(&stack);
        assert_eq!(chains[0], stack[0]);
        // As the engine itself names the directory of this stack.
        assert_eq!(chains[1], "sha256:59141b3197107f408ea54c477f42c1078d895ca75768b074183619afd988fc70");
    }

    #[test]
    fn the_directories_of_an_overlay_are_those_of_its_layers_from_the_bottom_up() {
        let inspect = |data| {
            let found = json!({"Id": "a", "RootFS": {"Layers": ["l1", "l2", "l3"]}, "GraphDriver": {"Data": data},
                "Metadata": {"LastTagTime": "2026-11-21T19:36:34.770517089Z"}});
            InspectedImage::of(&serde_json::from_value(found).unwrap(), None)
        };
        let facts = inspect(json!({"LowerDir": "/d/b/diff:/d/a/diff", "UpperDir": "/d/c/diff"}));
        assert_eq!(facts.dirs, Some(["/d/a", "/d/b", "/d/c"].map(PathBuf::from).to_vec()));
        assert_eq!(facts.added_at, Some(UnixMillis(1_795_289_794_770)));
        assert_eq!(inspect(json!({"UpperDir": "/d/c/diff"})).dirs, None, "not as many as layers");
        assert_eq!(inspect(json!(null)).dirs, None, "another driver, or containerd's store");
    }

    #[test]
    fn the_year_one_is_never() {
        let found = json!({"Id": "a", "Metadata": {"LastTagTime": "0001-01-01T00:00:00Z"}});
        let found: ImageInspect = serde_json::from_value(found).unwrap();
        assert_eq!(InspectedImage::of(&found, None).added_at, None);
        assert_eq!(InspectedImage::of(&found, Some(UnixMillis(7))).added_at, Some(UnixMillis(7)));
    }
}
