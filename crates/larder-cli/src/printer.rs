//! Output of commands: results on standard output, everything else on standard error.
//!
//! Live progress is below all of it. A closed pipe is a success without a message; any other write error is reported
//! once, at the end. Control characters in text from registries and files reach a terminal only in escaped form.

use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal as _, Write};
use std::sync::{Arc, OnceLock};

use larder::escape::escape_lines;
use larder::hint::Hint;
use parking_lot::Mutex;

use crate::output::hint;
use crate::output::progress::ProgressLines;
use crate::output::style::{ColorChoice, Style, TextStyle};
use crate::output::table::{TextTable, styled};

/// How many notes are held while a view has the terminal; the log may have thousands.
const HELD_NOTES: usize = 100;

/// The two outputs of the program. Shared by everything that prints.
pub(crate) struct Printer {
    inner: Mutex<PrinterStreams>,
    progress: OnceLock<Arc<ProgressLines>>,
    /// Arguments that commands in hints repeat.
    given: OnceLock<String>,
    /// Plain if unset.
    look: OnceLock<PrinterLook>,
    /// Notes that wait while a view has the terminal.
    held: Mutex<Option<Vec<String>>>,
}

/// How the two outputs look.
#[derive(Debug, Clone, Copy, Default)]
struct PrinterLook {
    results: Style,
    notes: Style,
    notes_terminal: bool,
    /// Columns of the terminal that results are printed on.
    columns: Option<usize>,
}

struct PrinterStreams {
    results: Box<dyn Write + Send>,
    notes: Box<dyn Write + Send>,
    /// Results can no longer be written.
    closed: bool,
    write_error: Option<io::Error>,
}

impl Printer {
    /// Standard output and standard error.
    pub(crate) fn standard() -> Self {
        Printer::to(Box::new(io::stdout()), Box::new(io::stderr()))
    }

    /// Any two writers.
    pub(crate) fn to(results: Box<dyn Write + Send>, notes: Box<dyn Write + Send>) -> Self {
        let inner = PrinterStreams { results, notes, closed: false, write_error: None };
        let (progress, given, look) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        Printer { inner: Mutex::new(inner), progress, given, look, held: Mutex::default() }
    }

    /// From now on, terminals get colors if `choice` says so, and tables that fit.
    pub(crate) fn set_look(&self, choice: ColorChoice) {
        let (results, notes) = (io::stdout(), io::stderr());
        let columns = console::Term::stdout().size_checked().map(|(_, columns)| usize::from(columns));
        let _ = self.look.set(PrinterLook {
            results: choice.style(&results),
            notes: choice.style(&notes),
            notes_terminal: notes.is_terminal(),
            columns: columns.filter(|columns| *columns > 0 && results.is_terminal()),
        }); // one process has one command line
    }

    /// Returns a printer of the same look for other writers.
    pub(crate) fn with_look_of(self, other: &Printer) -> Printer {
        let _ = self.look.set(other.look());
        self
    }

    fn look(&self) -> PrinterLook {
        self.look.get().copied().unwrap_or_default()
    }

    /// Whether results are printed on a terminal.
    pub(crate) fn is_terminal(&self) -> bool {
        self.look().columns.is_some()
    }

    /// Whether standard error is a terminal.
    pub(crate) fn notes_are_on_terminal(&self) -> bool {
        self.look().notes_terminal
    }

