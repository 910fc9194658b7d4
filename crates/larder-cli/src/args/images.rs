//! Arguments of the commands about present images.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]
#![allow(clippy::struct_excessive_bools, reason = "each is a flag")]

use clap::Args;
use larder::reference::ImageName;

use super::image_list::{ImageFilter, SortKey};
use super::platform::PlatformFlag;
use super::pull_flags::{CredentialArgs, TlsFlags};
use crate::output::{DataFormat, ListFormat, PrintFormat};

/// List images: names, age, last use, size, and what removing each would free (UNIQUE).
#[derive(Debug, Args)]
#[command(
    visible_alias = "ls",
    after_help = "Examples:
  larder images '*/team/*:v2*'          a pattern for repository and tag
  larder images -f in-use=false --sort unique    what could be removed
  larder images --tree                  layers that images share"
)]
pub(crate) struct ImagesArgs {
    /// Only images whose REPOSITORY or REPOSITORY:TAG matches this pattern; * matches any text. Short names match as
    /// docker prints them.
    pub(crate) pattern: Option<String>,

    /// All images, which is the default.
    #[arg(short, long)]
    pub(crate) all: bool,

    /// Only images that fit: dangling=true, in-use=false, reference=PATTERN, type=model, before=IMAGE, since=IMAGE or
    /// label=KEY[=VALUE]; may be repeated.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = ImageFilter::parse)]
    pub(crate) filter: Vec<ImageFilter>,

    /// Order.
    #[arg(long, value_enum, default_value_t, value_name = "KEY")]
    pub(crate) sort: SortKey,

    /// Show as a tree of the layers that images share.
    #[arg(long, conflicts_with_all = ["quiet", "output", "digests"])]
    pub(crate) tree: bool,

    /// Show digests.
    #[arg(long)]
    pub(crate) digests: bool,

    /// Show full IDs.
    #[arg(long)]
    pub(crate) no_trunc: bool,

    /// Print full IDs only.
    #[arg(short, long, conflicts_with = "output")]
    pub(crate) quiet: bool,

    /// Output format; name prints REPOSITORY:TAG only.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: ListFormat,
}

/// Show all data that the backend has about images, or their layers.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder inspect -o yaml busybox:1.36
  larder inspect --layers busybox:1.36     layers and their other images
  larder inspect --referrers app:1         signatures, SBOMs, attestations")]
pub(crate) struct InspectArgs {
    /// Names or IDs of images.
    #[arg(value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<ImageName>,

    #[command(flatten)]
    pub(crate) platform: PlatformFlag,

    /// Show the layers, the lowest first, and which other images share them.
    #[arg(long)]
    pub(crate) layers: bool,

    /// List signatures, SBOMs and attestations that registries have of the images.
    ///
    /// By the referrers API, or else by tags; also by the tags of cosign. For the digest of the index, and for that of
    /// the manifest for the platform. The images need not be present. This command asks the registry itself, with the
    /// credentials that a pull by its user has.
    #[arg(long, conflicts_with = "layers")]
    pub(crate) referrers: bool,

    /// Only referrers of this artifact type, or of a type in a word, such as sbom.
    #[arg(long, value_name = "TYPE", requires = "referrers")]
    pub(crate) artifact_type: Option<String>,

    /// Output format [default: json; with --layers or --referrers, a table].
    #[arg(short, long, visible_alias = "format", value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<DataFormat>,

    #[command(flatten)]
    pub(crate) tls: TlsFlags,

    #[command(flatten)]
    pub(crate) credentials: CredentialArgs,
}

/// Tell by the exit code whether an image is present.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder image exists app:1 || larder pull app:1

Exit code: 0 present, 1 not present, 2 invalid input, 3 backend unreachable.")]
pub(crate) struct ExistsArgs {
    /// Exact name, or ID, of the image.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: ImageName,

    #[command(flatten)]
    pub(crate) platform: PlatformFlag,
}

/// Remove names of images, and each image with its last name.
///
/// A name removes itself only, and means latest if it has no tag; an ID, from four digits, stands for the image, which
/// then needs --force if it has several names. Over CRI a runtime removes all names of an image at once: larder refuses
/// unless all of its tags are given, or with --force.
#[derive(Debug, Args)]
#[command(
    visible_alias = "rmi",
    after_help = "Examples:
  larder rm busybox:1.36
  larder rm -f 3f8a21b0c9d4        an image with all its names
  larder rm --ignore-not-found $(larder images -q registry.example/old)"
)]
pub(crate) struct RmArgs {
    /// Exact names, or IDs, of images.
    #[arg(value_name = "IMAGE", required_unless_present = "ignore_not_found")]
    pub(crate) images: Vec<ImageName>,

    #[command(flatten)]
    pub(crate) platform: PlatformFlag,

    /// Succeed if an image does not exist, or if no image is given.
    #[arg(long)]
    pub(crate) ignore_not_found: bool,

    /// Also remove images that containers use, and images that have other names. A mount from larder's own store
    /// remains until it is unmounted. Docker never removes the image of a container.
    #[arg(short, long)]
    pub(crate) force: bool,

    /// Print the removed images in this format.
    #[arg(short, long, visible_alias = "format", value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<DataFormat>,
}

/// Give an image another name.
///
/// The image that has the name loses it. Not over CRI, which has no call for it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder tag busybox:1.36 registry.example/tools/busybox:stable
  larder tag 3f8a21b0c9d4 app:old
  larder tag app:2 app:stable")]
pub(crate) struct TagArgs {
    /// Exact name, or ID, of a present image.
    pub(crate) source: ImageName,

    /// The name to add; without a tag, latest.
    pub(crate) target: ImageName,
}

/// Show the steps in which an image was built, newest first.
///
/// larder gc log lists the images that GC removed.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder history busybox:1.36
  larder history -o wide busybox:1.36     whole commands
  larder history -o json busybox:1.36

SIZE is what a pull fetches of the layer that a step made. Docker Engine reports
no history here: use docker history.")]
pub(crate) struct HistoryArgs {
    /// Name or ID of the image, or a part of it.
    pub(crate) image: Option<ImageName>,

    /// Show whole commands.
    #[arg(long)]
    pub(crate) no_trunc: bool,

    /// Output format; wide shows whole commands, too.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Show the disk usage of images, and how much of it garbage collection can free.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder df
  larder df -v                      the same with images by state, layers, ...
  larder --backend docker df        of a Docker Engine")]
pub(crate) struct DfArgs {
    /// Output format.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Show the backend, its version and condition, and where it stores images.
#[derive(Debug, Args)]
#[command(
    visible_alias = "info",
    after_help = "Examples:
  larder runtime
  larder --backend cri runtime
  larder --backend unix:///run/crio/crio.sock runtime -o yaml"
)]
pub(crate) struct RuntimeArgs {
    /// Output format.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}
