//! Where text goes: results to standard output, everything else to standard error.
//!
//! Promises: a reader that goes away is a quiet success; any other write error is kept and told once, at the end;
//! control characters in text from registries and files reach a terminal only in escaped form.

use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal as _, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The two outputs of the program. Shared by everything that prints.
pub(crate) struct Out(Mutex<Inner>);

struct Inner {
    results: Box<dyn Write + Send>,
    notes: Box<dyn Write + Send>,
    /// Nobody reads results any more, or they cannot be written.
    closed: bool,
    trouble: Option<io::Error>,
}

impl Out {
    /// Standard output and standard error.
    pub(crate) fn standard() -> Self {
        Out::to(Box::new(io::stdout()), Box::new(io::stderr()))
    }

    /// Any two writers.
    pub(crate) fn to(results: Box<dyn Write + Send>, notes: Box<dyn Write + Send>) -> Self {
        Out(Mutex::new(Inner { results, notes, closed: false, trouble: None }))
    }

    /// Prints one result, which may have several lines.
    pub(crate) fn line(&self, text: impl fmt::Display) {
        let text = format!("{}\n", escaped(&text.to_string()));
        self.raw(text.as_bytes());
    }

    /// Prints bytes as they are.
    pub(crate) fn raw(&self, bytes: &[u8]) {
        let mut inner = self.inner();
        if inner.closed {
            return;
        }
        let written = inner.results.write_all(bytes).and_then(|()| inner.results.flush());
        if let Err(error) = written {
            inner.closed = true;
            if error.kind() != io::ErrorKind::BrokenPipe {
                inner.trouble = Some(error);
            }
        }
    }

    /// Tells the user something beside the results.
    pub(crate) fn note(&self, text: impl fmt::Display) {
        let text = format!("{}\n", escaped(&text.to_string()));
        // There is no place left to say that standard error is broken.
        let _ = self.inner().notes.write_all(text.as_bytes());
    }

    /// Tells of something that is odd and was worked around.
    pub(crate) fn warning(&self, text: impl fmt::Display) {
        self.note(format_args!("warning: {text}"));
    }

    /// Tells of an error, and what could be tried next.
    pub(crate) fn error<H: fmt::Display>(&self, text: impl fmt::Display, hints: impl IntoIterator<Item = H>) {
        let mut all = format!("error: {text}");
        for hint in hints {
            let _ = write!(all, "\nhint: {hint}");
        }
        self.note(all);
    }

    /// What kept results from being written, if anything but a reader that went away.
    pub(crate) fn finish(&self) -> io::Result<()> {
        self.inner().trouble.take().map_or(Ok(()), Err)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether live progress can be drawn.
pub(crate) fn progress_possible() -> bool {
    io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// The text with control characters other than line breaks and tabs written as `\u{1b}`.
fn escaped(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() && c != '\n' && c != '\t' {
            clean.extend(c.escape_default());
        } else {
            clean.push(c);
        }
    }
    clean
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use super::*;

    /// A writer whose text a test can read.
    #[derive(Clone, Default)]
    pub(crate) struct Page(Arc<Mutex<Vec<u8>>>);

    impl Page {
        pub(crate) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Broken(io::ErrorKind);

    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_went_away_is_no_trouble() {
        let out = Out::to(Box::new(Broken(io::ErrorKind::BrokenPipe)), Box::new(io::sink()));
        out.line("one");
        out.line("two");
        out.finish().expect("a closed pipe is a quiet success");
    }

    #[test]
    fn a_full_disk_is_told_at_the_end() {
        let out = Out::to(Box::new(Broken(io::ErrorKind::StorageFull)), Box::new(io::sink()));
        out.line("one");
        assert_eq!(out.finish().expect_err("the disk is full").kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn escape_sequences_do_not_reach_the_terminal() {
        let page = Page::default();
        let out = Out::to(Box::new(page.clone()), Box::new(io::sink()));
        out.line("a\u{1b}[31mb\tc\nd");
        assert_eq!(page.text(), "a\\u{1b}[31mb\tc\nd\n");
    }
}
