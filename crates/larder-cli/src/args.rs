//! The command line: exactly what can be typed. What it means is worked out where it is used.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use larder::credentials::Tokens;
use larder::pull::{PullConfig, PullPolicy};

use crate::duration;
use crate::exit;
use crate::failure::Failure;
use crate::output::{DataFormat, Format};

/// Keeps a node's container images: fetched when wanted, kept while used.
///
/// Images are kept in larder's own store, which needs no container runtime; with --backend they are those of containerd,
/// CRI-O or any other CRI runtime.
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
  larder mount busybox:1.36 /mnt     the root file system of an image
  larder --backend cri images        the same commands on containerd or CRI-O";

/// What larder talks to, and how. Good with every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Connection {
    /// Where images live, if not in larder's own store: the socket of a container runtime, such as
    /// unix:///run/containerd/containerd.sock, or "cri" for whatever runtime runs here [env: LARDER_BACKEND]
    /// [default: store].
    ///
    /// Without it, larder uses a store of its own, which needs no runtime; a runtime is used only where one is named.
    /// "cri" stands for $CONTAINER_RUNTIME_ENDPOINT and $IMAGE_SERVICE_ENDPOINT, as crictl reads them, else for the first
    /// socket that a runtime listens on where runtimes usually do (containerd, CRI-O, cri-dockerd, k3s); where there is
    /// none, the error lists what was tried. "store" is larder's own store, whatever $LARDER_BACKEND says. An empty
    /// variable counts as unset.
    // Not clap's `env`: it takes an empty variable for a value, and shows the option as required in usage texts.
    #[arg(long, global = true, value_name = "ENDPOINT")]
    pub(crate) backend: Option<String>,

    /// Use larder's own store in this folder, which is made if there is none
    /// [default: /var/lib/larder, for others than root ~/.local/share/larder].
    #[arg(long, global = true, value_name = "DIR", conflicts_with = "backend")]
    pub(crate) root: Option<PathBuf>,

    /// How long one call to the runtime may take, such as 30s or 5m; a bare number is seconds. Pulls have --pull-timeout
    /// [default: 2m, of which 5s to connect].
    #[arg(long, global = true, value_name = "DURATION", value_parser = timeout)]
    pub(crate) timeout: Option<Duration>,

    /// Say more on standard error: which credentials fit each image, which documents were skipped, the events of pulls
    /// without a pod. Twice for what helps to find a mistake in larder.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Demo(DemoArgs),
    Ensure(EnsureArgs),
    Pull(PullArgs),
    Images(ImagesArgs),
    Inspect(InspectArgs),
    Rm(RmArgs),
    Df(DfArgs),
    Runtime(RuntimeArgs),
    Load(LoadArgs),
    Mount(MountArgs),
    Mounts(MountsArgs),
    Umount(UmountArgs),
    Fsck(FsckArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
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

/// Make images present: those named, or all that Kubernetes manifests need.
///
/// Each image goes through kubelet's steps (pull policy, credentials, back-off, queue) and prints kubelet's events.
/// Read from manifests: Pod, Deployment, StatefulSet, DaemonSet, ReplicaSet, ReplicationController, Job, CronJob,
/// PodTemplate, lists of these, objects of any other kind with a pod template at spec.template, and Secrets for the
/// imagePullSecrets of the pods beside them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder ensure busybox:1.36                            one image
  larder ensure -f pod.yaml                             all images of a pod
  larder ensure -f deploy/ -R --secret regcred.yaml     a tree of manifests and a pull secret
  kubectl get pods -A -o yaml | larder ensure -f -      everything that runs in a cluster
  larder ensure -f pod.yaml --retry-for 5m              keep trying with kubelet's back-off
  larder ensure -f pod.yaml -o json                     for programs

Exit code: 0 all present, 1 some failed, 2 bad input, 3 backend unreachable, 130 interrupted.")]
pub(crate) struct EnsureArgs {
    /// Images to make present.
    #[arg(value_name = "IMAGE")]
    pub(crate) images: Vec<String>,

    /// A manifest, a directory of manifests (*.yaml, *.yml, *.json), or - for standard input; may be repeated.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) filename: Vec<PathBuf>,

    /// Read directories below the directories given with -f, too.
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,

    /// A manifest with pull secrets, for pods that name them and for IMAGE arguments; may be repeated.
    #[arg(long, value_name = "FILE")]
    pub(crate) secret: Vec<PathBuf>,

    /// Namespace of objects that name none.
    #[arg(short, long, value_name = "NAMESPACE", default_value = "default")]
    pub(crate) namespace: String,

    /// Use this pull policy and not those of the manifests. Where a manifest names none, it is Always for the tag
    /// latest, given or implied, and IfNotPresent for all else.
    #[arg(long, value_enum, ignore_case = true, value_name = "POLICY")]
    pub(crate) policy: Option<Policy>,

    /// Keep trying for this long, such as 90s or 5m: a runtime that is not up yet, and failed images when kubelet's
    /// back-off allows it. A bare number is seconds; 0 tries once.
    #[arg(long, value_name = "DURATION", default_value = "0", value_parser = duration::parse, hide_default_value = true)]
    pub(crate) retry_for: Duration,

    /// What results look like.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: Format,

    #[command(flatten)]
    pub(crate) pulling: Pulling,

    #[command(flatten)]
    pub(crate) credentials: CredentialArgs,
}

/// Pull images, present or not, and print their ids.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder pull busybox:1.36
  larder pull --quiet busybox:1.36                                   the id, and nothing else
  echo $TOKEN | larder pull --username me --password-stdin registry.example/app:1

Exit code: 0 all pulled, 1 some failed, 2 bad input, 3 backend unreachable, 130 interrupted.")]
pub(crate) struct PullArgs {
    /// Images to pull.
    #[arg(value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<String>,

    /// Print ids only.
    #[arg(short, long, conflicts_with = "output")]
    pub(crate) quiet: bool,

    /// Print what came of each image as data, and not only the ids.
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<DataFormat>,

    #[command(flatten)]
    pub(crate) pulling: Pulling,

    #[command(flatten)]
    pub(crate) credentials: CredentialArgs,
}

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
    pub(crate) output: Format,
}

