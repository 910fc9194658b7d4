//! What can be typed after commands that work on larder's own store only.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::path::PathBuf;

use clap::Args;
use larder::reference::ImageName;

use super::pull_flags::CredentialArgs;
use crate::output::{DataFormat, PrintFormat};

/// Load images from files into larder's own store: an OCI layout or archive, or what docker save writes.
///
/// Layers that are here already are skipped.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder load app.tar                                 docker save app:1 > app.tar
  larder load layout/ --name registry.example/app     an OCI layout whose names are but tags: app:v1 for v1
  zcat app.tar.gz | larder load -

Exit code: 0 all loaded, 1 some failed, 2 not an image, 3 the store cannot be opened.")]
pub(crate) struct LoadArgs {
    /// Archives, folders with an OCI layout, or - for standard input.
    #[arg(value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,

    /// Repository of images whose names are but tags, as OCI layouts may have, or that have no name; with a tag, the
    /// name of the one such image. A name in full, which the file itself gives, stays.
    #[arg(long, value_name = "REPOSITORY[:TAG]")]
    pub(crate) name: Option<String>,

    /// Print ids and names as data.
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<DataFormat>,
}

/// Mount the root file system of an image in larder's own store.
///
/// For microVMs, chroots, image volumes and build jobs. The mount is a use: its image is not removed. It needs root.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder ensure busybox:1.36
  larder mount busybox:1.36 /mnt
  larder mount --writable busybox:1.36 /mnt      what is written goes with larder umount")]
pub(crate) struct MountArgs {
    /// Name or ID of the image.
    pub(crate) image: ImageName,

    /// An existing directory.
    pub(crate) dir: PathBuf,

    /// Take writes, into a folder of the mount's own.
    #[arg(short, long)]
    pub(crate) writable: bool,
}

/// List what is mounted from larder's own store.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder mounts
  larder mounts -o json")]
pub(crate) struct MountsArgs {
    /// Output format.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Unmount images, and drop what was written to them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder umount /mnt")]
pub(crate) struct UmountArgs {
    /// Where they are mounted.
    #[arg(value_name = "DIR", required = true)]
    pub(crate) dirs: Vec<PathBuf>,

    /// Forget a mount that was made in another mount namespace (unshare --mount, a container) also where larder cannot see
    /// whether one still has it. If one does, its files may go.
    #[arg(long)]
    pub(crate) force: bool,
}

/// Check larder's own store: find every damaged or missing file, and repair what can be.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder fsck
  larder fsck --quick           compare names, sizes and modes, not contents
  larder fsck --repair          fetch damaged layers again; one that cannot be had stays as it is
  larder fsck --rebuild         make a lost database anew from what is on disk

Exit code: 0 sound, 1 damaged, 3 the store cannot be opened.")]
pub(crate) struct FsckArgs {
    /// Compare names, sizes, modes and the like only, not contents.
    #[arg(long)]
    pub(crate) quick: bool,

    /// Put right what can be put right here, and fetch again what is damaged or missing. A damaged layer stays as it is
    /// until another has come; the next larder pull or load of its image replaces it, too.
    #[arg(long)]
    pub(crate) repair: bool,

    /// Make the database anew from what is on disk, and then check.
    #[arg(long)]
    pub(crate) rebuild: bool,

    #[command(flatten)]
    pub(crate) credentials: CredentialArgs,
}
