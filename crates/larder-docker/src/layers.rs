//! The layers of images and their disk usage.
//!
//! A graph driver has a directory for each layer, which the engine reports. Directories that larder can read are
//! measured once during the life of a layer. An engine with containerd's image store has archives and snapshots there,
//! and containerd reports their sizes. Otherwise (another user, another machine) sizes come from the image's history,
//! or else from the size of the image; both are estimates, and marked as such.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use larder::backend::{BackendError, Image};
use larder::gc::{DiskSpace, LayerSource, LayerUsageIndex, MeasuredLayer};
use larder::reference::{ImageId, LayerId};
use larder_containerd::ContainerdLayers;
use parking_lot::{Mutex as Lock, MutexGuard};
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::api::{ContainerInspect, ContainerSummary, EngineInfo, HistoryEntry};
use crate::files::GraphDriverFiles;
use crate::inspect_cache::{InspectCache, InspectedImage, dirs};
use crate::{history, locality, names};

/// Reads layers from the engine and its files.
pub struct EngineLayers {
    inspections: Arc<InspectCache>,
    /// One measurement runs at a time, to its end, even if its caller gave up.
    measure_lock: MeasureLock,
    known: LayerSizeCache,
    /// The containerd that was asked last.
    containerd: Lock<Option<Arc<EngineContainerd>>>,
}

/// The containerd that has the images of an engine.
pub(crate) struct EngineContainerd {
    address: String,
    namespace: String,
    /// The snapshotter of images and containers.
    snapshotter: String,
    layers: ContainerdLayers,
}

type MeasureLock = Arc<Mutex<()>>;

/// By chain ID. The content of a layer does not change. Measured layers stay cached if the caller gave up.
type LayerSizeCache = Arc<Lock<HashMap<LayerId, CachedLayerSize>>>;

/// Disk usage of a layer.
#[derive(Debug, Clone, Copy)]
struct CachedLayerSize {
    amount: DiskSpace,
    /// The part of it in the layer's directory; the rest is the engine's metadata.
    dir: DiskSpace,
    estimated: bool,
}

/// Disk usage of images.
pub(crate) struct LayerMeasurement {
    pub(crate) layers: LayerUsageIndex,
    /// Directories of all layers of images, and archives of them, each once.
    pub(crate) dirs: DiskSpace,
    /// Whether any of it is an estimate.
    pub(crate) estimated: bool,
}

impl EngineLayers {
    pub(crate) fn new(inspections: Arc<InspectCache>) -> EngineLayers {
        EngineLayers {
            inspections,
            measure_lock: MeasureLock::default(),
            known: Arc::default(),
            containerd: Lock::default(),
        }
    }

    /// Disk usage of these images, and the layers that containers reference.
    pub(crate) async fn look(&self, images: &[Image]) -> Result<LayerMeasurement, BackendError> {
        let engine = self.inspections.engine();
        let info: EngineInfo = engine.get_required("/info", &[]).await?;
        let listed: Vec<&ImageId> = images.iter().map(|image| &image.id).collect();
        let shown: Vec<&str> = listed.iter().map(|id| id.as_str()).collect();
        if let Some(containerd) = self.containerd(&info, &shown).await {
            match containerd.layers.layers(images).await {
                Ok(layers) => return Ok(LayerMeasurement::of_images(layers, images)),
                Err(error) => tracing::debug!("layer sizes are estimated: {error}"),
            }
        }
        let containers: Vec<ContainerSummary> =
            engine.get_required("/containers/json", &[("all", "1")]).await?;
        let hidden = containers.iter().filter(|container| !listed.contains(&&container.image_id));
        let hidden: Vec<&ContainerSummary> =
            hidden.filter(|container| !container.image_id.is_empty()).collect();
        let ids: Vec<&ImageId> =
            listed.iter().copied().chain(hidden.iter().map(|container| &container.image_id)).collect();
        let facts = self.inspections.of(&ids).await?;
        self.inspections.retain(&facts).await;
        let files = GraphDriverFiles::of(engine.host(), &info, &shown).await;
        let amounts = self.amounts(images, &facts, files.as_ref(), info.is_containerd_store()).await?;
        let mut own = own(files, &listed).await;
        let mut layers = LayerUsageIndex::unknown();
        let (mut dirs, mut estimated) = (DiskSpace::ZERO, false);
        for (chain, known) in &amounts {
            dirs += known.dir;
            estimated |= known.estimated;
            let (id, amount) = (chain.clone(), known.amount);
            layers.add(MeasuredLayer { id, amount, estimated: known.estimated, referenced_by: None });
        }
        for container in hidden {
            for layer in self.held(container, &facts, &amounts).await? {
                layers.add(layer);
            }
        }
        for image in images {
            let Some(facts) = facts.get(&image.id) else { continue };
            let own = own.remove(&image.id).unwrap_or_default();
            layers.add_image(&image.id, &facts.chains, own);
        }
        Ok(LayerMeasurement { layers, dirs, estimated })
    }

