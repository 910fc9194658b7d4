//! Which programs the real servers need, and which Debian package brings each.

use std::env;
use std::path::PathBuf;

use super::{PeerError, PeerResult};

/// A Debian package that tests with real servers use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Package {
    /// The container runtime, with `ctr`.
    Containerd,
    /// The runtime that containerd runs containers with.
    Runc,
    /// Docker Engine, with `dockerd`.
    DockerIo,
    /// The registry.
    DockerRegistry,
    /// Pushes images.
    Skopeo,
    /// Makes certificates.
    Openssl,
    /// Unpacks images: what ours are compared with.
    Umoci,
    /// Reads archives, with `bsdtar`.
    Libarchive,
    /// Reads archives as small systems do.
    Busybox,
    /// Lets system calls fail.
    Strace,
    /// Checks units, and hands sockets over; no server of it runs.
    Systemd,
    /// Checks EROFS files.
    ErofsUtils,
    /// Serves Docker's API.
    Podman,
    /// Checks metrics and alert rules with `promtool`, and reads metrics.
    Prometheus,
    /// A shell that completes command lines.
    Zsh,
    /// Another one.
    Fish,
}

impl Package {
    /// Packages that `scripts/try` installs: each plays a part with real servers.
    pub const ALL: [Package; 6] = [
        Package::Containerd,
        Package::Runc,
        Package::DockerRegistry,
        Package::Skopeo,
        Package::Openssl,
        Package::Umoci,
    ];

    /// Its name for `apt-get install`.
    pub fn name(self) -> &'static str {
        match self {
            Package::Containerd => "containerd",
            Package::Runc => "runc",
            Package::DockerIo => "docker.io",
            Package::DockerRegistry => "docker-registry",
            Package::Skopeo => "skopeo",
            Package::Openssl => "openssl",
            Package::Umoci => "umoci",
            Package::Libarchive => "libarchive-tools",
            Package::Busybox => "busybox",
            Package::Strace => "strace",
            Package::Systemd => "systemd",
            Package::ErofsUtils => "erofs-utils",
            Package::Podman => "podman",
            Package::Prometheus => "prometheus",
            Package::Zsh => "zsh",
            Package::Fish => "fish",
        }
    }

    /// The program that larder's tests run from it; nearly every package has one of its own name.
    pub fn program(self) -> Option<PathBuf> {
        find_program(match self {
            Package::DockerIo => "dockerd",
            Package::Systemd => "systemd-analyze",
            Package::ErofsUtils => "fsck.erofs",
            Package::Libarchive => "bsdtar",
            other => other.name(),
        })
    }
}

/// Whether a test with real servers can run here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Availability {
    /// All are installed.
    Available,
    /// Something is missing; the text says what, and how to get it.
    Skip(String),
}

impl Availability {
    /// Whether the test can run.
    pub fn is_available(&self) -> bool {
        *self == Availability::Available
    }
}

/// Says whether `packages` are installed and this user may use them.
///
/// # Panics
/// When something is missing and the environment variable `CI` is set: a test that CI skips tests nothing.
pub fn require(packages: &[Package]) -> Availability {
    let Some(reason) = lacking(packages) else { return Availability::Available };
    assert!(env::var_os("CI").is_none(), "CI must not skip tests with real servers: {reason}");
    eprintln!("==== SKIPPED, NOT TESTED: {reason} ====");
    Availability::Skip(reason)
}

/// Returns why these packages cannot be used here, and what to do about it; `None` if they can.
pub fn lacking(packages: &[Package]) -> Option<String> {
    let mut missing: Vec<&str> =
        packages.iter().filter(|package| package.program().is_none()).map(|package| package.name()).collect();
    let servers = [Package::Containerd, Package::DockerIo];
    let has_server = packages.iter().any(|package| servers.contains(package));
    if has_server && find_program("setpriv").is_none() {
        missing.push("util-linux");
    }
    if !missing.is_empty() {
        return Some(format!("missing: {0}; as root: apt-get install -y {0}", missing.join(" ")));
    }
    let needs_root = has_server && !rustix::process::geteuid().is_root();
    needs_root.then(|| "containerd and dockerd need root; run this as root".to_owned())
}

/// A program on `PATH`, or in the directories for administrators that are often not on it.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|program| program.is_file())
}

/// Like [`find_program`], as an error that says what to install.
pub(crate) fn program(package: Package) -> PeerResult<PathBuf> {
    package.program().ok_or_else(|| {
        PeerError::new(
            package.name(),
            format!("not installed; as root: apt-get install -y {}", package.name()),
        )
    })
}
