//! Two processes that do nothing but hold the descriptors of a group.
//!
//! ```text
//! larder serve -> larder hold-group ROOT    standard input: a socket, over which the descriptors come, once
//! larder serve -> ROOT/group.sock           one byte a connection: check, take, end
//! hold-group   -> its twin                  the same program, also with the socket that listens
//! ```
//!
//! The twin takes the place of the first process when that is killed, and starts another twin: a kill of larder and of
//! the process that answers it loses nothing. Connections wait meanwhile, since both have the socket that listens.
//!
//! The process has a session of its own, and leaves the control group of the service that started it: neither a kill
//! of the daemon's process group nor the end of its service ends it. Where a container ends, it ends, too.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use larder_store::lazy::{GroupKeeper, KeptGroup};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::time::Instant;

use super::{receive, send};

/// Hidden command of larder that runs the process.
const COMMAND: &str = "hold-group";
/// Name of the socket, in the root of the store.
const SOCKET: &str = "group.sock";

/// Times from the end of a twin to the start of the next one: the first, and the longest. It may be a program that ends
/// at once.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(60));

/// Connections that wait, at most.
const QUEUE: i32 = 16;

/// How long an answer may take; it takes less than a millisecond.
const TIMEOUT: Duration = Duration::from_secs(5);

// Requests.
const CHECK: u8 = b'c';
const TAKE: u8 = b't';
const END: u8 = b'e';
/// The answer to each.
const DONE: u8 = b'k';

/// Keeps descriptors in a process of its own.
#[derive(Debug)]
pub(super) struct HolderProcess {
    program: PathBuf,
    root: PathBuf,
    /// The process, if this one has started it.
    child: Mutex<Option<Child>>,
}

impl HolderProcess {
    pub(super) fn new(program: &Path, root: &Path) -> HolderProcess {
        HolderProcess { program: program.to_owned(), root: root.to_owned(), child: Mutex::new(None) }
    }

    /// Asks the process; `None` if there is none.
    fn ask(&self, request: u8) -> io::Result<Option<Vec<OwnedFd>>> {
        let socket = SocketPath::new(&self.root)?;
        loop {
            match socket.ask(request) {
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
                {
                    return Ok(None);
                }
                // It was killed with this request in its queue: the next attempt is refused.
                Err(error) if is_hang_up(&error) => {}
                answer => return answer.map(Some),
            }
        }
    }
}

