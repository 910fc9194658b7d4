//! The engine's own files: where layers are, what they take, and since when an image is there.

use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use larder::gc::{Amount, Stamp};

use crate::answers::Info;
use crate::host::EngineHost;
use crate::{here, measure};

/// Where the files of a graph driver are.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    /// The engine's root, such as `/var/lib/docker`.
    root: PathBuf,
    /// The graph driver, such as `overlay2`.
    driver: String,
}

impl Files {
    /// `None` where the engine is on another machine, or images are in containerd. `images` are ids that it lists.
    pub(crate) async fn of(host: &EngineHost, info: &Info, images: &[&str]) -> Option<Files> {
        let files = Files::said(info)?;
        here::is_here(host, info, images).await.then_some(files)
    }

    /// Where they are on the engine's own machine.
    pub(crate) fn said(info: &Info) -> Option<Files> {
        let usable =
            !info.docker_root_dir.is_empty() && !info.driver.is_empty() && !info.is_containerd_store();
        usable.then(|| Files { root: info.docker_root_dir.clone().into(), driver: info.driver.clone() })
    }

    /// All layers, of images, containers and the builder.
    pub(crate) fn layer_store(&self) -> PathBuf {
        self.root.join(&self.driver)
    }

    /// What a layer takes, and the part of it that is its folder; beside it are the short name that the driver links to
    /// it, and the engine's notes.
    pub(crate) fn measure(&self, chain: &str, folder: &Path) -> io::Result<(Amount, Amount)> {
        let inside = measure::tree(folder)?;
        let notes = self.notes().join("layerdb").join(chain.replacen(':', "/", 1));
        let link = Amount { bytes: 0, inodes: 1 };
        Ok((inside + link + measure::tree_if_there(&notes)?, inside))
    }

    /// What an image takes beside its layers: its config, and when it was named.
    pub(crate) fn own(&self, id: &str) -> Amount {
        let parts = ["content", "metadata"].map(|part| self.of_image(part, id));
        parts.iter().map(|path| measure::tree_if_there(path).unwrap_or_default()).sum()
    }

    /// When an image came: the engine writes its config once it has all layers. `None` where that cannot be read.
    pub(crate) fn came(&self, id: &str) -> Option<Stamp> {
        let written = fs_err::metadata(self.config(id)).ok()?.modified().ok()?;
        let since = written.duration_since(UNIX_EPOCH).ok()?;
        i64::try_from(since.as_millis()).ok().map(Stamp)
    }

    /// The config of an image, as a file.
    pub(crate) fn config(&self, id: &str) -> PathBuf {
        self.of_image("content", id)
    }

    /// What the engine notes of images, with whatever driver.
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
