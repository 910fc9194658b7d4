//! The terminal: raw mode and the alternate screen, left again on every way out.

use std::io::{self, Stdout, Write as _};
use std::panic;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::layout::{Position, Rect};

/// Whether the terminal is ours now.
static ENTERED: AtomicBool = AtomicBool::new(false);
static HOOK: Once = Once::new();

/// The terminal, until dropped. A panic restores it, too, before its message.
#[must_use]
pub struct Screen(pub(crate) Terminal<CrosstermBackend<Stdout>>);

impl Screen {
    /// Takes the terminal of standard output.
    pub fn enter() -> io::Result<Screen> {
        HOOK.call_once(|| {
            let print = panic::take_hook();
            panic::set_hook(Box::new(move |panic| {
                restore();
                print(panic);
            }));
        });
        enter_alternate_screen()?;
        Terminal::new(CrosstermBackend::new(io::stdout())).map(Screen).inspect_err(|_| restore())
    }

    /// Gives the terminal back for a while.
    pub(crate) fn leave() {
        restore();
    }

    /// Takes it again, and draws everything with the next frame.
    pub(crate) fn reenter(&mut self) -> io::Result<()> {
        enter_alternate_screen()?;
        // `clear` asks the terminal for its cursor, and the thread that reads keys takes the reply.
        let size = self.0.size()?;
        self.0.resize(Rect::from((Position::ORIGIN, size)))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn enter_alternate_screen() -> io::Result<()> {
    ENTERED.store(true, Ordering::Release);
    enable_raw_mode()?;
    execute!(io::stdout(), EnterAlternateScreen).inspect_err(|_| restore())
}

/// Restores the terminal as it was, if it is ours. Errors mean that it is gone.
fn restore() {
    if ENTERED.swap(false, Ordering::AcqRel) {
        let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
        let _ = io::stdout().flush();
    }
}
