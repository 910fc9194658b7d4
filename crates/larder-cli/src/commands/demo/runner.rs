//! Runs the commands of the demo as a user's would be, and prints the measured results.

use larder::hint::Hint;
use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;

use larder_api::v1::{StoreUsage, UsageRequest};
use parking_lot::Mutex;

use crate::args::{Cli, GlobalFlags};
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::interrupt::InterruptSignals;
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

/// The store, in the demo's directory.
pub(super) const ROOT: &str = "store";

/// Where the demo is.
pub(super) struct DemoRunner {
    out: Arc<Printer>,
    interrupt: InterruptSignals,
    step: usize,
    title: &'static str,
}

impl DemoRunner {
    pub(super) fn new(out: &Arc<Printer>, interrupt: InterruptSignals) -> DemoRunner {
        let _ = interrupt.clone().handle(); // from now on the demo ends by itself, and removes its directory
        DemoRunner { out: Arc::clone(out), interrupt, step: 0, title: "" }
    }

    /// Begins the next step.
    pub(super) fn step(&mut self, title: &'static str) {
        self.step += 1;
        self.title = title;
        self.out.line(format_args!("\n{}. {title}", self.step));
    }

    /// Shows a command line that is not larder's, and what it says.
    pub(super) fn show(&self, line: &str, text: &str) {
        self.out.line(format_args!("$ {line}"));
        if !text.is_empty() {
            self.out.line(text.trim_end());
        }
    }

    /// Runs a command line of larder's. What it prints is returned as well, if it ends as expected.
    pub(super) async fn run(&self, line: &str, expected: CommandOutcome) -> Result<String, Failure> {
        self.out.line(format_args!("$ {line}"));
        let printed = Arc::new(Mutex::new(Vec::new()));
        let tee = |to: Box<dyn Write + Send>| Box::new(CapturingWriter { to, copy: Arc::clone(&printed) });
        let out = Printer::to(tee(Box::new(io::stdout())), tee(Box::new(io::stderr())));
        let out = Arc::new(out.with_look_of(&self.out));
        let ended = self.command(line, &out).await.unwrap_or_else(|failure| failure.print(&out));
        if ended == CommandOutcome::Interrupted || self.interrupt.is_interrupted() {
            return Err(Failure::interrupted());
        }
        self.check(ended == expected, || {
            format!("{line}: exit code {}, expected {}", ended.code(), expected.code())
        })?;
        let printed = printed.lock();
        Ok(String::from_utf8_lossy(&printed).into_owned())
    }

    async fn command(&self, line: &str, out: &Arc<Printer>) -> Result<CommandOutcome, Failure> {
        let cli = Cli::read(line.split(' ')).map_err(|usage| Failure::bad_input(usage.to_string()))?;
        let mut connection = cli.connection;
        (connection.root, connection.root_is_of_variable) = (Some(ROOT.into()), false);
        connection.daemon = Some("none".into());
        let session = CommandSession::new(connection, Arc::clone(out)).with_default_settings();
        let ended = Box::pin(super::super::dispatch(&session, &cli.command, &self.interrupt)).await;
        session.close().await;
        ended
    }

    /// Returns the store's own account of its disk usage.
    pub(super) async fn usage(&self) -> Result<StoreUsage, Failure> {
        let connection =
            GlobalFlags { root: Some(ROOT.into()), daemon: Some("none".into()), ..GlobalFlags::default() };
        let session = CommandSession::new(connection, Arc::clone(&self.out)).with_default_settings();
        let client = session.open(&ImageAccess::collect()).await?;
        let usage = client.ask(async |mut calls| calls.usage(UsageRequest {}).await).await;
        session.close().await;
        usage?.store.ok_or_else(|| self.failed("the backend is not a store"))
    }

    /// Returns an error that ends the demo unless the condition is true.
    pub(super) fn check(&self, condition: bool, what: impl FnOnce() -> String) -> Result<(), Failure> {
        if self.interrupt.is_interrupted() {
            return Err(Failure::interrupted());
        }
        if condition { Ok(()) } else { Err(self.failed(what())) }
    }

    /// Prints a measured result.
    pub(super) fn report_result(&self, text: impl fmt::Display) {
        self.out.line(format_args!("=> {text}"));
    }

    /// Returns the failure of this step.
    pub(super) fn failed(&self, why: impl fmt::Display) -> Failure {
        Failure::failed(format!("step {} of the demo ({}) failed: {why}", self.step, self.title))
            .hint(Hint::new().command(["demo", "--keep"]).text(" keeps its directory"))
    }
}

/// Passes text on, and keeps a copy.
struct CapturingWriter {
    to: Box<dyn Write + Send>,
    copy: Arc<Mutex<Vec<u8>>>,
}

impl Write for CapturingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.copy.lock().extend_from_slice(bytes);
        match self.to.write_all(bytes) {
            // The copy is needed even if the pipe is closed.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
            _ => Ok(bytes.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.to.flush() {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
            _ => Ok(()),
        }
    }
}
