//! A fake runtime, a directory for files, and larder to run.

use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use larder_cri::proto;
use larder_testkit::private_state::assert_private;
use larder_testkit_peers::fake_cri::FakeCri;
use larder_testkit_peers::process::copy_program;
use tempfile::TempDir;

/// A fake runtime and a home without credentials.
pub(crate) struct CliFixture {
    pub(crate) cri: FakeCri,
    pub(crate) home: TempDir,
}

impl Drop for CliFixture {
    fn drop(&mut self) {
        assert_private(self.cri.endpoint().path());
    }
}

/// Result of a run of larder.
#[derive(Debug)]
pub(crate) struct CliOutput {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl CliFixture {
    pub(crate) fn new() -> CliFixture {
        CliFixture { cri: FakeCri::start(), home: tempfile::tempdir().unwrap() }
    }

    /// Lets pulls of these names succeed.
    pub(crate) fn offering(names: &[&str]) -> CliFixture {
        let world = CliFixture::new();
        for (number, name) in names.iter().enumerate() {
            let id = format!("sha256:{:064x}", number + 1);
            world.cri.offer(name, proto::Image { id, size: 4_261_550, ..proto::Image::default() });
        }
        world
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.home.path().join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(&path, text).unwrap();
        path
    }

    /// larder, talking to the fake runtime, in the directory.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = larder(self.home.path());
        command.env("LARDER_BACKEND", self.cri.endpoint().to_string());
        command.arg("--state").arg(self.state()).args(arguments);
        command
    }

    /// Where larder keeps its state of the fake runtime.
    pub(crate) fn state(&self) -> PathBuf {
        self.home.path().join("state")
    }

    /// As if what was ensured had been ensured long ago.
    pub(crate) fn end_leases(&self) {
        fs_err::remove_file(self.state().join("leases.json")).unwrap();
    }

    pub(crate) fn larder(&self, arguments: &[&str]) -> CliOutput {
        CliOutput::of(self.command(arguments).stdin(Stdio::null()).output().unwrap())
    }

    /// Runs larder with this on its standard input.
    pub(crate) fn larder_reading(&self, input: &str, arguments: &[&str]) -> CliOutput {
        let mut command = self.command(arguments);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        match child.stdin.take().unwrap().write_all(input.as_bytes()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {} // it ended without reading
            written => written.unwrap(),
        }
        CliOutput::of(child.wait_with_output().unwrap())
    }
}

/// larder with nothing of the surroundings in it.
pub(crate) fn larder(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.env_clear().env("HOME", home).env("TZ", "UTC").current_dir(home);
    command
}

/// Returns a command of an unprivileged user that owns the directory.
pub(crate) fn unprivileged(home: &Path) -> Command {
    if !rustix::process::geteuid().is_root() {
        return larder(home);
    }
    // The build directory need not be open to others.
    let binary = home.join("larder-for-all");
    copy_program(Path::new(env!("CARGO_BIN_EXE_larder")), &binary);
    chown(home, Some(UNPRIVILEGED_USER), Some(UNPRIVILEGED_USER)).unwrap();
    let mut command = Command::new("/usr/bin/setpriv");
    let user = UNPRIVILEGED_USER.to_string();
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--"]).arg(binary);
    command.env_clear().env("HOME", home).env("TZ", "UTC").env("TMPDIR", home).current_dir(home);
    command
}

/// UID and GID of a user without privileges.
const UNPRIVILEGED_USER: u32 = 65534;

impl CliOutput {
    pub(crate) fn of(output: Output) -> CliOutput {
        CliOutput {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> CliOutput {
        assert_eq!(self.code, Some(code), "\n{}\n{}", self.stdout, self.stderr);
        self
    }

    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}:\n{}", self.stdout))
    }

    /// Returns the output with the rows of the event table sorted. Images are ensured side by side: between the
    /// events of one image, those of another may be printed.
    pub(crate) fn with_sorted_events(self) -> CliOutput {
        let (table, rest) = self.stdout.split_once("\n\n").expect("an event table and a result table");
        let mut rows: Vec<&str> = table.lines().collect();
        // Times are equal or replaced later; the header stays first.
        rows[1..].sort_by_key(|row| row.split_once(' ').map(|(_time, event)| event));
        let stdout = format!("{}\n\n{rest}", rows.join("\n"));
        CliOutput { stdout, ..self }
    }

    /// Compares both outputs with the file of this name; `LARDER_BLESS=1` writes the file instead.
    #[track_caller]
    pub(crate) fn golden(&self, name: &str, world: &CliFixture) {
        let text = format!("exit {:?}\n--- stdout\n{}--- stderr\n{}", self.code, self.stdout, self.stderr);
        let text = scrubbed(&text)
            .replace(&world.cri.endpoint().to_string(), "ENDPOINT")
            .replace(&*world.home.path().to_string_lossy(), "HOME");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/golden").join(name);
        if std::env::var_os("LARDER_BLESS").is_some() {
            fs_err::write(&path, &text).unwrap();
        }
        let expected = fs_err::read_to_string(&path).unwrap();
        assert!(text == expected, "{name} differs; LARDER_BLESS=1 accepts it.\n{text}");
    }
}

/// The text with times of day and durations of pulls replaced by words. Whole seconds, which are back-offs, stay.
fn scrubbed(text: &str) -> String {
    let mut clean = String::new();
    for word in text.split_inclusive([' ', '\n', ',', '(']) {
        let end = word.trim_end_matches([' ', '\n', ',', '(']).len();
        let (word, rest) = word.split_at(end);
        let is = |shape: &str| {
            word.len() == shape.len()
                && word
                    .bytes()
                    .zip(shape.bytes())
                    .all(|(byte, shape)| if shape == b'0' { byte.is_ascii_digit() } else { byte == shape })
        };
        let number = word.strip_suffix("ms").or_else(|| word.strip_suffix('s'));
        let is_time = number.is_some_and(|number| number.parse::<f64>().is_ok());
        let whole_seconds = is_time && !word.ends_with("ms") && !word.contains('.') && word != "0s";
        match word {
            _ if is("00:00:00") => clean.push_str("HH:MM:SS"),
            _ if is_time && !whole_seconds => clean.push_str("TIME"),
            word => clean.push_str(word),
        }
        clean.push_str(rest);
    }
    clean
}