    /// The containerd that has the images of a local engine with these images. It may refuse calls.
    pub(crate) async fn containerd(
        &self,
        info: &EngineInfo,
        images: &[&str],
    ) -> Option<Arc<EngineContainerd>> {
        let engine = self.inspections.engine();
        let address = Path::new(&info.containerd.address);
        let is_here = info.is_containerd_store() && address.is_absolute();
        if !is_here || !locality::is_local(engine.host(), info, images).await {
            return None;
        }
        let mut last = self.containerd.lock();
        let known = last.take().filter(|known| known.is_of(info));
        let containerd = known.unwrap_or_else(|| {
            let namespace = info.containerd.namespace();
            let (connect_timeout, timeout) = (engine.connect_limit(), engine.limit());
            Arc::new(EngineContainerd {
                address: info.containerd.address.clone(),
                namespace: namespace.to_owned(),
                snapshotter: info.driver.clone(),
                layers: ContainerdLayers::of_docker(address, namespace, connect_timeout, timeout),
            })
        });
        *last = Some(containerd.clone());
        Some(containerd)
    }

    /// The layers referenced by a container of an unlisted image.
    async fn held(
        &self,
        container: &ContainerSummary,
        facts: &HashMap<ImageId, Arc<InspectedImage>>,
        amounts: &HashMap<LayerId, CachedLayerSize>,
    ) -> Result<Vec<MeasuredLayer>, BackendError> {
        let chains = match facts.get(&container.image_id) {
            Some(facts) => facts.chains.clone(),
            None => self.chains_below(container, facts).await?,
        };
        let held_by = Some(format!("container {}", name_of(container)));
        let layer = |chain: LayerId| {
            let known = amounts.get(&chain);
            let amount = known.map_or(DiskSpace::ZERO, |known| known.amount);
            let estimated = known.is_none_or(|known| known.estimated);
            MeasuredLayer { id: chain, amount, estimated, referenced_by: held_by.clone() }
        };
        Ok(chains.into_iter().map(layer).collect())
    }

    /// The layers below a container whose image was removed (`docker rmi --force`) that also belong to these images.
    async fn chains_below(
        &self,
        container: &ContainerSummary,
        facts: &HashMap<ImageId, Arc<InspectedImage>>,
    ) -> Result<Vec<LayerId>, BackendError> {
        let path = format!("/containers/{}/json", container.id);
        let found: Option<ContainerInspect> = match self.inspections.engine().get(&path, &[]).await {
            Err(error) if !matches!(error, BackendError::Unreachable { .. }) => {
                tracing::debug!("cannot list the parent layers of {}: {error}", name_of(container));
                None
            }
            found => found?,
        };
        let dirs = found.and_then(|found| dirs(&found.graph_driver)).unwrap_or_default();
        let below: HashSet<&PathBuf> = dirs.iter().collect();
        let all = facts.values().flat_map(|facts| facts.chains.iter().zip(facts.dirs.iter().flatten()));
        let held: BTreeSet<&LayerId> =
            all.filter(|(_, dir)| below.contains(dir)).map(|(chain, _)| chain).collect();
        Ok(held.into_iter().cloned().collect())
    }

