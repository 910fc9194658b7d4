//! One file per command. Each takes its arguments and what it needs of the world, and tells how it ended.

mod completions;
mod config;
mod demo;
pub(crate) mod df;
mod ensure;
mod events;
pub(crate) mod explain;
mod fsck;
pub(crate) mod gc;
pub(crate) mod history;
mod images;
pub(crate) mod inspect;
pub(crate) mod keep;
pub(crate) mod lease;
pub(crate) mod load;
mod login;
mod man;
pub(crate) mod mount;
mod pull;
mod reload;
pub(crate) mod rm;
pub(crate) mod runtime;
mod status;
mod trouble;
mod work;

use std::sync::Arc;

use crate::args::{Cli, Command, Connection};
use crate::connect;
use crate::daemon::Daemon;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::out::Out;
use crate::output::hint;
use crate::serve;

/// Runs one command to its end.
pub(crate) fn run(cli: Cli, out: &Arc<Out>) -> Result<Outcome, Failure> {
    let connection = cli.connection;
    out.hint_with(hint::given(&connection));
    let of_store = matches!(
        cli.command,
        Command::Load(_) | Command::Mount(_) | Command::Mounts(_) | Command::Umount(_) | Command::Fsck(_)
    );
    let explain = if of_store { connect::explain_store } else { connect::explain };
    dispatch(cli.command, &connection, out).map_err(|failure| explain(&connection, failure))
}

fn dispatch(command: Command, connection: &Connection, out: &Arc<Out>) -> Result<Outcome, Failure> {
    match command {
        Command::Completions(args) => Ok(completions::run(&args, out)),
        Command::Config(args) => Ok(config::run(&args, connection, out)),
        Command::Man(args) => man::run(&args, out),
        Command::Serve(args) => serve::run(&args, connection, out),
        Command::Demo(args) => demo::run(&args, connection, out),
        Command::Ensure(args) => {
            block_on(async |interrupt| ensure::run(&args, connection, out, interrupt).await)
        }
        Command::Pull(args) => block_on(async |interrupt| pull::run(&args, connection, out, interrupt).await),
        Command::Images(args) => block_on(async |_| images::run(&args, connection, out).await),
        Command::Inspect(args) => block_on(async |_| inspect::run(&args, connection, out).await),
        Command::Rm(args) => block_on(async |_| rm::run(&args, connection, out).await),
        Command::Df(args) => block_on(async |_| df::run(&args, connection, out).await),
        Command::Gc(args) => block_on(async |_| gc::run(&args, connection, out).await),
        Command::Explain(args) => block_on(async |_| explain::run(&args, connection, out).await),
        Command::Login(args) => {
            block_on(async |interrupt| login::log_in(&args, connection, out, interrupt).await)
        }
        Command::Logout(args) => block_on(async |_| login::log_out(&args, out).await),
        Command::History(args) => block_on(async |_| history::run(&args, connection, out).await),
        Command::Keep(args) => block_on(async |_| keep::keep(&args, connection, out).await),
        Command::Unkeep(args) => block_on(async |_| keep::unkeep(&args, connection, out).await),
        Command::Lease(args) => block_on(async |_| lease::run(&args, connection, out).await),
        Command::Status(args) => block_on(async |_| status::run(&args, connection, out).await),
        Command::Events(args) => block_on(async |_| events::run(&args, connection, out).await),
        Command::Reload(args) => block_on(async |_| reload::run(&args, connection, out).await),
        Command::Load(args) => block_on(async |_| load::run(&args, connection, out).await),
        Command::Mount(args) => block_on(async |_| mount::mount(&args, connection, out).await),
        Command::Mounts(args) => block_on(async |_| mount::list(&args, connection, out).await),
        Command::Umount(args) => block_on(async |_| mount::umount(&args, connection, out).await),
        Command::Fsck(args) => block_on(async |_| {
            Daemon::forbidden(connection, "fsck")?;
            fsck::run(&args, connection, out).await
        }),
        Command::Runtime(args) => block_on(async |_| runtime::run(&args, connection, out).await),
    }
}

/// One thread is enough for the work: all waiting is for the runtime. Signals have another.
fn block_on(command: impl AsyncFnOnce(Interrupt) -> Result<Outcome, Failure>) -> Result<Outcome, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime
        .map_err(|error| Failure::failed(format!("could not start: {error}")))?
        .block_on(command(Interrupt::watch()))
}
