//! `larder completions`.

use crate::args::CompletionsArgs;
use crate::completion;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::printer::Printer;

pub(super) fn run(args: &CompletionsArgs, out: &Printer) -> Result<CommandOutcome, Failure> {
    let script = completion::script(args.shell);
    out.raw(&script.map_err(|error| Failure::failed(format!("cannot write the script: {error}")))?);
    Ok(CommandOutcome::Done)
}
