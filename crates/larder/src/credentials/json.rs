//! JSON as Go reads and writes it, for files and secrets that kubelet reads too.
//!
//! A field's name matches without regard to case; a later duplicate overwrites an earlier one; `null` is accepted
//! anywhere; strings that are not proper Unicode get U+FFFD. The syntax is strict otherwise, and text after the value
//! is an error. Errors state the position and never quote the content, which may be a password.

use std::io;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Serializer;
use serde_json::ser::Formatter;
use zeroize::Zeroizing;

use super::secret::Secret;

/// How deep values may be nested, as in Go.
const MAX_DEPTH: usize = 10_000;

/// A syntax error and its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct JsonSyntaxError {
    /// Byte offset.
    pub(super) at: usize,
    /// The error, without content.
    pub(super) problem: String,
}

/// Reads one JSON text from left to right.
pub(super) struct JsonScanner<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

impl<'a> JsonScanner<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        JsonScanner { text, at: 0, depth: 0 }
    }

    /// Offset of the next value.
    pub(super) fn position(&mut self) -> usize {
        self.peek();
        self.at
    }

    /// Whether the next value is a string.
    pub(super) fn next_is_string(&mut self) -> bool {
        self.peek() == Some(b'"')
    }

    /// Whether the next value is an object.
    pub(super) fn next_is_object(&mut self) -> bool {
        self.peek() == Some(b'{')
    }

    /// Reads an object; `member` reads the value of each member. `false` if there was a `null` instead.
    pub(super) fn object(
        &mut self,
        what: &str,
        mut member: impl FnMut(&mut Self, &str) -> Result<(), JsonSyntaxError>,
    ) -> Result<bool, JsonSyntaxError> {
        match self.peek() {
            Some(b'n') => return self.word("null").map(|()| false),
            Some(b'{') => self.open()?,
            _ => return Err(self.syntax_error(format!("{what} must be an object"))),
        }
        if !self.eat(b'}') {
            loop {
                let name = self.name()?;
                member(self, &name)?;
                if self.eat(b'}') {
                    break;
                }
                self.expect(b',', "expected `,` or `}`")?;
            }
        }
        self.depth -= 1;
        Ok(true)
    }

    /// Reads a string; `None` if there was a `null` instead.
    pub(super) fn string(&mut self, what: &str) -> Result<Option<String>, JsonSyntaxError> {
        match self.peek() {
            Some(b'n') => self.word("null").map(|()| None),
            Some(b'"') => self.quoted().map(Some),
            _ => Err(self.syntax_error(format!("{what} must be a string"))),
        }
    }

    /// Reads a value of any kind and forgets it. Does not recurse: a deep text must not exhaust the stack.
    pub(super) fn skip(&mut self) -> Result<(), JsonSyntaxError> {
        let mut open = Vec::new();
        loop {
            match self.peek() {
                Some(b'{') => {
                    self.open()?;
                    if !self.eat(b'}') {
                        self.name()?;
                        open.push(b'}');
                        continue;
                    }
                    self.depth -= 1;
                }
                Some(b'[') => {
                    self.open()?;
                    if !self.eat(b']') {
                        open.push(b']');
                        continue;
                    }
                    self.depth -= 1;
                }
                Some(b'"') => drop(Zeroizing::new(self.quoted()?)),
                Some(b'n') => self.word("null")?,
                Some(b't') => self.word("true")?,
                Some(b'f') => self.word("false")?,
                Some(b'-' | b'0'..=b'9') => self.number()?,
                _ => return Err(self.syntax_error("expected a value")),
            }
            if !self.next_member(&mut open)? {
                return Ok(());
            }
        }
    }

    /// After a value: goes to the next one in what is still `open`, given by its end. `false` if all of it has ended.
    fn next_member(&mut self, open: &mut Vec<u8>) -> Result<bool, JsonSyntaxError> {
        while let Some(&end) = open.last() {
            if !self.eat(end) {
                self.expect(b',', "expected `,` or the end of the list or object")?;
                if end == b'}' {
                    self.name()?;
                }
                return Ok(true);
            }
            open.pop();
            self.depth -= 1;
        }
        Ok(false)
    }

    /// Checks that nothing follows.
    pub(super) fn end(&mut self) -> Result<(), JsonSyntaxError> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.syntax_error("data after the end of the value")),
        }
    }

    fn open(&mut self) -> Result<(), JsonSyntaxError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.syntax_error("nested too deeply"));
        }
        self.at += 1;
        Ok(())
    }

    /// A member's name and the colon after it.
    fn name(&mut self) -> Result<String, JsonSyntaxError> {
        if self.peek() != Some(b'"') {
            return Err(self.syntax_error("expected a name in double quotes"));
        }
        let name = self.quoted()?;
        self.expect(b':', "expected `:`")?;
        Ok(name)
    }

    fn quoted(&mut self) -> Result<String, JsonSyntaxError> {
        self.at += 1;
        // Wiped when dropped on an error, and never grows: unescaped text is shorter.
        let mut string = Zeroizing::new(String::with_capacity(self.length_of_string()));
        loop {
            let rest = &self.text[self.at..];
            let Some(plain) = rest.find(|c| c < ' ' || matches!(c, '"' | '\\')) else {
                self.at = self.text.len();
                return Err(self.syntax_error("unexpected end of input inside a string"));
            };
            string.push_str(&rest[..plain]);
            self.at += plain;
            match rest.as_bytes()[plain] {
                b'"' => {
                    self.at += 1;
                    return Ok(std::mem::take(&mut *string));
                }
                b'\\' => string.push(self.escape()?),
                _ => return Err(self.syntax_error("a control character inside of a string")),
            }
        }
    }

    /// Bytes up to the quote that ends the string here, or to the end of the text.
    fn length_of_string(&self) -> usize {
        let mut escaped = false;
        let rest = &self.text.as_bytes()[self.at..];
        let end = rest.iter().position(|&byte| {
            let ends = byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            ends
        });
        end.unwrap_or(rest.len())
    }

    fn escape(&mut self) -> Result<char, JsonSyntaxError> {
        let c = match self.text.as_bytes().get(self.at + 1) {
            Some(b'u') => return self.unicode_escape(),
            Some(&c @ (b'"' | b'\\' | b'/')) => char::from(c),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            _ => return Err(self.syntax_error("an unknown escape inside of a string")),
        };
        self.at += 2;
        Ok(c)
    }

    /// `\uXXXX`, or two of them for one character. Half a pair is U+FFFD.
    fn unicode_escape(&mut self) -> Result<char, JsonSyntaxError> {
        let Some(first) = self.code_unit() else {
            return Err(self.syntax_error("`\\u` needs four hexadecimal digits"));
        };
        self.at += 6;
        if let (0xd800..0xdc00, Some(second @ 0xdc00..0xe000)) = (first, self.code_unit()) {
            self.at += 6;
            let c = 0x10000 + ((u32::from(first) - 0xd800) << 10) + (u32::from(second) - 0xdc00);
            return Ok(char::from_u32(c).unwrap_or(char::REPLACEMENT_CHARACTER));
        }
        Ok(char::from_u32(first.into()).unwrap_or(char::REPLACEMENT_CHARACTER))
    }

    fn code_unit(&self) -> Option<u16> {
        let digits = self.text.get(self.at..self.at + 6)?.strip_prefix("\\u")?;
        let all_hex = digits.bytes().all(|b| b.is_ascii_hexdigit());
        all_hex.then(|| u16::from_str_radix(digits, 16).ok()).flatten()
    }

    fn number(&mut self) -> Result<(), JsonSyntaxError> {
        self.at += usize::from(self.next_is(b'-'));
        if self.next_is(b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.next_is(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if self.next_is(b'e') || self.next_is(b'E') {
            self.at += 1;
            self.at += usize::from(self.next_is(b'+') || self.next_is(b'-'));
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), JsonSyntaxError> {
        let rest = &self.text.as_bytes()[self.at..];
        match rest.iter().take_while(|b| b.is_ascii_digit()).count() {
            0 => Err(self.syntax_error("a number that is not one")),
            some => {
                self.at += some;
                Ok(())
            }
        }
    }

    fn word(&mut self, word: &str) -> Result<(), JsonSyntaxError> {
        if !self.text[self.at..].starts_with(word) {
            return Err(self.syntax_error("expected a value"));
        }
        self.at += word.len();
        Ok(())
    }

    /// The next byte that is not white space.
    fn peek(&mut self) -> Option<u8> {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start_matches([' ', '\t', '\r', '\n']).len();
        self.text.as_bytes().get(self.at).copied()
    }

    fn next_is(&self, byte: u8) -> bool {
        self.text.as_bytes().get(self.at) == Some(&byte)
    }

    fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8, problem: &str) -> Result<(), JsonSyntaxError> {
        if self.eat(byte) { Ok(()) } else { Err(self.syntax_error(problem)) }
    }

    fn syntax_error(&self, problem: impl Into<String>) -> JsonSyntaxError {
        let problem = match self.text.len() {
            0 => "empty input".to_owned(),
            end if self.at == end => "unexpected end of input".to_owned(),
            _ => problem.into(),
        };
        JsonSyntaxError { at: self.at, problem }
    }
}

/// Bytes as Go turns them into text: each byte that is not UTF-8 becomes U+FFFD.
pub(super) fn text_of(bytes: &[u8]) -> Zeroizing<String> {
    let replaced = |chunk: &[u8]| chunk.len() * char::REPLACEMENT_CHARACTER.len_utf8();
    let room = bytes.utf8_chunks().map(|chunk| chunk.valid().len() + replaced(chunk.invalid())).sum();
    // Allocated in full: a string that grows leaves copies that are not overwritten.
    let mut text = Zeroizing::new(String::with_capacity(room));
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|_| char::REPLACEMENT_CHARACTER));
    }
    text
}

