//! Plain columns, as kubectl and crictl print them: two or more spaces between, nothing cut off.

use std::fmt;

/// Rows under a head, each column as wide as its widest cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TextTable {
    rows: Vec<Vec<String>>,
}

/// Spaces between two columns.
const GAP: usize = 3;

impl TextTable {
    /// A table with these heads and no rows.
    pub(crate) fn new<'a>(heads: impl IntoIterator<Item = &'a str>) -> Self {
        TextTable { rows: vec![heads.into_iter().map(str::to_owned).collect()] }
    }

    /// Adds a row. Empty cells are shown as `-`.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let shown = cells.into_iter().map(|cell| if cell.is_empty() { "-".to_owned() } else { cell });
        self.rows.push(shown.collect());
    }
}

impl fmt::Display for TextTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (index, row) in self.rows.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            for (column, cell) in row.iter().enumerate() {
                if column + 1 == row.len() {
                    f.write_str(cell)?;
                } else {
                    write!(f, "{cell:<width$}", width = widths[column] + GAP)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_the_last_has_no_trailing_space() {
        let mut table = TextTable::new(["IMAGE", "SIZE"]);
        table.row(["busybox:1.36".into(), "4.26MB".into()]);
        table.row(["a".into(), String::new()]);
        assert_eq!(table.to_string(), "IMAGE          SIZE\nbusybox:1.36   4.26MB\na              -");
    }
}
