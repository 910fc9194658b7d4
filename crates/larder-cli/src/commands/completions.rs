//! `larder completions`.

use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs};
use crate::exit::Outcome;
use crate::out::Out;

pub(super) fn run(args: &CompletionsArgs, out: &Out) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "larder", &mut script);
    out.raw(&script);
    Outcome::Done
}