/// Returns true if the other end is closed.
fn is_hang_up(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

impl GroupKeeper for HolderProcess {
    fn take(&self) -> io::Result<Option<KeptGroup>> {
        let Some(descriptors) = self.ask(TAKE)? else { return Ok(None) };
        Ok(pair(descriptors))
    }

    fn keep(&self, kept: &KeptGroup) -> io::Result<()> {
        if self.ask(CHECK)?.is_some() {
            // If it was killed, its twin has answered.
            if let Some(child) = &mut *self.child.lock() {
                child.try_wait()?;
            }
            return Ok(());
        }
        let mut command = Command::new(&self.program);
        command.arg(COMMAND).arg(&self.root).env_clear().current_dir("/");
        let (mut ours, mut child) = start(command)?;
        let ready = (|| {
            ours.set_read_timeout(Some(TIMEOUT))?;
            send(&ours, &[DONE], &[kept.group.as_fd(), kept.journal.as_fd()])?;
            let mut said = String::new();
            ours.read_to_string(&mut said)?;
            match said.as_bytes() {
                [DONE] => Ok(()),
                [] => Err(io::ErrorKind::BrokenPipe.into()),
                _ => Err(io::Error::other(said)),
            }
        })();
        let ready = ready.map_err(|error| {
            let ended = || io::Error::other(format!("{} {COMMAND} ended at once", self.program.display()));
            if is_hang_up(&error) { ended() } else { error }
        });
        if ready.is_err() {
            let _ = child.kill();
            let _ = child.wait();
            return ready;
        }
        if let Some(mut killed) = self.child.lock().replace(child) {
            killed.wait()?;
        }
        Ok(())
    }

    fn release(&self) -> io::Result<()> {
        self.ask(END)?;
        if let Some(mut child) = self.child.lock().take() {
            child.wait()?;
        }
        Ok(())
    }
}

/// Starts a process whose standard input is the other end of a socket.
fn start(mut command: Command) -> io::Result<(UnixStream, Child)> {
    let (ours, theirs) = UnixStream::pair()?;
    command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
    Ok((ours, command.spawn()?))
}

fn pair(descriptors: Vec<OwnedFd>) -> Option<KeptGroup> {
    let [group, journal] = descriptors.try_into().ok()?;
    Some(KeptGroup { group, journal })
}

/// The path of the socket, by a descriptor of its directory: a path of a socket may have 107 bytes only.
struct SocketPath {
    dir: OwnedFd,
    root: PathBuf,
}

impl SocketPath {
    fn new(root: &Path) -> io::Result<SocketPath> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(SocketPath { dir: rustix::fs::open(root, flags, Mode::empty())?, root: root.to_owned() })
    }

    fn short(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.dir.as_raw_fd().to_string()).join(SOCKET)
    }

    /// One request to the process that listens.
    fn ask(&self, request: u8) -> io::Result<Vec<OwnedFd>> {
        let mut stream = UnixStream::connect(self.short())?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.write_all(&[request])?;
        let mut answer = [0];
        match receive(&stream, &mut answer)? {
            (1, descriptors) if answer == [DONE] => Ok(descriptors),
            (0, _) => Err(io::ErrorKind::BrokenPipe.into()),
            _ => Err(io::Error::other("the process that holds the group of partial layers gave no answer")),
        }
    }

    /// Listens, in place of a process that was killed; only the owner can connect, from the beginning.
    fn listen(&self) -> io::Result<UnixListener> {
        self.remove()?;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // Linux gives the path the mode of the socket.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(self.short())?)?;
        rustix::net::listen(&socket, QUEUE)?;
        Ok(UnixListener::from(socket))
    }

    fn remove(&self) -> io::Result<()> {
        match fs_err::remove_file(self.root.join(SOCKET)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// Runs the process that holds a group, if that is what the command line of this process asks for; then `main` does
/// nothing else. Call it first: what a program allocates before, the process has for its life.
pub fn hold_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let (command, root) = (arguments.next()?, arguments.next()?);
    if command != COMMAND || arguments.next().is_some() {
        return None;
    }
    Some(match hold(Path::new(&root)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    })
}

fn hold(root: &Path) -> io::Result<()> {
    let mut starter = UnixStream::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
    rustix::stdio::dup2_stdin(fs_err::File::open("/dev/null")?)?;
    let (_, mut descriptors) = receive(&starter, &mut [0])?;
    let listener = if descriptors.len() > 2 { descriptors.pop() } else { None };
    let kept = pair(descriptors).ok_or(io::ErrorKind::InvalidInput)?;
    let socket = SocketPath::new(root)?;
    if let Some(listener) = listener {
        // The twin: it is told to end, or the first process was killed.
        if starter.read(&mut [0])? == 1 {
            return Ok(());
        }
        // It names this process to clients from now on.
        rustix::net::listen(&listener, QUEUE)?;
        return Holder { listener: listener.into(), socket, kept }.answer();
    }
    let prepared = (|| {
        rustix::process::setsid()?;
        // At best: it is small, and the kernel has better choices.
        let _ = fs_err::write("/proc/self/oom_score_adj", "-1000");
        leave_service()?;
        socket.listen()
    })();
    match prepared {
        Ok(listener) => {
            let holder = Holder { listener, socket, kept };
            let twin = holder.start_twin();
            starter.write_all(&[DONE])?;
            drop(starter);
            holder.answer_beside(twin.ok())
        }
        Err(error) => {
            let error: io::Error = error;
            starter.write_all(error.to_string().as_bytes())?;
            Err(error)
        }
    }
}

/// The process that answers.
struct Holder {
    listener: UnixListener,
    socket: SocketPath,
    kept: KeptGroup,
}

impl Holder {
    /// Starts the process that takes the place of this one.
    fn start_twin(&self) -> io::Result<(UnixStream, Child)> {
        // Also if the file of the program was replaced.
        let mut command = Command::new("/proc/self/exe");
        command.args(std::env::args_os().skip(1));
        let (stream, child) = start(command)?;
        let descriptors = [self.kept.group.as_fd(), self.kept.journal.as_fd(), self.listener.as_fd()];
        send(&stream, &[DONE], &descriptors)?;
        Ok((stream, child))
    }

    fn answer(self) -> io::Result<()> {
        let twin = self.start_twin().ok();
        self.answer_beside(twin)
    }

    /// Answers until it is told to end. Without a twin it is one process, which answers as well.
    fn answer_beside(self, mut twin: Option<(UnixStream, Child)>) -> io::Result<()> {
        let (mut started, mut pause) = (Instant::now(), Duration::ZERO);
        loop {
            let mut polled = vec![PollFd::new(&self.listener, PollFlags::IN)];
            polled.extend(twin.iter().map(|(stream, _)| PollFd::new(stream, PollFlags::HUP)));
            let wait = twin.is_none().then(|| pause.saturating_sub(started.elapsed()));
            let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
            if poll(&mut polled, wait.as_ref()).is_err() {
                continue;
            }
            let is_asked = !polled[0].revents().is_empty();
            let is_alone = polled.get(1).is_some_and(|twin| !twin.revents().is_empty());
            if is_alone && let Some((_, mut killed)) = twin.take() {
                let _ = killed.wait();
                pause = next_pause(pause, started.elapsed());
                // The pause begins with the end of the twin.
                started = Instant::now();
            }
            if twin.is_none() && started.elapsed() >= pause {
                twin = self.start_twin().ok();
                started = Instant::now();
                if twin.is_none() {
                    pause = next_pause(pause, Duration::ZERO);
                }
            }
            if is_asked && self.answer_one(&mut twin)? {
                return Ok(());
            }
        }
    }

    /// Answers one connection; true if it was told to end.
    fn answer_one(&self, twin: &mut Option<(UnixStream, Child)>) -> io::Result<bool> {
        let Ok((mut stream, _)) = self.listener.accept() else { return Ok(false) };
        let mut request = [0];
        // A client that says nothing, or has gone, has nothing to do with the next one.
        if stream.set_read_timeout(Some(TIMEOUT)).and_then(|()| stream.read_exact(&mut request)).is_err() {
            return Ok(false);
        }
        match request {
            [TAKE] => {
                let _ = send(&stream, &[DONE], &[self.kept.group.as_fd(), self.kept.journal.as_fd()]);
            }
            [END] => {
                // Before the answer: after it, another one may have made its socket.
                let removed = self.socket.remove();
                // Or it would take the place of this process.
                if let Some((mut stream, mut child)) = twin.take() {
                    let _ = stream.write_all(&[END]);
                    let _ = child.wait();
                }
                removed?;
                let _ = stream.write_all(&[DONE]);
                return Ok(true);
            }
            _ => {
                let _ = stream.write_all(&[DONE]);
            }
        }
        Ok(false)
    }
}

/// Time until the next twin is started, after one that has lived for so long: longer each time for those that end
/// sooner than they were waited for.
fn next_pause(pause: Duration, lived: Duration) -> Duration {
    if lived > pause.max(PAUSE.0) { PAUSE.0 } else { PAUSE.1.min(PAUSE.0.max(pause * 2)) }
}

/// Moves this process from the control group of a service to the topmost one: a service manager ends all processes of
/// the group with the service.
fn leave_service() -> io::Result<()> {
    let Some((hierarchy, _)) = service_of(&fs_err::read_to_string("/proc/self/cgroup")?) else {
        return Ok(());
    };
    let candidates: &[&str] = match hierarchy {
        Hierarchy::Unified => &["/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/unified/cgroup.procs"],
        Hierarchy::Systemd => &["/sys/fs/cgroup/systemd/cgroup.procs"],
    };
    for path in candidates {
        let _ = fs_err::write(path, "0");
    }
    match service_of(&fs_err::read_to_string("/proc/self/cgroup")?) {
        None => Ok(()),
        Some((_, service)) => Err(io::Error::other(format!(
            "cannot leave the control group of {service}, with which the group of partial layers would end"
        ))),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hierarchy {
    /// Version 2.
    Unified,
    /// Version 1, the one by which systemd tracks processes.
    Systemd,
}

/// The service or session that a process belongs to, by its `/proc/self/cgroup`.
fn service_of(cgroups: &str) -> Option<(Hierarchy, &str)> {
    cgroups.lines().find_map(|line| {
        let (hierarchy, path) = match line.strip_prefix("0::") {
            Some(path) => (Hierarchy::Unified, path),
            None => (Hierarchy::Systemd, line.split_once(":name=systemd:")?.1),
        };
        let unit_type =
            |part: &str| part.rsplit_once('.').is_some_and(|(_, kind)| ["service", "scope"].contains(&kind));
        path.split('/').any(unit_type).then_some((hierarchy, path))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;

    use larder_testkit_peers::process::wait_until;
    use rustix::fs::MemfdFlags;
    use rustix::process::{Pid, Signal, kill_process, kill_process_group};

    use super::*;

    const HOLD: &str = "LARDER_TEST_HOLD";
    const DAEMON: &str = "LARDER_TEST_DAEMON";
    /// Twins end at once, and note that they were started in this file.
    const STARTS: &str = "LARDER_TEST_STARTS";

    /// Larder, as far as this is about it: it runs the test `outlives` again, which holds a group then.
    fn program(dir: &Path) -> PathBuf {
        let path = dir.join("larder");
        let tests = std::env::current_exe().unwrap();
        let script =
            format!("#!/bin/sh\nexport {HOLD}=\"$2\"\nexec {} {TEST} --nocapture\n", tests.display());
        fs_err::write(&path, script).unwrap();
        fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    const TEST: &str = "--exact group_keeper::holder::tests::the_process_outlives_a_kill_of_its_starter";

    fn file_with(content: &str) -> OwnedFd {
        let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&file, content.as_bytes()).unwrap();
        file
    }

    fn content(file: &OwnedFd) -> String {
        let mut bytes = [0; 16];
        let read = rustix::io::pread(file, &mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes[..read]).into_owned()
    }

    fn some_group() -> KeptGroup {
        KeptGroup { group: file_with("group"), journal: file_with("journal") }
    }

    fn assert_kept(holder: &HolderProcess) {
        let kept = holder.take().unwrap().expect("kept");
        assert_eq!((content(&kept.group), content(&kept.journal)), ("group".into(), "journal".into()));
    }

    /// The process that holds the group.
    fn pid(root: &Path) -> Pid {
        let stream = UnixStream::connect(SocketPath::new(root).unwrap().short()).unwrap();
        rustix::net::sockopt::socket_peercred(&stream).unwrap().pid
    }

    /// Processes that a thread of this one has started and that have not ended.
    fn children(of: Pid) -> Vec<Pid> {
        let threads = fs_err::read_dir(format!("/proc/{}/task", of.as_raw_pid())).into_iter().flatten();
        let lists =
            threads.filter_map(|thread| fs_err::read_to_string(thread.ok()?.path().join("children")).ok());
        let children = |list: String| {
            let pids: Vec<Pid> = list.split(' ').filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect();
            pids
        };
        lists.flat_map(children).collect()
    }

    #[test]
    fn the_process_outlives_a_kill_of_its_starter() {
        if let Some(starts) = std::env::var_os(STARTS) {
            let mut starts = fs_err::File::options().create(true).append(true).open(starts).unwrap();
            let is_first = starts.metadata().unwrap().len() == 0;
            writeln!(starts, "started").unwrap();
            if !is_first {
                return;
            }
        }
        if let Some(root) = std::env::var_os(HOLD) {
            return hold(Path::new(&root)).unwrap();
        }
        if let Some(dir) = std::env::var_os(DAEMON) {
            let dir = Path::new(&dir);
            HolderProcess::new(&program(dir), dir).keep(&some_group()).unwrap();
            rustix::io::write(rustix::stdio::stdout(), b"kept").unwrap();
            rustix::event::pause();
        }
        let dir = tempfile::tempdir().unwrap();
        // Longer than the path of a socket may be.
        let root = dir.path().join("r".repeat(120));
        fs_err::create_dir(&root).unwrap();
        let holder = HolderProcess::new(&program(&root), &root);
        assert!(holder.take().unwrap().is_none());

        let mut daemon = Command::new(std::env::current_exe().unwrap())
            .args(TEST.split(' '))
            .arg("--nocapture")
            .env(DAEMON, &root)
            .process_group(0)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = daemon.stdout.take().unwrap();
        let mut said = Vec::new();
        while !said.ends_with(b"kept") {
            let mut byte = [0];
            stdout.read_exact(&mut byte).unwrap();
            said.push(byte[0]);
        }
        kill_process_group(Pid::from_child(&daemon), Signal::KILL).unwrap();
        daemon.wait().unwrap();
        assert_kept(&holder);
        assert_kept(&holder);
        let socket = root.join(SOCKET);
        assert_eq!(fs_err::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);

        let first = pid(&root);
        holder.keep(&some_group()).unwrap();
        assert_eq!(pid(&root), first, "it keeps what it has");
        assert_eq!(rustix::process::getsid(Some(first)).unwrap(), first);

        kill_process(first, Signal::KILL).unwrap();
        wait_until("its twin answers", || pid(&root) != first);
        assert_kept(&holder);
        let twins = || children(pid(&root));
        wait_until("there is another twin", || twins().len() == 1);
        let killed = twins()[0];
        kill_process(killed, Signal::KILL).unwrap();
        wait_until("there is a third one", || matches!(twins()[..], [twin] if twin != killed));
        assert_kept(&holder);

        let (second, twin) = (pid(&root), twins()[0]);
        for (process, signal) in [(second, Signal::STOP), (twin, Signal::KILL), (second, Signal::KILL)] {
            kill_process(process, signal).unwrap();
        }
        wait_until("both have ended", || holder.take().unwrap().is_none());
        holder.keep(&some_group()).unwrap();
        assert_kept(&holder);

        holder.release().unwrap();
        assert!(holder.take().unwrap().is_none() && !socket.exists());
        holder.release().unwrap();
        assert_eq!(fs_err::read_dir(&root).unwrap().count(), 1, "the program alone");
    }

    #[test]
    fn a_program_that_does_not_hold_the_group_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let no_larder = HolderProcess::new(Path::new("/bin/true"), dir.path());
        assert!(no_larder.keep(&some_group()).unwrap_err().to_string().contains("ended at once"));
        fs_err::create_dir_all(dir.path().join("group.sock/taken")).unwrap();
        let no_socket = HolderProcess::new(&program(dir.path()), dir.path());
        let error = no_socket.keep(&some_group()).unwrap_err().to_string();
        assert!(error.contains("group.sock"), "{error}");
    }

    #[test]
    fn a_twin_that_ends_at_once_is_started_less_and_less_often() {
        let ends_at_once = |pause| next_pause(pause, Duration::from_millis(5));
        let mut pause = Duration::ZERO;
        let mut pauses = Vec::new();
        for _ in 0..14 {
            pause = ends_at_once(pause);
            pauses.push(pause.as_millis());
        }
        assert_eq!(pauses[..4], [20, 40, 80, 160]);
        assert_eq!(pauses[12..], [60_000, 60_000]);
        assert_eq!(next_pause(pause, Duration::from_secs(61)), PAUSE.0, "one that was killed");
    }

    #[test]
    fn a_holder_whose_twins_end_at_once_answers_and_starts_few() {
        let dir = tempfile::tempdir().unwrap();
        let starts = dir.path().join("starts");
        let script = format!(
            "#!/bin/sh\nexport {HOLD}=\"$2\" {STARTS}={}\nexec {} {TEST} --nocapture\n",
            starts.display(),
            std::env::current_exe().unwrap().display()
        );
        let program = dir.path().join("larder");
        fs_err::write(&program, script).unwrap();
        fs_err::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let holder = HolderProcess::new(&program, dir.path());
        holder.keep(&some_group()).unwrap();
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(1) {
            assert_kept(&holder);
        }
        let started = fs_err::read_to_string(&starts).unwrap().lines().count();
        assert!((2..12).contains(&started), "{started} twins in a second");
        holder.release().unwrap();
    }

    #[test]
    fn the_control_group_of_a_service_is_found() {
        let cases = [
            ("0::/system.slice/larder.service\n", Some((Hierarchy::Unified, "/system.slice/larder.service"))),
            (
                "2:cpu:/\n1:name=systemd:/user.slice/session-1.scope\n0::/\n",
                Some((Hierarchy::Systemd, "/user.slice/session-1.scope")),
            ),
            ("8:pids:/a.service\n0::/\n", None),
            ("0::/kubepods/pod1\n", None),
            ("", None),
        ];
        for (cgroups, expected) in cases {
            assert_eq!(service_of(cgroups), expected, "{cgroups}");
        }
    }
}
