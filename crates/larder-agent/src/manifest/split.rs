//! Splits a file into its documents, so that an invalid one does not affect the others.
//!
//! Files are cut at lines that start with `---`, as kubectl does; then JSON values that follow each other where one
//! ends. Every piece knows the line of the file on which it starts.

use serde::de::IgnoredAny;

/// One document's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DocumentText<'a> {
    /// The text, without the `---` line before it.
    pub(super) text: &'a str,
    /// How many lines of the file come before it.
    pub(super) lines_before: usize,
}

/// The documents of a file that hold more than comments and white space.
pub(super) fn split(text: &str) -> Vec<DocumentText<'_>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let pieces = split_at_dashes(text).into_iter().flat_map(split_json);
    pieces.filter(|piece| !is_blank(piece.text)).collect()
}

fn split_at_dashes(text: &str) -> Vec<DocumentText<'_>> {
    let mut pieces = Vec::new();
    let (mut start, mut lines_before) = (0, 0);
    let mut offset = 0;
    for (number, line) in text.split_inclusive('\n').enumerate() {
        if let Some(rest) = after_separator(line) {
            pieces.push(DocumentText { text: &text[start..offset], lines_before });
            // `--- # comment` and `--- {kind: Pod}` keep what follows the dashes, on its own line.
            start = offset + line.len() - rest.len();
            lines_before = number;
        }
        offset += line.len();
    }
    pieces.push(DocumentText { text: &text[start..], lines_before });
    pieces
}

/// Text after the `---` of a separator line.
fn after_separator(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("---")?;
    rest.is_empty().then_some(rest).or_else(|| rest.starts_with([' ', '\t', '\r', '\n']).then_some(rest))
}

/// Splits consecutive JSON values. Whatever else begins with a brace stays whole: YAML's own mappings do, and
/// only a JSON parser distinguishes the two.
fn split_json(piece: DocumentText<'_>) -> Vec<DocumentText<'_>> {
    let text = piece.text;
    if !text.trim_start().starts_with('{') {
        return vec![piece];
    }
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<IgnoredAny>();
    let (mut pieces, mut start, mut lines_before) = (Vec::new(), 0, piece.lines_before);
    while let Some(Ok(IgnoredAny)) = values.next() {
        let end = values.byte_offset();
        let value = DocumentText { text: &text[start..end], lines_before };
        lines_before += value.text.matches('\n').count();
        pieces.push(value);
        start = end;
    }
    let rest = &text[start..];
    match rest.trim_start().chars().next() {
        None => pieces,
        // Broken JSON takes nothing of what came before it along.
        Some('{') => {
            pieces.push(DocumentText { text: rest, lines_before });
            pieces
        }
        Some(_) => vec![piece],
    }
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
        assert_eq!(cut("{\"a\": 1}\n{\"b\": {\n{}\n"), [("{\"a\": 1}", 0), ("{\"b\": {\n{}", 0)]);
    }

    #[test]
    fn yaml_may_follow_json_and_has_braces_of_its_own() {
        assert_eq!(
            cut("{\"a\": 1}\n---\nb: 'it}'\nc: {d: 2}\n---\n{\"e\": 1} {\"f\": 2}\n"),
            [("{\"a\": 1}", 0), ("b: 'it}'\nc: {d: 2}", 1), ("{\"e\": 1}", 4), ("{\"f\": 2}", 5)]
        );
        for yaml in ["{a: 'x}', b: {c: \"}\"}}", "{a: 1} # {", "{\"a\": 1} # comment", "{\"a\": 1}: b"] {
            assert_eq!(cut(yaml), [(yaml, 0)]);
        }
    }

    #[test]
    fn lines_are_counted_from_the_first_line_of_the_file() {
        assert_eq!(cut("# one\n---\n\n{\n\"a\": 1}\n{\"b\": 1}"), [("{\n\"a\": 1}", 1), ("{\"b\": 1}", 4)]);
    }
}
