//! Waits between attempts to open images, and notes that say what a command waits for.

use std::time::Duration;

use larder::retry::RetryClock;
use parking_lot::Mutex;
use tokio::time::{self, Instant};

use crate::printer::Printer;

/// The clock of a retry that prints a note: the first time after `after`, and again for another text if
/// `follows_changes`.
pub(super) struct WaitNotes<'a, F> {
    out: &'a Printer,
    started: Instant,
    after: Duration,
    follows_changes: bool,
    text: F,
    printed: Mutex<Option<String>>,
}

impl<'a, F> WaitNotes<'a, F> {
    /// `text` says for a failure what the command waits for.
    pub(super) fn new(out: &'a Printer, after: Duration, follows_changes: bool, text: F) -> Self {
        let (started, printed) = (Instant::now(), Mutex::default());
        WaitNotes { out, started, after, follows_changes, text, printed }
    }

    /// Time since the first attempt.
    pub(super) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    fn print(&self, text: String) {
        let mut printed = self.printed.lock();
        let is_known = printed.as_ref().is_some_and(|known| !self.follows_changes || *known == text);
        if !is_known {
            self.out.info(format_args!("note: {text}"));
            *printed = Some(text);
        }
    }
}

impl<E, F: Fn(&E) -> String + Sync> RetryClock<E> for WaitNotes<'_, F> {
    fn wait(&self, time: Duration, failure: &E) -> impl Future<Output = ()> + Send {
        if self.elapsed() >= self.after {
            self.print((self.text)(failure));
        }
        time::sleep(time)
    }
}
