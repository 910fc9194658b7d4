//! `larder man`.

use std::path::Path;

use crate::args::{ManArgs, command_with_global_options};
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::printer::Printer;

pub(super) fn run(args: &ManArgs, out: &Printer) -> Result<CommandOutcome, Failure> {
    let command = command_with_global_options();
    match &args.dir {
        None => out.raw(&page(command)?),
        Some(dir) => write_all(command, dir)?,
    }
    Ok(CommandOutcome::Done)
}

fn page(command: clap::Command) -> Result<Vec<u8>, Failure> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .render(&mut page)
        .map_err(|error| Failure::failed(format!("cannot write the manual page: {error}")))?;
    Ok(page)
}

fn write_all(mut command: clap::Command, dir: &Path) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::failed(error.to_string());
    fs_err::create_dir_all(dir).map_err(failed)?;
    command.build();
    for sub in command.get_subcommands().filter(|sub| !matches!(sub.get_name(), "help" | "global")) {
        let name = format!("larder-{}", sub.get_name());
        let sub = sub.clone().display_name(&name);
        fs_err::write(dir.join(format!("{name}.1")), page(sub)?).map_err(failed)?;
    }
    fs_err::write(dir.join("larder.1"), page(command)?).map_err(failed)
}
