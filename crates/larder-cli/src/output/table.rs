//! Plain columns, as kubectl and crictl print them. Only a terminal gets colors, and a table that fits its width.

use std::fmt;

use larder::escape::escape_cell;

use super::style::{Style, TextStyle};

/// Rows under a head, each column as wide as its widest cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TextTable {
    rows: Vec<Vec<String>>,
    /// Heads of columns that a narrow terminal does not show, the first one first.
    optional: Vec<&'static str>,
}

/// Spaces between two columns.
const GAP: usize = 3;
/// Gap on a terminal that is too narrow for [`GAP`].
const NARROW_GAP: usize = 2;
/// The least width of the first column on a narrow terminal.
const NAME_WIDTH: usize = 24;

/// Heads of columns with numbers, which are aligned on the right.
const NUMBERS: [&str; 21] = [
    "SIZE",
    "UNIQUE",
    "SHARED",
    "ACTIVE",
    "TOTAL",
    "COUNT",
    "INODES",
    "ON DISK",
    "USED",
    "AVAIL",
    "USE%",
    "IUSED",
    "IUSE%",
    "IMAGES INODES",
    "FREES",
    "FREED",
    "EXPECTED",
    "LAYERS",
    "RATE",
    "RECLAIMABLE",
    "HERE",
];

impl TextTable {
    /// A table with these heads and no rows.
    pub(crate) fn new<'a>(heads: impl IntoIterator<Item = &'a str>) -> Self {
        TextTable { rows: vec![heads.into_iter().map(str::to_owned).collect()], optional: Vec::new() }
    }

    /// Marks columns as optional; a terminal that is too narrow does not show these columns, the first one first.
    #[must_use]
    pub(crate) fn optional(self, heads: impl IntoIterator<Item = &'static str>) -> Self {
        TextTable { optional: heads.into_iter().collect(), ..self }
    }

    /// Adds a row. Empty cells are shown as `-`; each cell is one line, whatever its text.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let shown =
            cells.into_iter().map(|cell| if cell.is_empty() { "-".to_owned() } else { escape_cell(&cell) });
        self.rows.push(shown.collect());
    }

    /// The lines, as parts with a style. With `width`, columns get narrower or are omitted until a line fits.
    pub(crate) fn lines(&self, width: Option<usize>) -> Vec<Vec<(TextStyle, String)>> {
        let mut table = self.clone();
        let mut gap = GAP;
        if let Some(width) = width {
            gap = table.fit(width);
        }
        let widths = table.widths();
        let heads = &table.rows[0];
        let line = |index: usize, row: &Vec<String>| {
            let cells = row.iter().enumerate().map(|(column, cell)| {
                let head = heads.get(column).map_or("", String::as_str);
                let style = if index == 0 { TextStyle::Head } else { TextStyle::of_cell(head, cell) };
                let is_last = column + 1 == row.len();
                (style, padded(cell, widths[column], gap, NUMBERS.contains(&head), is_last))
            });
            cells.collect()
        };
        table.rows.iter().enumerate().map(|(index, row)| line(index, row)).collect()
    }

    /// Makes the table fit, as far as possible, and returns the gap.
    fn fit(&mut self, width: usize) -> usize {
        if self.width(GAP) <= width {
            return GAP;
        }
        for head in std::mem::take(&mut self.optional) {
            let excess = self.width(NARROW_GAP).saturating_sub(width);
            let first = self.widths().first().copied().unwrap_or(0);
            if excess == 0 || first.saturating_sub(excess) >= NAME_WIDTH {
                break;
            }
            if let Some(column) = self.rows[0].iter().position(|cell| cell == head) {
                self.rows
                    .iter_mut()
                    .filter(|row| row.len() > column)
                    .for_each(|row| drop(row.remove(column)));
            }
        }
        let excess = self.width(NARROW_GAP).saturating_sub(width);
        let first = self.widths().first().copied().unwrap_or(0).saturating_sub(excess).max(NAME_WIDTH);
        for cell in self.rows.iter_mut().filter_map(|row| row.first_mut()) {
            *cell = end_of(cell, first);
        }
        NARROW_GAP
    }

    fn width(&self, gap: usize) -> usize {
        let widths = self.widths();
        widths.iter().sum::<usize>() + gap * widths.len().saturating_sub(1)
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        (0..columns).map(width).collect()
    }
}

/// A cell with the space up to the next one.
fn padded(cell: &str, width: usize, gap: usize, is_number: bool, is_last: bool) -> String {
    match (is_number, is_last) {
        (true, true) => format!("{cell:>width$}"),
        (true, false) => format!("{cell:>width$}{:gap$}", ""),
        (false, true) => cell.to_owned(),
        (false, false) => format!("{cell:<width$}", width = width + gap),
    }
}

/// The text, or its end: images differ in the end of their names.
pub(crate) fn end_of(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let end: String = text.chars().skip(length + 1 - width.max(1)).collect();
    format!("\u{2026}{end}")
}

impl fmt::Display for TextTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, line) in self.lines(None).into_iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            line.iter().try_for_each(|(_, text)| f.write_str(text))?;
        }
        Ok(())
    }
}

/// A line for a terminal.
pub(crate) fn styled(style: Style, parts: &[(TextStyle, String)]) -> String {
    parts.iter().map(|(of, text)| style.paint(*of, text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_numbers_on_the_right_and_the_last_has_no_trailing_space() {
        let mut table = TextTable::new(["IMAGE", "SIZE", "REASON"]);
        table.row(["busybox:1.36".into(), "4.26MB".into(), "in use".into()]);
        table.row(["a".into(), String::new(), String::new()]);
        assert_eq!(
            table.to_string(),
            "IMAGE            SIZE   REASON\nbusybox:1.36   4.26MB   in use\na                   -   -"
        );
    }

    #[test]
    fn no_cell_adds_a_line_or_a_column() {
        let mut table = TextTable::new(["IMAGE", "CREATED"]);
        table.row(["a".into(), "now\nb       \u{202e}today\t".into()]);
        let text = table.to_string();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(!text.contains(['\t', '\u{202e}']), "{text:?}");
    }

    #[test]
    fn a_narrow_terminal_gets_narrow_gaps_fewer_columns_and_the_ends_of_names() {
        let mut table = TextTable::new(["IMAGE", "TAG", "CREATED", "SIZE"]).optional(["CREATED", "TAG"]);
        let name = "registry.example/some/team/with/a/long/name/app";
        table.row([name.to_owned(), "1.36".to_owned(), "2 hours ago".to_owned(), "4.26MB".to_owned()]);
        let shown = |width| {
            let lines = table.lines(Some(width)).into_iter();
            lines.map(|line| line.into_iter().map(|(_, text)| text).collect::<String>()).collect::<Vec<_>>()
        };
        assert_eq!(shown(200)[1], format!("{name}   1.36   2 hours ago   4.26MB"));
        assert_eq!(shown(60)[1], "\u{2026}e/some/team/with/a/long/name/app  1.36  2 hours ago  4.26MB");
        assert_eq!(shown(40)[1], "\u{2026}team/with/a/long/name/app  1.36  4.26MB");
        assert!(shown(40).iter().all(|line| line.chars().count() <= 40), "{:?}", shown(40));
    }
}
