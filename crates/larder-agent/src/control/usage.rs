//! Disk usage: of images, of their filesystem, and what the backend reports in addition.

use std::sync::Arc;

use larder::backend::BackendError;
use larder::error_chain;
use larder::gc::{
    ClockReading, Collector, GcError, GcPolicy, ReclaimTrigger, ReclaimableSpace, RetentionBreakdown,
    usage_by_class,
};
use larder::image_service::{FilesystemError, FsStats, ImageService, local_disk};
use larder::retention::{RetentionClass, RetentionError, RetentionPurpose, SourceScope};
use larder_api::convert;
use larder_api::v1 as api;
use larder_store::disk::DiskSpace;
use larder_store::store::{ImageUsage, Store, StoreError, StoreUsage};
use tokio::task::spawn_blocking;

use super::report::usage_by_state;
use crate::backend::published_layers::bytes_in_containerd;
use crate::error::Error;
use crate::node::Storage;
use crate::node::collection::Collection;

/// The disk usage of images. `policy` says which images count as unused.
pub(super) async fn usage(
    storage: &Storage,
    collection: &Collection,
    policy: &GcPolicy,
) -> Result<api::UsageResponse, Error> {
    let (store, reclaimable_beside_images) = match storage.store() {
        Some(store) => {
            let (usage, reclaimable) = of_store(store.store().clone()).await?;
            (Some(usage), Some(convert::space_beside_images(&reclaimable)))
        }
        None => (None, None),
    };
    let mut usage =
        api::UsageResponse { store, reclaimable_beside_images, ..measure(storage, collection).await? };
    #[cfg(feature = "docker")]
    if let Some(crate::backend::BackendHandle::Docker(engine)) = storage.handle() {
        let engine = docker::of_engine(&engine.usage().await?);
        if let (Some(filesystem), Some(images)) = (&mut usage.filesystem, &engine.images) {
            filesystem.images_bytes = Some(images.size_bytes);
            // A guess at inodes may be more than the filesystem has.
            filesystem.images_inodes = (!images.estimated).then_some(images.inodes);
        }
        usage.docker = Some(engine);
    }
    let disk_is_here = usage.filesystem.as_ref().is_some_and(|filesystem| filesystem.size_bytes.is_some());
    if let Some((held, in_containerd)) = held(collection.collector()?, policy, disk_is_here).await {
        let beside_images = usage.reclaimable_beside_images.as_ref().and_then(|space| space.total);
        let beside_images = beside_images.unwrap_or_default().size_bytes;
        usage.reclaimable_bytes = Some(held.reclaimable.bytes.saturating_add(beside_images));
        usage.usage_by_state = Some(usage_by_state(&held));
        if storage.store().is_some() {
            usage.containerd_bytes = in_containerd;
        }
    }
    Ok(usage)
}

/// Disk usage by state of the images, and the bytes of copies of containerd; `None`, after a warning, if image usage
/// cannot be determined.
async fn held(
    collector: &Collector,
    policy: &GcPolicy,
    disk_is_here: bool,
) -> Option<(RetentionBreakdown, u64)> {
    let measured = async {
        let mut snapshot = collector.snapshot(policy).await?;
        if disk_is_here {
            collector.add_filesystem(&mut snapshot).await?;
        }
        Ok::<_, GcError>((usage_by_class(&snapshot, policy), bytes_in_containerd(&snapshot.layers, None)))
    };
    let warn = |error: &GcError| tracing::warn!("cannot determine disk usage: {error}");
    measured.await.inspect_err(warn).ok()
}

async fn measure(storage: &Storage, collection: &Collection) -> Result<api::UsageResponse, Error> {
    let service = ImageService::new(Arc::clone(storage.backend()));
    let list = storage.backend().list().await?;
    // A process that does not publish the images does not ask containerd either.
    let scope = if storage.require_publisher().is_ok() { SourceScope::Runtime } else { SourceScope::Backend };
    let retained = collection.unchecked_collector().retentions(&list, scope).await;
    let retained = retained.map_err(RetentionError::into_backend_error)?;
    let found = service.image_filesystem(local_disk).await.map_err(filesystem_error)?;
    let [mut total, mut used, mut unused] = [api::ImageTotal::default(); 3];
    for image in &list {
        add(&mut total, image.size);
        let reasons = retained.get(&image.id).into_iter().flatten();
        let is_used = reasons.map(RetentionPurpose::class).any(|class| class == RetentionClass::InUse);
        add(if is_used { &mut used } else { &mut unused }, image.size);
    }
    let disk = found.disk;
    let filesystem = api::UsageFileSystem {
        mountpoint: found.usage.mountpoint.display().to_string(),
        images_bytes: found.usage.used_bytes,
        images_inodes: found.usage.inodes_used,
        size_bytes: disk.map(|disk| disk.capacity),
        used_bytes: disk.map(|disk| disk.capacity.saturating_sub(disk.available)),
        available_bytes: disk.map(|disk| disk.available),
        reserved_bytes: disk.map(|disk| disk.reserved),
        inodes: disk.map(|disk| disk.inodes),
        inodes_free: disk.map(|FsStats { inodes_free, .. }| inodes_free),
    };
    let images = api::UsageImages { total: Some(total), in_use: Some(used), unused: Some(unused) };
    Ok(api::UsageResponse {
        filesystem: Some(filesystem),
        images: Some(images),
        ..api::UsageResponse::default()
    })
}