    /// Disk usage of each layer of these images, with its archive if the engine has them.
    async fn amounts(
        &self,
        images: &[Image],
        facts: &HashMap<ImageId, Arc<InspectedImage>>,
        files: Option<&GraphDriverFiles>,
        has_archives: bool,
    ) -> Result<HashMap<LayerId, CachedLayerSize>, BackendError> {
        let mut guard = Arc::clone(&self.measure_lock).lock_owned().await;
        let mut known = lock(&self.known).clone();
        let new: Vec<(LayerId, PathBuf)> = facts.values().flat_map(|facts| new_dirs(facts, &known)).collect();
        if let Some(files) = files.filter(|_| !new.is_empty()) {
            let (files, layers) = (files.clone(), self.known.clone());
            let measure = move || measure_all(new, &layers, |chain, dir| files.measure(chain.as_str(), dir));
            guard = match run_locked(guard, measure).await {
                Some(guard) => guard,
                None => Arc::clone(&self.measure_lock).lock_owned().await,
            };
            known.clone_from(&lock(&self.known));
        }
        let mut order: Vec<(&Image, &Arc<InspectedImage>)> =
            images.iter().filter_map(|image| Some((image, facts.get(&image.id)?))).collect();
        // Sizes derived from small stacks are known before the larger stacks on top of them.
        order.sort_by_key(|(image, facts)| (facts.chains.len(), &image.id));
        for (image, facts) in &order {
            if facts.chains.iter().any(|chain| !known.contains_key(chain)) {
                let history = self.history(image.id.as_str()).await?;
                let sizes = history::sizes(&history, facts.chains.len());
                let with_archives =
                    |sizes| if has_archives { history::scaled(sizes, image.size) } else { sizes };
                guess(image.size, facts, sizes.map(with_archives), &mut known);
            }
        }
        let present: HashSet<&LayerId> = facts.values().flat_map(|facts| &facts.chains).collect();
        known.retain(|chain, _| present.contains(chain));
        lock(&self.known).clone_from(&known);
        drop(guard);
        Ok(known)
    }

    async fn history(&self, image: &str) -> Result<Vec<HistoryEntry>, BackendError> {
        let path = format!("/images/{}/history", names::in_path(image)?);
        match self.inspections.engine().get(&path, &[]).await {
            Ok(history) => Ok(history.unwrap_or_default()),
            Err(error @ BackendError::Unreachable { .. }) => Err(error),
            Err(error) => {
                tracing::debug!("cannot read the history of {image}: {error}");
                Ok(Vec::new())
            }
        }
    }
}

impl EngineContainerd {
    /// Whether an engine that reports this uses it, in the same way.
    fn is_of(&self, info: &EngineInfo) -> bool {
        (self.address.as_str(), self.namespace.as_str(), &self.snapshotter)
            == (&info.containerd.address, info.containerd.namespace(), &info.driver)
    }

    /// The directory of archives and layers; `None` if containerd does not report it.
    pub(crate) async fn root(&self) -> Option<PathBuf> {
        let root = self.layers.root(&self.snapshotter).await;
        let unknown = |error: &BackendError| tracing::debug!("the directory of images is assumed: {error}");
        root.inspect_err(unknown).ok().flatten()
    }

    /// Disk usage of the writable layer of a container, and the init layer below it; `None` if containerd does not
    /// report it.
    pub(crate) async fn written(&self, container: &str) -> Option<DiskSpace> {
        let of = async |snapshot: &str| self.layers.written(&self.snapshotter, snapshot).await.ok();
        Some(of(container).await? + of(&format!("{container}-init")).await?)
    }
}

impl LayerMeasurement {
    /// The sum of all that these images have.
    fn of_images(layers: LayerUsageIndex, images: &[Image]) -> LayerMeasurement {
        let known: Vec<_> = images.iter().filter_map(|image| layers.layers_of(&image.id)).collect();
        let used: BTreeSet<u32> = known.iter().flat_map(|image| image.layers.iter().copied()).collect();
        let used = || used.iter().map(|&at| &layers.all()[at as usize]);
        let own: DiskSpace = known.iter().map(|image| image.own).sum();
        let dirs = used().map(|layer| layer.amount).sum::<DiskSpace>() + own;
        let estimated = used().any(|layer| layer.estimated) || known.len() < images.len();
        LayerMeasurement { layers, dirs, estimated }
    }
}

#[async_trait]
impl LayerSource for EngineLayers {
    async fn layers(&self, images: &[Image]) -> Result<LayerUsageIndex, BackendError> {
        Ok(self.look(images).await?.layers)
    }
}

/// Disk usage of each of these images besides its layers, if that can be read.
async fn own(files: Option<GraphDriverFiles>, images: &[&ImageId]) -> HashMap<ImageId, DiskSpace> {
    let Some(files) = files else { return HashMap::new() };
    let images: Vec<ImageId> = images.iter().map(|&id| id.clone()).collect();
    let measure = move || images.into_iter().map(|id| (id.clone(), files.layer_dir(id.as_str()))).collect();
    tokio::task::spawn_blocking(measure).await.unwrap_or_default()
}

fn new_dirs(facts: &InspectedImage, known: &HashMap<LayerId, CachedLayerSize>) -> Vec<(LayerId, PathBuf)> {
    let dirs = facts.dirs.iter().flatten();
    let all = facts.chains.iter().zip(dirs);
    all.filter(|(chain, _)| !known.contains_key(*chain))
        .map(|(chain, dir)| (chain.clone(), dir.clone()))
        .collect()
}