/// Line and column of a byte offset, both from 1; columns count characters.
pub(super) fn line_and_column(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |end| end + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

/// Whether a member's name means a field. Go folds two letters outside of ASCII into it.
pub(super) fn is_field(name: &str, field: &str) -> bool {
    let fold = |c: char| match c {
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        c => c.to_ascii_lowercase(),
    };
    name.chars().map(fold).eq(field.chars().map(fold))
}

/// Reads a field as Go does: `null` is the empty value.
pub(crate) fn or_null<'de, T: Deserialize<'de> + Default, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// The JSON text of a value as Go writes it, in a buffer of at least `room` bytes. If that is enough, no copy of a
/// secret is left in memory that the buffer had before.
pub(crate) fn encode(value: &impl Serialize, room: usize) -> Zeroizing<Vec<u8>> {
    let mut text = Zeroizing::new(Vec::with_capacity(room));
    let mut serializer = Serializer::with_formatter(&mut *text, GoFormatter);
    value.serialize(&mut serializer).unwrap_or_default(); // to memory, with keys that are strings: cannot fail
    text
}

/// The JSON object of the fields that are not empty, in this order.
pub(super) fn encode_fields(fields: &[(&str, &str)]) -> Secret {
    // With escapes.
    let room = fields.iter().map(|(name, value)| name.len() + 6 * value.len() + 8).sum();
    let mut text = encode(&NonEmptyFields(fields), room);
    Secret::new(String::from_utf8(std::mem::take(&mut *text)).unwrap_or_default())
}

struct NonEmptyFields<'a>(&'a [(&'a str, &'a str)]);

