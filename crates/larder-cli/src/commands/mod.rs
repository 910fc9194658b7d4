//! The commands, a file or directory each, beside what several of them share. Most take their arguments and a session,
//! ask the control API, and print the answer.

mod bundle;
mod completions;
mod config;
mod containerd;
mod demo;
mod df;
mod ensure;
mod ensure_runner;
mod events;
mod explain;
mod export;
mod fsck;
mod gc;
mod history;
mod images;
mod inspect;
mod keep;
#[cfg(feature = "kube")]
mod kube;
mod lease;
mod load;
mod login;
mod make_room;
mod man;
mod mount;
mod prune;
mod pull;
mod pull_failure;
mod reload;
mod rm;
mod runtime;
mod serve;
mod status;
mod tag;
#[cfg(feature = "top")]
mod top;

use std::sync::Arc;

use larder::backend::PullUntil;

use crate::args::{Cli, Command, ContainerdArgs, ContainerdSubcommand};
#[cfg(feature = "kube")]
use crate::args::{KubeArgs, KubeSubcommand};
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::interrupt::InterruptSignals;
use crate::printer::Printer;
use crate::session::CommandSession;
use pull::PulledSet;

/// Runs one command to its end.
pub(crate) fn run(cli: Cli, out: &Arc<Printer>) -> Result<CommandOutcome, Failure> {
    let connection = cli.connection;
    out.hint_with(connection.given());
    let mut command = cli.command.ungrouped();
    command.apply_platform()?;
    match command {
        Command::Version(_) => {
            out.line(concat!("larder ", env!("CARGO_PKG_VERSION")));
            Ok(CommandOutcome::Done)
        }
        Command::Completions(args) => completions::run(&args, out),
        Command::Global(_) => Ok(print_global_options(out)),
        Command::Config(args) => Ok(config::run(&args, &connection, out)),
        Command::Bundle(args) => block_on(async |interrupt| {
            let ended = interrupt.handle().or(bundle::run(&args, &connection, out)).await;
            ended.unwrap_or(Ok(CommandOutcome::Interrupted))
        }),
        Command::Containerd(ContainerdArgs { command: ContainerdSubcommand::Configure(args) }) => {
            block_on(async |_| containerd::run(&args, &connection, out).await)
        }
        #[cfg(feature = "kube")]
        Command::Kube(KubeArgs { command: KubeSubcommand::Check(args) }) => {
            block_on(async |_| kube::check(&args, &connection, out).await)
        }
        #[cfg(not(feature = "kube"))]
        Command::Kube(_) => Err(crate::failure::missing_feature("larder kube", "kube")),
        Command::Man(args) => man::run(&args, out),
        Command::Serve(args) => serve::run(&args, &connection, out),
        Command::Demo(args) => demo::run(&args, &connection, out),
        command => {
            larder_agent::traces::continue_from_environment();
            let session = CommandSession::new(connection, Arc::clone(out));
            block_on(async |interrupt| run_in(&session, command, interrupt).await)
        }
    }
}

/// Prints the options of every command.
fn print_global_options(out: &Printer) -> CommandOutcome {
    let mut command = crate::args::command();
    command.build();
    if let Some(global) = command.find_subcommand_mut("global") {
        out.line(global.render_long_help().to_string().trim_end());
    }
    CommandOutcome::Done
}

/// Runs one command in a session, and closes the session.
async fn run_in(
    session: &CommandSession,
    command: Command,
    interrupt: InterruptSignals,
) -> Result<CommandOutcome, Failure> {
    let of_store = matches!(
        command,
        Command::Load(_)
            | Command::Save(_)
            | Command::Export(_)
            | Command::Mount(_)
            | Command::Mounts(_)
            | Command::Umount(_)
            | Command::Fsck(_)
    );
    session.warn_about_joined_commands(interrupt.joined_commands());
    let ended =
        interrupt.run_unless_interrupted(Box::pin(dispatch_or_repeat(session, &command, &interrupt))).await;
    interrupt.mark_command_finished();
    session.close().await;
    ended.unwrap_or(Ok(CommandOutcome::Interrupted)).map_err(|failure| session.explain(failure, of_store))
}

