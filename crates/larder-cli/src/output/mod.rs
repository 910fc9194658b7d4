//! Output formats: tables for people, JSON and YAML for programs.

pub(crate) mod events;
pub(crate) mod hint;
pub(crate) mod names;
pub(crate) mod progress;
pub(crate) mod progress_timeline;
pub(crate) mod size;
pub(crate) mod table;

use clap::ValueEnum;
use serde::Serialize;

use crate::printer::Printer;
use table::TextTable;

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum PrintFormat {
    /// Table.
    #[default]
    Table,
    /// Table with more columns.
    Wide,
    /// JSON with stable fields, see docs/output.md.
    Json,
    /// The same data as YAML.
    Yaml,
}

/// Output format of commands without a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum DataFormat {
    /// JSON with stable fields, see docs/output.md.
    #[default]
    Json,
    /// The same data as YAML.
    Yaml,
}

impl PrintFormat {
    /// The format for data, `None` for tables.
    pub(crate) fn data(self) -> Option<DataFormat> {
        match self {
            PrintFormat::Table | PrintFormat::Wide => None,
            PrintFormat::Json => Some(DataFormat::Json),
            PrintFormat::Yaml => Some(DataFormat::Yaml),
        }
    }

    /// Whether the table has more columns.
    pub(crate) fn is_wide(self) -> bool {
        self == PrintFormat::Wide
    }
}

/// Prints data.
pub(crate) fn data(out: &Printer, format: DataFormat, value: &impl Serialize) {
    let text = match format {
        DataFormat::Json => serde_json::to_string_pretty(value).map_err(|error| error.to_string()),
        DataFormat::Yaml => serde_saphyr::to_string(value).map_err(|error| error.to_string()),
    };
    match text {
        Ok(text) => out.line(text.trim_end()),
        // Our own types have text keys and finite numbers, so neither writer refuses them.
        Err(error) => out.error(format_args!("cannot write the result: {error}"), &[]),
    }
}

/// Prints a table or data, by format.
pub(crate) fn show(
    out: &Printer,
    format: PrintFormat,
    value: &impl Serialize,
    table: impl FnOnce() -> TextTable,
) {
    match format.data() {
        Some(format) => data(out, format, value),
        None => out.line(table()),
    }
}
