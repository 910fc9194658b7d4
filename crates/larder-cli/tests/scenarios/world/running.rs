//! larder as a process: how it is started, watched and ended, and what it did.

use std::fs::File;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use larder_testkit_peers::process::{WAIT_LIMIT, pause, poll};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::time::Instant;

/// larder with nothing of the surroundings in it: no configuration, no credentials, no variables of other tools.
pub(crate) fn larder_in(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.env_clear().env("HOME", home).env("PATH", std::env::var_os("PATH").unwrap_or_default());
    // As the systemd unit has it.
    command.env("MALLOC_ARENA_MAX", "2").env("MALLOC_TRIM_THRESHOLD_", "131072");
    command.current_dir(home);
    command
}

/// larder while it runs.
pub(crate) struct LarderProcess {
    child: Child,
    output: TempDir,
}

impl LarderProcess {
    pub(crate) fn start(command: Command) -> LarderProcess {
        LarderProcess::reading(command, Stdio::null())
    }

    pub(crate) fn reading(mut command: Command, input: Stdio) -> LarderProcess {
        let output = tempfile::tempdir().unwrap();
        let sink = |name: &str| -> Stdio {
            File::options().create(true).append(true).open(output.path().join(name)).unwrap().into()
        };
        let child = command.stdin(input).stdout(sink("stdout")).stderr(sink("stderr")).spawn().unwrap();
        LarderProcess { child, output }
    }

    fn read(&self, name: &str) -> String {
        fs_err::read_to_string(self.output.path().join(name)).unwrap()
    }

    /// Returns its standard output so far.
    pub(crate) fn stdout(&self) -> String {
        self.read("stdout")
    }

    /// Returns its standard error so far.
    pub(crate) fn stderr(&self) -> String {
        self.read("stderr")
    }

    /// Waits until its standard output has `text`.
    pub(crate) fn wait_for_output(&mut self, text: &str) {
        let found = poll(WAIT_LIMIT, || {
            let ended = self.child.try_wait().unwrap().is_some();
            (ended || self.read("stdout").contains(text)).then_some(())
        });
        let (stdout, stderr) = (self.read("stdout"), self.read("stderr"));
        assert!(found.is_some() && stdout.contains(text), "waited for {text:?}\n{stdout}\n{stderr}");
    }

    /// Presses Ctrl-C.
    pub(crate) fn interrupt(&self) {
        self.signal(Signal::INT);
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Asks it to end, as a service manager does.
    pub(crate) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Lets it run for this time, and then kills it; says whether there was something to kill.
    pub(crate) fn kill_after(mut self, time: Duration) -> bool {
        pause(time);
        self.child.kill().unwrap();
        self.child.wait().unwrap().signal().is_some()
    }

    /// Kills it as soon as this holds, unless it ended before.
    pub(crate) fn kill_when(mut self, mut holds: impl FnMut() -> bool) {
        // It does not wait between two looks, since much can happen there.
        let begun = Instant::now();
        while !holds() && !self.is_finished() {
            assert!(begun.elapsed() < WAIT_LIMIT, "it neither does that nor ends");
            thread::yield_now();
        }
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Waits for its end, which has to be a good one, to the moment: [`finish`](LarderProcess::finish) looks now and
    /// then.
    #[track_caller]
    pub(crate) fn succeed(mut self) {
        assert!(self.child.wait().unwrap().success(), "{}", self.read("stderr"));
    }

    pub(crate) fn is_finished(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for its end, at most twice the limit of a test.
    pub(crate) fn finish(mut self) -> LarderOutput {
        let status = poll(WAIT_LIMIT * 2, || self.child.try_wait().unwrap());
        let (stdout, stderr) = (self.read("stdout"), self.read("stderr"));
        let status = status.unwrap_or_else(|| panic!("larder does not end\n{stdout}\n{stderr}"));
        LarderOutput { code: status.code().unwrap_or(-1), stdout, stderr }
    }
}

impl Drop for LarderProcess {
    fn drop(&mut self) {
        if !self.is_finished() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Result of a run of larder.
#[derive(Debug)]
pub(crate) struct LarderOutput {
    /// Exit code; -1 when a signal killed it.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl LarderOutput {
    /// Fails the test unless larder ended with this code.
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> LarderOutput {
        assert_eq!(self.code, code, "\n{}\n{}", self.stdout, self.stderr);
        self
    }

    /// How many lines of the output have all of these words.
    pub(crate) fn lines_with(&self, words: &[&str]) -> usize {
        self.stdout.lines().filter(|line| words.iter().all(|word| line.contains(word))).count()
    }

    /// Standard output as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}:\n{}", self.stdout))
    }
}