/// Runs one command. One that only looks is run once more where the command that it worked through ends before it has
/// answered; pulls see to that by themselves, and what may have changed something is not repeated.
async fn dispatch_or_repeat(
    session: &CommandSession,
    command: &Command,
    interrupt: &InterruptSignals,
) -> Result<CommandOutcome, Failure> {
    let ended = Box::pin(dispatch(session, command, interrupt)).await;
    match ended {
        Err(failure)
            if failure.outcome() == CommandOutcome::Unreachable
                && command.is_read_only()
                && session.has_joined() =>
        {
            tracing::info!("{}: retrying once", failure.message());
            Box::pin(dispatch(session, command, interrupt)).await
        }
        ended => ended,
    }
}

async fn dispatch(
    session: &CommandSession,
    command: &Command,
    interrupt: &InterruptSignals,
) -> Result<CommandOutcome, Failure> {
    match command {
        Command::Ensure(args) => ensure::run(args, session, interrupt.clone()).await,
        Command::Pull(args) => {
            let until = if args.wait { PullUntil::Complete } else { PullUntil::Configured };
            pull::run(&args.work, PulledSet::Named(until), session, interrupt.clone()).await
        }
        Command::Complete(args) => {
            pull::run(&args.work, PulledSet::Present, session, interrupt.clone()).await
        }
        Command::Images(args) => images::run(args, session).await,
        Command::Inspect(args) => inspect::run(args, session).await,
        Command::Exists(args) => inspect::exists(args, session).await,
        Command::Rm(args) => rm::run(args, session).await,
        Command::Tag(args) => tag::run(args, session).await,
        Command::Df(args) => df::run(args, session).await,
        Command::Gc(args) => gc::run(args, session, interrupt.clone()).await,
        Command::Prune(args) => prune::run(args, session, interrupt.clone()).await,
        Command::Explain(args) => explain::run(args, session).await,
        Command::Login(args) => login::log_in(args, session, interrupt.clone()).await,
        Command::Logout(args) => login::log_out(args, &session.out).await,
        Command::History(args) => history::run(args, session).await,
        Command::Keep(args) => keep::keep(args, session).await,
        Command::Unkeep(args) => keep::unkeep(args, session).await,
        Command::Lease(args) => lease::run(args, session).await,
        #[cfg(feature = "top")]
        Command::Top(_) => top::run(session, interrupt.clone()).await,
        #[cfg(not(feature = "top"))]
        Command::Top(_) => Err(crate::failure::missing_feature("larder top", "top")),
        Command::Status(args) => status::run(args, session).await,
        Command::Events(args) => events::run(args, session).await,
        Command::Reload(_) => reload::run(session).await,
        Command::Load(args) => load::run(args, session).await,
        Command::Save(args) => export::save(args, session, interrupt.clone()).await,
        Command::Export(args) => export::run(args, session, interrupt.clone()).await,
        Command::Mount(args) => mount::mount(args, session).await,
        Command::Mounts(args) => mount::list(args, session).await,
        Command::Umount(args) => mount::umount(args, session).await,
        Command::Fsck(args) => fsck::run(args, session).await,
        Command::Runtime(args) => runtime::run(args, session).await,
        // They have no session, or another name.
        Command::Bundle(_)
        | Command::Completions(_)
        | Command::ImageGroup(_)
        | Command::SystemGroup(_)
        | Command::Version(_)
        | Command::Config(_)
        | Command::Containerd(_)
        | Command::Kube(_)
        | Command::Global(_)
        | Command::Man(_)
        | Command::Serve(_)
        | Command::Demo(_) => Ok(CommandOutcome::Done),
    }
}

/// The command's own work is done on this thread, which may block in a write to a pipe. What it serves to other
/// commands has another one, and so have signals.
fn block_on(
    command: impl AsyncFnOnce(InterruptSignals) -> Result<CommandOutcome, Failure>,
) -> Result<CommandOutcome, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime
        .map_err(|error| Failure::failed(format!("cannot start: {error}")))?
        .block_on(command(InterruptSignals::watch()))
}
