//! Output on a terminal: colors, tables that fit, live progress, and a clean screen after it.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use larder_cri::proto;
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use larder_testkit_peers::fake_cri::Rpc;
use larder_testkit_peers::packages::find_program;
use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{Package, require};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::world::{CliFixture, larder};

const HEAD: &str = "\u{1b}[1m";

/// A program on a terminal.
pub(crate) struct Terminal {
    pub(crate) controller: OwnedFd,
    pub(crate) child: Child,
    seen: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl Terminal {
    pub(crate) fn start(mut command: Command, rows: u16, columns: u16) -> Terminal {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&controller).unwrap();
        unlockpt(&controller).unwrap();
        let name = ptsname(&controller, Vec::new()).unwrap();
        let open = || fs_err::OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let terminal = Terminal {
            seen: Arc::default(),
            reader: None,
            child: {
                resize(&controller, rows, columns);
                let slave = open();
                command.stdin(open().into_file()).stdout(open().into_file()).stderr(slave.into_file());
                command.env("TERM", "xterm").spawn().unwrap()
            },
            controller,
        };
        drop(command); // its ends of the terminal
        let mut output = std::fs::File::from(terminal.controller.try_clone().unwrap());
        let seen = Arc::clone(&terminal.seen);
        let reader = std::thread::spawn(move || {
            let mut piece = [0; 4096];
            // The terminal is gone when its last user has ended.
            while let Ok(read @ 1..) = output.read(&mut piece) {
                seen.lock().unwrap().extend_from_slice(&piece[..read]);
            }
        });
        Terminal { reader: Some(reader), ..terminal }
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Returns the output until the program ended.
    pub(crate) fn finish(mut self, code: i32) -> String {
        let status = self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        let text = self.text();
        assert_eq!(status.code(), Some(code), "{text}");
        text
    }
}

fn resize(terminal: &OwnedFd, rows: u16, columns: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).unwrap();
}

/// The lines that a screen shows in the end: carriage returns, and the sequences that move up and wipe, take effect.
fn screen(text: &str, columns: usize) -> Vec<String> {
    let (mut lines, mut row, mut column) = (vec![Vec::<char>::new()], 0_usize, 0_usize);
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '\r' => column = 0,
            '\n' => {
                row += 1;
                lines.resize(lines.len().max(row + 1), Vec::new());
            }
            '\u{1b}' if rest.next_if_eq(&'[').is_some() => {
                let mut count = String::new();
                while let Some(digit) = rest.next_if(|c| c.is_ascii_digit() || matches!(c, ';' | '?')) {
                    count.push(digit);
                }
                match rest.next() {
                    Some('A') => row = row.saturating_sub(count.parse().unwrap_or(1)),
                    Some('K') if count == "2" => lines[row].clear(),
                    Some('K') => lines[row].truncate(column),
                    Some('J') => lines.truncate(row + 1),
                    _ => {}
                }
            }
            c => {
                if column == columns {
                    (row, column) = (row + 1, 0);
                    lines.resize(lines.len().max(row + 1), Vec::new());
                }
                let line = &mut lines[row];
                line.resize(line.len().max(column + 1), ' ');
                line[column] = c;
                column += 1;
            }
        }
    }
    lines.into_iter().map(|line| line.into_iter().collect::<String>().trim_end().to_owned()).collect()
}

/// Images with names of different lengths.
fn named_images() -> CliFixture {
    let names = [
        "docker.io/library/busybox:1.36",
        "registry.example:5000/some/team/with/a/long/name/application:v1.27.3",
    ];
    let world = CliFixture::offering(&names);
    world.cri.change(|contents| {
        let image = |(name, image): (&String, &proto::Image)| proto::Image {
            repo_tags: vec![name.clone()],
            ..image.clone()
        };
        contents.images = contents.offers.iter().map(image).collect();
    });
    world
}

