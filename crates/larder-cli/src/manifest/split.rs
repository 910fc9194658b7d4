//! Cuts a file into its documents, so that one that is broken does not take the others with it.
//!
//! YAML documents are cut at lines that start with `---`, as kubectl does; JSON values that follow each other are
//! cut where one ends. Every piece knows the line of the file on which it starts.

/// One document's text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece<'a> {
    /// The text, without the `---` line before it.
    pub(super) text: &'a str,
    /// How many lines of the file come before it.
    pub(super) lines_before: usize,
}

/// The documents of a file that hold more than comments and white space.
pub(super) fn split(text: &str) -> Vec<Piece<'_>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let pieces = if text.trim_start().starts_with('{') { split_json(text) } else { split_yaml(text) };
    pieces.into_iter().filter(|piece| !is_blank(piece.text)).collect()
}

fn split_yaml(text: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let (mut start, mut lines_before) = (0, 0);
    let mut offset = 0;
    for (number, line) in text.split_inclusive('\n').enumerate() {
        if let Some(rest) = after_separator(line) {
            pieces.push(Piece { text: &text[start..offset], lines_before });
            // `--- # comment` and `--- {kind: Pod}` keep what follows the dashes, on its own line.
            start = offset + line.len() - rest.len();
            lines_before = number;
        }
        offset += line.len();
    }
    pieces.push(Piece { text: &text[start..], lines_before });
    pieces
}

/// What follows the `---` of a separator line.
fn after_separator(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("---")?;
    rest.is_empty().then_some(rest).or_else(|| rest.starts_with([' ', '\t', '\r', '\n']).then_some(rest))
}

/// Cuts after each closing brace of the outermost level. Broken JSON stays in one piece with what follows it.
fn split_json(text: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let (mut start, mut lines_before) = (0, 0);
    let (mut depth, mut lines) = (0_usize, 0);
    let (mut in_string, mut escape) = (false, false);
    for (offset, byte) in text.bytes().enumerate() {
        lines += usize::from(byte == b'\n');
        if in_string {
            match byte {
                _ if escape => escape = false,
                b'\\' => escape = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' | b'[' => depth += 1,
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    pieces.push(Piece { text: &text[start..=offset], lines_before });
                    (start, lines_before) = (offset + 1, lines);
                }
            }
            _ => {}
        }
    }
    pieces.push(Piece { text: &text[start..], lines_before });
    // A `---` between JSON values belongs to YAML's way of separating.
    for piece in &mut pieces {
        let trimmed = piece.text.trim_start();
        if let Some(rest) = trimmed.strip_prefix("---") {
            let skipped = &piece.text[..piece.text.len() - rest.len()];
            piece.lines_before += skipped.matches('\n').count();
            piece.text = rest;
        }
    }
    pieces
}

fn is_blank(text: &str) -> bool {
    text.lines().map(str::trim).all(|line| line.is_empty() || line.starts_with(['#', '%']) || line == "...")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str) -> Vec<(&str, usize)> {
        split(text).into_iter().map(|piece| (piece.text.trim(), piece.lines_before)).collect()
    }

    #[test]
    fn documents_are_cut_at_dashes_and_keep_their_lines() {
        assert_eq!(cut("a: 1\n---\nb: 2\n---\nc: 3\n"), [("a: 1", 0), ("b: 2", 1), ("c: 3", 3)]);
        assert_eq!(cut("---\r\na: 1\r\n---\r\nb: 2"), [("a: 1", 0), ("b: 2", 2)]);
    }

    #[test]
    fn blank_documents_do_not_count() {
        assert_eq!(cut("# a licence\n---\n\n---\na: 1\n---\n# the end\n"), [("a: 1", 3)]);
        assert_eq!(cut(""), []);
        assert_eq!(cut("\u{feff}---\n"), []);
    }

    #[test]
    fn dashes_within_a_line_or_a_word_do_not_cut() {
        assert_eq!(cut("a: ---\nb: |\n  ---\n----\n").len(), 1);
    }

    #[test]
    fn content_after_the_dashes_belongs_to_the_new_document() {
        assert_eq!(cut("--- # first\na: 1\n--- {b: 2}\n"), [("# first\na: 1", 0), ("{b: 2}", 2)]);
    }

    #[test]
    fn json_values_may_follow_each_other() {
        assert_eq!(
            cut("{\"a\": \"}\\\"{\"}\n{\n\"b\": [{}]}\n---\n{\"c\": 1}"),
            [("{\"a\": \"}\\\"{\"}", 0), ("{\n\"b\": [{}]}", 0), ("{\"c\": 1}", 3)]
        );
    }

    #[test]
    fn a_json_value_without_an_end_is_one_document() {
        assert_eq!(cut("{\"a\": {\n").len(), 1);
    }
}
