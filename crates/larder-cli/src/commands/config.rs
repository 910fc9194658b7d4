//! `larder config`.

use larder_agent::config::{self, ConfigErrors};
use larder_agent::serve;

use crate::args::{ConfigArgs, GlobalFlags};
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::output::{self, DataFormat};
use crate::printer::Printer;

/// Shows or checks the settings.
pub(super) fn run(args: &ConfigArgs, connection: &GlobalFlags, out: &Printer) -> CommandOutcome {
    if args.reference {
        out.raw(config::reference_page().as_bytes());
        return CommandOutcome::Done;
    }
    let flags = match &args.check {
        Some(Some(file)) => args.flags.with_file(file),
        Some(None) | None => args.flags.clone(),
    };
    let config = match config::load(&flags.sources(connection)) {
        Ok(config) => config,
        Err(errors) => return print_config_errors(&errors, out),
    };
    if args.check.is_some()
        && let Some(group) = &config.listen.group
        && let Err(failure) = serve::group_id(group)
    {
        // Groups differ between machines, so only --check on this one reports a missing group.
        let (at, what) = (config.origin("listen.group"), failure.message());
        let error = Failure::bad_input(format!("{at}: listen.group: {what}"));
        return error.hints(failure.next_steps().iter().cloned()).print(out);
    }
    for warning in &config.warnings {
        out.warning(warning);
    }
    match (&args.check, args.output) {
        (Some(Some(file)), _) => out.line(format_args!("{}: valid", file.display())),
        (Some(None), _) => out.line("settings: valid"),
        (None, DataFormat::Yaml) => out.raw(config::as_yaml(&config).as_bytes()),
        (None, DataFormat::Json) => output::data(out, DataFormat::Json, &config::as_data(&config)),
    }
    CommandOutcome::Done
}

/// Prints everything that is wrong with the settings.
pub(super) fn print_config_errors(errors: &ConfigErrors, out: &Printer) -> CommandOutcome {
    for error in errors.each() {
        out.error(error, error.hints());
    }
    CommandOutcome::BadInput
}
