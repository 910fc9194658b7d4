//! Questions before a command removes more than was named.

use std::io::{self, IsTerminal as _};

use crate::failure::Failure;
use crate::interrupt::InterruptHandle;
use crate::terminal;

/// Whether the user can be asked.
pub(crate) fn can_ask() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Asks a question that is answered with yes or no; anything but yes is no.
pub(crate) async fn ask(question: &str, interrupt: &InterruptHandle) -> Result<bool, Failure> {
    let answer = terminal::ask(&format!("{question} [y/N] "), false, interrupt).await?;
    Ok(matches!(answer.reveal().trim().to_lowercase().as_str(), "y" | "yes"))
}

/// Asks whether to do an action that removes something; without a terminal, `flag` says yes.
pub(crate) async fn ask_or_require(
    action: &str,
    flag: &'static str,
    interrupt: &InterruptHandle,
) -> Result<bool, Failure> {
    if !can_ask() {
        let why = format!("cannot ask whether to {action}: standard input or error is not a terminal");
        return Err(Failure::bad_input(why).hint(format!("add {flag} to do it without a question")));
    }
    ask(&format!("{action}?"), interrupt).await
}
