//! Why an image could not be mounted or unmounted.

use std::io;
use std::path::PathBuf;

use larder::hint::Hint;
use larder::reference::ImageName;

use crate::store::{LayerKey, StoreError, damage_hint};

/// Why an image could not be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// This process may not mount.
    #[error("mounting requires root")]
    Unprivileged {
        /// The image.
        image: ImageName,
    },
    /// `fsck` found a layer damaged.
    #[error("{image} is damaged: layer {key}")]
    Damaged {
        /// The layer.
        key: LayerKey,
        /// The image.
        image: ImageName,
    },
    /// The target is no directory.
    #[error("cannot mount at {}", target.display())]
    Target {
        /// As given.
        target: PathBuf,
        /// Error of the system.
        #[source]
        cause: io::Error,
    },
    /// The kernel refused the EROFS filesystem of a layer.
    #[error("cannot mount layer {key}")]
    Layer {
        /// Names its file.
        key: LayerKey,
        /// The error.
        #[source]
        cause: io::Error,
    },
    /// The kernel refused the overlay.
    #[error("the kernel refused to mount an overlay at {}{}", target.display(), kernel_messages(messages))]
    Refused {
        /// Where it was to be.
        target: PathBuf,
        /// Further messages of the kernel; may be empty.
        messages: String,
        /// The error.
        #[source]
        cause: io::Error,
    },
    /// An old kernel takes all paths in one page of memory.
    #[error("cannot mount {layers} layers: the kernel's limit is lower")]
    TooManyLayers {
        /// How many there are.
        layers: usize,
    },
    /// Something has files open below the mount.
    #[error("{} is busy", target.display())]
    Busy {
        /// Where it is mounted.
        target: PathBuf,
    },
    /// The kernel refused to unmount.
    #[error("cannot unmount {}", target.display())]
    Unmount {
        /// Where it is mounted.
        target: PathBuf,
        /// Why not.
        #[source]
        cause: io::Error,
    },
    /// Nothing of this store is mounted there.
    #[error("no image of this store is mounted at {}", target.display())]
    NotOurs {
        /// As given.
        target: PathBuf,
    },
    /// The mount is in another mount namespace, where this process cannot see it.
    #[error("the mount at {} is in another mount namespace{}", target.display(), of_process(*process))]
    OtherNamespace {
        /// As given.
        target: PathBuf,
        /// A process in that namespace, if known.
        process: Option<u32>,
    },
    /// The files of a layer cannot be extracted, where EROFS cannot be mounted.
    #[error("cannot extract layer {key}")]
    Extract {
        /// The layer.
        key: LayerKey,
        /// Error of the system or of the layer.
        #[source]
        cause: io::Error,
    },
    /// An image is mounted there already.
    #[error("an image is already mounted at {}", target.display())]
    Taken {
        /// As given.
        target: PathBuf,
    },
    /// Data of a layer is missing, and nothing is there to bring it when it is read.
    #[error("{image} is incomplete (layer {key}), and this process does not fill it while it is read")]
    Incomplete {
        /// The layer.
        key: LayerKey,
        /// The image, as it was asked for; else one of the layer's.
        image: String,
    },
    /// The mount would hide files of the store, and then nothing could unmount it.
    #[error("cannot mount at {}: it would hide the store {}", target.display(), store.display())]
    HidesStore {
        /// Where it was to be.
        target: PathBuf,
        /// The store's directory.
        store: PathBuf,
    },
    /// The kernel's mount table cannot be read.
    #[error("cannot read the mount table")]
    Table(#[source] io::Error),
}

impl MountError {
    /// Returns the next step that the reader could try.
    pub fn hint(&self) -> Option<Hint> {
        Some(match self {
            MountError::Store(error) => return error.hint(),
            MountError::Unprivileged { image } => without_root(image),
            MountError::Damaged { image, .. } => damage_hint(image.as_str()),
            MountError::Incomplete { image, .. } => Hint::new()
                .command(["complete".to_owned(), image.clone()])
                .text(" fetches the rest; a daemon that pulls lazily, as the setting pull.lazy says, fills it while it is read"),
            MountError::Target { target, cause } if cause.kind() == io::ErrorKind::NotFound => {
                format!("create the directory: mkdir -p {}", target.display()).into()
            }
            MountError::Target { .. } => "the mount point must be a directory".into(),
            MountError::Refused { cause, .. }
            | MountError::Unmount { cause, .. }
            | MountError::Extract { cause, .. }
                if cause.kind() == io::ErrorKind::PermissionDenied =>
            {
                Hint::from(
                    "mounting requires root; as another user, run unshare --user --map-root-user --mount, then, on a store \
                     that this user owns, ",
                )
                .command(["mount"])
            }
            MountError::Refused { cause, .. } | MountError::Unmount { cause, .. } => match cause.kind() {
                io::ErrorKind::Unsupported | io::ErrorKind::NotFound => {
                    "the kernel needs overlayfs: modprobe overlay".into()
                }
                _ => "check the kernel log: dmesg".into(),
            },
            MountError::Extract { cause, .. } => match cause.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    Hint::from("free disk space with ").command(["gc"])
                }
                _ => checks_layer(),
            },
            // A kernel that cannot mount layers is found out before.
            MountError::Layer { .. } => checks_layer().text("; see dmesg"),
            MountError::TooManyLayers { .. } => "Linux 6.5 and later supports up to 500 layers".into(),
            MountError::Busy { target } => {
                format!("stop the processes that use it: fuser -vm {}", target.display()).into()
            }
            MountError::NotOurs { .. } => Hint::new().command(["mounts"]).text(" lists the mounts of this store"),
            MountError::OtherNamespace { target, process } => {
                let target = target.display().to_string();
                let process = process.map_or_else(|| "PROCESS".to_owned(), |process| process.to_string());
                Hint::from(format!(
                    "unmount it in its namespace: nsenter --target {process} --mount umount {target}; if no process is left \
                     there, run as root "
                ))
                .command(["umount".to_owned(), target])
                .text(" to drop its record; add ")
                .setting("force", "")
                .text(" if the namespace cannot be inspected")
            }
            MountError::Taken { target } => Hint::new()
                .command(["umount".to_owned(), target.display().to_string()])
                .text(" first, or mount at another directory"),
            MountError::HidesStore { .. } => "choose another directory, neither in the store nor above it".into(),
            MountError::Table(_) => "check that /proc is mounted".into(),
        })
    }
}

fn checks_layer() -> Hint {
    Hint::new().command(["fsck", "--repair"]).text(" checks the layer")
}

/// The ways to the files of an image for a user who may not mount.
fn without_root(image: &ImageName) -> Hint {
    Hint::new()
        .command(["export", image.as_str(), "--to", "DIR"].map(str::to_owned))
        .text(" writes the files without root; in unshare --user --map-root-user --mount, a user can mount images of a store ")
        .text("that belongs to that user")
}

fn of_process(process: Option<u32>) -> String {
    process.map_or_else(String::new, |pid| format!(" (process {pid})"))
}

fn kernel_messages(messages: &str) -> String {
    if messages.is_empty() { String::new() } else { format!(" ({messages})") }
}
