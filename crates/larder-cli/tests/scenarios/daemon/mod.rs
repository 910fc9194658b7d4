//! The daemon on larder's own store, and the command line as its client.

mod calls;
mod ensures;
mod meddling;
mod ways;

use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{HoldingProxy, ImageBuilder, Package, RegistryOptions, RegistryProcess, require};
use tempfile::TempDir;

use crate::world::{LarderOutput, LarderProcess, larder_in};

/// A registry, a directory for a store, and perhaps a daemon.
struct MachineWithDaemon {
    registry: RegistryProcess,
    home: TempDir,
    /// Whom larder runs as, if not as this user.
    user: Option<u32>,
    daemon: Option<LarderProcess>,
}

impl MachineWithDaemon {
    fn new() -> Option<MachineWithDaemon> {
        if !require(&[Package::DockerRegistry, Package::Skopeo]).is_available() {
            return None;
        }
        let registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
        Some(MachineWithDaemon { registry, home: tempfile::tempdir().unwrap(), user: None, daemon: None })
    }

    fn serving() -> Option<MachineWithDaemon> {
        let mut machine = MachineWithDaemon::new()?;
        machine.serve();
        Some(machine)
    }

    fn root(&self) -> PathBuf {
        self.home.path().join("store")
    }

    fn socket(&self) -> PathBuf {
        self.root().join("larder.sock")
    }

    fn gate(&self) -> HoldingProxy {
        HoldingProxy::for_registry(self.registry.port()).unwrap()
    }

    /// Pushes a small image and returns the name that it has there.
    fn push(&self, seed: u64, name: &str) -> String {
        ImageBuilder::small(seed, 100_000).push(&self.registry, name).unwrap();
        self.registry.image(name)
    }

    fn serve(&mut self) {
        self.serve_with(&[]);
    }

    fn serve_with(&mut self, flags: &[&str]) {
        // Whatever else is on the disk of the tests is not to start a collection.
        let never = ["--image-gc-high-threshold", "100", "--metrics-address", ""];
        self.daemon = Some(self.start(&[&["serve"][..], &never, flags].concat()));
        wait_until("the daemon listens, and says where", || {
            self.root().join("daemon").exists() && UnixStream::connect(self.socket()).is_ok()
        });
    }

    /// Stops the daemon as a service manager does, and waits for its end.
    fn stop(&mut self) -> LarderOutput {
        let daemon = self.daemon.take().expect("a daemon");
        daemon.terminate();
        daemon.finish()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = larder_in(self.home.path());
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        command.arg("--root").arg(self.root()).args(arguments);
        command
    }

    fn start(&self, arguments: &[&str]) -> LarderProcess {
        LarderProcess::start(self.command(arguments))
    }

    fn larder(&self, arguments: &[&str]) -> LarderOutput {
        self.start(arguments).finish()
    }

    fn status(&self) -> serde_json::Value {
        self.larder(&["status", "-o", "json"]).expect(0).json()
    }
}

/// Whether this process may become other users and mount; says loudly that a test is skipped where it may not.
fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    assert!(root || std::env::var_os("CI").is_none(), "with CI set, this needs root");
    if !root {
        eprintln!("SKIPPED: this needs root");
    }
    root
}

/// Gives a directory and what is in it to a user.
fn give(dir: &Path, user: u32) {
    let status = Command::new("chown").args(["-R", &format!("{user}:{user}")]).arg(dir).status();
    assert!(status.unwrap().success());
}

/// UID and GID of a user without privileges.
const UNPRIVILEGED_USER: u32 = 65534;
