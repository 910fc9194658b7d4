//! One file per command. Each takes its arguments and what it needs of the world, and tells how it ended.

mod completions;
mod config;
mod demo;
mod df;
mod ensure;
mod explain;
mod fsck;
mod gc;
mod history;
mod images;
mod inspect;
mod keep;
mod load;
mod man;
mod mount;
mod pull;
mod rm;
mod runtime;
mod trouble;
mod work;

use std::sync::Arc;

use crate::args::{Cli, Command, Connection};
use crate::connect;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::out::Out;
use crate::serve;

/// Runs one command to its end.
pub(crate) fn run(cli: Cli, out: &Arc<Out>) -> Result<Outcome, Failure> {
    let connection = cli.connection;
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
        Command::History(args) => history::run(&args, connection, out),
        Command::Keep(args) => block_on(async |_| keep::keep(&args, connection, out).await),
        Command::Unkeep(args) => keep::unkeep(&args, connection, out),
        Command::Load(args) => block_on(async |_| load::run(&args, connection, out).await),
        Command::Mount(args) => mount::mount(&args, connect::store(connection)?.store(), out),
        Command::Mounts(args) => mount::list(&args, connection, out),
        Command::Umount(args) => Ok(mount::umount(&args, connect::store(connection)?.store(), out)),
        Command::Fsck(args) => block_on(async |_| fsck::run(&args, connection, out).await),
        Command::Runtime(args) => {
            block_on(async |_| runtime::run(&args, &*connect::backend(connection)?, out).await)
        }
    }
}

/// One thread is enough for the work: all waiting is for the runtime. Signals have another.
fn block_on(command: impl AsyncFnOnce(Interrupt) -> Result<Outcome, Failure>) -> Result<Outcome, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime
        .map_err(|error| Failure::failed(format!("could not start: {error}")))?
        .block_on(command(Interrupt::watch()))
}
