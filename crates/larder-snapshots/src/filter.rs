//! containerd's filters: `name==a,labels."x.y"!=b`, several of which are alternatives. Pure.
//!
//! ```text
//! filter   = selector {"," selector}        all must match
//! selector = field {"." field} [operator value]
//! field    = quoted | letters, digits and "_"
//! operator = "==" | "!=" | "~="             equal, not equal, matches a regular expression
//! value    = quoted | anything up to a blank or ","
//! quoted   = a Go string literal in double quotes; a regular expression also in "/" or "|"
//! ```

use std::iter::Peekable;
use std::str::Chars;

use larder_store::store::{SnapshotKind, SnapshotRecord};
use regex::Regex;

/// Filters, of which one must match. None at all match everything.
#[derive(Debug)]
pub(crate) struct SnapshotFilters(Vec<Vec<FieldSelector>>);

#[derive(Debug)]
struct FieldSelector {
    path: Vec<String>,
    test: FieldTest,
}

#[derive(Debug)]
enum FieldTest {
    IsPresent,
    Equals(String),
    Differs(String),
    Matches(Option<Regex>),
}

impl SnapshotFilters {
    pub(crate) fn parse(texts: &[String]) -> Result<SnapshotFilters, String> {
        let parse = |text: &String| {
            let parsed = FilterParser { rest: text.chars().peekable() }.filter();
            parsed.map_err(|problem| format!("invalid filter {text:?}: {problem}"))
        };
        texts.iter().map(parse).collect::<Result<_, _>>().map(SnapshotFilters)
    }

    pub(crate) fn has(&self, snapshot: &SnapshotRecord) -> bool {
        let all = |selectors: &Vec<FieldSelector>| selectors.iter().all(|selector| selector.has(snapshot));
        self.0.is_empty() || self.0.iter().any(all)
    }
}

impl FieldSelector {
    fn has(&self, snapshot: &SnapshotRecord) -> bool {
        let value = field(snapshot, &self.path);
        match &self.test {
            FieldTest::IsPresent => value.is_some(),
            FieldTest::Equals(wanted) => value == Some(wanted.as_str()),
            FieldTest::Differs(other) => value != Some(other.as_str()),
            FieldTest::Matches(pattern) => {
                let value = value.unwrap_or_default();
                pattern.as_ref().is_some_and(|pattern| pattern.is_match(value))
            }
        }
    }
}

fn field<'a>(snapshot: &'a SnapshotRecord, path: &[String]) -> Option<&'a str> {
    let (first, rest) = path.split_first()?;
    match first.as_str() {
        "kind" => Some(match snapshot.kind {
            SnapshotKind::View => "view",
            SnapshotKind::Active => "active",
            SnapshotKind::Committed => "committed",
        }),
        "name" => Some(&snapshot.key),
        "parent" => Some(&snapshot.parent),
        "labels" => snapshot.labels.get(&rest.join(".")).map(String::as_str),
        _ => None,
    }
}

struct FilterParser<'a> {
    rest: Peekable<Chars<'a>>,
}

