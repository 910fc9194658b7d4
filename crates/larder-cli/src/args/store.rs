//! Arguments of the commands that work on larder's own store only.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use larder::reference::ImageName;

use super::platform::PlatformFlag;
use super::pull_flags::CredentialArgs;
use crate::output::{DataFormat, PrintFormat};

/// Load images from OCI layouts, OCI archives, docker save archives or directories of skopeo into larder's own store.
///
/// Layers that are already present are skipped. Archives may be compressed with gzip, zstd, xz or bzip2.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder load app.tar                            docker save app:1 > app.tar
  larder load layout/ --name registry.example/app     its tags get this name
  zcat app.tar.gz | larder load

Exit code: 0 all loaded, 1 some failed, 2 not an image, 3 cannot open the store.")]
pub(crate) struct LoadArgs {
    /// Archives, directories with an OCI layout or of skopeo, or - for standard input, which is read if no file is
    /// given.
    #[arg(value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,

    /// Alias of FILE, as in docker load -i.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) input: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) platform: PlatformFlag,

    /// Repository for images that have only a tag, as in OCI layouts, or no name. With a tag, the name of the only such
    /// image. Full names in the file are kept.
    #[arg(long, value_name = "REPOSITORY[:TAG]")]
    pub(crate) name: Option<String>,

    /// Print IDs and names in this format.
    #[arg(short, long, visible_alias = "format", value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<DataFormat>,
}

/// Write the files of an image in larder's own store to a file or a directory.
///
/// An existing file is replaced once the export is complete.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder export app:1 rootfs/                        the same as --to rootfs/
  larder export app:1 -o app.tar                     as docker export does
  larder export app:1 -o app.erofs --format erofs    a disk for a microVM

Exit code: 0 exported, 1 failed, 2 bad input, 3 cannot open the store.")]
pub(crate) struct ExportArgs {
    /// Name or ID of the image.
    pub(crate) image: ImageName,

    #[command(flatten)]
    pub(crate) platform: PlatformFlag,

    /// Alias of --to. A name with the suffix of an archive (.tar, .erofs, ...) that does not exist is refused: write a
    /// file with -o.
    #[arg(value_name = "DIR", conflicts_with_all = ["to", "output", "format"])]
    pub(crate) dir: Option<PathBuf>,

    /// File to write, or - for standard output, which is the default unless it is a terminal.
    #[arg(short, long, value_name = "FILE", conflicts_with = "to")]
    pub(crate) output: Option<PathBuf>,

    /// Format to write: the files as a tar archive, the files as an EROFS filesystem, which Linux mounts, or the
    /// image as larder save does.
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT", conflicts_with = "to")]
    pub(crate) format: ExportFormat,

    /// Write the files below this directory, which must be empty or not exist. Without root, they belong to the current
    /// user, and have no set-user-ID and set-group-ID bits.
    #[arg(long, value_name = "DIR")]
    pub(crate) to: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) honored: HonoredArgs,
}

/// Format of an export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportFormat {
    /// All files as one tar archive, without layers.
    #[default]
    Tar,
    /// All files as one EROFS filesystem, which Linux mounts read-only.
    Erofs,
    /// An archive of an OCI layout with the layers and the config of the image, as of larder save.
    Oci,
}

/// Save images of larder's own store to an archive, for larder load, docker load, podman load and skopeo.
///
/// The archive is an OCI layout. Images have the IDs that they had; layers are uncompressed. larder load gives an image
/// the name and digest by which it was saved; to other programs it has another digest. An existing file is replaced
/// once the archive is complete.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder save -o app.tar app:1
  larder save -o all.tar app:1 'app:1#linux/arm64' db:2
  larder save app:1 | ssh node2 larder load

Exit code: 0 saved, 1 failed, 2 bad input, 3 cannot open the store.")]
pub(crate) struct SaveArgs {
    /// Names or IDs of the images. An image that is named by its ID has no name in the archive.
    #[arg(value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<ImageName>,

