//! The command line: exactly what can be typed. What it means is worked out where it is used.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

mod collect;
mod config;
mod daemon;
mod images;
mod login;
mod pulling;
mod serve;
pub(crate) mod settings;
mod store;

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand};
use clap_complete::Shell;

use larder_agent::quantity::parse_duration;

use crate::exit;

pub(crate) use collect::{
    ExplainAccessArgs, ExplainArgs, ExplainWhat, GcArgs, HistoryArgs, KeepArgs, UnkeepArgs,
};
pub(crate) use config::ConfigArgs;
pub(crate) use daemon::{EventsArgs, LeaseArgs, ReloadArgs, StatusArgs};
pub(crate) use images::{DfArgs, ImagesArgs, InspectArgs, RmArgs, RuntimeArgs};
pub(crate) use login::{LoginArgs, LogoutArgs};
pub(crate) use pulling::{CredentialArgs, EnsureArgs, PullArgs, Pulling};
pub(crate) use serve::ServeArgs;
pub(crate) use store::{FsckArgs, LoadArgs, MountArgs, MountsArgs, UmountArgs};

/// Keeps a node's container images: fetched when wanted, kept while used.
///
/// Images are kept in larder's own store, which needs no container runtime; with --backend they are those of containerd,
/// CRI-O or any other CRI runtime, or of Docker.
#[derive(Debug, Parser)]
#[command(
    name = "larder",
    version,
    after_help = EXAMPLES,
    after_long_help = format!("{EXAMPLES}\n\n{}", exit::HELP),
    subcommand_required = true,
    arg_required_else_help = true
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) connection: Connection,

    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "Examples:
  larder demo                        see larder at work in a few seconds, without root or network
  larder ensure -f pod.yaml          make every image of a pod present, with kubelet's behaviour
  larder ensure -f manifests/ -R     the same for a directory of manifests
  larder images                      list images
  larder gc --dry-run                what would be removed to make room, and why
  larder mount busybox:1.36 /mnt     the root file system of an image
  larder --backend cri images        the same commands on containerd or CRI-O
  larder --backend docker images     and on Docker";

/// What larder talks to, and how. Good with every command.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Connection {
    /// Where images live, if not in larder's own store: the socket of a container runtime, such as
    /// unix:///run/containerd/containerd.sock, "cri" for whatever runtime runs here, or "docker" for Docker Engine
    /// [env: LARDER_BACKEND] [default: store].
    ///
    /// Without it, larder uses a store of its own, which needs no runtime; a runtime is used only where one is named.
    /// "cri" stands for $CONTAINER_RUNTIME_ENDPOINT and $IMAGE_SERVICE_ENDPOINT, as crictl reads them, else for the first
    /// socket that a runtime listens on where runtimes usually do (containerd, CRI-O, cri-dockerd, k3s); where there is
    /// none, the error lists what was tried. "docker" is the engine of $DOCKER_HOST (with $DOCKER_TLS_VERIFY and
    /// $DOCKER_CERT_PATH, as docker reads them), else the one at /var/run/docker.sock; docker:///path/to.sock and
    /// docker://HOST:PORT name another one. "store" is larder's own store, whatever $LARDER_BACKEND says; load, mount,
    /// mounts, umount and fsck work on it alone, and do not read the variable. An empty variable counts as unset.
    // Not clap's `env`: it takes an empty variable for a value, and shows the option as required in usage texts.
    #[arg(long, global = true, value_name = "ENDPOINT")]
    pub(crate) backend: Option<String>,

    /// Use larder's own store in this folder; ensure, pull and load make it if there is none
    /// [default: /var/lib/larder, for others than root ~/.local/share/larder].
    #[arg(long, global = true, value_name = "DIR", conflicts_with = "backend")]
    pub(crate) root: Option<PathBuf>,

    /// Where larder's own store finds mirrors, private authorities and client certificates of registries: a folder in
    /// containerd's certs.d format, HOST/hosts.toml or Docker's certificates for each registry
    /// [default: /etc/containerd/certs.d, then /etc/docker/certs.d; before them, for others than root,
    /// ~/.config/larder/certs.d].
    ///
    /// Given, it is the only one. A runtime has a configuration of its own.
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) certs_d: Option<PathBuf>,

    /// Where larder notes when images were used, what it removed, and what to keep
    /// [default: the folder collect of the store; for a runtime, one for its socket in the store's usual place].
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,

    /// The socket of a daemon (larder serve) that does the work, such as unix:///run/larder/larder.sock, or "none": then
    /// no daemon is asked; a command that has the images open is [env: LARDER_DAEMON] [default: the daemon that runs on these images, if any].
    #[arg(long, global = true, value_name = "SOCKET")]
    pub(crate) daemon: Option<String>,

    /// How long one call to the runtime may take, such as 30s or 5m; a bare number is seconds. Pulls have --pull-timeout
    /// [default: 2m, of which 5s to connect].
    #[arg(long, global = true, value_name = "DURATION", value_parser = timeout)]
    pub(crate) timeout: Option<Duration>,

    /// Say more on standard error: which credentials fit each image, which documents were skipped, the events of pulls
    /// without a pod. Twice for what helps to find a mistake in larder. Filters override it [env: LARDER_LOG].
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl Connection {
    /// What was given of where images are, as flags for a shell; empty if nothing was.
    pub(crate) fn given(&self) -> String {
        match (&self.root, &self.backend) {
            (Some(root), _) => format!("--root {}", quoted(&root.to_string_lossy())),
            (None, Some(backend)) => format!("--backend {}", quoted(backend)),
            (None, None) => String::new(),
        }
    }
}

fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-:@%+=,".contains(c);
    if text.chars().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Demo(DemoArgs),
    Serve(Box<ServeArgs>),
    Ensure(EnsureArgs),
    Pull(PullArgs),
    Images(ImagesArgs),
    Inspect(InspectArgs),
    Rm(RmArgs),
    Df(DfArgs),
    Gc(GcArgs),
    Explain(ExplainArgs),
    History(HistoryArgs),
    Keep(KeepArgs),
    Unkeep(UnkeepArgs),
    Lease(LeaseArgs),
    Status(StatusArgs),
    Events(EventsArgs),
    Reload(ReloadArgs),
    Runtime(RuntimeArgs),
    Load(LoadArgs),
    Mount(MountArgs),
    Mounts(MountsArgs),
    Umount(UmountArgs),
    Fsck(FsckArgs),
    Login(LoginArgs),
    Logout(LogoutArgs),
    Config(Box<ConfigArgs>),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

impl Command {
    /// Whether it answers from what there is, and changes nothing.
    pub(crate) fn only_looks(&self) -> bool {
        matches!(
            self,
            Command::Images(_)
                | Command::Inspect(_)
                | Command::Df(_)
                | Command::Explain(_)
                | Command::History(_)
                | Command::Mounts(_)
                | Command::Runtime(_)
        )
    }
}

/// See larder at work: in a temporary folder, without root, network or container runtime.
///
/// Starts a registry in this process, on loopback, and runs larder's own commands against it: pull, pull again, disk
/// use, a damaged file found and repaired, removal. Each step is checked by what the registry served and by what is on
/// disk. It takes a few seconds and 50 MB, and leaves nothing behind.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder demo
  larder demo --keep          leave the folder, to look around in

Exit code: 0 every step holds, 1 one does not, 130 interrupted.")]
pub(crate) struct DemoArgs {
    /// Keep the folder, and say where it is.
    #[arg(long)]
    pub(crate) keep: bool,
}

/// Print the completion script of a shell.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder completions bash > /etc/bash_completion.d/larder
  larder completions zsh > ~/.zfunc/_larder")]
pub(crate) struct CompletionsArgs {
    /// The shell.
    pub(crate) shell: Shell,
}

/// Print the manual page, or write the pages of all commands.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder man | man -l -
  larder man --dir /usr/local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Write larder.1, larder-ensure.1 and so on into this directory.
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
}

/// The level that `-v`, given so often, stands for.
pub(crate) fn verbosity_level(verbosity: u8) -> tracing::Level {
    match verbosity {
        0 => tracing::Level::WARN,
        1 => tracing::Level::INFO,
        _ => tracing::Level::DEBUG,
    }
}

fn timeout(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        Duration::ZERO => Err("it must be more than 0: write it like 10s".into()),
        timeout => Ok(timeout),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_was_given_can_be_typed_into_a_shell() {
        let docker = Connection { backend: Some("docker".into()), ..Connection::default() };
        let root = Connection { root: Some("/my images".into()), ..Connection::default() };
        assert_eq!(docker.given(), "--backend docker");
        assert_eq!(root.given(), "--root '/my images'");
        assert_eq!(Connection::default().given(), "");
    }
}
