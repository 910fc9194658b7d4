//! `larder completions`.

use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs};
use crate::exit::CommandOutcome;
use crate::printer::Printer;

pub(super) fn run(args: &CompletionsArgs, out: &Printer) -> CommandOutcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "larder", &mut script);
    out.raw(&script);
    CommandOutcome::Done
}
