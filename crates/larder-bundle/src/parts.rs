//! The list of parts, and the page that explains them.

use std::fmt::Write as _;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use crate::BundleFile;

/// Where a part comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PartSource {
    /// A command of this program that asks the daemon, or opens the images itself.
    Images(&'static [&'static str]),
    /// A command of this program that does not.
    Own(&'static [&'static str]),
    /// Another program with its arguments.
    Program(&'static [&'static str]),
    /// Several programs, each with the argument `--version`.
    Versions(&'static [&'static str]),
    /// A file.
    File(&'static str),
    /// larder's settings file, also where it is invalid.
    SettingsFile,
    /// The daemon's metrics, from the socket in the status.
    Metrics,
    /// The log of the daemon's unit.
    Log,
    /// Variables of this process that concern larder.
    Environment,
    /// Mounted filesystems, without those of the kernel's interfaces.
    Mounts,
    /// Text of the caller about the program.
    About,
}

/// One file of the bundle.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BundlePart {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) source: PartSource,
}

impl BundlePart {
    /// Returns true if the part is collected from a daemon, after the status has shown that one answers.
    pub(crate) fn follows_status(&self) -> bool {
        matches!(self.source, Images(_) | Metrics) && self.name != STATUS
    }
}

/// The daemon's status.
pub(crate) const STATUS: &str = "status.json";

const fn part(name: &'static str, about: &'static str, source: PartSource) -> BundlePart {
    BundlePart { name, about, source }
}

use PartSource::{
    About, Environment, File, Images, Log, Metrics, Mounts, Own, Program, SettingsFile, Versions,
};

/// The parts, in the order in which they are collected: what a slow disk or daemon does not delay comes first. The
/// status comes before what else the daemon is asked for: it shows whether one answers.
pub(crate) const ALL: &[BundlePart] = &[
    part("version.txt", "version and features of larder", About),
    part("environment.txt", "variables that concern larder", Environment),
    part("log.txt", "the log of the unit larder", Log),
    part(
        "unit.txt",
        "the state of the unit larder",
        Program(&[
            "systemctl",
            "show",
            "larder.service",
            "larder.socket",
            "--property",
            "Id,LoadState,ActiveState,SubState,Result,NRestarts,ExecMainStartTimestamp,ExecMainStatus,FragmentPath,DropInPaths,MemoryCurrent,TasksCurrent",
        ]),
    ),
    part("kernel.txt", "the kernel", Program(&["uname", "-a"])),
    part("os-release.txt", "the distribution", File("/etc/os-release")),
    part("mountinfo.txt", "mounts with their types and options", Mounts),
    part("kernel-filesystems.txt", "filesystem types that the kernel knows", File("/proc/filesystems")),
    part("memory.txt", "memory of the machine", File("/proc/meminfo")),
    part("pressure-io.txt", "stalls on I/O", File("/proc/pressure/io")),
    part(
        "versions.txt",
        "versions of container runtimes and of systemd",
        Versions(&[
            "containerd",
            "runc",
            "crun",
            "crio",
            "dockerd",
            "podman",
            "kubelet",
            "crictl",
            "systemctl",
        ]),
    ),
    part("settings-file.yaml", "the settings file, without secrets", SettingsFile),
    part("settings.yaml", "effective settings", Own(&["config"])),
    part("settings-check.txt", "problems of the settings, and their files", Own(&["config", "--check"])),
    part(STATUS, "the daemon: process, backend, disk, pulls, calls", Images(&["status", "-o", "json"])),
    part("metrics.txt", "the daemon's metrics", Metrics),
    part("runtime.json", "the backend, its version and conditions", Images(&["runtime", "-o", "json"])),
    part("images.json", "all images", Images(&["images", "-o", "json"])),
    part("df.json", "disk usage of images and of the store", Images(&["df", "-o", "json"])),
    part(
        "gc-plan.json",
        "what GC would remove, and why not the rest",
        Images(&["gc", "--dry-run", "-o", "json"]),
    ),
    part("gc-log.json", "the journal of removed images", Images(&["gc", "log", "-o", "json"])),
    part("keep.json", "keep rules", Images(&["keep", "-o", "json"])),
    part("leases.json", "leases", Images(&["lease", "-o", "json"])),
    part("events.jsonl", "the daemon's recent events", Images(&["events", "-o", "json"])),
    part("mounts.json", "mounts of images of the store", Images(&["mounts", "-o", "json"])),
    part(
        "fsck.txt",
        "a check of names, sizes and modes in the store; impossible while a daemon has it",
        Own(&["fsck", "--quick", "--no-wait"]),
    ),
    part("filesystems.txt", "size and use of filesystems", Program(&["df", "-P", "-T", "-k"])),
    part("inodes.txt", "inodes of filesystems", Program(&["df", "-P", "-i"])),
];

/// Text about what is left out, and why.
const LEFT_OUT: &str = "\
Left out:

- Credentials: Docker's config.json, pull secrets, credential providers and their configuration, certificates, certs.d
  (headers of hosts.toml may be credentials). They are not read.
- Manifests of static pods and of the prefetch list: they may contain secrets. Their images are in images.json.
- Pull records: they contain hashes of credentials.
- Values of variables that are not larder's own or proxies; user names and passwords in URLs; values of keys such as
  password, token, secret, auth and authorization; paths and queries of URLs in the settings; tokens in any text. Each
  is replaced by ****.
- The contents of images.

Names of images, registries, pods, hosts and directories are in the bundle. Read it before you make it public.
";

/// The page that explains the bundle.
pub(crate) fn readme(files: &[BundleFile], now: Timestamp, since: Duration) -> BundleFile {
    let mut text = format!(
        "# A bundle of larder\n\nMade at {now:.0}, with the log of the last {:#}. A part that failed has a file NAME.error.\n\n",
        SignedDuration::try_from(since).unwrap_or(SignedDuration::MAX)
    );
    for file in files {
        let failed = file.error.as_ref().map_or("", |_| " (failed)");
        // Writing to a `String` does not fail.
        let _ = writeln!(text, "- {}: {}{failed}", file.name, file.about);
    }
    let _ = write!(text, "\n{LEFT_OUT}");
    BundleFile { name: "README.md".to_owned(), about: "this page", text, error: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_open_no_images_are_collected_before_those_that_do() {
        let opens = |part: &&BundlePart| matches!(part.source, Images(_) | Metrics);
        let first = ALL.iter().position(|part| opens(&part)).unwrap();
        let later: Vec<&str> =
            ALL[first..].iter().filter(|part| !opens(part)).map(|part| part.name).collect();
        assert_eq!(later, ["fsck.txt", "filesystems.txt", "inodes.txt"], "these wait for disks too");
        assert_eq!(ALL[first].name, STATUS);
    }

    #[test]
    fn the_page_lists_each_part_and_what_is_left_out() {
        let file = |name: &str, error: Option<&str>| BundleFile {
            name: name.into(),
            about: "a part",
            text: String::new(),
            error: error.map(str::to_owned),
        };
        let files = [file("a.txt", None), file("b.txt", Some("broken"))];
        let page = readme(&files, Timestamp::UNIX_EPOCH, Duration::from_secs(5400)).text;
        assert!(page.contains("Made at 1970-01-01T00:00:00Z, with the log of the last 1h 30m."), "{page}");
        assert!(page.contains("- a.txt: a part\n- b.txt: a part (failed)\n\nLeft out:\n"), "{page}");
    }
}
