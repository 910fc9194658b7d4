//! `larder kube`.

use larder_agent::{config, node};

use super::config::print_config_errors;
use crate::args::settings::SettingFlags;
use crate::args::{GlobalFlags, KubeCheckArgs};
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::{self, table::TextTable};
use crate::printer::Printer;

pub(super) async fn check(
    args: &KubeCheckArgs,
    connection: &GlobalFlags,
    out: &Printer,
) -> Result<CommandOutcome, Failure> {
    let flags = SettingFlags::default();
    let flags = args.config.as_deref().map_or(flags.clone(), |file| flags.with_file(file));
    let config = match config::load(&flags.sources(connection)) {
        Ok(config) => config,
        Err(errors) => return Ok(print_config_errors(&errors, out)),
    };
    let checks = node::check_cluster(&config).await;
    if let Some(format) = args.output.data() {
        output::data(out, format, &checks);
    } else {
        let mut table = TextTable::new(["", "PART", "FOUND"]);
        for check in &checks {
            let state = if check.ok { "ok" } else { "failed" };
            table.row([state.to_owned(), check.name.to_owned(), check.found.clone()]);
        }
        out.table(&table);
        for next in checks.iter().filter_map(|check| check.next.as_ref()) {
            out.line(next);
        }
    }
    Ok(if checks.iter().all(|check| check.ok) { CommandOutcome::Done } else { CommandOutcome::Failed })
}
