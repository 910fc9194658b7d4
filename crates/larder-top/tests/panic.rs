//! A panic of the view on a real terminal.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::io::Read as _;
use std::process::Command;

use fs_err::OpenOptions;
use larder_top::Screen;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

/// Set in the process that panics.
const PANICS: &str = "LARDER_TEST_PANICS";

#[test]
fn a_panic_restores_the_terminal_before_its_message() {
    if std::env::var_os(PANICS).is_some() {
        let _screen = Screen::enter().unwrap();
        panic!("the view is broken");
    }
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    tcsetwinsize(&controller, Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap();
    let open = || OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap().into_file();
    let terminal = open();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_panic_restores_the_terminal_before_its_message", "--nocapture"]);
    command.env(PANICS, "1").stdin(open()).stdout(open()).stderr(open());
    let status = command.status().unwrap();
    drop(command); // its ends of the terminal
    assert!(!status.success());
    assert!(tcgetattr(&controller).unwrap().local_modes.contains(LocalModes::ICANON), "raw mode is left");
    drop(terminal);
    let (mut text, mut piece) = (Vec::new(), [0; 4096]);
    let mut output = std::fs::File::from(controller);
    // The terminal is gone when its last user has ended.
    while let Ok(read @ 1..) = output.read(&mut piece) {
        text.extend_from_slice(&piece[..read]);
    }
    let text = String::from_utf8_lossy(&text);
    let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("no {part:?} in {text:?}"));
    let (entered, left) = (at("\u{1b}[?1049h"), at("\u{1b}[?1049l"));
    assert!(entered < left && left < at("the view is broken"), "{text:?}");
}