    #[command(flatten)]
    pub(crate) platform: PlatformFlag,

    /// File to write, or - for standard output, which is the default unless it is a terminal.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// Mount the root filesystem of an image in larder's own store.
///
/// For microVMs, chroots, image volumes and build jobs. A mounted image is in use: GC retains it. Requires root. Prints
/// the directory; without any argument, lists the mounts.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder mount busybox:1.36 /mnt
  larder mount busybox:1.36                      in a new directory
  larder mount --writable busybox:1.36 /mnt      until larder umount")]
pub(crate) struct MountArgs {
    /// Exact name, or ID, of the image.
    pub(crate) image: Option<ImageName>,

    #[command(flatten)]
    pub(crate) platform: PlatformFlag,

    /// An existing directory; by default a new one below /run/larder/mounts, which larder umount removes.
    pub(crate) dir: Option<PathBuf>,

    /// Mount read-write; writes go to a directory that larder umount deletes.
    #[arg(short, long)]
    pub(crate) writable: bool,

    #[command(flatten)]
    pub(crate) honored: HonoredArgs,
}

/// Attributes of an image that could make its users root of this machine.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct HonoredArgs {
    /// Honor set-user-ID and set-group-ID bits and file capabilities of the image. Without this flag, they have no
    /// effect: any user who can reach the files could run the image's programs as root.
    #[arg(long)]
    pub(crate) suid: bool,

    /// Honor device nodes of the image.
    #[arg(long)]
    pub(crate) dev: bool,
}

/// List the mounts of images in larder's own store.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder mounts
  larder mounts -o json
  larder --root /srv/images mounts")]
pub(crate) struct MountsArgs {
    /// Output format.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Unmount images, and delete what was written to the mounts.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder umount /mnt
  larder umount /mnt/a /mnt/b
  larder umount --all")]
pub(crate) struct UmountArgs {
    /// Mountpoints, or images that are mounted once.
    #[arg(value_name = "DIR", required_unless_present = "all")]
    pub(crate) dirs: Vec<PathBuf>,

    /// All mounts of the store.
    #[arg(short, long, conflicts_with = "dirs")]
    pub(crate) all: bool,

    /// Remove the record of a mount from another mount namespace (unshare --mount, a container), even if larder cannot
    /// determine whether that namespace still has it. If it does, the mount can lose its files.
    #[arg(long)]
    pub(crate) force: bool,
}

/// Check larder's own store for damaged and missing files, and repair it.
///
/// Needs the store alone: waits for other larder commands to end, and fails if a daemon serves the store.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder fsck --quick           compare names, sizes and modes, not contents
  larder fsck --repair          fetch damaged layers again
  larder fsck --rebuild         rebuild a lost database from the files on disk

Exit code: 0 no damage, 1 damaged, 3 cannot open the store, or another process has it.")]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct FsckArgs {
    /// Compare names, sizes and modes only, not contents.
    #[arg(long)]
    pub(crate) quick: bool,

    /// Repair what can be repaired locally, and fetch damaged and missing content again: of a damaged layer only the
    /// parts that are damaged, where that is possible. It remains until its replacement is complete; larder pull and
    /// larder load of its image replace it, too.
    #[arg(long)]
    pub(crate) repair: bool,

    /// Rebuild the database from the files on disk, then check.
    #[arg(long)]
    pub(crate) rebuild: bool,

    /// Wait until no other process has the store, however long it takes, even for a daemon to stop. Without this flag,
    /// larder commands are waited for as long as --timeout (default 2m).
    #[arg(long, conflicts_with = "no_wait")]
    pub(crate) wait: bool,

    /// Fail at once if another process has the store.
    #[arg(long)]
    pub(crate) no_wait: bool,

    #[command(flatten)]
    pub(crate) credentials: CredentialArgs,
}