#[test]
fn colors_are_for_terminals_and_for_those_who_ask() {
    let world = named_images();
    let on_terminal = |variable: Option<(&str, &str)>, arguments: &[&str]| {
        let mut command = world.command(arguments);
        command.envs(variable);
        Terminal::start(command, 24, 200).finish(0)
    };
    assert!(on_terminal(None, &["images"]).contains(&format!("{HEAD}IMAGE")));
    assert!(!on_terminal(Some(("NO_COLOR", "1")), &["images"]).contains('\u{1b}'));
    assert!(!on_terminal(None, &["images", "--color", "never"]).contains('\u{1b}'));
    assert!(!on_terminal(None, &["images", "-o", "json"]).contains('\u{1b}'));
    assert!(!world.larder(&["images"]).expect(0).stdout.contains('\u{1b}'), "a pipe is quiet");
    assert!(world.larder(&["--color", "always", "images"]).expect(0).stdout.contains(HEAD));
    let mut forced = world.command(&["images"]);
    assert!(
        String::from_utf8_lossy(&forced.env("CLICOLOR_FORCE", "1").output().unwrap().stdout).contains(HEAD)
    );
    let failed = Terminal::start(world.command(&["inspect", "nowhere:1"]), 24, 80).finish(1);
    assert!(failed.contains("\u{1b}[1;31merror:\u{1b}[0m nowhere:1"), "{failed}");
}

#[test]
fn tables_fit_a_terminal_of_80_columns() {
    let world = named_images();
    let lines = screen(&Terminal::start(world.command(&["images"]), 24, 80).finish(0), 80);
    assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
    let long = lines.iter().find(|line| line.contains("application")).unwrap();
    assert!(long.starts_with('\u{2026}') && long.contains("v1.27.3") && long.contains("MB"), "{long}");
    let wide = screen(&Terminal::start(world.command(&["images"]), 24, 200).finish(0), 200).join("\n");
    assert!(wide.contains("registry.example:5000/some/team/with/a/long/name/application   "), "{wide}");
}

/// Starts a pull that does not end, once its progress is drawn.
fn hanging_pull(world: &CliFixture, columns: u16) -> Terminal {
    world.cri.hang_next(Rpc::PullImage);
    let terminal = Terminal::start(world.command(&["pull", "busybox:1.36"]), 24, columns);
    wait_until("progress is drawn", || terminal.text().contains("0 of 1 done"));
    terminal
}

#[test]
fn an_interrupt_leaves_a_clean_screen_and_says_how_to_resume() {
    let world = CliFixture::new();
    let terminal = hanging_pull(&world, 80);
    terminal.signal(Signal::INT);
    let text = terminal.finish(130);
    let lines: Vec<_> = screen(&text, 80).into_iter().filter(|line| !line.is_empty()).collect();
    let [error, hint] = lines.as_slice() else { panic!("{lines:#?}") };
    assert_eq!(error, "error: interrupted; not finished: busybox:1.36");
    assert!(hint.starts_with("hint: rerun the command to resume"), "{hint}");
}

#[test]
fn progress_follows_the_size_of_the_terminal() {
    let world = CliFixture::new();
    let name = format!("registry.example/{}:1", "long".repeat(20));
    world.cri.hang_next(Rpc::PullImage);
    let terminal = Terminal::start(world.command(&["pull", &name]), 24, 120);
    wait_until("it is drawn in full", || terminal.text().contains(&format!("{name}   pulling")));
    resize(&terminal.controller, 24, 60);
    let before = terminal.text().len();
    wait_until("it is drawn shorter", || terminal.text()[before..].contains('\u{2026}'));
    terminal.signal(Signal::INT);
    let text = terminal.finish(130);
    let shorter: String = text[before + text[before..].find('\u{2026}').unwrap()..].to_owned();
    let line = shorter.split("0 of 1 done").next().unwrap();
    assert_eq!(line.chars().count(), 60, "it fills one line of the terminal: {line:?}");
}

