//! A place to try larder: a private containerd and two registries on loopback, one of them with a password, with the
//! images that the example manifests name. Everything it starts ends with it.
//!
//! ```text
//! larder-playground -- larder ensure -f examples/
//! larder-playground                                 # waits until Ctrl-C
//! larder-playground registry stop                   # from inside, or from the terminal next to it
//! ```

use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};

use larder_testkit_peers::examples::{self, PORT, PRIVATE_PORT};
use larder_testkit_peers::packages::lacking;
use larder_testkit_peers::{Containerd, Package, RegistryAccess, RegistryOptions, RegistryProcess};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

/// Set for the command: the socket that `larder-playground registry stop` and its like talk to.
const CONTROL: &str = "LARDER_PLAYGROUND_CONTROL";
/// Set for the command: the directory with the manifests, rewritten when the port is not the one they name.
const EXAMPLES: &str = "LARDER_EXAMPLES";

const HELP: &str = "\
Try larder against a private containerd and two registries on loopback (needs root).

usage: larder-playground [--port N] [--examples DIR] [-- COMMAND [ARG]...]
       larder-playground registry stop|start
       larder-playground runtime stop|start

Starts them, the second registry with a password, pushes the images that the manifests in DIR (default: examples) name
for 127.0.0.1:5000 and 127.0.0.1:5001, and runs COMMAND with
LARDER_BACKEND set to containerd's socket, LARDER_EXAMPLES to the dir of manifests, and PATH so that larder is
found. Ends with COMMAND's exit code, and ends everything it started. Without COMMAND it waits until Ctrl-C.

With --port N the registries listen on N and N+1, and COMMAND gets a copy of the manifests that says so.

The second and third form stop and start the registries or containerd while the playground runs. They work from inside COMMAND, or
elsewhere with the LARDER_PLAYGROUND_CONTROL that the playground prints.
";

fn main() -> ExitCode {
    let outcome = match PlaygroundCommand::parse(env::args_os().skip(1).collect()) {
        Ok(PlaygroundCommand::Help) => {
            eprint!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Ok(PlaygroundCommand::Control(line)) => control(&line).map(|()| 0),
        Ok(PlaygroundCommand::Play(options)) => play(&options),
        Err(error) => Err(error),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("larder-playground: {error}");
            ExitCode::from(2)
        }
    }
}

enum PlaygroundCommand {
    Help,
    Control(String),
    Play(PlaygroundOptions),
}

struct PlaygroundOptions {
    port: u16,
    examples: PathBuf,
    command: Vec<OsString>,
}

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

impl PlaygroundCommand {
    fn parse(words: Vec<OsString>) -> Outcome<PlaygroundCommand> {
        let mut options = PlaygroundOptions { port: PORT, examples: "examples".into(), command: Vec::new() };
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let text = word.to_string_lossy().into_owned();
            let mut value = || words.next().ok_or(format!("{text} needs a value"));
            match text.as_str() {
                "-h" | "--help" => return Ok(PlaygroundCommand::Help),
                "--port" => options.port = port(&value()?.to_string_lossy())?,
                "--examples" => options.examples = value()?.into(),
                "--" => options.command = words.by_ref().collect(),
                "registry" | "runtime" => {
                    let verb = value()?.to_string_lossy().into_owned();
                    return Ok(PlaygroundCommand::Control(format!("{text} {verb}")));
                }
                _ => return Err(format!("{text}: not understood; see --help").into()),
            }
        }
        Ok(PlaygroundCommand::Play(options))
    }
}

/// A port that has another after it.
fn port(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(port) if (1..u16::MAX).contains(&port) => Ok(port),
        _ => Err(format!("--port {text}: write a number from 1 to {}", u16::MAX - 1)),
    }
}

/// Running servers. Dropping it ends them.
struct Servers {
    registries: [RegistryProcess; 2],
    containerd: Containerd,
}

fn play(options: &PlaygroundOptions) -> Outcome<u8> {
    if let Some(reason) = lacking(&Package::ALL) {
        return Err(reason.into());
    }
    if !options.examples.is_dir() {
        let dir = options.examples.display();
        return Err(format!("{dir}: directory with manifests not found; set one with --examples DIR").into());
    }
    let dir = tempfile::Builder::new().prefix("larder-playground-").tempdir()?;
    let examples = match options.port {
        PORT => options.examples.clone(),
        port => examples::copied_for(&options.examples, port, port + 1, dir.path())?,
    };
    let private_port = if options.port == PORT { PRIVATE_PORT } else { options.port + 1 };
    let registries = [
        start_registry(options.port, RegistryAccess::None)?,
        start_registry(private_port, RegistryAccess::Basic)?,
    ];
    let containerd = Containerd::start()?;
    for registry in &registries {
        containerd.add_registry(registry)?;
        examples::push_all(&examples, registry)?;
    }

    let socket = dir.path().join("control.sock");
    let listener = UnixListener::bind(&socket)?;
    let surroundings = PlaygroundEnvironment {
        backend: containerd.endpoint(),
        socket: socket.clone(),
        examples,
        programs: env::current_exe()?.parent().map(Path::to_owned).unwrap_or_default(),
    };
    let mut servers = Servers { registries, containerd };
    std::thread::scope(|scope| {
        scope.spawn(move || serve_control(&listener, &mut servers));
        let code = run_or_wait(&options.command, &surroundings);
        control_at(&socket, "end")?;
        code
    })
}

