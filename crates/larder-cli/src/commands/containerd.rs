//! `larder containerd configure`.

use larder_agent::config::{self, BackendSetting, Config};
use larder_containerd::configuration::{
    self, ConfigChange, ConfigurationError, ConfigurationErrorKind, ContainerdFiles, LarderSettings,
};

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
    let settings = match config::load(&SettingFlags::default().sources(connection)) {
        Ok(config) => settings_of(&config),
        Err(errors) => return Ok(print_config_errors(&errors, out)),
    };
    let files = ContainerdFiles {
        config: args.config.clone(),
        containerd: args.containerd.clone(),
        kubelet: args.kubelet_config.clone(),
    };
    if args.check {
        return check(&files, &settings, out).await;
    }
    let change = if args.undo {
        configuration::plan_undo(&files, &settings).await
    } else {
        configuration::plan(&files, &settings).await
    };
    let change = change.map_err(failure)?;
    print_change(&change, out);
    if args.undo && !change.is_empty() && !args.force {
        change.refuse_dependents().await.map_err(failure)?;
    }
    let write = args.apply || (args.undo && !args.dry_run);
    if change.is_empty() {
        out.info("no change is needed");
    } else if write {
        for backup in change.apply(args.apply).await.map_err(failure)? {
            out.info(format_args!("kept a copy: {}", backup.display()));
        }
        for hint in configuration::after_change(&files, args.apply) {
            out.hint(hint);
        }
    } else {
        out.hint(configuration::before_change(&files, args.undo));
    }
    Ok(CommandOutcome::Done)
}

fn settings_of(config: &Config) -> LarderSettings {
    LarderSettings {
        socket: config.listen.socket.clone(),
        root: config.root.clone(),
        runtime: config.runtime.clone(),
        uses_store: config.backend == BackendSetting::Store,
        serves_snapshots: config.containerd.snapshotter,
        containerd_socket: config.containerd.socket.clone(),
    }
}

fn failure(error: ConfigurationError) -> Failure {
    let failure = match error.kind {
        ConfigurationErrorKind::Failed => Failure::failed(error.message),
        ConfigurationErrorKind::InvalidInput => Failure::bad_input(error.message),
        ConfigurationErrorKind::Unreachable => Failure::unreachable(error.message),
    };
    failure.hints(error.hint)
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
    settings: &LarderSettings,
    out: &Printer,
) -> Result<CommandOutcome, Failure> {
    let checks = configuration::check(files, settings).await.map_err(failure)?;
    let mut table = TextTable::new(["", "PART", "FOUND"]);
    for check in &checks {
        table.row([
            if check.ok { "ok" } else { "failed" }.to_owned(),
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
