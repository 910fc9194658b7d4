//! SIGINT and SIGTERM, watched by a thread of their own.
//!
//! The thread that does the work may block in a write to a full pipe. Promises: a
//! command that does not [handle](InterruptSignals::handle) interrupts ends at once, unless others work through it; one that does
//! has [`GRACE`] to end by itself, and longer while others work through it, which standard error says; a second signal
//! ends any at once. The exit code is that of [`CommandOutcome::Interrupted`].

use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;
use std::{future, io, process, thread};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time;

use crate::exit::CommandOutcome;

/// How long a command may take to end by itself after the first signal.
const GRACE: Duration = Duration::from_secs(3);

/// How long standard error may take for a note about joined commands.
const NOTE_WITHIN: Duration = Duration::from_millis(200);

/// Signals from now on. Clones share them.
#[derive(Clone)]
pub(crate) struct InterruptSignals {
    handled: InterruptHandle,
    /// A signal has come that the command does not handle, while others work through it.
    cut_off: watch::Receiver<bool>,
    others: JoinedCommandCount,
}

/// How many other commands work through this one, once that is known.
pub(crate) type JoinedCommandCount = Arc<OnceLock<Box<dyn Fn() -> usize + Send + Sync>>>;

/// Signals that the command handles: it ends by itself after the first one.
#[derive(Clone)]
pub(crate) struct InterruptHandle {
    asked: watch::Receiver<bool>,
    claimed: Arc<AtomicBool>,
    lingers: Arc<AtomicBool>,
}

impl InterruptSignals {
    /// Begins to watch. Should that fail, signals end the program as they do without.
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

    /// The first signal is the caller's from now on.
    pub(crate) fn handle(self) -> InterruptHandle {
        self.handled.claimed.store(true, Ordering::Release);
        self.handled
    }

    /// Where to say how many other commands work through this one.
    pub(crate) fn joined_commands(&self) -> JoinedCommandCount {
        Arc::clone(&self.others)
    }

    /// Does this unless, or until, a signal comes that it does not handle while others work through the command.
    pub(crate) async fn run_unless_interrupted<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut cut_off = self.cut_off.clone();
        tokio::select! {
            biased;
            Ok(_) = cut_off.wait_for(|cut_off| *cut_off) => None,
            done = work => Some(done),
        }
    }

    /// The command has ended, and waits for others that work through it: only a further signal ends it early.
    pub(crate) fn mark_command_finished(&self) {
        self.handled.claimed.store(true, Ordering::Release);
        self.handled.lingers.store(true, Ordering::Release);
    }

    /// Whether a signal has come.
    pub(crate) fn is_interrupted(&self) -> bool {
        *self.handled.asked.borrow()
    }
}

impl InterruptHandle {
    /// Done when a signal has come.
    pub(crate) async fn interrupted(&self) {
        let mut asked = self.asked.clone();
        if asked.wait_for(|asked| *asked).await.is_err() {
            future::pending::<()>().await; // no watcher
        }
    }

    /// Does this work unless, or until, a signal comes; `None` says that one came.
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
                note_if_any(joined(), "still uses this one; interrupt again to stop it");
                while time::timeout(GRACE, signals.next()).await.is_err()
                    && (lingers.load(Ordering::Acquire) || joined() > 0)
                {}
                note_if_any(joined(), "used this one and was stopped");
            }
            Ok(())
        })
    });
    match watched {
        Ok(()) => process::exit(CommandOutcome::Interrupted.code().into()),
        Err(error) => tracing::debug!("interrupts are not handled: {error}"),
    }
}

/// Prints what happens to joined commands, if there are any. Not through [`Printer`](crate::out::Printer), whose lock the command
/// may hold in a blocked write; a blocked standard error is not waited for either.
fn note_if_any(joined: usize, happens: &'static str) {
    let commands = match joined {
        0 => return,
        1 => "1 other larder command".to_owned(),
        more => format!("each of {more} other larder commands"),
    };
    let (done, printed) = mpsc::channel();
    let print = move || {
        let _ = writeln!(io::stderr(), "note: {commands} {happens}");
        let _ = done.send(());
    };
    if thread::Builder::new().name("note".into()).spawn(print).is_ok() {
        let _ = printed.recv_timeout(NOTE_WITHIN); // printed, or as good as it gets
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