/// Show everything the backend knows of images.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder inspect busybox:1.36
  larder inspect -o yaml sha256:0123...")]
pub(crate) struct InspectArgs {
    /// Names or ids of images.
    #[arg(value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<String>,

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
    pub(crate) images: Vec<String>,

    /// An image that is not there is as good as removed, and no image at all is none too few.
    #[arg(long)]
    pub(crate) ignore_not_found: bool,

    /// Remove images that containers use, too, and images that have names in other repositories. What is mounted out
    /// of larder's own store stays as it is until it is unmounted.
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
    pub(crate) output: Format,
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
    pub(crate) output: Format,
}

/// Load images from files into larder's own store: an OCI layout or archive, or what docker save writes.
///
/// Layers that are here already are skipped.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder load app.tar                                 docker save app:1 > app.tar
  larder load layout/ --name registry.example/app     an OCI layout whose names are but tags
  zcat app.tar.gz | larder load -

Exit code: 0 all loaded, 1 some failed, 2 not an image, 3 the store cannot be opened.")]
pub(crate) struct LoadArgs {
    /// Archives, folders with an OCI layout, or - for standard input.
    #[arg(value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,

    /// Repository of images whose names are but tags, as OCI layouts may have.
    #[arg(long, value_name = "REPOSITORY")]
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
    /// Name or id of the image.
    pub(crate) image: String,

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
    /// What results look like.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: Format,
}

/// Unmount images, and drop what was written to them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder umount /mnt")]
pub(crate) struct UmountArgs {
    /// Where they are mounted.
    #[arg(value_name = "DIR", required = true)]
    pub(crate) dirs: Vec<PathBuf>,
}

