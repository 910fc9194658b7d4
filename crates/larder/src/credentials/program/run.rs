//! One run of a program.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};
use tokio::time;
use zeroize::Zeroizing;

use crate::go_format;

/// Time limit of a program.
pub(in super::super) const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Wait after which a slow program is logged.
const REPORT_AFTER: Duration = Duration::from_secs(5);
/// The largest output, in bytes.
const MAX_ANSWER: usize = 1 << 20;
/// Bytes of standard error that are kept; the rest is read and dropped.
const MAX_WORDS: usize = 4096;
/// How long child processes may keep the output open after a program has ended.
const LINGER: Duration = Duration::from_secs(1);
/// A file that is open for writing cannot be run: number of retries and the delay between them.
const BUSY: (u32, Duration) = (5, Duration::from_millis(20));
/// Environment variable with the chain of running programs, to detect cycles.
const RUNNING: &str = "LARDER_CREDENTIAL_PROGRAMS";

/// Program with its arguments, environment and input.
pub(in super::super) struct ProgramCommand<'a> {
    /// The file, [checked](super::check_program).
    pub(in super::super) path: &'a Path,
    pub(in super::super) args: &'a [String],
    /// Set on top of this process's own, in order.
    pub(in super::super) env: Vec<(OsString, OsString)>,
    /// Written to its standard input.
    pub(in super::super) input: Zeroizing<Vec<u8>>,
}

/// How it ended.
pub(in super::super) struct ProgramOutput {
    pub(in super::super) status: ExitStatus,
    pub(in super::super) stdout: Zeroizing<Vec<u8>>,
    /// The first part of it.
    pub(in super::super) stderr: Zeroizing<Vec<u8>>,
}

/// Why a program returned no output. Never quotes it.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum ProgramError {
    #[error("cannot be started: {0}")]
    Start(#[source] io::Error),
    #[error("did not end within {} and was killed", go_format::duration(TIME_LIMIT))]
    TimedOut,
    #[error("wrote more than {} KiB and was killed", MAX_ANSWER >> 10)]
    TooMuch,
    #[error("failed on standard input or output: {0}")]
    Pipe(#[source] io::Error),
    #[error("would start itself: it is already running and started larder")]
    Circular,
}

/// Runs it to its end. Dropping the future kills it.
pub(in super::super) async fn run(program: ProgramCommand<'_>) -> Result<ProgramOutput, ProgramError> {
    let mut child = started(&mut command_for(program.path, program.args, program.env)?).await?;
    let mut group = ProcessGroup(child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)));
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (mut answer, mut words) = (Zeroizing::new(Vec::new()), Zeroizing::new(Vec::new()));
    let talk = async {
        let feed = async {
            if let Some(mut stdin) = stdin {
                // A program may ignore its standard input.
                let _ = stdin.write_all(&program.input).await;
            }
            Ok(())
        };
        tokio::try_join!(feed, read_answer(stdout, &mut answer), read_words(stderr, &mut words)).map(drop)
    };
    let whole = ended(program.path, &mut child, &mut group, talk);
    let slow = || {
        let (limit, waited) = (go_format::duration(TIME_LIMIT), go_format::duration(REPORT_AFTER));
        tracing::warn!("still waiting for {} after {waited} (time limit {limit})", program.path.display());
    };
    let status = time::timeout(TIME_LIMIT, log_if_slow(Box::pin(whole), slow))
        .await
        .map_err(|_| ProgramError::TimedOut)??;
    Ok(ProgramOutput { status, stdout: answer, stderr: words })
}

fn command_for(
    path: &Path,
    args: &[String],
    env: Vec<(OsString, OsString)>,
) -> Result<Command, ProgramError> {
    let running = std::env::var_os(RUNNING).unwrap_or_default();
    let chain = chained(&running, path).ok_or(ProgramError::Circular)?;
    let mut command = Command::new(path);
    command
        .args(args)
        .envs(env)
        .env(RUNNING, chain)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    Ok(command)
}

/// Serves the program's pipes until it has ended. `group` remains set, to be killed, if a child may still run.
async fn ended(
    path: &Path,
    child: &mut Child,
    group: &mut ProcessGroup,
    talk: impl Future<Output = Result<(), ProgramError>>,
) -> Result<ExitStatus, ProgramError> {
    let mut talk = std::pin::pin!(talk);
    tokio::select! {
        biased;
        talked = &mut talk => {
            talked?;
            // A program that closed its output may still run; the time limit kills it with its children.
            let status = child.wait().await;
            group.0 = None;
            status.map_err(ProgramError::Pipe)
        }
        status = child.wait() => {
            if let Ok(talked) = time::timeout(LINGER, talk).await {
                talked?;
                group.0 = None;
            } else {
                // A child process still has the pipes open.
                tracing::debug!("{} left a child process running", path.display());
            }
            status.map_err(ProgramError::Pipe)
        }
    }
}

/// Logs once if the work is slow.
async fn log_if_slow<T>(mut work: Pin<Box<impl Future<Output = T>>>, log: impl FnOnce()) -> T {
    if let Ok(done) = time::timeout(REPORT_AFTER, &mut work).await {
        return done;
    }
    log();
    work.await
}