#[test]
fn pulls_and_layers_have_bars_that_are_gone_in_the_end() {
    let registry = FaultRegistry::start();
    let layer = TarBuilder::new().with(TarBuilderEntry::file("web", vec![7; 8 << 20])).finish();
    let plain = "application/vnd.oci.image.layer.v1.tar";
    let image = registry.put_image("shop/web", "1", plain, &[layer], &[]);
    registry.fault(FaultTrigger::path(&image.layers[0]), ResponseFault::StallAfter(4 << 20));
    let home = tempfile::tempdir().unwrap();
    let mut command = larder(home.path());
    command.args(["--root", "store", "pull", &registry.image("shop/web:1"), &registry.image("shop/none:1")]);
    let terminal = Terminal::start(command, 40, 140);
    wait_until("the bars are drawn", || {
        let text = terminal.text();
        ["=>   ", "   pulling   ", "  sha256:", "1 of 2 done"].iter().all(|part| text.contains(part))
    });
    terminal.signal(Signal::INT);
    let text = terminal.finish(130);
    let lines = screen(&text, 140);
    assert!(!lines.iter().any(|line| line.contains("of 2 done")), "no progress is left: {lines:#?}");
}

#[test]
fn a_daemon_on_a_terminal_prints_what_to_try() {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("store");
    let mut command = larder(home.path());
    command.arg("--root").arg(&root).args(["serve", "--metrics-address", ""]);
    let terminal = Terminal::start(command, 24, 200);
    let images = format!("  larder --root {} images", root.display());
    wait_until("it prints what to try", || terminal.text().contains(&images));
    terminal.signal(Signal::TERM);
    assert!(terminal.finish(0).contains("try in another terminal:"));
}

/// Completes a line of bash, zsh or fish, with larder in the path.
fn completed(world: &CliFixture, shell: &str, script: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_BIN_EXE_larder")).parent().unwrap();
    let mut command = Command::new(find_program(shell).unwrap());
    command.arg("-c").arg(script).env_clear().env("HOME", world.home.path());
    command.env("PATH", format!("{}:/usr/bin:/bin", path.display())).env("TERM", "dumb");
    command.env("LARDER_BACKEND", world.cri.endpoint().to_string()).current_dir(world.home.path());
    let output = command.output().unwrap();
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn bash_completes_commands_and_names_with_colons() {
    let world = named_images();
    let ask = |words: &str, index: usize| {
        let script = format!(
            "source <(larder completions bash); COMP_LINE='{words}'; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9; \
             COMP_WORDS=({}); COMP_CWORD={index}; _complete_larder larder \"${{COMP_WORDS[COMP_CWORD]}}\"; \
             printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            words.replace(':', " : ")
        );
        completed(&world, "bash", &script)
    };
    assert_eq!(ask("larder inspe", 1), "inspect\n");
    assert_eq!(ask("larder rm busy", 2), "busybox:1.36\n");
    assert_eq!(
        ask("larder rm registry.example:5000/so", 4),
        "5000/some/team/with/a/long/name/application:v1.27.3\n"
    );
    assert_eq!(ask("larder images --so", 2), "--sort\n");
    assert_eq!(ask("larder images --sort si", 3), "size\n");
}

#[test]
fn fish_completes_commands_and_names() {
    let world = named_images();
    let script = "larder completions fish | source; complete -C 'larder rm busy'; complete -C 'larder ima'";
    if !require(&[Package::Fish]).is_available() {
        return;
    }
    let text = completed(&world, "fish", script);
    assert!(text.contains("busybox:1.36") && text.contains("images"), "{text}");
}

#[test]
fn zsh_completes_commands_and_names() {
    let world = named_images();
    if !require(&[Package::Zsh]).is_available() {
        return;
    }
    let text = completed(&world, "zsh", ZSH);
    assert!(text.contains("busybox:1.36"), "{text}");
}

/// Types into a zsh on a terminal of its own.
const ZSH: &str = r#"
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1=; autoload -U compinit; compinit -u -D; source <(larder completions zsh); stty columns 200; echo rea''dy'
zpty -r shell output '*ready*'
zpty -n -w shell $'larder rm busy\t'
zpty -r -m shell output '*busybox*1.36*' ; print -r -- "$output"
zpty -d shell
"#;
