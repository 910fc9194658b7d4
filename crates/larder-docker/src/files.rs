//! The engine's own files: directories of layers, their disk usage, and the creation times of images.

use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use larder::gc::{DiskSpace, UnixMillis};

use crate::api::EngineInfo;
use crate::host::EngineHost;
use crate::{dir_size, locality};

/// The location of a graph driver's files.
#[derive(Debug, Clone)]
pub(crate) struct GraphDriverFiles {
    /// The engine's root, such as `/var/lib/docker`.
    root: PathBuf,
    /// The graph driver, such as `overlay2`.
    driver: String,
}

impl GraphDriverFiles {
    /// `None` if the engine is on another machine, or images are in containerd. `images` are IDs that it lists.
    pub(crate) async fn of(
        host: &EngineHost,
        info: &EngineInfo,
        images: &[&str],
    ) -> Option<GraphDriverFiles> {
        let files = GraphDriverFiles::reported(info)?;
        locality::is_local(host, info, images).await.then_some(files)
    }

    /// The location on the engine's own machine.
    pub(crate) fn reported(info: &EngineInfo) -> Option<GraphDriverFiles> {
        let usable =
            !info.docker_root_dir.is_empty() && !info.driver.is_empty() && !info.is_containerd_store();
        usable.then(|| GraphDriverFiles {
            root: info.docker_root_dir.clone().into(),
            driver: info.driver.clone(),
        })
    }

    /// All layers, of images, containers and the builder.
    pub(crate) fn layer_store(&self) -> PathBuf {
        self.root.join(&self.driver)
    }

    /// Disk usage of a layer, and the part of it in its directory; the rest is the driver's short link and the engine's
    /// metadata.
    pub(crate) fn measure(&self, chain: &str, dir: &Path) -> io::Result<(DiskSpace, DiskSpace)> {
        let inside = dir_size::tree(dir)?;
        let notes = self.notes().join("layerdb").join(chain.replacen(':', "/", 1));
        let link = DiskSpace { bytes: 0, inodes: 1 };
        Ok((inside + link + dir_size::size_if_present(&notes)?, inside))
    }

    /// Disk usage of an image besides its layers: its config and tag time.
    pub(crate) fn layer_dir(&self, id: &str) -> DiskSpace {
        let parts = ["content", "metadata"].map(|part| self.of_image(part, id));
        parts.iter().map(|path| dir_size::size_if_present(path).unwrap_or_default()).sum()
    }

    /// When an image was added: the engine writes its config once it has all layers. `None` if that cannot be read.
    pub(crate) fn added_at(&self, id: &str) -> Option<UnixMillis> {
        let written = fs_err::metadata(self.config(id)).ok()?.modified().ok()?;
        let since = written.duration_since(UNIX_EPOCH).ok()?;
        i64::try_from(since.as_millis()).ok().map(UnixMillis)
    }

    /// The file of an image's config.
    pub(crate) fn config(&self, id: &str) -> PathBuf {
        self.of_image("content", id)
    }

    /// The engine's metadata of images, for any driver.
    pub(crate) fn of_images(&self) -> PathBuf {
        self.root.join("image")
    }

    fn of_image(&self, part: &str, id: &str) -> PathBuf {
        self.notes().join("imagedb").join(part).join(id.replacen(':', "/", 1))
    }

    fn notes(&self) -> PathBuf {
        self.of_images().join(&self.driver)
    }
}
