//! Root filesystems of images in larder's own store. Everything here may block.

use std::path::Path;
use std::time::SystemTime;

use larder::error_chain;
use larder_api::v1::Mount;
use larder_store::mounts::{MountError, MountOptions};
use larder_store::store::{MountRecord, Store};

use crate::error::Error;

/// Mounts an image of this store. May block.
pub(super) fn mount_of(
    store: &Store,
    image: &str,
    target: &Path,
    options: MountOptions,
) -> Result<Mount, Error> {
    let mount = store.mount(image, target, options, SystemTime::now());
    mount.map(|mount| shown(&mount, 0)).map_err(|error| failed(&error))
}

/// Ends a mount of this store. May block.
pub(super) fn umount_of(store: &Store, target: &Path, force: bool) -> Result<Mount, Error> {
    store.umount_with(target, force).map(|mount| shown(&mount, 0)).map_err(|error| failed(&error))
}

/// Lists the mounts of this store with the bytes written to each. May block.
pub(super) fn mounts_of(store: &Store) -> Result<Vec<Mount>, Error> {
    let mounts = store.mounts().map_err(|error| Error::failed(error_chain(&error)))?;
    // A mount that ended since has nothing any more.
    let written = |mount: &MountRecord| store.written_to(mount).map_or(0, |space| space.bytes);
    Ok(mounts.iter().map(|mount| shown(mount, written(mount))).collect())
}

fn shown(mount: &MountRecord, written_bytes: u64) -> Mount {
    Mount {
        target: mount.target.display().to_string(),
        image: mount.name.to_string(),
        image_id: mount.image.to_string(),
        writable: mount.writable,
        mounted: mount.mounted,
        written_bytes,
    }
}

fn failed(error: &MountError) -> Error {
    Error::failed(error_chain(error)).hints(error.hint())
}
