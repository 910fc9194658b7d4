//! The command line, as typed. Commands interpret it.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

mod bundle;
mod collect;
mod config;
mod containerd;
mod daemon;
mod groups;
pub(crate) mod habits;
mod image_list;
mod images;
mod kube;
mod login;
mod platform;
mod pull_flags;
mod serve;
pub(crate) mod settings;
mod store;
mod suggestions;
mod verify;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::Resettable;
use clap::{Arg, ArgAction, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use clap_complete::Shell;

use larder_agent::config::SettingOrigin;
use larder_agent::environment::variable;
use larder_agent::quantity::parse_duration;

use crate::exit;
use crate::output::hint::quoted;
use crate::output::style::ColorChoice;

pub(crate) use bundle::BundleArgs;
pub(crate) use collect::{
    ExplainAccessArgs, ExplainArgs, ExplainSubcommand, GcArgs, GcLogArgs, GcSubcommand, KeepArgs,
    KeepSubcommand, PruneArgs, UnkeepArgs,
};
pub(crate) use config::ConfigArgs;
pub(crate) use containerd::{ConfigureArgs, ContainerdArgs, ContainerdSubcommand};
pub(crate) use daemon::{
    EventsArgs, EventsSince, LeaseArgs, LeaseSubcommand, ReloadArgs, StatusArgs, TopArgs,
};
pub(crate) use groups::{ImageArgs, SystemArgs};
pub(crate) use image_list::{ImageFilter, SortKey};
pub(crate) use images::{
    DfArgs, ExistsArgs, HistoryArgs, ImagesArgs, InspectArgs, RmArgs, RuntimeArgs, TagArgs,
};
pub(crate) use kube::KubeArgs;
#[cfg(feature = "kube")]
pub(crate) use kube::{KubeCheckArgs, KubeSubcommand};
pub(crate) use login::{LoginArgs, LogoutArgs};
pub(crate) use platform::{PlatformFlag, is_id};
pub(crate) use pull_flags::{
    CompleteArgs, CredentialArgs, EnsureArgs, PullArgs, PullCallFlags, PullFlags, PullWorkArgs, TlsFlags,
};
pub(crate) use serve::ServeArgs;
pub(crate) use store::{
    ExportArgs, ExportFormat, FsckArgs, LoadArgs, MountArgs, MountsArgs, SaveArgs, UmountArgs,
};
use suggestions::retain_similar;
pub(crate) use verify::VerifyArgs;

/// Manage the container images of a node: pull, list, explain, garbage-collect.
///
/// Works on larder's own store, which requires no container runtime; with --backend on the images of containerd, CRI-O,
/// another CRI runtime, or Docker.
#[derive(Debug, Parser)]
#[command(
    name = "larder",
    version,
    after_help = format!("{EXAMPLES}\n\n{MORE}"),
    after_long_help = format!("{EXAMPLES}\n\n{}\n\n{MORE}", exit::HELP),
    subcommand_required = true,
    arg_required_else_help = true,
    disable_help_flag = true
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) connection: GlobalFlags,

    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "Examples:
  larder demo                        try larder in a few seconds, without root or network
  larder ensure -f pod.yaml          pull the missing images of a pod, as kubelet does
  larder ensure -f manifests/ -R     the same for a directory of manifests
  larder images                      list images
  larder gc --dry-run                show what GC would remove, and why
  larder mount busybox:1.36 /mnt     mount the root filesystem of an image
  larder --backend cri images        list the images of containerd or CRI-O
  larder --backend docker images     list the images of Docker";

const MORE: &str = "\
Options of every command, such as --backend and --root: larder help global
All options of a command: larder help COMMAND";

/// The options of every command, which are printed by `larder help global` only.
const GLOBAL_OPTIONS: &str = "Global options";

/// Has the root of larder's own store where no flag does.
const ROOT_VARIABLE: &str = "LARDER_ROOT";

/// Options of every command: the backend, its directories, the daemon.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = GLOBAL_OPTIONS)]
pub(crate) struct GlobalFlags {
    /// The backend: "store" for larder's own store, "cri" for the CRI runtime of this machine, "docker" for Docker
    /// Engine, "podman" for Podman, or the socket of a runtime, such as unix:///run/containerd/containerd.sock
    /// [env: LARDER_BACKEND] [default: backend of the settings, store].
    ///
    /// "cri" uses $CONTAINER_RUNTIME_ENDPOINT and $IMAGE_SERVICE_ENDPOINT, as crictl does, else the first default
    /// socket of a runtime that answers (containerd, CRI-O, cri-dockerd, k3s). "docker" uses $DOCKER_HOST (with
    /// $DOCKER_TLS_VERIFY and $DOCKER_CERT_PATH, as docker does), else /var/run/docker.sock; docker:///path/to.sock and
    /// docker://HOST:PORT name another engine. "podman" uses $CONTAINER_HOST, else the socket of this user's or of
    /// root's podman.socket. load, save, export, mount, mounts, umount and fsck work on larder's own store only and
    /// ignore $LARDER_BACKEND. An empty variable counts as unset.
    // Not clap's `env`: it takes an empty variable for a value, and shows the option as required in usage texts.
    #[arg(long, global = true, value_name = "ENDPOINT")]
    pub(crate) backend: Option<String>,

