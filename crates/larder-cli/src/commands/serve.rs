//! `larder serve`: the daemon, until a signal ends it.

use std::sync::Arc;
use std::time::Duration;

use larder_agent::config::LogFormat;
use larder_agent::serve::{self, Daemon, StartError};

use crate::args::{GlobalFlags, ServeArgs, verbosity_level};
use crate::commands::config::print_config_errors;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::printer::Printer;

/// Runs until a signal arrives.
pub(super) fn run(
    args: &ServeArgs,
    connection: &GlobalFlags,
    out: &Arc<Printer>,
) -> Result<CommandOutcome, Failure> {
    let runtime = serve::runtime().map_err(|error| Failure::failed(format!("cannot start: {error}")))?;
    let within = runtime.enter();
    let daemon = match Daemon::build(&args.flags.sources(connection), verbosity_level(connection.verbose)) {
        Ok(daemon) => daemon,
        Err(StartError::Settings(errors)) => return Ok(print_config_errors(&errors, out)),
        Err(StartError::Failed(failure)) => return Err(failure),
    };
    announce(&daemon, out);
    drop(within);
    let ended = runtime.block_on(daemon.run());
    // Blocking tasks have had their grace period.
    runtime.shutdown_timeout(Duration::from_millis(200));
    ended.map(|()| CommandOutcome::Done)
}

/// Prints the backend and the addresses.
fn announce(daemon: &Daemon, out: &Printer) {
    let socket = match daemon.socket() {
        Some(path) => path.display().to_string(),
        None => "socket passed by systemd".to_owned(),
    };
    let (version, backend) = (env!("CARGO_PKG_VERSION"), daemon.node().description());
    let address = daemon.metrics_address();
    if daemon.config().log.format == LogFormat::Json {
        // A log that is read by programs has no other lines.
        let metrics = address.map(|address| address.to_string()).unwrap_or_default();
        let dashboard = daemon.dashboard().unwrap_or_default();
        tracing::info!(version, socket, metrics, dashboard, "larder serves {backend}");
        return;
    }
    out.info(format_args!("larder {version} serves {backend}"));
    out.info(format_args!("  CRI image service and larder's own API: {socket}"));
    if let Some(address) = address {
        out.info(format_args!("  metrics and health: http://{address}/metrics, /healthz, /readyz"));
    }
    if let Some(dashboard) = daemon.dashboard() {
        out.info(format_args!("  dashboard: {dashboard}"));
    }
    if out.notes_are_on_terminal() {
        out.info("try in another terminal:");
        for arguments in [&["pull", "IMAGE"][..], &["images"], &["status", "--watch"]] {
            out.info(format_args!("  {}", out.command(arguments)));
        }
    }
}
