//! Arguments of the commands about present images.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use clap::Args;
use larder::reference::ImageName;

use crate::output::{DataFormat, PrintFormat};

/// List images.
#[derive(Debug, Args)]
#[command(
    visible_alias = "ls",
    after_help = "Examples:
  larder images                    all images, by name
  larder images busybox            all tags of one repository
  larder images '*/team/*:v2*'     a pattern for repository and tag; * matches any text
  larder images -q                 IDs only"
)]
pub(crate) struct ImagesArgs {
    /// Only images whose REPOSITORY or REPOSITORY:TAG matches this pattern. Short names match as docker prints them.
    pub(crate) pattern: Option<String>,

    /// Show digests.
    #[arg(long)]
    pub(crate) digests: bool,

    /// Show full IDs.
    #[arg(long)]
    pub(crate) no_trunc: bool,

    /// Print full IDs only.
    #[arg(short, long, conflicts_with = "output")]
    pub(crate) quiet: bool,

    /// Output format.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Show all data that the backend has about images.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder inspect busybox:1.36
  larder inspect -o yaml sha256:0123...")]
pub(crate) struct InspectArgs {
    /// Names or IDs of images.
    #[arg(value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<ImageName>,

    /// Output format.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: DataFormat,
}

/// Remove names of images, and each image with its last name.
///
/// A name removes itself only; an ID or digest stands for the image, which then needs --force if it has several names. A part
/// of a name or ID will do, as long as one image has it. Over CRI a runtime removes all names of an image at once: larder
/// refuses unless all of its tags are given, or with --force.
#[derive(Debug, Args)]
#[command(
    visible_alias = "rmi",
    after_help = "Examples:
  larder rm busybox:1.36
  larder rm -f 3f8a21b0c9d4                                                 an image with all its names
  larder rm --ignore-not-found $(larder images -q registry.example/old)     all images of one repository"
)]
pub(crate) struct RmArgs {
    /// Names or IDs of images, or parts of them.
    #[arg(value_name = "IMAGE", required_unless_present = "ignore_not_found")]
    pub(crate) images: Vec<ImageName>,

    /// Succeed if an image does not exist, or if no image is given.
    #[arg(long)]
    pub(crate) ignore_not_found: bool,

    /// Also remove images that containers use, and images that have other names. A mount from larder's own store remains
    /// until it is unmounted. Docker never removes the image of a container.
    #[arg(short, long)]
    pub(crate) force: bool,

    /// Print the removed images in this format.
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<DataFormat>,
}

/// Give an image another name.
///
/// The image that has the name loses it. Not over CRI, which has no call for it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder tag busybox:1.36 registry.example/tools/busybox:stable
  larder tag 3f8a21b0c9d4 app:old")]
pub(crate) struct TagArgs {
    /// Name or ID of a present image, or a part of it.
    pub(crate) source: ImageName,

    /// The name to add; without a tag, latest.
    pub(crate) target: ImageName,
}

/// Show the disk usage of images, and of all data in larder's own store.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder df
  larder df -o json")]
pub(crate) struct DfArgs {
    /// Output format.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Show the backend, its version and condition, and where it stores images.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder runtime
  larder --backend cri runtime
  larder --backend unix:///run/crio/crio.sock runtime -o yaml")]
pub(crate) struct RuntimeArgs {
    /// Output format.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}
