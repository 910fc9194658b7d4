//! `larder runtime`.

use larder::backend::{Backend, FilesystemUsage};
use larder_control::v1alpha1::{Condition, RuntimeRequest, RuntimeResponse};

use crate::args::{Connection, RuntimeArgs};
use crate::connect;
use crate::daemon::Daemon;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output;
use crate::output::table::Table;

pub(super) async fn run(args: &RuntimeArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let runtime = match Daemon::find(connection)? {
        Some(daemon) => daemon.ask(async |mut client| client.runtime(RuntimeRequest {}).await).await?,
        None => ask(&*connect::backend(connection)?).await?,
    };
    output::show(out, args.output, &runtime, || table(&runtime, args.output.is_wide()));
    Ok(Outcome::Done)
}

/// What larder works on.
pub(crate) async fn ask(backend: &dyn Backend) -> Result<RuntimeResponse, Failure> {
    let (info, filesystems) = (backend.info().await?, backend.filesystems().await?);
    let paths = |found: &[FilesystemUsage]| {
        found.iter().map(|usage| usage.mountpoint.display().to_string()).collect()
    };
    let known = |text: String| Some(text).filter(|text| !text.is_empty());
    let conditions = info.conditions.into_iter().map(|condition| Condition {
        r#type: condition.kind,
        status: condition.ok,
        reason: known(condition.reason),
        message: known(condition.message),
    });
    Ok(RuntimeResponse {
        endpoint: info.endpoint,
        name: info.name,
        version: info.version,
        api_version: info.api_version,
        conditions: conditions.collect(),
        image_filesystems: paths(&filesystems.image),
        container_filesystems: paths(&filesystems.container),
    })
}

fn table(runtime: &RuntimeResponse, wide: bool) -> Table {
    let mut table = Table::new(["RUNTIME", &runtime.name]);
    table.row(["Version".to_owned(), runtime.version.clone()]);
    table.row(["API".to_owned(), runtime.api_version.clone()]);
    table.row(["Endpoint".to_owned(), runtime.endpoint.clone()]);
    for condition in &runtime.conditions {
        table.row([condition.r#type.clone(), text(condition)]);
    }
    table.row(["Images".to_owned(), runtime.image_filesystems.join(", ")]);
    if wide {
        table.row(["Containers".to_owned(), runtime.container_filesystems.join(", ")]);
    }
    table
}

fn text(condition: &Condition) -> String {
    let or_nothing = |text: &Option<String>| text.clone().unwrap_or_default();
    match (condition.status, or_nothing(&condition.reason), or_nothing(&condition.message)) {
        (true, ..) => "yes".into(),
        (false, reason, message) if reason.is_empty() && message.is_empty() => "no".into(),
        (false, reason, message) => format!("no, {reason}: {message}"),
    }
}
