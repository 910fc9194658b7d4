//! `larder runtime`.

use larder_agent::environment::DefaultPaths;
use larder_api::v1::{Condition, RuntimeRequest, RuntimeResponse};

use crate::args::RuntimeArgs;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output;
use crate::output::table::TextTable;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &RuntimeArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let runtime = match session.open_to_list(&ImageAccess::read()).await? {
        Some(client) => client.ask(async |mut calls| calls.runtime(RuntimeRequest {}).await).await?,
        None => store_to_come(),
    };
    output::show(&session.out, args.output, &runtime, || table(&runtime, args.output.is_wide()));
    Ok(CommandOutcome::Done)
}

/// larder's own store before the first pull.
fn store_to_come() -> RuntimeResponse {
    RuntimeResponse {
        endpoint: DefaultPaths::current().root.unwrap_or_default().display().to_string(),
        name: "larder".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..RuntimeResponse::default()
    }
}

fn table(runtime: &RuntimeResponse, wide: bool) -> TextTable {
    let mut table = TextTable::new(["RUNTIME", &runtime.name]);
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
