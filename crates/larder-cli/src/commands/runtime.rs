//! `larder runtime`.

use larder::backend::{Backend, Condition, FilesystemUsage, Filesystems, RuntimeInfo};
use serde::Serialize;

use crate::args::RuntimeArgs;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output;
use crate::output::table::Table;

pub(super) async fn run(args: &RuntimeArgs, backend: &dyn Backend, out: &Out) -> Result<Outcome, Failure> {
    let report = Report::new(backend.info().await?, &backend.filesystems().await?);
    output::show(out, args.output, &report, || report.table(args.output.is_wide()));
    Ok(Outcome::Done)
}

/// What larder talks to. The shape of `-o json`.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    endpoint: String,
    name: String,
    version: String,
    api_version: String,
    conditions: Vec<ConditionReport>,
    image_filesystems: Vec<String>,
    container_filesystems: Vec<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct ConditionReport {
    #[serde(rename = "type")]
    kind: String,
    status: bool,
    #[serde(serialize_with = "output::or_null")]
    reason: String,
    #[serde(serialize_with = "output::or_null")]
    message: String,
}

impl Report {
    fn new(info: RuntimeInfo, filesystems: &Filesystems) -> Self {
        let paths = |found: &[FilesystemUsage]| {
            found.iter().map(|usage| usage.mountpoint.display().to_string()).collect()
        };
        Report {
            endpoint: info.endpoint,
            name: info.name,
            version: info.version,
            api_version: info.api_version,
            conditions: info.conditions.into_iter().map(ConditionReport::from).collect(),
            image_filesystems: paths(&filesystems.image),
            container_filesystems: paths(&filesystems.container),
        }
    }

    fn table(&self, wide: bool) -> Table {
        let mut table = Table::new(["RUNTIME", &self.name]);
        table.row(["Version".to_owned(), self.version.clone()]);
        table.row(["API".to_owned(), self.api_version.clone()]);
        table.row(["Endpoint".to_owned(), self.endpoint.clone()]);
        for condition in &self.conditions {
            table.row([condition.kind.clone(), condition.text()]);
        }
        table.row(["Images".to_owned(), self.image_filesystems.join(", ")]);
        if wide {
            table.row(["Containers".to_owned(), self.container_filesystems.join(", ")]);
        }
        table
    }
}

impl From<Condition> for ConditionReport {
    fn from(Condition { kind, ok, reason, message }: Condition) -> Self {
        ConditionReport { kind, status: ok, reason, message }
    }
}

impl ConditionReport {
    fn text(&self) -> String {
        match (self.status, self.reason.as_str(), self.message.as_str()) {
            (true, ..) => "yes".into(),
            (false, "", "") => "no".into(),
            (false, reason, message) => format!("no, {reason}: {message}"),
        }
    }
}
