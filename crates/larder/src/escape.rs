//! Text from registries, images and files, made safe for a terminal: it cannot move the cursor, forge lines or reorder
//! text.

use std::fmt::Write as _;

/// Characters of a table cell; the rest is cut off.
const CELL: usize = 4096;

/// Whether a terminal may interpret it: control characters, line separators, and marks of writing direction.
pub fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The text of any number of lines, with unsafe characters written as `\u{1b}`. Line breaks and tabs stay.
pub fn escape_lines(text: &str) -> String {
    escape(text.chars(), |c| is_unsafe(c) && c != '\n' && c != '\t')
}

/// The text on one line, cut off at a length that no honest cell has.
pub fn escape_cell(text: &str) -> String {
    let mut cell = escape(text.chars().take(CELL), is_unsafe);
    if text.chars().nth(CELL).is_some() {
        cell.push('\u{2026}');
    }
    cell
}

/// Escapes characters of JSON: control characters that it allows as they are, and marks of writing direction, as
/// `\u202e`.
pub fn escape_json(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unsafe(c) && c != '\n' {
            let _ = write!(clean, "\\u{:04x}", u32::from(c)); // writing to a text does not fail
        } else {
            clean.push(c);
        }
    }
    clean
}

fn escape(text: impl Iterator<Item = char>, is_escaped: impl Fn(char) -> bool) -> String {
    let mut clean = String::new();
    for c in text {
        if is_escaped(c) {
            clean.extend(c.escape_default());
        } else {
            clean.push(c);
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_one_line_of_bounded_length_without_marks_of_direction() {
        assert_eq!(escape_cell("a\nb\tc\u{1b}[2J\u{202e}d"), "a\\nb\\tc\\u{1b}[2J\\u{202e}d");
        assert_eq!(escape_lines("a\nb\tc\u{2066}d"), "a\nb\tc\\u{2066}d");
        assert_eq!(escape_cell(&"x".repeat(1 << 20)).chars().count(), CELL + 1);
        assert_eq!(escape_cell("caf\u{e9}"), "caf\u{e9}");
    }
}
