//! Commands under the names that docker has for them, such as `larder image ls`.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use clap::{Args, Subcommand};

use super::{
    Command, DfArgs, ExistsArgs, HistoryArgs, ImagesArgs, InspectArgs, LoadArgs, MountArgs, PruneArgs,
    PullArgs, RmArgs, RuntimeArgs, SaveArgs, TagArgs, UmountArgs,
};

/// Commands about images, under docker's names.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder image ls           the same as larder images
  larder image rm app:1     the same as larder rm app:1
  larder image prune -a     the same as larder prune -a")]
pub(crate) struct ImageArgs {
    #[command(subcommand)]
    pub(crate) command: ImageSubcommand,
}

/// The commands of `larder image`.
#[derive(Debug, Subcommand)]
pub(crate) enum ImageSubcommand {
    List(ImagesArgs),
    Inspect(InspectArgs),
    Exists(ExistsArgs),
    History(HistoryArgs),
    Pull(PullArgs),
    Load(LoadArgs),
    Save(SaveArgs),
    Tag(TagArgs),
    Rm(RmArgs),
    Prune(PruneArgs),
    Mount(MountArgs),
    #[command(visible_alias = "unmount")]
    Umount(UmountArgs),
}

/// Commands about the node, under docker's names.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder system df            the same as larder df
  larder system df -o json
  larder system info          the same as larder runtime")]
pub(crate) struct SystemArgs {
    #[command(subcommand)]
    pub(crate) command: SystemSubcommand,
}

/// The commands of `larder system`.
#[derive(Debug, Subcommand)]
pub(crate) enum SystemSubcommand {
    Df(DfArgs),
    Runtime(RuntimeArgs),
}

impl Command {
    /// The command under its own name.
    pub(crate) fn ungrouped(self) -> Command {
        match self {
            Command::ImageGroup(ImageArgs { command }) => match command {
                ImageSubcommand::List(args) => Command::Images(args),
                ImageSubcommand::Inspect(args) => Command::Inspect(args),
                ImageSubcommand::Exists(args) => Command::Exists(args),
                ImageSubcommand::History(args) => Command::History(args),
                ImageSubcommand::Pull(args) => Command::Pull(args),
                ImageSubcommand::Load(args) => Command::Load(args),
                ImageSubcommand::Save(args) => Command::Save(args),
                ImageSubcommand::Tag(args) => Command::Tag(args),
                ImageSubcommand::Rm(args) => Command::Rm(args),
                ImageSubcommand::Prune(args) => Command::Prune(args),
                ImageSubcommand::Mount(args) => Command::Mount(args),
                ImageSubcommand::Umount(args) => Command::Umount(args),
            },
            Command::SystemGroup(SystemArgs { command }) => match command {
                SystemSubcommand::Df(args) => Command::Df(args),
                SystemSubcommand::Runtime(args) => Command::Runtime(args),
            },
            command => command,
        }
    }
}