/// Check larder's own store: find every damaged or missing file, and repair what can be.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder fsck
  larder fsck --quick           compare names, sizes and modes, not contents
  larder fsck --repair          take damaged layers away; the next pull of their images brings them back
  larder fsck --rebuild         make a lost database anew from what is on disk

Exit code: 0 sound, 1 damaged, 3 the store cannot be opened.")]
pub(crate) struct FsckArgs {
    /// Compare names, sizes, modes and the like only, not contents.
    #[arg(long)]
    pub(crate) quick: bool,

    /// Put right what can be put right here, and note what a pull must bring back.
    #[arg(long)]
    pub(crate) repair: bool,

    /// Make the database anew from what is on disk, and then check.
    #[arg(long)]
    pub(crate) rebuild: bool,
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

/// A pull policy that can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub(crate) enum Policy {
    /// Pull, whatever is here.
    Always,
    /// Pull what is absent.
    IfNotPresent,
    /// Pull nothing.
    Never,
}

impl From<Policy> for PullPolicy {
    fn from(policy: Policy) -> PullPolicy {
        match policy {
            Policy::Always => PullPolicy::Always,
            Policy::IfNotPresent => PullPolicy::IfNotPresent,
            Policy::Never => PullPolicy::Never,
        }
    }
}

/// How pulls are queued and throttled, by kubelet's names.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Pulling")]
pub(crate) struct Pulling {
    /// Pull one image at a time [default: false].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) serialize_image_pulls: Option<bool>,

    /// How many images may be pulled at once [default: 4].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) max_parallel_image_pulls: Option<NonZeroU32>,

    /// Pulls started per second, on average; 0 is no limit [default: 5].
    #[arg(long, value_name = "N", value_parser = whole_number, allow_negative_numbers = true)]
    pub(crate) registry_qps: Option<u32>,

    /// Pulls started at once before that limit bites; 0 counts as 1, and with --kubelet as the default, as in kubelet's
    /// configuration [default: 10].
    #[arg(long, value_name = "N", value_parser = whole_number, allow_negative_numbers = true)]
    pub(crate) registry_burst: Option<u32>,

    /// Cancel a pull that takes longer than this once it has its turn, such as 10m; it counts as failed [default: none].
    #[arg(long, value_name = "DURATION", value_parser = timeout)]
    pub(crate) pull_timeout: Option<Duration>,

    /// Pull as kubelet does by default, in these four points: one pull at a time; a pull of its own for each container
    /// that wants an image; pulls over the limit fail, where larder lets them wait; identity and registry tokens of
    /// pull secrets and docker configs are ignored. The flags above adjust it. All else stays as it is: docker configs
    /// are looked for where users keep them, and bad input is refused.
    #[arg(long)]
    pub(crate) kubelet: bool,
}

impl Pulling {
    /// What is done with the tokens of credentials.
    pub(crate) fn tokens(&self) -> Tokens {
        if self.kubelet { Tokens::Ignore } else { Tokens::Keep }
    }

    /// What the flags mean.
    pub(crate) fn config(&self) -> Result<PullConfig, Failure> {
        let mut config = if self.kubelet { PullConfig::kubelet() } else { PullConfig::default() };
        let bound = self.max_parallel_image_pulls;
        if let Some(bound) = bound {
            config.max_parallel_image_pulls = Some(bound);
            // Kubelet's default is to serialise unless a bound above one is given.
            config.serialize_image_pulls &= bound.get() < 2;
        }
        if let Some(serialize) = self.serialize_image_pulls {
            config.serialize_image_pulls = serialize;
        }
        if config.serialize_image_pulls && bound.is_some_and(|bound| bound.get() > 1) {
            return Err(Failure::bad_input(
                "--max-parallel-image-pulls cannot be larger than 1 unless --serialize-image-pulls is false",
            ));
        }
        if let Some(qps) = self.registry_qps {
            config.registry_pull_qps = qps;
        }
        // Kubelet's configuration takes 0 for a burst that is not set.
        if let Some(burst) = self.registry_burst.filter(|burst| *burst > 0 || !self.kubelet) {
            config.registry_burst = burst;
        }
        config.pull_timeout = self.pull_timeout;
        Ok(config)
    }
}

