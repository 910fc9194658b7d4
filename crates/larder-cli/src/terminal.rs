//! Prompts on the terminal.

use std::io::{self, IsTerminal as _, Write as _};
use std::thread;

use larder::credentials::Secret;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::sync::oneshot;
use zeroize::{Zeroize as _, Zeroizing};

use crate::failure::Failure;
use crate::interrupt::InterruptHandle;

/// Longest answer, in bytes.
const MAX_ANSWER: usize = 4096;

/// Prompts for a line, with `hidden` without echo.
pub(crate) async fn ask(
    question: &str,
    hidden: bool,
    interrupt: &InterruptHandle,
) -> Result<Secret, Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::bad_input("cannot prompt for a password: standard input is not a terminal").hint(
            "use --password-stdin: echo \"$TOKEN\" | larder login --username USER --password-stdin REGISTRY",
        ));
    }
    let unasked = |error: io::Error| Failure::failed(format!("cannot read from the terminal: {error}"));
    let mute = if hidden { Some(EchoOff::new().map_err(unasked)?) } else { None };
    let mut terminal = io::stderr();
    let _ = terminal.write_all(question.as_bytes()).and_then(|()| terminal.flush());
    let (answer, answered) = oneshot::channel();
    // Its read may block for ever, so nothing waits for the thread.
    thread::spawn(move || answer.send(read_line()));
    let line = interrupt.or(answered).await;
    drop(mute);
    if hidden || line.is_none() {
        let _ = terminal.write_all(b"\n");
    }
    let line = line.ok_or_else(Failure::interrupted)?;
    let line = line.unwrap_or_else(|_| Err(io::Error::other("no input")));
    line.map_err(unasked)
}

/// Reads a line without its break, byte by byte: a buffer would leave a copy of the password in memory.
fn read_line() -> io::Result<Secret> {
    let mut line = Zeroizing::new(String::with_capacity(MAX_ANSWER));
    let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_ANSWER));
    let mut byte = [0];
    while rustix::io::read(rustix::stdio::stdin(), &mut byte)? == 1 && byte[0] != b'\n' {
        if bytes.len() == MAX_ANSWER {
            return Err(io::Error::other("the answer is too long"));
        }
        bytes.push(byte[0]);
    }
    byte.zeroize();
    let text = std::str::from_utf8(&bytes).map_err(|_| io::Error::other("the answer is not UTF-8 text"))?;
    line.push_str(text.strip_suffix('\r').unwrap_or(text));
    Ok(Secret::new(line.as_str()))
}

/// Turns off the terminal's echo until dropped.
struct EchoOff(Termios);

impl EchoOff {
    fn new() -> io::Result<EchoOff> {
        let before = tcgetattr(rustix::stdio::stdin())?;
        let mut mute = before.clone();
        mute.local_modes.remove(LocalModes::ECHO);
        tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, &mute)?;
        Ok(EchoOff(before))
    }
}

impl Drop for EchoOff {
    fn drop(&mut self) {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &self.0);
    }
}
