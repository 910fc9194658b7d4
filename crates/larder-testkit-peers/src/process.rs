//! Starting, watching and ending the processes of real servers, and waiting for what they do.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::packages::find_program;
use super::{PeerError, PeerResult};

/// How long a server may take to start, to stop, or to show what a test waits for. Real servers need
/// milliseconds; the rest is for a machine that is busy with something else.
pub const WAIT_LIMIT: Duration = Duration::from_secs(30);

/// How long a server may take to end after SIGTERM before it is killed.
const GRACE: Duration = Duration::from_secs(10);

/// Calls `ready` until it answers, at most for `limit`. `None` when it never did.
///
/// Besides [`pause`] this is the one place of the testkit that sleeps: the processes waited for live in real time.
#[expect(clippy::disallowed_methods, reason = "other processes do not follow a simulated clock")]
pub fn poll<T>(limit: Duration, mut ready: impl FnMut() -> Option<T>) -> Option<T> {
    let start = std::time::Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(answer) = ready() {
            return Some(answer);
        }
        if start.elapsed() > limit {
            return None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Copies a program that the test is about to run, in another process: a child that this process forks during the copy
/// would inherit the file open for writing, and the copy could not be executed ("Text file busy").
///
/// # Panics
/// When the copy fails.
pub fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("--").arg(from).arg(to).status().expect("cp is installed");
    assert!(copied.success(), "cp {} {}: {copied}", from.display(), to.display());
}

/// Lets other processes run for this time: for tests that disturb them at moments of no meaning.
#[expect(clippy::disallowed_methods, reason = "other processes do not follow a simulated clock")]
pub fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Waits until `condition` is true, and fails the test with `what` when it does not within [`WAIT_LIMIT`].
///
/// # Panics
/// When the wait was in vain.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    assert!(
        poll(WAIT_LIMIT, || condition().then_some(())).is_some(),
        "waited {WAIT_LIMIT:?} in vain until {what}"
    );
}

/// A running server process. Dropping it ends exactly this process.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

impl ServerProcess {
    /// Starts `program` and appends its standard output to `stdout` and its standard error to `log`.
    ///
    /// The process is in a group of its own, so that Ctrl-C in a terminal reaches only its parent, and it
    /// gets SIGTERM when the thread that started it ends, for whatever reason.
    pub(crate) fn start(
        name: &'static str,
        program: &Path,
        configure: impl FnOnce(&mut Command),
        stdout: &Path,
        log: &Path,
    ) -> PeerResult<ServerProcess> {
        use std::os::unix::process::CommandExt;

        let open = |path: &Path| fs_err::OpenOptions::new().create(true).append(true).open(path);
        // By its full path: the PATH that `configure` may set is the server's.
        let mut command = Command::new(find_program("setpriv").unwrap_or_else(|| "setpriv".into()));
        command.args(["--pdeathsig", "TERM", "--"]).arg(program).process_group(0).stdin(Stdio::null());
        configure(&mut command);
        command.stdout(open(stdout)?.into_parts().0).stderr(open(log)?.into_parts().0);
        let child = command.spawn().map_err(|error| PeerError::new(format!("start {name}"), error))?;
        Ok(ServerProcess { name, child, log: log.to_owned() })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until `ready`, or until the server exits, which is an error that quotes its log.
    pub(crate) fn wait_ready(&mut self, mut ready: impl FnMut() -> bool) -> PeerResult<()> {
        let name = self.name;
        let outcome = poll(WAIT_LIMIT, || match self.child.try_wait() {
            Ok(Some(status)) => Some(Err(format!("ended at once, {status}"))),
            Ok(None) => ready().then_some(Ok(())),
            Err(error) => Some(Err(error.to_string())),
        });
        let problem = match outcome {
            Some(Ok(())) => return Ok(()),
            Some(Err(problem)) => problem,
            None => format!("not ready after {WAIT_LIMIT:?}"),
        };
        Err(PeerError::new(format!("start {name}"), format!("{problem}; its log ends: {}", self.log_tail())))
    }

    /// Asks it to end, and kills it when it does not.
    pub(crate) fn stop(&mut self) -> Option<ExitStatus> {
        if let Ok(Some(status)) = self.child.try_wait() {
            return Some(status);
        }
        self.signal(Signal::TERM);
        let ended = poll(GRACE, || self.child.try_wait().ok().flatten());
        ended.or_else(|| {
            eprintln!("{} (pid {}) did not end within {GRACE:?}, killing it", self.name, self.pid());
            self.child.kill().ok()?;
            self.child.wait().ok()
        })
    }

    /// Sends a signal to exactly this process; it has not been waited for yet, so its id is still its own.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.pid().cast_signed()) {
            // It may have ended in the meantime, which is what was wanted.
            let _ = kill_process(pid, signal);
        }
    }

    fn log_tail(&self) -> String {
        let log = fs_err::read_to_string(&self.log).unwrap_or_default();
        // containerd prints its whole configuration in one line.
        let lines: Vec<String> = log.lines().map(|line| line.chars().take(300).collect()).collect();
        lines[lines.len().saturating_sub(8)..].join("\n")
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Runs a helper program to its end; an exit code other than 0 is an error with what it said.
pub(crate) fn run(command: &mut Command) -> PeerResult<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| PeerError::new(format!("run {name}"), error))?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(PeerError::new(format!("{name}, {}", output.status), said.trim()))
}