impl FilterParser<'_> {
    fn filter(mut self) -> Result<Vec<FieldSelector>, String> {
        let mut selectors = Vec::new();
        if self.rest.peek().is_none() {
            return Ok(selectors); // an empty filter matches everything
        }
        loop {
            selectors.push(self.selector()?);
            match self.next_after_blanks() {
                None => return Ok(selectors),
                Some(',') => {}
                Some(other) => return Err(format!("unexpected {other:?}")),
            }
        }
    }

    fn selector(&mut self) -> Result<FieldSelector, String> {
        let mut path = vec![self.name()?];
        while self.peek_after_blanks() == Some('.') {
            self.rest.next();
            path.push(self.name()?);
        }
        if matches!(self.peek_after_blanks(), None | Some(',')) {
            return Ok(FieldSelector { path, test: FieldTest::IsPresent });
        }
        let operator = self.take_while(|letter| matches!(letter, '=' | '!' | '~'));
        let test = match operator.as_str() {
            "==" => FieldTest::Equals(self.value(false)?),
            "!=" => FieldTest::Differs(self.value(false)?),
            // containerd logs an expression that does not compile, and matches nothing.
            "~=" => FieldTest::Matches(Regex::new(&self.value(true)?).ok()),
            "" => return Err("expected an operator".to_owned()),
            other => return Err(format!("unsupported operator {other:?}")),
        };
        Ok(FieldSelector { path, test })
    }

    fn name(&mut self) -> Result<String, String> {
        if let Some(quote @ ('"' | '/' | '|')) = self.peek_after_blanks() {
            return self.quoted(quote, false);
        }
        let name = self.take_while(|letter| letter.is_ascii_alphanumeric() || letter == '_');
        if name.is_empty() { Err("expected a field".to_owned()) } else { Ok(name) }
    }

    fn value(&mut self, is_pattern: bool) -> Result<String, String> {
        if let Some(quote @ ('"' | '/' | '|')) = self.peek_after_blanks() {
            return self.quoted(quote, is_pattern);
        }
        let value =
            self.take_while(|letter| letter != ',' && !letter.is_whitespace() && !letter.is_control());
        if value.is_empty() { Err("expected a value".to_owned()) } else { Ok(value) }
    }

    /// A Go string literal; `quote` is the next character.
    fn quoted(&mut self, quote: char, is_pattern: bool) -> Result<String, String> {
        if quote != '"' && !is_pattern {
            return Err("only a regular expression may be quoted by / or |".to_owned());
        }
        self.rest.next();
        let mut bytes = Vec::new();
        loop {
            match self.rest.next() {
                Some(end) if end == quote => {
                    return String::from_utf8(bytes).map_err(|_| "not UTF-8".to_owned());
                }
                None | Some('\n') => return Err("quoted text is not terminated".to_owned()),
                Some('\\') => self.escape(quote, &mut bytes)?,
                Some(letter) => bytes.extend(letter.to_string().as_bytes()),
            }
        }
    }

    fn escape(&mut self, quote: char, bytes: &mut Vec<u8>) -> Result<(), String> {
        let wrong = || "illegal escape sequence".to_owned();
        let letter = self.rest.next().ok_or_else(wrong)?;
        let plain = match letter {
            'a' => 7,
            'b' => 8,
            't' => 9,
            'n' => 10,
            'v' => 11,
            'f' => 12,
            'r' => 13,
            '\\' => b'\\',
            'x' => u8::try_from(self.number("", 2, 16)?).map_err(|_| wrong())?,
            '0'..='7' => u8::try_from(self.number(&letter.to_string(), 3, 8)?).map_err(|_| wrong())?,
            'u' | 'U' => {
                let digits = if letter == 'u' { 4 } else { 8 };
                let letter = char::from_u32(self.number("", digits, 16)?).ok_or_else(wrong)?;
                bytes.extend(letter.to_string().as_bytes());
                return Ok(());
            }
            other if other == quote => u8::try_from(quote).map_err(|_| wrong())?,
            _ => return Err(wrong()),
        };
        bytes.push(plain);
        Ok(())
    }

    /// A number of so many digits, the first of which may be read already.
    fn number(&mut self, read: &str, digits: usize, base: u32) -> Result<u32, String> {
        let mut text = read.to_owned();
        text.extend(self.rest.by_ref().take(digits - read.len()));
        let is_number = text.len() == digits && text.chars().all(|digit| digit.is_digit(base));
        let number = u32::from_str_radix(&text, base).ok().filter(|_| is_number);
        number.ok_or_else(|| "illegal numeric escape sequence".to_owned())
    }

    fn take_while(&mut self, is_part: impl Fn(char) -> bool) -> String {
        let mut taken = String::new();
        while let Some(letter) = self.rest.next_if(|letter| is_part(*letter)) {
            taken.push(letter);
        }
        taken
    }

    fn peek_after_blanks(&mut self) -> Option<char> {
        while self.rest.next_if(|letter| letter.is_whitespace()).is_some() {}
        self.rest.peek().copied()
    }

    fn next_after_blanks(&mut self) -> Option<char> {
        self.peek_after_blanks();
        self.rest.next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot() -> SnapshotRecord {
        SnapshotRecord {
            id: 1,
            key: "k8s.io/5/a b".into(),
            parent: "p".into(),
            kind: SnapshotKind::Active,
            labels: [("l".to_owned(), "2".to_owned()), ("containerd.io/x".to_owned(), "y,z".to_owned())]
                .into(),
            created_ns: 0,
            updated_ns: 0,
            layer: None,
            usage: larder::gc::DiskSpace::ZERO,
        }
    }

    fn has(filters: &[&str]) -> bool {
        let filters: Vec<String> = filters.iter().map(|&filter| filter.to_owned()).collect();
        SnapshotFilters::parse(&filters).unwrap().has(&snapshot())
    }

    #[test]
    fn selectors_are_joined_by_and_and_filters_by_or() {
        assert!(has(&[]) && has(&[""]));
        assert!(has(&["kind==active,parent==p"]) && !has(&["kind==active,parent==q"]));
        assert!(has(&["kind==view", "name==\"k8s.io/5/a b\""]));
        assert!(has(&["labels.l"]) && !has(&["labels.m"]) && !has(&["other"]));
        assert!(has(&["labels.l!=3"]) && has(&["labels.m!=3"]) && !has(&["labels.l!=2"]));
        assert!(has(&[r#"labels."containerd.io/x"=="y\x2cz""#, "never"]));
        assert!(has(&["parent!=\"\""]));
        assert!(has(&["name~=/^k8s\\\\.io\\//"]) && has(&["name~=a"]) && !has(&["name~=|^a|"]));
        assert!(!has(&["name~=|(|"]), "an expression that does not compile matches nothing");
        assert!(has(&[" kind == active , parent == p "]));
    }

    #[test]
    fn what_does_not_parse_is_refused() {
        for bad in [
            "==a",
            "name=a",
            "name==",
            "name==a b",
            "name==a,",
            "a..b",
            "name==\"a",
            r#"name=="\q""#,
            "name==/a/",
            "é",
        ] {
            assert!(SnapshotFilters::parse(&[bad.to_owned()]).is_err(), "{bad}");
        }
    }
}
