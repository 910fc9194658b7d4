//! The `larder` command: makes images present on a node, lists, inspects and removes them.
//!
//! Each command is a file or directory in `commands/`. What all of them share: `args` (what was typed), `session` (the
//! way to the images), `interrupt` (signals), `printer` and `output` (what is printed), `exit` (how it ended).

mod args;
mod commands;
mod completion;
mod confirm;
mod credential_setup;
mod exit;
mod failure;
mod interrupt;
mod limits;
mod output;
mod printer;
mod session;
mod terminal;

use std::process::ExitCode;
use std::sync::Arc;

use larder_agent::environment::variable;
use larder_agent::group_keeper::hold_if_asked;
use larder_agent::log;

use args::{Cli, habits, verbosity_level};
use exit::CommandOutcome;
use failure::{ExitReport as _, Failure};
use output::style::ColorChoice;
use printer::Printer;

fn main() -> ExitCode {
    if let Some(code) = hold_if_asked() {
        return code;
    }
    let out = Arc::new(Printer::standard());
    completion::answer_shell();
    let cli = match Cli::read(std::env::args_os()) {
        Ok(cli) => cli,
        Err(usage) => {
            out.set_look(ColorChoice::Auto);
            return finish(&out, explain(&out, &usage));
        }
    };
    out.set_look(cli.connection.color);
    let log_to = Arc::clone(&out);
    let (level, directives) = (verbosity_level(cli.connection.verbose), variable(log::VARIABLE));
    if let Err(failure) = log::start(level, directives.as_deref(), move |line| log_to.info(line)) {
        return finish(&out, failure.print(&out));
    }
    limits::forbid_core_files();
    limits::raise_open_files();
    let outcome = commands::run(cli, &out).unwrap_or_else(|failure| failure.print(&out));
    finish(&out, outcome)
}

/// Prints help, the version, or what is wrong with the command line.
fn explain(out: &Printer, usage: &clap::Error) -> CommandOutcome {
    let text = usage.render();
    if usage.use_stderr() {
        let words: Vec<String> =
            std::env::args_os().skip(1).map(|word| word.to_string_lossy().into()).collect();
        match habits::advice(usage, &words) {
            Some(advice) => {
                let text = text.to_string();
                out.info(text.lines().next().unwrap_or_default());
                out.info(format_args!("hint: {advice}"));
            }
            // The words of the standard library.
            None => out.info(
                text.to_string().trim_end().replace("invalid digit found in string", "not a whole number"),
            ),
        }
        return CommandOutcome::BadInput;
    }
    if out.style().colors {
        out.raw(format!("{}\n", text.ansi().to_string().trim_end()).as_bytes());
    } else {
        out.line(text.to_string().trim_end());
    }
    CommandOutcome::Done
}

fn finish(out: &Printer, outcome: CommandOutcome) -> ExitCode {
    match out.finish() {
        Ok(()) => outcome.into(),
        Err(error) => {
            let failure = Failure::failed(format!("cannot write the result: {error}"));
            failure.print(out).max(outcome).into()
        }
    }
}
