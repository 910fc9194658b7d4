//! `larder reload`: the daemon reloads its settings.

use larder_api::v1::ReloadRequest;

use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let daemon = session.open(&ImageAccess::daemon()).await?;
    let reloaded = daemon.ask(async |mut calls| calls.reload(ReloadRequest {}).await).await?;
    for key in &reloaded.applied {
        out.line(format_args!("{key}: in effect"));
    }
    for key in &reloaded.needs_restart {
        out.line(format_args!("{key}: requires a restart"));
    }
    for key in &reloaded.held {
        out.line(format_args!("{key}: waits for that restart"));
    }
    if reloaded.applied.is_empty() && reloaded.needs_restart.is_empty() {
        out.line("no changes");
    }
    Ok(if reloaded.needs_restart.is_empty() { CommandOutcome::Done } else { CommandOutcome::Failed })
}
