//! `larder top` on a terminal, with a real daemon and pulls from a registry.

use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use larder_testkit_peers::process::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::{LocalModes, tcgetattr};

use crate::terminal::Terminal;
use crate::world::{CliOutput, larder};

const LEFT: &str = "\u{1b}[?1049l";
const ENTERED: &str = "\u{1b}[?1049h";

/// A store, and a daemon of it.
struct Node {
    home: tempfile::TempDir,
    daemon: Child,
}

impl Node {
    fn start() -> Node {
        let home = tempfile::tempdir().unwrap();
        let daemon = serve(home.path());
        let node = Node { home, daemon };
        wait_until("the daemon answers", || node.larder(&["status"]).code == Some(0));
        node
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = larder(self.home.path());
        command.arg("--root").arg(self.home.path().join("store")).args(arguments);
        command
    }

    fn larder(&self, arguments: &[&str]) -> CliOutput {
        CliOutput::of(self.command(arguments).stdin(Stdio::null()).output().unwrap())
    }

    fn stop(&mut self) {
        kill_process(Pid::from_child(&self.daemon), Signal::TERM).unwrap();
        self.daemon.wait().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn serve(home: &Path) -> Child {
    let mut command = larder(home);
    command.arg("--root").arg(home.join("store"));
    // The disk of this machine may be full.
    command
        .args(["serve", "--image-gc-high-threshold", "100", "--metrics-address", "", "--socket"])
        .arg(home.join("larder.sock"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// A layer with one file of this many bytes.
fn layer(byte: u8, size: usize) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(size as u64);
    header.set_mode(0o644);
    archive.append_data(&mut header, format!("file-{byte}"), &vec![byte; size][..]).unwrap();
    archive.into_inner().unwrap()
}

/// `larder top` in 80 columns, and what its screen shows.
struct Top(Terminal);

impl Top {
    fn start(mut command: Command) -> Top {
        Top(Terminal::start(
            {
                command.arg("top");
                command
            },
            24,
            80,
        ))
    }

    fn screen(&self) -> String {
        let mut screen = vt100::Parser::new(24, 80, 0);
        screen.process(self.0.text().as_bytes());
        screen.screen().contents()
    }

    #[track_caller]
    fn shows(&self, text: &str) {
        wait_until(text, || self.screen().contains(text));
    }

    #[track_caller]
    fn hides(&self, text: &str) {
        wait_until(text, || !self.screen().contains(text));
    }

    fn press(&self, keys: &str) {
        std::fs::File::from(self.0.controller.try_clone().unwrap()).write_all(keys.as_bytes()).unwrap();
    }

    /// Answers a question, which takes no answer at first. The key has no other meaning.
    fn answers(&self, key: &str) {
        self.shows("y removes it");
        wait_until("the question is answered", || {
            self.press(key);
            !self.screen().contains("y removes it")
        });
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.0.controller).unwrap().local_modes.contains(LocalModes::ICANON)
    }

    /// Whether signals have stopped it.
    fn is_stopped(&self) -> bool {
        let stat = fs_err::read_to_string(format!("/proc/{}/stat", self.0.child.id())).unwrap();
        stat.rsplit(") ").next().unwrap().starts_with('T')
    }
}

#[test]
fn a_pull_is_watched_an_image_found_explained_and_removed() {
    let (registry, node) = (FaultRegistry::start(), Node::start());
    let plain = "application/vnd.oci.image.layer.v1.tar";
    registry.put_image("shop/cart", "1", plain, &[layer(1, 40_000)], &[]);
    let web = registry.put_image("shop/web", "1", plain, &[layer(1, 40_000), layer(2, 400_000)], &[]);
    // Half a minute: long enough for each view.
    let slow = ResponseFault::Trickle(1024, Duration::from_millis(80));
    registry.fault(FaultTrigger::path(&web.layers[1]), slow);
    node.larder(&["pull", &registry.image("shop/cart:1")]).expect(0);

    let top = Top::start(node.command(&[]));
    top.shows("shop/cart:1");
    top.shows("no GC by usage");
    let web = registry.image("shop/web:1");
    let mut pull = node.command(&["pull", "-q", &web]).stdout(Stdio::null()).spawn().unwrap();
    top.shows("1 pull,");
    top.press("2");
    top.shows("fetching");
    top.press("4");
    top.shows(&registry.address());
    pull.kill().unwrap();
    pull.wait().unwrap();
    registry.clear_faults();
    node.larder(&["pull", "-q", &web]).expect(0);
    top.press("1");
    top.shows("shop/web:1");

    top.press("/WEB\r");
    top.shows("(1 match WEB)");
    top.hides("shop/cart:1");
    top.press("e");
    top.shows("next GC:");
    top.press("q");
    top.hides("next GC:");
    top.press("p");
    top.shows("GC keeps");
    top.press("p");
    top.shows("removed the keep rule");
    top.press("x");
    top.answers("n");
    top.hides("y removes it");
    assert!(node.larder(&["images"]).expect(0).stdout.contains("shop/web"), "a no removes nothing");
    top.press("x");
    top.answers("y");
    top.shows("removed 127.0.0.1");
    top.shows("(0 match WEB)");
    assert!(!node.larder(&["images"]).expect(0).stdout.contains("shop/web"));
    assert!(top.is_raw());
    top.press("q");
    let text = top.0.finish(0);
    assert!(
        text.rfind(LEFT) > text.rfind(ENTERED) && text.contains("\u{1b}[?25h"),
        "the terminal is restored"
    );
}

#[test]
fn a_suspended_view_gives_the_terminal_back_and_a_lost_daemon_is_found_again() {
    let mut node = Node::start();
    let top = Top::start(node.command(&[]));
    top.shows("no images");
    top.0.signal(Signal::TSTP);
    wait_until("it is stopped", || top.is_stopped());
    // What it wrote last is read a moment later.
    wait_until("the terminal is given back", || !top.is_raw() && top.0.text().ends_with("\u{1b}[?25h"));
    top.0.signal(Signal::CONT);
    wait_until("it draws again", || top.0.text().matches(ENTERED).count() >= 2 && top.is_raw());
    top.shows("no images");

    node.stop();
    top.shows("no connection for");
    top.shows("no images");
    node.daemon = serve(node.home.path());
    top.hides("no connection for");
    assert_eq!(node.larder(&["status"]).code, Some(0), "the view did not take the images of the daemon");

    top.0.signal(Signal::TERM);
    wait_until("raw mode is left", || !top.is_raw());
    let text = top.0.finish(130);
    assert!(text.rfind(LEFT) > text.rfind(ENTERED), "{text:?}");
}

#[test]
fn without_a_daemon_the_view_has_the_images_open_and_others_join() {
    let home = tempfile::tempdir().unwrap();
    let command = |arguments: &[&str]| {
        let mut command = larder(home.path());
        command.arg("--root").arg(home.path().join("store")).args(arguments);
        command
    };
    let refused = CliOutput::of(command(&["top"]).stdin(Stdio::null()).output().unwrap()).expect(2);
    assert!(
        refused.stderr.contains("requires a terminal") && refused.stderr.contains("larder --root"),
        "{refused:?}"
    );
    let registry = FaultRegistry::start();
    registry.put_image("shop/cart", "1", "application/vnd.oci.image.layer.v1.tar", &[layer(1, 4000)], &[]);
    registry.put_image("shop/web", "1", "application/vnd.oci.image.layer.v1.tar", &[layer(2, 4000)], &[]);
    let pull = |name: &str| CliOutput::of(command(&["pull", "-q", &registry.image(name)]).output().unwrap());
    pull("shop/cart:1").expect(0);
    let top = Top::start(command(&[]));
    top.shows("shop/cart:1");
    pull("shop/web:1").expect(0);
    top.shows("2 images");
    top.press("q");
    top.0.finish(0);
}