/// Runs blocking work, which cannot be canceled. The work holds the lock until it ends; the lock is lost if the work
/// fails.
async fn run_locked(
    guard: OwnedMutexGuard<()>,
    work: impl FnOnce() + Send + 'static,
) -> Option<OwnedMutexGuard<()>> {
    let done = tokio::task::spawn_blocking(move || {
        work();
        guard
    });
    done.await.inspect_err(|error| tracing::warn!("cannot measure layers: {error}")).ok()
}

/// Measures directories of layers, each once; those that cannot be read stay unknown.
fn measure_all(
    dirs: Vec<(LayerId, PathBuf)>,
    known: &LayerSizeCache,
    measure: impl Fn(&LayerId, &Path) -> io::Result<(DiskSpace, DiskSpace)>,
) {
    for (chain, dir) in dirs {
        if lock(known).contains_key(&chain) {
            continue;
        }
        match measure(&chain, &dir) {
            Ok((amount, dir)) => {
                lock(known).insert(chain, CachedLayerSize { amount, dir, estimated: false });
            }
            Err(error) => {
                tracing::debug!("layer sizes are estimated: {error}");
                // They all are in one place: an error for one applies to all.
                if error.kind() == io::ErrorKind::PermissionDenied {
                    return;
                }
            }
        }
    }
}

fn lock(known: &LayerSizeCache) -> MutexGuard<'_, HashMap<LayerId, CachedLayerSize>> {
    known.lock()
}

/// Estimates the layers of an image: from its history, else as even parts of its size.
fn guess(
    size: u64,
    facts: &InspectedImage,
    history: Option<Vec<u64>>,
    known: &mut HashMap<LayerId, CachedLayerSize>,
) {
    let estimate = |bytes| {
        let amount = DiskSpace::estimate(bytes);
        CachedLayerSize { amount, dir: amount, estimated: true }
    };
    if let Some(sizes) = history {
        for (chain, bytes) in facts.chains.iter().zip(sizes) {
            known.entry(chain.clone()).or_insert_with(|| estimate(bytes));
        }
        return;
    }
    let below: u64 =
        facts.chains.iter().filter_map(|chain| known.get(chain)).map(|known| known.amount.bytes).sum();
    let new: Vec<&LayerId> = facts.chains.iter().filter(|chain| !known.contains_key(*chain)).collect();
    let each = size.saturating_sub(below) / (new.len() as u64).max(1);
    for chain in new {
        known.insert(chain.clone(), estimate(each));
    }
}

fn name_of(container: &ContainerSummary) -> &str {
    container.names.first().map_or(container.id.as_str(), |name| name.trim_start_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(chains: &[&str]) -> InspectedImage {
        let chains = chains.iter().map(|&chain| chain.into()).collect();
        InspectedImage { chains, dirs: None, added_at: None }
    }

    fn bytes(known: &HashMap<LayerId, CachedLayerSize>, chain: &str) -> u64 {
        assert!(known[chain].estimated);
        known[chain].amount.bytes
    }

    #[tokio::test]
    async fn an_abandoned_measurement_keeps_its_place_in_the_queue() {
        let measure_lock = MeasureLock::default();
        let (go_on, held) = std::sync::mpsc::channel::<()>();
        let (started, begun) = tokio::sync::oneshot::channel();
        let work = run_locked(Arc::clone(&measure_lock).lock_owned().await, move || {
            started.send(()).unwrap();
            held.recv().unwrap();
        });
        tokio::select! {
            _ = work => panic!("it goes on"),
            begun = begun => begun.unwrap(),
        }
        assert!(measure_lock.try_lock().is_err(), "it still measures");
        go_on.send(()).unwrap();
        let _next = measure_lock.lock().await;
    }

    #[test]
    fn without_files_sizes_are_of_the_history_or_else_of_the_image() {
        let mut known = HashMap::new();
        guess(100, &facts(&["base"]), Some(vec![100]), &mut known);
        guess(160, &facts(&["base", "a", "b"]), None, &mut known);
        assert_eq!(["base", "a", "b"].map(|chain| bytes(&known, chain)), [100, 30, 30]);
        guess(999, &facts(&["base", "c"]), Some(vec![1, 7]), &mut known);
        assert_eq!(bytes(&known, "base"), 100, "what is known stays");
        assert_eq!(bytes(&known, "c"), 7);
    }
}
