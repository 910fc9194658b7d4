//! A document as a tree that knows its lines; a [cursor](NodeCursor) reads it, and names what is wrong where.
//!
//! Manifests are read through this tree and not into typed structs, because each invalid field must be reported with
//! its path and line, and one bad field must not hide the next.

mod cursor;

use std::collections::HashSet;
use std::fmt;

use larder::hint::Hint;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::problem::InputProblem;

pub use cursor::NodeCursor;

/// A value and the line it starts on, counted within its document; 0 when not known.
#[derive(Debug, Clone, PartialEq)]
pub struct YamlNode {
    line: usize,
    value: YamlValue,
}

#[derive(Debug, Clone, PartialEq)]
enum YamlValue {
    Null,
    Bool(bool),
    Number(String),
    Text(String),
    List(Vec<YamlNode>),
    Map(Vec<(String, YamlNode)>),
}

/// How deep a document may nest. The schemas within custom resource definitions reach about 60.
const MAX_DEPTH: usize = 128;
/// Stack for reading so deep: reading is recursive and takes up to 40 kB per level in a debug build.
const STACK_BYTES: usize = 16 * 1024 * 1024;

/// Reads each of the documents, on a thread that has the stack for the deepest.
///
/// Nothing is caught here: the reader gives an error beyond `MAX_DEPTH`, aliases counted in, and so cannot use the
/// stack up; a panic would be a defect of the program and ends it, as everywhere.
pub fn parse_all(texts: &[&str]) -> Vec<Result<YamlNode, InputProblem>> {
    on_deep_stack(texts, KeyVisibility::Hidden)
}

/// Reads one document that holds no secrets.
pub fn parse_open(text: &str) -> Result<YamlNode, InputProblem> {
    on_deep_stack(&[text], KeyVisibility::Shown).remove(0)
}

/// Whether keys may be shown: in a secret, a value may have slipped into the place of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeyVisibility {
    Hidden,
    Shown,
}

fn on_deep_stack(texts: &[&str], keys: KeyVisibility) -> Vec<Result<YamlNode, InputProblem>> {
    std::thread::scope(|scope| {
        let reader = || texts.iter().map(|text| parse(text, keys)).collect();
        match std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, reader) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(error) => {
                let problem = InputProblem::new(format!("cannot start a thread to read it: {error}"));
                texts.iter().map(|_| Err(problem.clone())).collect()
            }
        }
    })
}

fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_depth: MAX_DEPTH },
        with_snippet: false,
        non_finite_float_policy: serde_saphyr::NonFiniteFloatPolicy::AsString,
    }
}

/// Reads one document. An error has its line and no excerpt: the document may hold secrets.
fn parse(text: &str, keys: KeyVisibility) -> Result<YamlNode, InputProblem> {
    let from_yaml = serde_saphyr::from_str_with_options::<YamlNode>(text, options());
    let error = match from_yaml {
        Ok(node) => return Ok(node),
        Err(error) => error,
    };
    // JSON allows what YAML does not, such as tabs and escaped surrogate pairs. Its reader knows no lines.
    if text.trim_start().starts_with('{') {
        match serde_json::from_str::<YamlNode>(text) {
            Ok(node) => return Ok(node),
            Err(error) if looks_like_json(text) => return Err(not_json(&error)),
            Err(_) => {}
        }
    }
    let line = error.location().and_then(|location| usize::try_from(location.line()).ok()).unwrap_or(0);
    let problem = InputProblem::new(format!("not valid YAML: {}", explained(&error))).at_line(line);
    Err(match &error {
        serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } if keys == KeyVisibility::Shown => {
            problem.at_field(key).hint("remove one of them")
        }
        _ if text.contains("{{") && keys == KeyVisibility::Hidden => problem
            .hint(Hint::from("this is a template: helm template CHART | ").command(["ensure", "-f", "-"])),
        serde_saphyr::Error::DuplicateMappingKey { .. } => problem.hint("remove one of them"),
        _ if text.lines().any(|line| line.trim_start_matches(' ').starts_with('\t')) => {
            problem.hint("indent with spaces, not tabs")
        }
        serde_saphyr::Error::ExternalMessage { .. } => {
            problem.hint("check indentation, colons, quotes and brackets up to this line")
        }
        _ => problem,
    })
}

/// Whether a text that begins with a brace is meant as JSON: its first key is in quotes.
fn looks_like_json(text: &str) -> bool {
    text.trim_start().trim_start_matches('{').trim_start().starts_with('"')
}

/// The reader's own texts are fixed but for those of [`YamlNode`], which quote nothing; only its line is kept.
fn not_json(error: &serde_json::Error) -> InputProblem {
    let what = match error.classify() {
        serde_json::error::Category::Eof => "unexpected end of the document",
        serde_json::error::Category::Data => "unexpected value or key",
        serde_json::error::Category::Syntax | serde_json::error::Category::Io => {
            "missing or extra comma, colon, quote or brace"
        }
    };
    InputProblem::new(format!("not valid JSON: {what} (column {})", error.column())).at_line(error.line())
}

