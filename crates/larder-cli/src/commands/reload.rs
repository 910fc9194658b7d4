//! `larder reload`: the daemon reads its configuration again.

use larder_control::v1alpha1::ReloadRequest;

use crate::args::{Connection, ReloadArgs};
use crate::daemon::Daemon;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;

pub(super) async fn run(_: &ReloadArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let daemon = Daemon::required(connection)?;
    let reloaded = daemon.ask(async |mut client| client.reload(ReloadRequest {}).await).await?;
    for key in &reloaded.applied {
        out.line(format_args!("{key}: in force"));
    }
    for key in &reloaded.needs_restart {
        out.line(format_args!("{key}: needs a restart"));
    }
    if reloaded.applied.is_empty() && reloaded.needs_restart.is_empty() {
        out.line("Nothing has changed.");
    }
    Ok(if reloaded.needs_restart.is_empty() { Outcome::Done } else { Outcome::Failed })
}