fn start_registry(port: u16, auth: RegistryAccess) -> Outcome<RegistryProcess> {
    let options = RegistryOptions { port: Some(port), auth, ..RegistryOptions::default() };
    RegistryProcess::start(options).map_err(|error| format!("{error}; --port N takes others").into())
}

/// The environment of a command inside the playground.
struct PlaygroundEnvironment {
    backend: String,
    socket: PathBuf,
    examples: PathBuf,
    /// The directory of this program: larder is built next to it.
    programs: PathBuf,
}

/// Runs the command, if there is one, and gives its exit code; else waits for Ctrl-C.
fn run_or_wait(command: &[OsString], around: &PlaygroundEnvironment) -> Outcome<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let Some((program, arguments)) = command.split_first() else {
            eprintln!("{}", around.welcome());
            tokio::select! { _ = interrupt.recv() => {} _ = terminate.recv() => {} }
            return Ok(0);
        };
        let path = env::var_os("PATH").unwrap_or_default();
        let mut child = Command::new(program)
            .args(arguments)
            .env("LARDER_BACKEND", &around.backend)
            .env(CONTROL, &around.socket)
            .env(EXAMPLES, &around.examples)
            .env(
                "PATH",
                env::join_paths(std::iter::once(around.programs.clone()).chain(env::split_paths(&path)))?,
            )
            .spawn()
            .map_err(|error| format!("{}: {error}", program.to_string_lossy()))?;
        loop {
            tokio::select! {
                status = child.wait() => return Ok(exit_code(status?)),
                // A terminal sends Ctrl-C to the command as well: what happens next is the command's choice.
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {
                    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
                    pid.map(|pid| kill_process(pid, Signal::TERM));
                }
            }
        }
    })
}

impl PlaygroundEnvironment {
    fn welcome(&self) -> String {
        format!(
            "A containerd, and registries with the images of {0}, are up until Ctrl-C. In another terminal:\n\n    \
             export LARDER_BACKEND={1} {CONTROL}={2} PATH={3}:$PATH\n    \
             larder ensure -f {0}\n    \
             larder-playground registry stop\n",
            self.examples.display(),
            self.backend,
            self.socket.display(),
            self.programs.display(),
        )
    }
}

/// The command's own code; a command that a signal ended gives 128 and the signal's number, as in a shell.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// Executes the requests of the control socket, one line and one response at a time, until a request to end.
fn serve_control(listener: &UnixListener, servers: &mut Servers) {
    for visitor in listener.incoming() {
        let Ok(mut visitor) = visitor else { continue };
        let mut line = String::new();
        if BufReader::new(&visitor).read_line(&mut line).is_err() {
            continue;
        }
        if line.trim() == "end" {
            return;
        }
        let answer = run_order(line.trim(), servers).map_or_else(|problem| problem, |()| "done".to_owned());
        // A client that disconnected before its response is no error.
        let _ = writeln!(visitor, "{answer}");
    }
}

fn run_order(order: &str, servers: &mut Servers) -> Result<(), String> {
    match order {
        "registry stop" => servers.registries.iter_mut().for_each(RegistryProcess::stop),
        "registry start" => {
            servers
                .registries
                .iter_mut()
                .try_for_each(RegistryProcess::start_again)
                .map_err(|error| error.to_string())?;
        }
        "runtime stop" => servers.containerd.stop(),
        "runtime start" => servers.containerd.start_again().map_err(|error| error.to_string())?,
        _ => return Err(format!("{order}: not understood; see --help")),
    }
    Ok(())
}

fn control(line: &str) -> Outcome<()> {
    let socket = env::var_os(CONTROL).ok_or(format!("{CONTROL} is not set: is a playground running?"))?;
    match control_at(Path::new(&socket), line)?.trim() {
        "done" => Ok(()),
        problem => Err(problem.into()),
    }
}

fn control_at(socket: &Path, line: &str) -> Outcome<String> {
    let mut stream = UnixStream::connect(socket).map_err(|error| format!("{}: {error}", socket.display()))?;
    writeln!(stream, "{line}")?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