impl Serialize for NonEmptyFields<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().copied().filter(|(_, value)| !value.is_empty()))
    }
}

/// Compact, and escapes what is special in HTML and JavaScript, as Go does.
struct GoFormatter;

impl Formatter for GoFormatter {
    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, text: &str) -> io::Result<()> {
        let mut written = 0;
        for (at, special) in text.match_indices(['&', '<', '>', '\u{2028}', '\u{2029}']) {
            writer.write_all(&text.as_bytes()[written..at])?;
            written = at + special.len();
            special.chars().try_for_each(|c| write!(writer, "\\u{:04x}", u32::from(c)))?;
        }
        writer.write_all(&text.as_bytes()[written..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skipped(text: &str) -> Result<(), JsonSyntaxError> {
        let mut reader = JsonScanner::new(text);
        reader.skip().and_then(|()| reader.end())
    }

    #[test]
    fn a_json_document_is_skipped_whole() {
        for text in
            ["0", "-1.5e+3", " [1, {\"a\": [true, false, null]}, \"x\\u00e9\"] ", "{}", "[]", "[[],{}]"]
        {
            assert_eq!(skipped(text), Ok(()), "{text}");
        }
    }

    #[test]
    fn input_that_is_not_json_is_refused() {
        for text in [
            "",
            "01",
            "1.",
            "1e",
            "-",
            "[1,]",
            "{\"a\":1,}",
            "{a:1}",
            "\"",
            "\"\t\"",
            "\"\\x\"",
            "nul",
            "1 2",
            "[}",
            "\"\\u12g4\"",
        ] {
            assert!(skipped(text).is_err(), "{text}");
        }
    }

    #[test]
    fn depth_is_bounded_as_in_go() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(skipped(&nested(10_000)), Ok(()));
        assert_eq!(
            skipped(&nested(10_001)).map_err(|broken| broken.problem),
            Err("nested too deeply".into())
        );
    }

    #[test]
    fn strings_are_unescaped_as_in_go() {
        for (json, text) in [
            (r#""a\u0026\n\/""#, "a&\n/"),
            (r#""\ud83d\ude00""#, "😀"),
            (r#""\ud83d""#, "\u{fffd}"),
            (r#""\ud83d\u0041""#, "\u{fffd}A"),
            (r#""\udc00""#, "\u{fffd}"),
        ] {
            assert_eq!(JsonScanner::new(json).string("it"), Ok(Some(text.to_owned())), "{json}");
        }
        assert_eq!(*text_of(b"a\xff\xe2\x82b"), "a\u{fffd}\u{fffd}\u{fffd}b");
    }

    #[test]
    fn columns_count_characters() {
        assert_eq!(line_and_column("ab\nüx", 5), (2, 2));
        assert_eq!(line_and_column("", 0), (1, 1));
    }

    #[test]
    fn names_match_without_regard_to_case() {
        assert!(is_field("AUTH\u{17f}", "auths"));
        assert!(!is_field("auth", "auths"));
    }

    #[test]
    fn special_characters_are_escaped_as_in_go() {
        let text = encode(&"<&>\u{2028}\u{1}\u{8}\u{c}\n\u{7f}\"\\/ü", 0);
        let expected = "\"\\u003c\\u0026\\u003e\\u2028\\u0001\\b\\f\\n\u{7f}\\\"\\\\/ü\"";
        assert_eq!(str::from_utf8(&text), Ok(expected));
    }
}