fn add(group: &mut api::ImageTotal, size: u64) {
    group.count += 1;
    group.size_bytes = group.size_bytes.saturating_add(size);
}

fn filesystem_error(error: FilesystemError) -> Error {
    match error {
        FilesystemError::Backend(error @ BackendError::Unreachable { .. }) => error.into(),
        other => Error::failed(other.to_string()),
    }
}

async fn of_store(store: Store) -> Result<(api::StoreUsage, ReclaimableSpace), Error> {
    let failed = |error: StoreError| Error::failed(error_chain(&error));
    let measured = spawn_blocking(move || {
        let images = store.image_usages().map_err(failed)?;
        let reclaimable = store.reclaimable(ReclaimTrigger::Request, &ClockReading::now()).map_err(failed)?;
        let usage =
            store_usage(images, &store.usage().map_err(failed)?, reclaimable.layers, store.estimates_sizes());
        Ok((api::StoreUsage { new_layers: store.describe_layers(), ..usage }, reclaimable))
    });
    let measured = measured.await;
    measured.map_err(|error| Error::failed(format!("cannot measure the store: {error}")))?
}

/// Layers that one image alone has, and those without an image that GC may remove, are unique; what images share, and
/// what mounts, leases and pulls need, is shared in both tables.
fn store_usage(
    images: Vec<ImageUsage>,
    usage: &StoreUsage,
    orphans: DiskSpace,
    estimated: bool,
) -> api::StoreUsage {
    let mut unique_layers = orphans;
    for image in &images {
        unique_layers.bytes += image.unique.bytes.saturating_sub(image.own.bytes);
        unique_layers.inodes += image.unique.inodes.saturating_sub(image.own.inodes);
    }
    let unique_layers = DiskSpace {
        bytes: unique_layers.bytes.min(usage.layers.bytes),
        inodes: unique_layers.inodes.min(usage.layers.inodes),
    };
    let shared_layers = DiskSpace {
        bytes: usage.layers.bytes - unique_layers.bytes,
        inodes: usage.layers.inodes - unique_layers.inodes,
    };
    let mut images: Vec<_> = images.into_iter().map(image_usage).collect();
    images.sort_by(|a, b| (b.size_bytes, &a.repo_tags, &a.id).cmp(&(a.size_bytes, &b.repo_tags, &b.id)));
    let disk = api::StoreDiskUsage {
        shared_layers: space(shared_layers),
        unique_layers: space(unique_layers),
        manifests: space(usage.blobs),
        remnants: space(usage.remnants),
        downloads: space(usage.ingest),
        unpacking: space(usage.staging),
        mounts: space(usage.mounts),
        extracted: space(usage.extracted),
        trash: space(usage.trash),
        database: space(usage.database),
        total: space(usage.total()),
        promised: space(usage.promised),
    };
    api::StoreUsage { images, disk: Some(disk), estimated, new_layers: String::new() }
}

#[expect(clippy::unnecessary_wraps, reason = "messages in messages are optional")]
fn space(amount: DiskSpace) -> Option<api::DiskSpace> {
    Some(api::DiskSpace { size_bytes: amount.bytes, inodes: amount.inodes })
}

fn image_usage(usage: ImageUsage) -> api::StoreImageUsage {
    api::StoreImageUsage {
        id: usage.id.to_string(),
        artifact_type: usage.artifact_type,
        repo_tags: usage.tags,
        repo_digests: usage.digests,
        pinned: usage.pinned,
        size_bytes: usage.total.bytes,
        shared_bytes: usage.shared.bytes,
        unique_bytes: usage.unique.bytes,
        inodes: usage.total.inodes,
        compressed_bytes: usage.compressed_bytes,
    }
}

#[cfg(feature = "docker")]
mod docker {
    use larder_api::v1 as api;
    use larder_docker::{EngineUsage, LayerStoreShare};

    /// Converts an engine's account of its disk usage.
    pub(super) fn of_engine(usage: &EngineUsage) -> api::DockerUsage {
        let reported = usage.engine.as_ref();
        api::DockerUsage {
            build_cache_bytes: reported.map(|reported| reported.builder_bytes).ok(),
            build_cache_unused_bytes: reported.map(|reported| reported.builder_unused_bytes).ok(),
            system_df: reported.ok().map(|reported| api::DockerSystemDf {
                layers_bytes: reported.layers_bytes,
                reclaimable_bytes: reported.reclaimable_bytes,
                containers_bytes: reported.containers_bytes,
            }),
            system_df_error: reported.err().map(ToString::to_string),
            layer_store: usage.layer_store.as_ref().map(|path| path.display().to_string()),
            layer_store_bytes: usage.on_disk.map(|amount| amount.bytes),
            layer_store_inodes: usage.on_disk.map(|amount| amount.inodes),
            images: Some(part(usage.images)),
            containers: Some(part(usage.containers)),
            other_bytes: usage.unattributed().map(|amount| amount.bytes),
        }
    }

    fn part(part: LayerStoreShare) -> api::DockerDiskSpace {
        api::DockerDiskSpace {
            count: part.count as u64,
            size_bytes: part.amount.bytes,
            inodes: part.amount.inodes,
            estimated: part.estimated,
        }
    }
}
