//! Disk usage of an engine by kind, and the engine's own figures: `docker system df` counts differently.

use std::path::{Path, PathBuf};

use larder::backend::{BackendError, Image};
use larder::gc::DiskSpace;

use crate::api::{ContainerInspect, ContainerSummary, EngineInfo, ImageSummary, SystemDf, count};
use crate::dir_size;
use crate::files::GraphDriverFiles;
use crate::inspect_cache::InspectCache;
use crate::layers::EngineLayers;

/// Disk usage by kind. All but [`engine`](EngineUsage::engine) is on disk, as `du` counts, unless it is an estimate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineUsage {
    /// The directory of layers, with containerd's store also of their archives; `None` if larder cannot read it.
    pub layer_store: Option<PathBuf>,
    /// Its total.
    pub on_disk: Option<DiskSpace>,
    /// Layers of images, each once.
    pub images: LayerStoreShare,
    /// Writable layers of containers, running or not.
    pub containers: LayerStoreShare,
    /// The figures of `docker system df`, or why they are unavailable.
    pub engine: Result<EngineCounts, BackendError>,
}

/// One part of the layer store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerStoreShare {
    /// Number of layers.
    pub count: usize,
    /// Their disk usage.
    pub amount: DiskSpace,
    /// Whether that is an estimate.
    pub estimated: bool,
}

/// The engine's own sums, in bytes of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineCounts {
    /// All layers, each once: `SIZE` of images.
    pub layers_bytes: u64,
    /// Bytes unique to images that no container uses: `RECLAIMABLE` of images, approximately.
    pub reclaimable_bytes: u64,
    /// Writable layers of containers: `SIZE` of containers.
    pub containers_bytes: u64,
    /// The build cache, without what an image shares.
    pub builder_bytes: u64,
    /// The part of it that no build uses: what the engine's own prune may remove.
    pub builder_unused_bytes: u64,
}

impl EngineUsage {
    /// The part of the layer store that belongs neither to images nor to containers: the build cache, and unaccounted
    /// files.
    pub fn unattributed(&self) -> Option<DiskSpace> {
        Some((self.images.amount + self.containers.amount).shortfall_to(self.on_disk?))
    }
}

/// Reads usage from the engine, and from its files where they can be read.
pub(crate) async fn usage(
    inspections: &InspectCache,
    layers: &EngineLayers,
) -> Result<EngineUsage, BackendError> {
    let engine = inspections.engine();
    let system_df = match engine.get_required::<SystemDf>("/system/df", &[]).await {
        // It takes minutes on large hosts, and the engine refuses concurrent requests.
        Err(error @ BackendError::Call { .. }) => Err(error),
        system_df => Ok(system_df?),
    };
    let (summaries, summed) = match &system_df {
        Ok(system_df) => (&system_df.images, &system_df.containers),
        Err(_) => (
            &engine.get_required::<Vec<ImageSummary>>("/images/json", &[]).await?,
            &engine.get_required::<Vec<ContainerSummary>>("/containers/json", &[("all", "1")]).await?,
        ),
    };
    let info: EngineInfo = engine.get_required("/info", &[]).await?;
    let image =
        |image: &ImageSummary| Image { id: image.id.clone(), size: count(image.size), ..Image::default() };
    let listed: Vec<Image> = summaries.iter().map(image).collect();
    let measured = layers.look(&listed).await?;
    let ids: Vec<&str> = listed.iter().map(|image| image.id.as_str()).collect();
    let containerd = layers.containerd(&info, &ids).await;
    let store = match &containerd {
        Some(containerd) => containerd.root().await,
        None => GraphDriverFiles::of(engine.host(), &info, &ids).await.map(|files| files.layer_store()),
    };
    let on_disk = match store.clone() {
        Some(store) => blocking(move || dir_size::tree(&store).ok()).await,
        None => None,
    };
    let mut writable = LayerStoreShare { count: summed.len(), ..LayerStoreShare::default() };
    for container in summed {
        let measured = match &containerd {
            Some(containerd) => containerd.written(&container.id).await,
            None if on_disk.is_some() => written(inspections, container).await?,
            None => None,
        };
        writable.estimated |= measured.is_none();
        writable.amount += measured.unwrap_or_else(|| DiskSpace::estimate(count(container.size_rw)));
    }
    Ok(EngineUsage {
        layer_store: store.filter(|_| on_disk.is_some()),
        on_disk,
        images: LayerStoreShare { count: listed.len(), amount: measured.dirs, estimated: measured.estimated },
        containers: writable,
        engine: system_df.map(|system_df| EngineCounts::of(&system_df)),
    })
}

impl EngineCounts {
    fn of(system_df: &SystemDf) -> EngineCounts {
        let cache = |unused: bool| {
            let records =
                system_df.build_cache.iter().filter(|record| !(record.shared || unused && record.in_use));
            records.map(|record| count(record.size)).sum()
        };
        let unused = system_df.images.iter().filter(|image| image.containers <= 0);
        EngineCounts {
            layers_bytes: count(system_df.layers_size),
            reclaimable_bytes: unused.map(|image| count(image.size - image.shared_size.max(0))).sum(),
            containers_bytes: system_df.containers.iter().map(|container| count(container.size_rw)).sum(),
            builder_bytes: cache(false),
            builder_unused_bytes: cache(true),
        }
    }
}

/// The writable layer of a container, and the init layer below it; `None` if that cannot be read.
async fn written(
    inspections: &InspectCache,
    container: &ContainerSummary,
) -> Result<Option<DiskSpace>, BackendError> {
    let path = format!("/containers/{}/json", container.id);
    let Some(found) = inspections.engine().get::<ContainerInspect>(&path, &[]).await? else {
        return Ok(Some(DiskSpace::ZERO));
    };
    let Some(upper) = found.graph_driver.data.get("UpperDir") else { return Ok(None) };
    let Some(dir) = Path::new(upper).parent().map(Path::to_owned) else { return Ok(None) };
    Ok(blocking(move || {
        let mut first = dir.clone().into_os_string();
        first.push("-init");
        Some(dir_size::tree(&dir).ok()? + dir_size::size_if_present(Path::new(&first)).ok()?)
    })
    .await)
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Option<T> + Send + 'static) -> Option<T> {
    tokio::task::spawn_blocking(work).await.ok().flatten()
}
