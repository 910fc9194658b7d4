//! SIGINT and SIGTERM, watched by a thread of their own.
//!
//! The thread of the command may block in a write to a full pipe. A command that does not
//! [handle](InterruptSignals::handle) interrupts ends at once, unless calls of other commands are in progress in it.
//! One that does has [`GRACE`] to end, and longer while calls of other commands are in progress, which is noted on
//! standard error. A second signal ends any command at once. The exit code is that of [`CommandOutcome::Interrupted`].

use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;
use std::{future, io, process, thread};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time;

use crate::exit::CommandOutcome;

/// How long a command that handles interrupts may take to end after the first signal.
const GRACE: Duration = Duration::from_secs(3);

/// How long standard error may take for a note about joined commands.
const NOTE_WITHIN: Duration = Duration::from_millis(200);

/// Signals from now on. Clones share them.
#[derive(Clone)]
pub(crate) struct InterruptSignals {
    handled: InterruptHandle,
    /// Whether a signal arrived that the command does not handle, while calls of others are in progress.
    cut_off: watch::Receiver<bool>,
    others: JoinedCommandCount,
}

/// Returns the number of other commands with a call in progress in this one, once that is known.
pub(crate) type JoinedCommandCount = Arc<OnceLock<Box<dyn Fn() -> usize + Send + Sync>>>;

/// Signals that the command handles: it ends its work after the first one.
#[derive(Clone)]
pub(crate) struct InterruptHandle {
    asked: watch::Receiver<bool>,
    claimed: Arc<AtomicBool>,
    lingers: Arc<AtomicBool>,
}

impl InterruptSignals {
    /// Begins to watch. If that fails, signals have their default effect.
    pub(crate) fn watch() -> InterruptSignals {
        let (ask, asked) = watch::channel(false);
        let (cut, cut_off) = watch::channel(false);
        let handled = InterruptHandle { asked, claimed: Arc::default(), lingers: Arc::default() };
        let interrupt = InterruptSignals { handled, cut_off, others: Arc::default() };
        let shared = interrupt.clone();
        let (begun, listening) = mpsc::channel();
        let started =
            thread::Builder::new().name("signals".into()).spawn(move || listen(&ask, &cut, &shared, &begun));
        if let Err(error) = started {
            tracing::debug!("interrupts are not handled: {error}");
        }
        let _ = listening.recv(); // closed if the thread cannot listen
        interrupt
    }

    /// From now on, the caller handles the first signal.
    pub(crate) fn handle(self) -> InterruptHandle {
        self.handled.claimed.store(true, Ordering::Release);
        self.handled
    }

    /// To be set to the function that counts the commands with calls in progress.
    pub(crate) fn joined_commands(&self) -> JoinedCommandCount {
        Arc::clone(&self.others)
    }

    /// Runs this until a signal arrives that the command does not handle while calls of others are in progress.
    pub(crate) async fn run_unless_interrupted<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut cut_off = self.cut_off.clone();
        tokio::select! {
            biased;
            Ok(_) = cut_off.wait_for(|cut_off| *cut_off) => None,
            done = work => Some(done),
        }
    }

    /// The command has ended and waits for calls of others: only a further signal ends it early.
    pub(crate) fn mark_command_finished(&self) {
        self.handled.claimed.store(true, Ordering::Release);
        self.handled.lingers.store(true, Ordering::Release);
    }

    /// Whether a signal has arrived.
    pub(crate) fn is_interrupted(&self) -> bool {
        *self.handled.asked.borrow()
    }
}

impl InterruptHandle {
    /// Returns when a signal has arrived.
    pub(crate) async fn interrupted(&self) {
        let mut asked = self.asked.clone();
        if asked.wait_for(|asked| *asked).await.is_err() {
            future::pending::<()>().await; // no watcher
        }
    }

    /// Runs this until a signal arrives, and then returns `None`.
    pub(crate) async fn or<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.interrupted() => None,
            done = work => Some(done),
        }
    }
}

/// Runs until a signal ends the program.
fn listen(
    ask: &watch::Sender<bool>,
    cut: &watch::Sender<bool>,
    shared: &InterruptSignals,
    begun: &mpsc::Sender<()>,
) {
    let InterruptHandle { claimed, lingers, .. } = &shared.handled;
    let watched = tokio::runtime::Builder::new_current_thread().enable_all().build().and_then(|runtime| {
        runtime.block_on(async {
            let mut signals = SignalStreams::new()?;
            let _ = begun.send(());
            signals.next().await;
            let is_handled = claimed.load(Ordering::Acquire);
            let joined = || shared.others.get().map_or(0, |others| others());
            if is_handled || joined() > 0 {
                ask.send_replace(true);
                cut.send_replace(!is_handled);
                print_note(joined(), |calls| format!("{calls} in progress; interrupt again to end them"));
                while time::timeout(GRACE, signals.next()).await.is_err()
                    && (lingers.load(Ordering::Acquire) || joined() > 0)
                {}
                print_note(joined(), |calls| format!("ended {calls}"));
            }
            Ok(())
        })
    });
    match watched {
        Ok(()) => process::exit(CommandOutcome::Interrupted.code().into()),
        Err(error) => tracing::debug!("interrupts are not handled: {error}"),
    }
}

/// The calls of so many other commands, in notes.
pub(crate) fn joined_calls(commands: usize) -> String {
    format!("calls of {commands} other larder {}", if commands == 1 { "command" } else { "commands" })
}

/// Prints a note about calls of so many joined commands, if there are any. Not through
/// [`Printer`](crate::printer::Printer), whose lock the command may hold in a blocked write.
fn print_note(commands: usize, note: impl FnOnce(String) -> String) {
    if commands == 0 {
        return;
    }
    let note = note(joined_calls(commands));
    let (done, printed) = mpsc::channel();
    let print = move || {
        let _ = writeln!(io::stderr(), "note: {note}");
        let _ = done.send(());
    };
    if thread::Builder::new().name("note".into()).spawn(print).is_ok() {
        let _ = printed.recv_timeout(NOTE_WITHIN); // a blocked standard error is not waited for
    }
}

struct SignalStreams {
    interrupt: Signal,
    terminate: Signal,
}

impl SignalStreams {
    fn new() -> io::Result<SignalStreams> {
        Ok(SignalStreams {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handled() -> (watch::Sender<bool>, InterruptHandle) {
        let (ask, asked) = watch::channel(false);
        (ask, InterruptHandle { asked, claimed: Arc::default(), lingers: Arc::default() })
    }

    #[tokio::test]
    async fn work_continues_until_a_signal_and_does_not_begin_after_it() {
        let (ask, interrupt) = handled();
        assert_eq!(interrupt.or(async { 1 }).await, Some(1));
        let signal = async { ask.send_replace(true) };
        let (worked, _) = tokio::join!(interrupt.or(future::pending::<()>()), signal);
        assert_eq!(worked, None);
        assert_eq!(interrupt.or(async { 2 }).await, None);
    }

    #[tokio::test]
    async fn work_is_done_without_a_signal_handler() {
        let (ask, interrupt) = handled();
        drop(ask);
        assert_eq!(interrupt.or(tokio::task::yield_now()).await, Some(()));
    }
}
