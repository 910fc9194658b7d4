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

/// The name that larder's own store has among runtimes.
const OWN_STORE: &str = "larder";

/// larder's own store before the first pull.
fn store_to_come() -> RuntimeResponse {
    RuntimeResponse {
        endpoint: DefaultPaths::current().root.unwrap_or_default().display().to_string(),
        name: OWN_STORE.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..RuntimeResponse::default()
    }
}

fn table(runtime: &RuntimeResponse, wide: bool) -> TextTable {
    let mut table = TextTable::new(["RUNTIME", &runtime.name]);
    table.row(["Version".to_owned(), runtime.version.clone()]);
    // larder's own store has no API version: it reports its format, and how layers are mounted.
    let version_of = if runtime.name == OWN_STORE { "Store" } else { "API" };
    table.row([version_of.to_owned(), runtime.api_version.clone()]);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printer::Printer;
    use crate::printer::tests::TestWriter;

    #[test]
    fn a_store_has_a_format_and_a_runtime_an_api() {
        for (name, api_version, line) in
            [("larder", "format 1, layers: EROFS", "Store "), ("containerd", "v1", "API ")]
        {
            let page = TestWriter::default();
            let out = Printer::to(Box::new(page.clone()), Box::new(std::io::sink()));
            let (name, api_version) = (name.to_owned(), api_version.to_owned());
            out.table(&table(&RuntimeResponse { name, api_version, ..RuntimeResponse::default() }, false));
            assert_eq!(
                page.text().lines().filter(|shown| shown.starts_with(line)).count(),
                1,
                "{}",
                page.text()
            );
        }
    }
}