/// Credentials beside those of pull secrets.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Credentials")]
pub(crate) struct CredentialArgs {
    /// Read credentials from this file, a docker config.json, and not from the usual places.
    #[arg(long, value_name = "FILE")]
    pub(crate) authfile: Option<PathBuf>,

    /// User name for the registry of the images; the password comes with --password-stdin.
    #[arg(short, long, value_name = "USER", requires = "password_stdin")]
    pub(crate) username: Option<String>,

    /// Read the password from standard input. There is no flag with the password itself: every user of the machine
    /// could see it in the list of processes.
    #[arg(long, requires = "username")]
    pub(crate) password_stdin: bool,
}

fn whole_number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("write a whole number from 0 to {}", u32::MAX))
}

fn at_least_one(text: &str) -> Result<NonZeroU32, String> {
    let number = whole_number(text).map_err(|_| format!("write a whole number from 1 to {}", u32::MAX))?;
    NonZeroU32::new(number).ok_or_else(|| "it must be at least 1".to_owned())
}

fn timeout(text: &str) -> Result<Duration, String> {
    match duration::parse(text)? {
        Duration::ZERO => Err("it must be more than 0: write it like 10s".into()),
        timeout => Ok(timeout),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use larder::pull::{OverRate, SameImage};

    use super::*;

    fn config(flags: &[&str]) -> Result<PullConfig, Failure> {
        let cli = Cli::try_parse_from(["larder", "pull", "x"].iter().chain(flags)).unwrap();
        match cli.command {
            Command::Pull(args) => args.pulling.config(),
            other => panic!("not pull: {other:?}"),
        }
    }

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn without_flags_pulls_are_as_larder_has_them() {
        assert_eq!(config(&[]), Ok(PullConfig::default()));
    }

    #[test]
    fn kubelets_behaviour_is_one_flag_and_can_be_adjusted() {
        assert_eq!(config(&["--kubelet"]), Ok(PullConfig::kubelet()));
        let adjusted = config(&["--kubelet", "--max-parallel-image-pulls", "3"]).unwrap();
        assert!(!adjusted.serialize_image_pulls, "as kubelet defaults it for a bound above one");
        assert_eq!((adjusted.over_rate, adjusted.same_image), (OverRate::Refuse, SameImage::EachRequest));
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(config(&["--serialize-image-pulls", "--max-parallel-image-pulls=2"]).is_err());
        assert!(config(&["--serialize-image-pulls=false", "--max-parallel-image-pulls=2"]).is_ok());
    }

    #[test]
    fn a_burst_of_zero_is_kubelets_default_only_to_kubelet() {
        assert_eq!(config(&["--registry-burst=0"]).unwrap().registry_burst, 0, "the throttle counts it as 1");
        assert_eq!(config(&["--kubelet", "--registry-burst=0"]).unwrap().registry_burst, 10);
    }

    #[test]
    fn wrong_numbers_are_refused_in_our_words() {
        for (flags, said) in [
            (["--max-parallel-image-pulls", "0"], "it must be at least 1"),
            (["--max-parallel-image-pulls", "x"], "write a whole number from 1 to 4294967295"),
            (["--registry-qps", "0.5"], "write a whole number from 0 to 4294967295"),
            (["--registry-qps", "-1"], "write a whole number from 0 to 4294967295"),
            (["--registry-burst", "99999999999"], "write a whole number from 0 to 4294967295"),
        ] {
            let error = Cli::try_parse_from(["larder", "pull", "x"].iter().chain(&flags)).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
    }

    #[test]
    fn there_is_no_flag_that_takes_a_password() {
        assert!(Cli::try_parse_from(["larder", "pull", "x", "--password", "p"]).is_err());
        assert!(Cli::try_parse_from(["larder", "pull", "x", "--username", "u"]).is_err());
    }
}