    /// Directory of larder's own store; ensure, pull and load create it if missing
    /// [env: LARDER_ROOT, unless --backend is given; it overrides LARDER_BACKEND]
    /// [default: /var/lib/larder, without root ~/.local/share/larder].
    #[arg(long, global = true, value_name = "DIR", conflicts_with = "backend")]
    pub(crate) root: Option<PathBuf>,

    /// Whether `root` is the value of the variable.
    #[arg(skip)]
    pub(crate) root_is_of_variable: bool,

    /// Directory with mirrors, CA certificates and client certificates of registries, for larder's own store: in
    /// containerd's certs.d format, with HOST/hosts.toml or Docker's certificates for each registry
    /// [default: /etc/containerd/certs.d, then /etc/docker/certs.d; without root, ~/.config/larder/certs.d before
    /// them].
    ///
    /// If given, no other directory is read. A runtime has its own configuration.
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) certs_d: Option<PathBuf>,

    /// State directory: last use of images, GC history, keep rules
    /// [default: collect in the root of the store; for a runtime, a directory per socket in the default root].
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,

    /// Socket of the daemon (larder serve) to use, such as unix:///run/larder/larder.sock, or "none" to use no daemon
    /// [env: LARDER_DAEMON] [default: the daemon that serves these images, if one runs].
    ///
    /// With "none", a command still connects to another larder command that has the images open.
    #[arg(long, global = true, value_name = "SOCKET")]
    pub(crate) daemon: Option<String>,

    /// Timeout of one call to the runtime, such as 30s or 5m; a bare number is seconds. Of pulls, the time limit for
    /// each image, unless --pull-timeout is given [default: 2m, and 5s to connect; none for pulls].
    #[arg(long, global = true, value_name = "DURATION", value_parser = timeout, allow_hyphen_values = true)]
    pub(crate) timeout: Option<Duration>,

    /// When to use colors; auto also heeds $NO_COLOR and $CLICOLOR_FORCE.
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN")]
    pub(crate) color: ColorChoice,

    /// Log more to standard error: the credentials for each image, skipped documents, events of pulls without a pod.
    /// Twice for debug logs. Filters override it [env: LARDER_LOG].
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl GlobalFlags {
    /// The flag or variable that has `root`.
    pub(crate) fn root_origin(&self) -> SettingOrigin {
        if self.root_is_of_variable {
            SettingOrigin::Variable(ROOT_VARIABLE)
        } else {
            SettingOrigin::Flag("--root")
        }
    }

    /// The flags that select the images, quoted for a shell; empty without one.
    pub(crate) fn given(&self) -> String {
        match (&self.root, &self.backend) {
            (Some(root), _) => format!("--root {}", quoted(&root.to_string_lossy())),
            (None, Some(backend)) => format!("--backend {}", quoted(backend)),
            (None, None) => String::new(),
        }
    }

    /// The flags that select images and daemon, as arguments for another run.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let path =
            |name: &str, value: &Option<PathBuf>| Some((name.to_owned(), value.clone()?.into_os_string()));
        let text = |name: &str, value: &Option<String>| Some((name.to_owned(), value.clone()?.into()));
        let given = [
            text("--backend", &self.backend),
            path("--root", &self.root),
            path("--certs-d", &self.certs_d),
            path("--state", &self.state),
            text("--daemon", &self.daemon),
        ];
        given.into_iter().flatten().flat_map(|(name, value)| [name.into(), value]).collect()
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Demo(DemoArgs),
    Serve(Box<ServeArgs>),
    Ensure(EnsureArgs),
    Pull(PullArgs),
    Complete(CompleteArgs),
    Images(ImagesArgs),
    Inspect(InspectArgs),
    Rm(RmArgs),
    Tag(TagArgs),
    Df(DfArgs),
    Gc(GcArgs),
    Prune(PruneArgs),
    Explain(ExplainArgs),
    History(HistoryArgs),
    Keep(KeepArgs),
    Unkeep(UnkeepArgs),
    Lease(LeaseArgs),
    Top(TopArgs),
    Status(StatusArgs),
    Events(EventsArgs),
    Reload(ReloadArgs),
    Runtime(RuntimeArgs),
    Bundle(BundleArgs),
    Load(LoadArgs),
    Save(SaveArgs),
    Export(ExportArgs),
    Mount(MountArgs),
    Mounts(MountsArgs),
    Umount(UmountArgs),
    Fsck(FsckArgs),
    Login(LoginArgs),
    Logout(LogoutArgs),
    Config(Box<ConfigArgs>),
    Containerd(ContainerdArgs),
    Kube(KubeArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
    Global(GlobalHelpArgs),
    #[command(name = "image")]
    ImageGroup(ImageArgs),
    #[command(name = "system")]
    SystemGroup(SystemArgs),
    Version(VersionArgs),
    /// Under `image` only.
    #[command(skip)]
    Exists(ExistsArgs),
}

impl Command {
    /// Returns true if the command changes nothing.
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(
            self,
            Command::Images(_)
                | Command::Inspect(_)
                | Command::Exists(_)
                | Command::Df(_)
                | Command::Explain(_)
                | Command::History(_)
                | Command::Mounts(_)
                | Command::Runtime(_)
                | Command::Gc(GcArgs { action: Some(GcSubcommand::Log(_)), .. })
        )
    }
}

