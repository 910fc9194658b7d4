//! `larder config`.

use crate::args::{ConfigArgs, Connection};
use crate::config;
use crate::exit::Outcome;
use crate::out::Out;
use crate::output::{self, DataFormat};

/// Shows or checks the settings.
pub(super) fn run(args: &ConfigArgs, connection: &Connection, out: &Out) -> Outcome {
    if args.reference {
        out.raw(config::reference_page().as_bytes());
        return Outcome::Done;
    }
    let flags = match &args.check {
        Some(file) => args.flags.with_file(file),
        None => args.flags.clone(),
    };
    let config = match config::load(&flags.sources(connection)) {
        Ok(config) => config,
        Err(mistakes) => return mistakes.print(out),
    };
    for warning in &config.warnings {
        out.warning(warning);
    }
    match (&args.check, args.output) {
        (Some(file), _) => out.line(format_args!("{}: no mistakes", file.display())),
        (None, DataFormat::Yaml) => out.raw(config::as_yaml(&config).as_bytes()),
        (None, DataFormat::Json) => output::data(out, DataFormat::Json, &config::as_data(&config)),
    }
    Outcome::Done
}
