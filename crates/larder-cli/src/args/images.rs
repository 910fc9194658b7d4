//! What can be typed after commands about images that are here.

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
  larder images '*/team/*:v2*'     a pattern over repository and tag; * stands for anything
  larder images -q                 ids only"
)]
pub(crate) struct ImagesArgs {
    /// Only images whose REPOSITORY or REPOSITORY:TAG fits this pattern. Short names fit as docker prints them.
    pub(crate) pattern: Option<String>,

    /// Show digests.
    #[arg(long)]
    pub(crate) digests: bool,

    /// Show ids in full.
    #[arg(long)]
    pub(crate) no_trunc: bool,

    /// Print ids only, in full.
    #[arg(short, long, conflicts_with = "output")]
    pub(crate) quiet: bool,

    /// What results look like.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Show everything the backend knows of images.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder inspect busybox:1.36
  larder inspect -o yaml sha256:0123...")]
pub(crate) struct InspectArgs {
    /// Names or ids of images.
    #[arg(value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<ImageName>,

    /// What results look like.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: DataFormat,
}

/// Remove images, each under all of its names.
///
/// Runtimes remove an image whole: one name stands for the image, and its other names go with it. An image that has
/// names in repositories which were not asked for is left alone unless --force is given. An argument is taken for a
/// name first, then for the start of an id, which needs at least 4 digits.
#[derive(Debug, Args)]
#[command(
    visible_alias = "rmi",
    after_help = "Examples:
  larder rm busybox:1.36
  larder rm --ignore-not-found $(larder images -q registry.example/old)     all tags of one repository"
)]
pub(crate) struct RmArgs {
    /// Names or ids of images.
    #[arg(value_name = "IMAGE", required_unless_present = "ignore_not_found")]
    pub(crate) images: Vec<ImageName>,

    /// An image that is not there is as good as removed, and no image at all is none too few.
    #[arg(long)]
    pub(crate) ignore_not_found: bool,

    /// Remove images that containers use, too, and images that have names in other repositories. What is mounted out
    /// of larder's own store stays as it is until it is unmounted; on Docker it never removes an image of a container.
    #[arg(short, long)]
    pub(crate) force: bool,

    /// Print what was removed as data.
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<DataFormat>,
}

/// Show how much room images take, and in larder's own store what holds the disk.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder df
  larder df -o json")]
pub(crate) struct DfArgs {
    /// What results look like.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Show what larder works on, its own store or a runtime, and where that keeps images.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder runtime
  larder --backend cri runtime
  larder --backend unix:///run/crio/crio.sock runtime -o yaml")]
pub(crate) struct RuntimeArgs {
    /// What results look like.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}
