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

/// Remove images with all of their names.
///
/// Runtimes remove a whole image: any of its names selects it, and all its names are removed. An image that also has
/// names in other repositories is removed only if a name of each is given, or with --force. An argument is a name, or
/// else the start of an ID with at least 4 digits.
#[derive(Debug, Args)]
#[command(
    visible_alias = "rmi",
    after_help = "Examples:
  larder rm busybox:1.36
  larder rm --ignore-not-found $(larder images -q registry.example/old)     all tags of one repository"
)]
pub(crate) struct RmArgs {
    /// Names or IDs of images.
    #[arg(value_name = "IMAGE", required_unless_present = "ignore_not_found")]
    pub(crate) images: Vec<ImageName>,

    /// Succeed if an image does not exist, or if no image is given.
    #[arg(long)]
    pub(crate) ignore_not_found: bool,

    /// Also remove images that containers use, and images that have names in other repositories. A mount from larder's
    /// own store remains until it is unmounted. Docker never removes the image of a container.
    #[arg(short, long)]
    pub(crate) force: bool,

    /// Print the removed images in this format.
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<DataFormat>,
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
