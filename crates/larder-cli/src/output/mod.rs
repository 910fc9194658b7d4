//! Output formats: tables for people, JSON and YAML for programs.

pub(crate) mod events;
pub(crate) mod hint;
pub(crate) mod names;
pub(crate) mod progress;
pub(crate) mod progress_timeline;
pub(crate) mod size;
pub(crate) mod style;
pub(crate) mod table;

use clap::ValueEnum;
use larder::escape::{escape_json, is_unsafe};
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
    /// YAML, with the data of `json`.
    Yaml,
}

/// Output format of a list of what has names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum ListFormat {
    /// Table.
    #[default]
    Table,
    /// Table with more columns.
    Wide,
    /// Names, one a line.
    Name,
    /// JSON with stable fields, see docs/output.md.
    Json,
    /// YAML, with the data of `json`.
    Yaml,
}

impl ListFormat {
    /// The format of what is printed unless it is names.
    pub(crate) fn print_format(self) -> PrintFormat {
        match self {
            ListFormat::Table | ListFormat::Name => PrintFormat::Table,
            ListFormat::Wide => PrintFormat::Wide,
            ListFormat::Json => PrintFormat::Json,
            ListFormat::Yaml => PrintFormat::Yaml,
        }
    }
}

/// Output format of commands without a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum DataFormat {
    /// JSON with stable fields, see docs/output.md.
    #[default]
    Json,
    /// YAML, with the data of `json`.
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
    match text_of(format, value) {
        Ok(text) => out.line(text.trim_end()),
        // Our own types have text keys and finite numbers, so neither writer refuses them.
        Err(error) => out.error(format_args!("cannot write the result: {error}"), &[]),
    }
}

fn text_of(format: DataFormat, value: &impl Serialize) -> Result<String, String> {
    if format == DataFormat::Yaml {
        let text = serde_saphyr::to_string(value).map_err(|error| error.to_string())?;
        if !text.contains(|c: char| is_unsafe(c) && c != '\n') {
            return Ok(text);
        }
        // JSON is YAML, and has an escape for each character.
    }
    serde_json::to_string_pretty(value).map(|text| escape_json(&text)).map_err(|error| error.to_string())
}

/// Prints data as one line of JSON.
pub(crate) fn json_line(out: &Printer, value: &impl Serialize) {
    // Own types have text keys and finite numbers: it does not fail.
    out.line(escape_json(&serde_json::to_string(value).unwrap_or_default()));
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
        None => out.table(&table()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_in_json_and_yaml_and_read_back() {
        let value =
            std::collections::BTreeMap::from([("name", "a\u{85}b\u{202e}\u{9b}31m\u{7f}\u{1b}[2J\nc\td")]);
        let printed = |print: &dyn Fn(&Printer)| {
            let page = crate::printer::tests::TestWriter::default();
            print(&Printer::to(Box::new(page.clone()), Box::new(std::io::sink())));
            let text = page.text();
            assert!(!text.contains(|c: char| is_unsafe(c) && c != '\n'), "{text:?}");
            text
        };
        for json in
            [printed(&|out| data(out, DataFormat::Json, &value)), printed(&|out| json_line(out, &value))]
        {
            let read: serde_json::Value = serde_json::from_str(&json).expect("JSON");
            assert_eq!(read["name"], value["name"], "{json}");
        }
        let controls = (0..=0x9f_u8).map(char::from).filter(|c| c.is_control() && *c != '\n');
        for text in controls.flat_map(|c| [format!("{c}"), format!("a{c}b"), format!("a\nb{c}\n c\n")]) {
            let value = std::collections::BTreeMap::from([("name", text)]);
            let yaml = printed(&|out| data(out, DataFormat::Yaml, &value));
            let read: std::collections::BTreeMap<String, String> =
                serde_saphyr::from_str(&yaml).expect("YAML");
            assert_eq!(read["name"], value["name"], "{yaml}");
        }
    }
}
