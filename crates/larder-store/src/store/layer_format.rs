//! How new layers are stored, and how EROFS images are mounted.

use std::io;
use std::path::Path;

use rustix::io::Errno;

use super::config::LayerFormat;
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::{OpenStore, Store};
use crate::erofs::{DetachedMount, ErofsMountKind, mount_somehow, probe};

impl Store {
    /// Whether new layers are EROFS images. Fails if they have to be and cannot be mounted.
    pub fn uses_images(&self) -> Result<bool, StoreError> {
        match self.0.config.layer_format {
            LayerFormat::Directory => Ok(false),
            LayerFormat::Auto => Ok(self.0.erofs_mount().is_ok()),
            LayerFormat::Erofs => self.0.erofs_mount().map(|_| true).context("mount EROFS images"),
        }
    }

    /// How new layers are stored, and why: `EROFS images, mounted from files`.
    pub fn describe_layers(&self) -> String {
        let mounted = match self.0.config.layer_format {
            LayerFormat::Directory => return "directories".to_owned(),
            LayerFormat::Auto | LayerFormat::Erofs => self.0.erofs_mount(),
        };
        match (mounted, self.0.config.layer_format) {
            (Ok(ErofsMountKind::File), _) => "EROFS images, mounted from files".to_owned(),
            (Ok(ErofsMountKind::LoopDevice), _) => "EROFS images, mounted through loop devices".to_owned(),
            (Err(error), LayerFormat::Auto) => format!("directories (cannot mount EROFS images: {error})"),
            (Err(error), _) => format!("EROFS images, which cannot be mounted: {error}"),
        }
    }

    /// How this process can mount EROFS images. Tried until it is known.
    pub fn erofs_mount(&self) -> io::Result<ErofsMountKind> {
        self.0.erofs_mount()
    }
}

impl OpenStore {
    /// How this process can mount EROFS images that lie in this store. Tried until it is known: a full disk, or loop devices
    /// that are all in use, are no reason to do without images until the next start.
    pub(crate) fn erofs_mount(&self) -> io::Result<ErofsMountKind> {
        if let Some(known) = self.known_erofs_mount() {
            return known;
        }
        let found = probe(&self.layout.new_staging());
        let known = match &found {
            Ok(kind) => Some(Ok(*kind)),
            Err(error) => lasting_refusal(error).map(Err),
        };
        if let Some(known) = known {
            tracing::debug!(?known, "how EROFS images can be mounted");
            let _ = self.erofs.set(known); // another thread found the same
        }
        found
    }

    /// Mounts the image of a layer. If it is not known yet how, that is tried with this image: a full disk has no room for another.
    pub(crate) fn mount_image(&self, image: &Path) -> io::Result<DetachedMount> {
        if let Some(known) = self.known_erofs_mount() {
            return DetachedMount::of(image, known?);
        }
        let (kind, mount) = mount_somehow(image)?;
        let _ = self.erofs.set(Ok(kind)); // another thread found the same
        Ok(mount)
    }

    fn known_erofs_mount(&self) -> Option<io::Result<ErofsMountKind>> {
        let configured = self.config.erofs_mount.map(Ok);
        configured.or_else(|| self.erofs.get().map(|known| Ok((*known)?)))
    }
}

/// The error of a kernel that has no EROFS, or of a process that may not mount it. Any other one may pass.
fn lasting_refusal(error: &io::Error) -> Option<Errno> {
    let lasting = [Errno::NODEV, Errno::NOSYS, Errno::PERM, Errno::ACCESS];
    Errno::from_io_error(error).filter(|errno| lasting.contains(errno))
}