    /// A command line of larder's for the same images.
    pub(crate) fn command(&self, arguments: &[&'static str]) -> String {
        hint::carrying(self.given(), &Hint::new().command(arguments.iter().copied()))
    }

    /// The style of results.
    pub(crate) fn style(&self) -> Style {
        self.look().results
    }

    /// Prints a table.
    pub(crate) fn table(&self, table: &TextTable) {
        let look = self.look();
        let mut text = String::new();
        for mut line in table.lines(look.columns) {
            for (_, cell) in &mut line {
                *cell = escape_lines(cell);
            }
            let _ = writeln!(text, "{}", styled(look.results, &line)); // writing to a text does not fail
        }
        self.raw(text.as_bytes());
    }

    /// Prints the heading of a part of the results.
    pub(crate) fn heading(&self, text: impl fmt::Display) {
        let text = self.style().paint(TextStyle::Head, &escape_lines(&text.to_string()));
        self.raw(format!("{text}\n").as_bytes());
    }

    /// From now on, everything is printed above this progress.
    pub(crate) fn keep_above(&self, progress: &Arc<ProgressLines>) {
        let _ = self.progress.set(Arc::clone(progress)); // one command has one progress
    }

    /// From now on, commands in hints carry these flags.
    pub(crate) fn hint_with(&self, given: String) {
        let _ = self.given.set(given); // one process has one command line
    }

    /// Prints one result, which may have several lines.
    pub(crate) fn line(&self, text: impl fmt::Display) {
        let text = format!("{}\n", escape_lines(&text.to_string()));
        self.raw(text.as_bytes());
    }

    /// Prints bytes as they are.
    pub(crate) fn raw(&self, bytes: &[u8]) {
        self.above_progress(|| self.inner.lock().write(bytes));
    }

    /// Prints a line to standard error. Words at its start that say what it is have their color.
    pub(crate) fn info(&self, text: impl fmt::Display) {
        let style = self.look().notes;
        let text = escape_lines(&text.to_string());
        let text: String = text.split('\n').map(|line| marked(style, line) + "\n").collect();
        if let Some(held) = &mut *self.held.lock() {
            if held.len() < HELD_NOTES {
                held.push(text);
            }
            return;
        }
        // An error of standard error cannot be reported.
        self.above_progress(|| _ = self.inner.lock().notes.write_all(text.as_bytes()));
    }

    /// Prints a line that stands out to standard error: the sum of what the lines before it say.
    pub(crate) fn summary(&self, text: impl fmt::Display) {
        let text = escape_lines(&text.to_string());
        let text = self.look().notes.paint(TextStyle::Head, &text) + "\n";
        // An error of standard error cannot be reported.
        self.above_progress(|| _ = self.inner.lock().notes.write_all(text.as_bytes()));
    }

    /// Until dropped, standard error gets nothing; then it gets the first of the notes since.
    #[cfg(feature = "top")]
    pub(crate) fn hold_notes(&self) -> HeldNotes<'_> {
        self.held.lock().get_or_insert_default();
        HeldNotes(self)
    }

    /// Prints a warning.
    pub(crate) fn warning(&self, text: impl fmt::Display) {
        self.info(format_args!("warning: {text}"));
    }

    /// Prints a hint.
    pub(crate) fn hint(&self, hint: impl Into<Hint>) {
        self.info(self.hinted(&hint.into()));
    }

    /// Prints an error with its hints.
    pub(crate) fn error(&self, text: impl fmt::Display, hints: &[Hint]) {
        let mut all = format!("error: {text}");
        for hint in hints {
            let _ = write!(all, "\n{}", self.hinted(hint));
        }
        self.info(all);
    }

    /// The error of writing results, unless the reader closed the pipe.
    pub(crate) fn finish(&self) -> io::Result<()> {
        self.inner.lock().write_error.take().map_or(Ok(()), Err)
    }

    /// The options that printed commands carry.
    pub(crate) fn given(&self) -> &str {
        self.given.get().map_or("", String::as_str)
    }

    /// A hint as it is printed.
    pub(crate) fn hinted(&self, hint: &Hint) -> String {
        format!("hint: {}", hint::carrying(self.given(), hint))
    }

    fn above_progress(&self, print: impl FnOnce()) {
        match self.progress.get() {
            Some(progress) => progress.above(print),
            None => print(),
        }
    }
}

/// Notes that were held are printed when this is dropped.
#[cfg(feature = "top")]
pub(crate) struct HeldNotes<'a>(&'a Printer);

#[cfg(feature = "top")]
impl Drop for HeldNotes<'_> {
    fn drop(&mut self) {
        let held = self.0.held.lock().take().unwrap_or_default();
        // An error of standard error cannot be reported.
        for text in held {
            let _ = self.0.inner.lock().notes.write_all(text.as_bytes());
        }
    }
}

