//! `larder containerd configure`.

use larder_agent::config;
use larder_agent::containerd_config::{self as setup, ConfigChange, ContainerdFiles};

use super::config::print_config_errors;
use crate::args::settings::SettingFlags;
use crate::args::{ConfigureArgs, GlobalFlags};
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::table::TextTable;
use crate::printer::Printer;

pub(super) async fn run(
    args: &ConfigureArgs,
    connection: &GlobalFlags,
    out: &Printer,
) -> Result<CommandOutcome, Failure> {
    let config = match config::load(&SettingFlags::default().sources(connection)) {
        Ok(config) => config,
        Err(errors) => return Ok(print_config_errors(&errors, out)),
    };
    let files = ContainerdFiles {
        config: args.config.clone(),
        containerd: args.containerd.clone(),
        kubelet: args.kubelet_config.clone(),
    };
    if args.check {
        return check(&files, &config, out).await;
    }
    let change = if args.undo {
        setup::plan_undo(&files, &config).await?
    } else {
        setup::plan(&files, &config).await?
    };
    print_change(&change, out);
    if args.undo && !change.is_empty() && !args.force {
        change.refuse_dependents().await?;
    }
    let write = args.apply || (args.undo && !args.dry_run);
    if change.is_empty() {
        out.info("no change is needed");
    } else if write {
        for backup in change.apply(args.apply).await? {
            out.info(format_args!("kept a copy: {}", backup.display()));
        }
        for hint in setup::after_change(&files, args.apply) {
            out.hint(hint);
        }
    } else {
        out.hint(setup::before_change(&files, args.undo));
    }
    Ok(CommandOutcome::Done)
}

fn print_change(change: &ConfigChange, out: &Printer) {
    out.info(change.target());
    for (path, lines) in change.differences() {
        out.line(path.display());
        for line in lines {
            out.line(line);
        }
    }
    for note in &change.notes {
        out.warning(note);
    }
}

async fn check(
    files: &ContainerdFiles,
    config: &config::Config,
    out: &Printer,
) -> Result<CommandOutcome, Failure> {
    let checks = setup::check(files, config).await?;
    let mut table = TextTable::new(["", "PART", "FOUND"]);
    for check in &checks {
        table.row([
            if check.ok { "ok" } else { "not" }.to_owned(),
            check.name.to_owned(),
            check.found.clone(),
        ]);
    }
    out.table(&table);
    for hint in checks.iter().filter_map(|check| check.next.clone()) {
        out.hint(hint);
    }
    Ok(if checks.iter().all(|check| check.ok) { CommandOutcome::Done } else { CommandOutcome::Failed })
}