/// Describes an error in fixed texts: the reader's own quote keys and values, which may be a secret's.
fn explained(error: &serde_saphyr::Error) -> String {
    use serde_saphyr::Error;
    use serde_saphyr::budget::BudgetBreach;

    match error {
        Error::WithSnippet { error, .. } | Error::AliasError { error, .. } => explained(error),
        // The scanner's texts are fixed but for one, which shows a character.
        Error::ExternalMessage { msg, .. } if msg.starts_with("unexpected character") => {
            "unexpected character".into()
        }
        Error::ExternalMessage { msg, .. } => msg.clone(),
        Error::Eof { .. } => "unexpected end of the document".into(),
        Error::MultipleDocuments { .. } => "more than one document".into(),
        Error::DuplicateMappingKey { .. } => REPEATED_KEY.into(),
        Error::UnknownAnchor { .. } => "an alias names an unknown anchor".into(),
        Error::Budget { breach: BudgetBreach::Depth { .. }, .. } => {
            format!("nested deeper than {MAX_DEPTH} levels")
        }
        Error::Budget { .. }
        | Error::AliasReplayCounterOverflow { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. } => "it is, or expands to, more than the limit".into(),
        Error::MergeValueNotMapOrSeqOfMaps { .. } => "the value of << must be a mapping".into(),
        Error::UnsupportedTag { .. } => "an unknown tag".into(),
        Error::InvalidScalar { .. } | Error::InvalidBinaryBase64 { .. } | Error::BinaryNotUtf8 { .. } => {
            "the value does not match its tag".into()
        }
        Error::Unexpected { expected, .. } => format!("expected {expected}"),
        _ => "unexpected value or key".into(),
    }
}

/// Said of a mapping that has a key more than once. The key is not shown: it may be part of a secret.
const REPEATED_KEY: &str = "a mapping has the same key twice";

impl YamlNode {
    /// A text that is not from a document, such as a flag.
    pub fn text(text: &str) -> YamlNode {
        YamlNode { line: 0, value: YamlValue::Text(text.to_owned()) }
    }

    /// A text that is not from a document, as a number.
    pub fn number(text: &str) -> YamlNode {
        YamlNode { line: 0, value: YamlValue::Number(text.to_owned()) }
    }

    /// A list of this text alone.
    pub fn list(text: &str) -> YamlNode {
        YamlNode { line: 0, value: YamlValue::List(vec![YamlNode::text(text)]) }
    }

    /// A list of these texts.
    pub fn texts(texts: &[String]) -> YamlNode {
        YamlNode { line: 0, value: YamlValue::List(texts.iter().map(|text| YamlNode::text(text)).collect()) }
    }

    /// A text that is not from a document, as a boolean, or as a text if it is none.
    pub fn boolean(text: &str) -> YamlNode {
        match text.parse() {
            Ok(value) => YamlNode { line: 0, value: YamlValue::Bool(value) },
            Err(_) => YamlNode::text(text),
        }
    }
}

impl<'de> Deserialize<'de> for YamlNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, .. } = Spanned::<YamlValue>::deserialize(deserializer)?;
        Ok(YamlNode { line: usize::try_from(referenced.line()).unwrap_or(0), value })
    }
}

impl<'de> Deserialize<'de> for YamlValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(YamlNodeVisitor)
    }
}

struct YamlNodeVisitor;

impl<'de> Visitor<'de> for YamlNodeVisitor {
    type Value = YamlValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Null)
    }

    fn visit_none<E>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<YamlValue, D::Error> {
        YamlValue::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<YamlValue, E> {
        Ok(YamlValue::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<YamlValue, E> {
        Ok(YamlValue::Number(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<YamlValue, E> {
        Ok(YamlValue::Number(value.to_string()))
    }

    fn visit_i128<E>(self, value: i128) -> Result<YamlValue, E> {
        Ok(YamlValue::Number(value.to_string()))
    }

    fn visit_u128<E>(self, value: u128) -> Result<YamlValue, E> {
        Ok(YamlValue::Number(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<YamlValue, E> {
        Ok(YamlValue::Number(value.to_string()))
    }

    fn visit_str<E>(self, value: &str) -> Result<YamlValue, E> {
        Ok(YamlValue::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<YamlValue, E> {
        Ok(YamlValue::Text(value))
    }

    fn visit_bytes<E>(self, value: &[u8]) -> Result<YamlValue, E> {
        Ok(YamlValue::Text(String::from_utf8_lossy(value).into_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<YamlValue, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(YamlValue::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<YamlValue, A::Error> {
        let mut map: Vec<(String, YamlNode)> = Vec::new();
        let mut known = HashSet::new();
        while let Some((key, node)) = entries.next_entry::<String, YamlNode>()? {
            if !known.insert(key.clone()) {
                return Err(serde::de::Error::custom(REPEATED_KEY)); // the JSON reader does not mind
            }
            map.push((key, node));
        }
        Ok(YamlValue::Map(map))
    }
}

#[cfg(test)]
pub(super) mod tests;