impl PrinterStreams {
    fn write(&mut self, bytes: &[u8]) {
        if self.closed {
            return;
        }
        let written = self.results.write_all(bytes).and_then(|()| self.results.flush());
        if let Err(error) = written {
            self.closed = true;
            if error.kind() != io::ErrorKind::BrokenPipe {
                self.write_error = Some(error);
            }
        }
    }
}

/// A line with its first word in color, if that says what the line is.
fn marked(style: Style, line: &str) -> String {
    for (mark, of) in [
        ("error:", TextStyle::Bad),
        ("warning:", TextStyle::Warning),
        ("hint:", TextStyle::Hint),
        ("note:", TextStyle::Hint),
    ] {
        if let Some(rest) = line.strip_prefix(mark) {
            return format!("{}{rest}", style.paint(of, mark));
        }
    }
    line.to_owned()
}

/// Whether live progress can be drawn.
pub(crate) fn progress_possible() -> bool {
    io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

#[cfg(test)]
pub(crate) mod tests {
    use indicatif::{ProgressDrawTarget, TermLike};
    use tokio::time::Instant;

    use super::*;

    /// A writer whose text a test can read.
    #[derive(Clone, Default)]
    pub(crate) struct TestWriter(Arc<Mutex<Vec<u8>>>);

    impl TestWriter {
        pub(crate) fn text(&self) -> String {
            String::from_utf8(self.0.lock().clone()).unwrap()
        }
    }

    impl Write for TestWriter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct FailingWriter(io::ErrorKind);

    impl Write for FailingWriter {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_closed_output_is_no_error() {
        let out = Printer::to(Box::new(FailingWriter(io::ErrorKind::BrokenPipe)), Box::new(io::sink()));
        out.line("one");
        out.line("two");
        out.finish().expect("a closed pipe is a quiet success");
    }

    #[test]
    fn a_full_disk_is_reported_at_the_end() {
        let out = Printer::to(Box::new(FailingWriter(io::ErrorKind::StorageFull)), Box::new(io::sink()));
        out.line("one");
        assert_eq!(out.finish().expect_err("the disk is full").kind(), io::ErrorKind::StorageFull);
    }

    /// A terminal that writes down what is drawn and wiped.
    #[derive(Clone, Default)]
    struct TestTerminal(TestWriter);

    impl fmt::Debug for TestTerminal {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Screen")
        }
    }

    impl TestTerminal {
        fn draw(&self, text: &str) -> io::Result<()> {
            self.0.clone().write_all(text.as_bytes())
        }
    }

    impl TermLike for TestTerminal {
        fn width(&self) -> u16 {
            80
        }

        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn write_line(&self, text: &str) -> io::Result<()> {
            self.draw(&format!("{text}\n"))
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            self.draw(text)
        }

        fn clear_line(&self) -> io::Result<()> {
            self.draw("<wiped>")
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    type PrintStep = fn(&Printer);

    #[test]
    fn everything_is_printed_above_live_progress() {
        let screen = TestTerminal::default();
        let progress = Arc::new(ProgressLines::on(ProgressDrawTarget::term_like(Box::new(screen.clone()))));
        let out = Printer::to(Box::new(screen.0.clone()), Box::new(screen.0.clone()));
        out.keep_above(&progress);
        progress.update(&[], 0, 1, Instant::now());
        let prints: [(PrintStep, &str); 3] = [
            (|out| out.warning("odd"), "warning: odd\n"),
            (|out| out.line("result"), "result\n"),
            (|out| out.raw(b"bytes\n"), "bytes\n"),
        ];
        for (print, text) in prints {
            let before = screen.0.text();
            assert!(before.trim_end().ends_with("0 of 1 done"), "{before:?}");
            print(&out);
            let after = screen.0.text();
            let new = after.strip_prefix(&before).expect("more of the same");
            assert!(new.starts_with(&format!("<wiped>{text}")), "{new:?}");
        }
    }

    #[test]
    fn escape_sequences_do_not_reach_the_terminal() {
        let page = TestWriter::default();
        let out = Printer::to(Box::new(page.clone()), Box::new(io::sink()));
        out.line("a\u{1b}[31mb\tc\nd");
        assert_eq!(page.text(), "a\\u{1b}[31mb\tc\nd\n");
    }
}
