//! How EROFS layers are mounted.

use std::io;
use std::path::Path;

use rustix::io::Errno;

use super::handle::{OpenStore, Store};
use crate::erofs::{DetachedMount, LayerMountKind, mount_somehow, probe};

impl Store {
    /// How layers are stored and mounted: `EROFS, mounted from files`.
    pub fn describe_layers(&self) -> String {
        match self.0.erofs_mount() {
            Ok(LayerMountKind::File) => "EROFS, mounted from files".to_owned(),
            Ok(LayerMountKind::LoopDevice) => "EROFS, mounted through loop devices".to_owned(),
            Ok(LayerMountKind::Extracted) => {
                "EROFS, extracted for mounts (EROFS cannot be mounted here)".to_owned()
            }
            Err(error) => format!("EROFS, which cannot be mounted: {error}"),
        }
    }

    /// How layers become lower directories of overlays. Tried until it is known.
    pub fn erofs_mount(&self) -> io::Result<LayerMountKind> {
        self.0.erofs_mount()
    }
}

impl OpenStore {
    /// How layers of this store become lower directories of overlays. Tried until it is known: a full disk, or loop
    /// devices that are all in use, are no reason to extract layers until the next start.
    pub(crate) fn erofs_mount(&self) -> io::Result<LayerMountKind> {
        if let Some(known) = self.known_erofs_mount() {
            return Ok(known);
        }
        self.note_erofs_mount(probe(&self.layout.new_staging()))
    }

    /// Mounts a layer's file; `None` if layers cannot be mounted here. If that is not known yet, it is tried with this
    /// file: a full disk has no room for another.
    pub(crate) fn mount_layer(&self, file: &Path) -> io::Result<Option<DetachedMount>> {
        let kind = match self.known_erofs_mount() {
            Some(kind) => kind,
            None => match mount_somehow(file) {
                Ok((kind, mount)) => {
                    self.note_erofs_mount(Ok(kind))?;
                    return Ok(Some(mount));
                }
                Err(error) => kind_after(error, || self.erofs_mount())?,
            },
        };
        if kind == LayerMountKind::Extracted { Ok(None) } else { DetachedMount::of(file, kind).map(Some) }
    }

    fn known_erofs_mount(&self) -> Option<LayerMountKind> {
        self.config.erofs_mount.or_else(|| self.erofs.get().copied())
    }

    /// Remembers what was found, unless it may pass.
    fn note_erofs_mount(&self, found: io::Result<LayerMountKind>) -> io::Result<LayerMountKind> {
        let kind = match found {
            Err(error) if is_lasting(&error) => {
                tracing::info!(%error, "cannot mount EROFS; layers are extracted for mounts");
                LayerMountKind::Extracted
            }
            found => found?,
        };
        Ok(*self.erofs.get_or_init(|| kind))
    }
}

/// How layers are mounted, after the mount of one has failed. An empty layer decides: the one that failed may be
/// damaged.
fn kind_after(
    error: io::Error,
    probe: impl FnOnce() -> io::Result<LayerMountKind>,
) -> io::Result<LayerMountKind> {
    if is_lasting(&error) && probe()? == LayerMountKind::Extracted {
        return Ok(LayerMountKind::Extracted);
    }
    Err(error)
}

/// Returns true for the error of a kernel that has no EROFS, or of a process that may not mount it. Any other one may
/// pass.
fn is_lasting(error: &io::Error) -> bool {
    let lasting = [Errno::NODEV, Errno::NOSYS, Errno::PERM, Errno::ACCESS];
    Errno::from_io_error(error).is_some_and(|errno| lasting.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_layer_that_cannot_be_mounted_says_nothing_about_the_others() {
        let after = |errno: Errno, probed: io::Result<LayerMountKind>| kind_after(errno.into(), || probed);
        let failed = after(Errno::ACCESS, Ok(LayerMountKind::File)).unwrap_err();
        assert_eq!(Errno::from_io_error(&failed), Some(Errno::ACCESS), "the layer's own error");
        let kind = after(Errno::NODEV, Ok(LayerMountKind::Extracted)).unwrap();
        assert_eq!(kind, LayerMountKind::Extracted, "a kernel without EROFS");
        let failed = after(Errno::PERM, Err(Errno::NOSPC.into())).unwrap_err();
        assert_eq!(Errno::from_io_error(&failed), Some(Errno::NOSPC), "nothing is known yet");
        after(Errno::NOSPC, Ok(LayerMountKind::Extracted)).unwrap_err();
    }
}
