//! Questions before a command removes more than was named.

use std::io::{self, IsTerminal as _};

use crate::access::terminal;
use crate::failure::Failure;
use crate::interrupt::InterruptHandle;

/// Whether the user can be asked.
pub(crate) fn can_ask() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Asks a question that is answered with yes or no; anything but yes is no.
pub(crate) async fn ask(question: &str, interrupt: &InterruptHandle) -> Result<bool, Failure> {
    let answer = terminal::ask(&format!("{question} [y/N] "), false, interrupt).await?;
    Ok(matches!(answer.reveal().trim().to_lowercase().as_str(), "y" | "yes"))
}

/// Asks before something is removed; without a terminal, `flag` says yes.
pub(crate) async fn ask_or_require(
    question: &str,
    flag: &'static str,
    interrupt: &InterruptHandle,
) -> Result<bool, Failure> {
    if !can_ask() {
        return Err(Failure::bad_input(format!("{question} cannot ask: standard input is not a terminal"))
            .hint(format!("use {flag} to do it without a question")));
    }
    ask(question, interrupt).await
}