/// Try larder in a temporary directory, without root, network or container runtime.
///
/// Starts a registry on loopback and runs larder's own commands against it: pull, list, pull again, disk usage, find
/// and repair a damaged file, explain, collect. Each step is verified against the registry's log and the files on disk.
/// Takes a few seconds and 50 MB, and removes everything at the end.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder demo
  larder demo --keep          keep the directory
  TMPDIR=/var/tmp larder demo

Exit code: 0 all steps passed, 1 a step failed, 130 interrupted.")]
pub(crate) struct DemoArgs {
    /// Keep the directory, and print its path.
    #[arg(long)]
    pub(crate) keep: bool,
}

/// Print the version.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder version
  larder runtime        the version of the backend
  larder status         the version of the daemon")]
pub(crate) struct VersionArgs {}

/// Print the completion script for a shell.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder completions bash > /etc/bash_completion.d/larder
  larder completions zsh > ~/.zfunc/_larder
  larder completions fish > ~/.config/fish/completions/larder.fish")]
pub(crate) struct CompletionsArgs {
    /// The shell.
    pub(crate) shell: Shell,
}

/// Print the manual page, or write the manual pages of all commands.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder man | man -l -
  larder man > larder.1
  larder man --dir /usr/local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Write larder.1, larder-ensure.1 and so on into this directory.
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
}

/// Options of every command.
#[derive(Debug, Args)]
#[command(hide = true, override_usage = "larder [GLOBAL OPTIONS] <COMMAND>")]
pub(crate) struct GlobalHelpArgs {}

/// The command line. Help of a command has its own options; `larder help global` has those of every command.
pub(crate) fn command() -> clap::Command {
    let is_global = |arg: &Arg| arg.get_help_heading() == Some(GLOBAL_OPTIONS);
    let help = Arg::new("help").short('h').long("help").action(ArgAction::HelpShort).global(true);
    let help = help.help_heading(Resettable::Reset);
    let command = Cli::command().mut_args(|arg| if is_global(&arg) { arg.hide(true) } else { arg });
    command.arg(help.help("Print help")).mut_subcommand("global", |global| {
        let global = <GlobalFlags as Args>::augment_args(global.disable_help_flag(true));
        global.mut_args(|arg| if is_global(&arg) { arg.global(false) } else { arg })
    })
}

/// The pages of the manual show all options.
pub(crate) fn command_with_global_options() -> clap::Command {
    command().mut_args(|arg| arg.hide(false))
}

impl Cli {
    /// The command line of this process, or of `words`.
    pub(crate) fn read(
        words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Cli, clap::Error> {
        let mut command = command();
        let matches = command.try_get_matches_from_mut(words).map_err(retain_similar)?;
        let mut cli = Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
        let GlobalFlags { root, root_is_of_variable, backend, .. } = &mut cli.connection;
        if root.is_none() && backend.is_none() {
            *root = variable(ROOT_VARIABLE).map(PathBuf::from);
            *root_is_of_variable = root.is_some();
        }
        Ok(cli)
    }
}

/// The log level for this number of `-v`.
pub(crate) fn verbosity_level(verbosity: u8) -> tracing::Level {
    match verbosity {
        0 => tracing::Level::WARN,
        1 => tracing::Level::INFO,
        _ => tracing::Level::DEBUG,
    }
}

/// The shortest timeout: the control API counts milliseconds.
const SHORTEST: Duration = Duration::from_millis(1);

fn timeout(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        short if short < SHORTEST => Err("must be at least 1ms, such as 10s".into()),
        timeout => Ok(timeout),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
        command_with_global_options().debug_assert();
    }

    #[test]
    fn a_time_for_which_images_are_retained_has_a_unit() {
        for (line, message) in [
            (&["keep", "x", "--ttl", "1"][..], "no unit: write 1s, 1m, 1h or 1d"),
            (&["keep", "x", "--ttl", "0"], "must be greater than 0"),
            (&["lease", "x", "1"], "no unit: write 1s, 1m, 1h or 1d"),
        ] {
            let error = Cli::read(["larder"].iter().chain(line)).unwrap_err().to_string();
            assert!(error.contains(message), "{line:?}: {error}");
        }
    }

    #[test]
    fn flags_in_hints_are_quoted_for_a_shell() {
        let docker = GlobalFlags { backend: Some("docker".into()), ..GlobalFlags::default() };
        let root = GlobalFlags { root: Some("/my images".into()), ..GlobalFlags::default() };
        assert_eq!(docker.given(), "--backend docker");
        assert_eq!(root.given(), "--root '/my images'");
        assert_eq!(GlobalFlags::default().given(), "");
    }
}
