//! `larder status`: what the daemon is, does, and is connected to.

use std::time::Duration;

use larder::go_format;
use larder_api::convert;
use larder_api::v1alpha1::{GcStatus, StatusRequest, StatusResponse};
use tokio::time::Instant;

use crate::args::StatusArgs;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output;
use crate::output::progress;
use crate::output::table::TextTable;
use crate::printer::Printer;
use crate::session::CommandSession;

pub(super) async fn run(args: &StatusArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let daemon = session.daemon().await?;
    let status = daemon.ask(async |mut calls| calls.status(StatusRequest { look: true }).await).await?;
    match args.output.data() {
        Some(format) => output::data(out, format, &status),
        None => tell(&status, args.output.is_wide(), out),
    }
    Ok(if status.backend_answers { CommandOutcome::Done } else { CommandOutcome::Unreachable })
}

fn tell(status: &StatusResponse, wide: bool, out: &Printer) {
    out.line(table(status));
    let now = Instant::now();
    for pull in &status.pulls {
        out.line(format_args!("  {}", progress::full_line(&convert::pull_from(pull.clone(), now), now)));
    }
    // This call is under way, too.
    let calls = status.calls.iter().filter(|call| wide && !call.path.ends_with("/Status"));
    for call in calls {
        out.line(format_args!("  {}   {}", call.path, age(call.milliseconds)));
    }
}

fn table(status: &StatusResponse) -> TextTable {
    let mut table = TextTable::new(["DAEMON", &format!("larder {}", status.version)]);
    let up = age(status.uptime_seconds.saturating_mul(1000));
    table.row(["Process".to_owned(), format!("{}, up {up}", status.process)]);
    table.row(["Socket".to_owned(), status.socket.clone().unwrap_or_else(|| "of systemd".to_owned())]);
    table.row(["Serves".to_owned(), status.backend.clone()]);
    let answers = if status.backend_answers { "answers" } else { "does not answer" };
    table.row(["Backend".to_owned(), format!("{answers}: {}", status.backend_message)]);
    table.row(["State".to_owned(), status.state.clone()]);
    if let Some(configuration) = &status.configuration {
        table.row(["Configuration".to_owned(), configuration.clone()]);
    }
    if !status.needs_restart.is_empty() {
        table.row(["Needs a restart".to_owned(), status.needs_restart.join(", ")]);
    }
    if let Some(error) = &status.reload_error {
        table.row(["Last reload".to_owned(), format!("failed, and changed nothing: {error}")]);
    }
    table.row(["Collection".to_owned(), collection(status.collection.as_ref())]);
    table.row(["Connections".to_owned(), status.connections.to_string()]);
    table.row(["Events".to_owned(), status.next_event.to_string()]);
    table.row(["Pulls".to_owned(), status.pulls.len().to_string()]);
    table
}

fn collection(status: Option<&GcStatus>) -> String {
    let Some(status) = status else { return String::new() };
    let last = match (&status.ended, &status.last) {
        (Some(ended), Some(last)) => format!("{} at {ended}", stopped(last)),
        _ => "no round yet".to_owned(),
    };
    let running = if status.running { "; a round is running" } else { "" };
    match status.failures {
        0 => format!("{last}{running}"),
        failures => format!("{last} ({failed} failed){running}", failed = rounds(failures)),
    }
}

fn rounds(count: u64) -> String {
    if count == 1 { "1 round".to_owned() } else { format!("{count} rounds in a row") }
}

/// A sentence with a stop, or a phrase with a comma.
fn stopped(text: &str) -> String {
    if text.ends_with('.') { format!("{text} Ended") } else { format!("{text},") }
}

/// Whole seconds.
fn age(milliseconds: u64) -> String {
    go_format::duration(Duration::from_secs(milliseconds / 1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_round_did_reads_well_with_the_time_after_it() {
        let told = |last: &str, failures| {
            let status = GcStatus {
                ended: Some("T".into()),
                last: Some(last.into()),
                failures,
                ..GcStatus::default()
            };
            collection(Some(&status))
        };
        assert_eq!(told("removed nothing", 0), "removed nothing, at T");
        assert_eq!(told("The disk is full.", 1), "The disk is full. Ended at T (1 round failed)");
        assert_eq!(told("no answer", 3), "no answer, at T (3 rounds in a row failed)");
    }
}