/// The chain with this program; `None` if it is already in the chain.
fn chained(running: &OsString, path: &Path) -> Option<OsString> {
    let mut chain: Vec<_> = std::env::split_paths(running).collect();
    if chain.iter().any(|above| above == path) {
        return None;
    }
    chain.retain(|above| !above.as_os_str().is_empty());
    chain.push(path.to_owned());
    std::env::join_paths(chain).ok()
}

async fn started(command: &mut Command) -> Result<Child, ProgramError> {
    let (mut left, pause) = BUSY;
    loop {
        match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && left > 0 => {
                left -= 1;
                time::sleep(pause).await;
            }
            child => return child.map_err(ProgramError::Start),
        }
    }
}

async fn read_answer(from: Option<impl AsyncRead + Unpin>, into: &mut Vec<u8>) -> Result<(), ProgramError> {
    let Some(from) = from else { return Ok(()) };
    // Allocated in full: a vector that grows leaves copies that are not overwritten.
    into.reserve_exact(64 << 10);
    let mut from = from.take(MAX_ANSWER as u64 + 1);
    loop {
        if into.len() == into.capacity() {
            let mut larger = Vec::with_capacity(MAX_ANSWER + 1);
            larger.extend_from_slice(into);
            zeroize::Zeroize::zeroize(&mut *into);
            *into = larger;
        }
        match from.read_buf(into).await.map_err(ProgramError::Pipe)? {
            0 => return Ok(()),
            _ if into.len() > MAX_ANSWER => return Err(ProgramError::TooMuch),
            _ => {}
        }
    }
}

async fn read_words(from: Option<impl AsyncRead + Unpin>, into: &mut Vec<u8>) -> Result<(), ProgramError> {
    let Some(mut from) = from else { return Ok(()) };
    let mut piece = Zeroizing::new([0; MAX_WORDS]);
    into.reserve_exact(MAX_WORDS);
    loop {
        let read = from.read(&mut piece[..]).await.map_err(ProgramError::Pipe)?;
        if read == 0 {
            return Ok(());
        }
        into.extend_from_slice(&piece[..read.min(MAX_WORDS - into.len())]);
    }
}

/// A process group that is killed when this is dropped.
struct ProcessGroup(Option<Pid>);

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    async fn script(text: &str) -> Result<(i32, usize, usize), ProgramError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p");
        fs_err::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = ProgramCommand {
            path: &path,
            args: &[],
            env: Vec::new(),
            input: Zeroizing::new(b"question".to_vec()),
        };
        let ended = run(program).await?;
        Ok((ended.status.code().unwrap_or(-1), ended.stdout.len(), ended.stderr.len()))
    }

    #[tokio::test]
    async fn a_program_is_asked_and_answers() {
        assert_eq!(script("cat; exit 3").await.unwrap(), (3, "question".len(), 0));
        assert_eq!(script("echo ok").await.unwrap(), (0, 3, 0), "who does not read is no error");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_program_is_logged_once_and_continues() {
        for (seconds, times) in [(4, 0), (6, 1), (59, 1)] {
            let logged = std::cell::Cell::new(0);
            let work = Box::pin(time::sleep(Duration::from_secs(seconds)));
            log_if_slow(work, || logged.set(logged.get() + 1)).await;
            assert_eq!(logged.get(), times, "{seconds} s");
        }
    }

    #[tokio::test]
    async fn endless_answers_end_the_program_and_endless_words_are_dropped() {
        assert!(matches!(script("cat /dev/zero").await, Err(ProgramError::TooMuch)));
        let words = script("head -c 3000000 /dev/zero >&2; echo ok").await.unwrap();
        assert_eq!(words, (0, 3, MAX_WORDS));
    }

    #[tokio::test(start_paused = true)]
    async fn a_program_that_hangs_is_killed_with_what_it_started() {
        for said_all in ["", "exec > /dev/null 2>&1; "] {
            assert_killed_with_what_it_started(said_all).await;
        }
    }

    /// `first`: what it does before it starts something and hangs.
    async fn assert_killed_with_what_it_started(first: &str) {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let text = format!("{first}sleep 600 & echo $! > {0}.new; mv {0}.new {0}; wait", pid.display());
        let before = std::time::SystemTime::now();
        let hung = async {
            // The clock stands still until the grandchild is there.
            while !pid.exists() {
                tokio::task::yield_now().await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            ended = script(&text) => assert!(matches!(ended, Err(ProgramError::TimedOut))),
            () = hung => {}
        }
        assert!(before.elapsed().unwrap() < TIME_LIMIT, "the clock is simulated");
        let pid = fs_err::read_to_string(&pid).unwrap();
        let alive = || {
            let stat = fs_err::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
            !stat.is_empty() && !stat.contains(") Z ")
        };
        while alive() {
            tokio::task::yield_now().await;
        }
    }

    #[test]
    fn a_program_does_not_run_within_itself() {
        let chain = chained(&OsString::new(), Path::new("/bin/a")).unwrap();
        assert_eq!(chain, "/bin/a");
        let chain = chained(&chain, Path::new("/bin/b")).unwrap();
        assert_eq!(chain, "/bin/a:/bin/b");
        assert_eq!(chained(&chain, Path::new("/bin/a")), None);
    }
}
