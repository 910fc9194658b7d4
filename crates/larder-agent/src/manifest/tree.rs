//! A document as a tree that knows its lines; a [cursor](At) reads it, and names what is wrong where.
//!
//! Manifests are read through this tree and not into typed structs, because each bad field must be told with its
//! path and line, and one bad field must not hide the next.

mod at;

use std::collections::HashSet;
use std::fmt;

use larder::hint::Hint;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::problem::Problem;

pub use at::At;

/// A value and the line it starts on, counted within its document; 0 when not known.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    line: usize,
    value: Value,
}

#[derive(Debug, Clone, PartialEq)]
enum Value {
    Null,
    Bool(bool),
    Number(String),
    Text(String),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

/// How deep a document may nest. The schemas within custom resource definitions reach about 60.
const MAX_DEPTH: usize = 128;
/// Stack for reading so deep: reading is recursive and takes up to 40 kB per level in a debug build.
const STACK_BYTES: usize = 16 * 1024 * 1024;

/// Reads each of the documents, on a thread that has the stack for the deepest.
///
/// Nothing is caught here: the reader gives an error beyond `MAX_DEPTH`, aliases counted in, and so cannot use the
/// stack up; a panic would be a mistake of the program and ends it, as everywhere.
pub fn parse_all(texts: &[&str]) -> Vec<Result<Node, Problem>> {
    on_deep_stack(texts, Keys::Hidden)
}

/// Reads one document that holds no secrets.
pub fn parse_open(text: &str) -> Result<Node, Problem> {
    on_deep_stack(&[text], Keys::Shown).remove(0)
}

/// Whether keys may be shown: in a secret, a value may have slipped into the place of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keys {
    Hidden,
    Shown,
}

fn on_deep_stack(texts: &[&str], keys: Keys) -> Vec<Result<Node, Problem>> {
    std::thread::scope(|scope| {
        let reader = || texts.iter().map(|text| parse(text, keys)).collect();
        match std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, reader) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(error) => {
                let problem =
                    Problem::new(format!("could not be read, the system has no thread for it: {error}"));
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

/// Reads one document. An error is told with its line and without an excerpt: the document may hold secrets.
fn parse(text: &str, keys: Keys) -> Result<Node, Problem> {
    let from_yaml = serde_saphyr::from_str_with_options::<Node>(text, options());
    let error = match from_yaml {
        Ok(node) => return Ok(node),
        Err(error) => error,
    };
    // JSON allows what YAML does not, such as tabs and escaped surrogate pairs. Its reader knows no lines.
    if text.trim_start().starts_with('{') {
        match serde_json::from_str::<Node>(text) {
            Ok(node) => return Ok(node),
            Err(error) if looks_like_json(text) => return Err(not_json(&error)),
            Err(_) => {}
        }
    }
    let line = error.location().and_then(|location| usize::try_from(location.line()).ok()).unwrap_or(0);
    let problem = Problem::new(format!("not valid YAML: {}", explained(&error))).at_line(line);
    Err(match &error {
        serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } if keys == Keys::Shown => {
            problem.at_field(key).hint("keep one of the two")
        }
        _ if text.contains("{{") && keys == Keys::Hidden => problem
            .hint(Hint::from("this is a template: helm template CHART | ").command(["ensure", "-f", "-"])),
        serde_saphyr::Error::DuplicateMappingKey { .. } => problem.hint("keep one of the two"),
        _ if text.lines().any(|line| line.trim_start_matches(' ').starts_with('\t')) => {
            problem.hint("YAML is indented with spaces, and never with tabs")
        }
        _ => problem,
    })
}

/// Whether a text that begins with a brace is meant as JSON: its first key is in quotes.
fn looks_like_json(text: &str) -> bool {
    text.trim_start().trim_start_matches('{').trim_start().starts_with('"')
}

/// The reader's own texts are fixed but for those of [`Node`], which quote nothing; only its line is kept.
fn not_json(error: &serde_json::Error) -> Problem {
    let what = match error.classify() {
        serde_json::error::Category::Eof => "it ends too early",
        serde_json::error::Category::Data => "a value or key that has no meaning here",
        serde_json::error::Category::Syntax | serde_json::error::Category::Io => {
            "a comma, colon, quote or brace is missing, or one too many"
        }
    };
    Problem::new(format!("not valid JSON: {what} (column {})", error.column())).at_line(error.line())
}

/// What is wrong, in texts that are fixed: the reader's own quote keys and values, which may be a secret's.
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
        Error::Eof { .. } => "it ends too early".into(),
        Error::MultipleDocuments { .. } => "more follows after the end of the document".into(),
        Error::DuplicateMappingKey { .. } => REPEATED_KEY.into(),
        Error::UnknownAnchor { .. } => "an alias names an anchor that is not there".into(),
        Error::Budget { breach: BudgetBreach::Depth { .. }, .. } => {
            format!("nested deeper than {MAX_DEPTH} levels")
        }
        Error::Budget { .. }
        | Error::AliasReplayCounterOverflow { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. } => "it holds, or expands to, too much".into(),
        Error::MergeValueNotMapOrSeqOfMaps { .. } => "what is merged with << must be a mapping".into(),
        Error::UnsupportedTag { .. } => "an unknown tag".into(),
        Error::InvalidScalar { .. } | Error::InvalidBinaryBase64 { .. } | Error::BinaryNotUtf8 { .. } => {
            "a value that is not what its tag says".into()
        }
        Error::Unexpected { expected, .. } => format!("expected {expected}"),
        _ => "a value or key that has no meaning here".into(),
    }
}

/// Said of a mapping that has a key more than once. The key is not shown: it may be part of a secret.
const REPEATED_KEY: &str = "a mapping has the same key twice";

impl Node {
    /// A text from elsewhere than a document, such as a flag.
    pub fn text(text: &str) -> Node {
        Node { line: 0, value: Value::Text(text.to_owned()) }
    }

    /// The same as the number that it should be.
    pub fn number(text: &str) -> Node {
        Node { line: 0, value: Value::Number(text.to_owned()) }
    }

    /// A list of this text alone.
    pub fn list(text: &str) -> Node {
        Node { line: 0, value: Value::List(vec![Node::text(text)]) }
    }

    /// A list of these texts.
    pub fn texts(texts: &[String]) -> Node {
        Node { line: 0, value: Value::List(texts.iter().map(|text| Node::text(text)).collect()) }
    }

    /// The same as the boolean that it should be.
    pub fn boolean(text: &str) -> Node {
        match text.parse() {
            Ok(value) => Node { line: 0, value: Value::Bool(value) },
            Err(_) => Node::text(text),
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, .. } = Spanned::<Value>::deserialize(deserializer)?;
        Ok(Node { line: usize::try_from(referenced.line()).unwrap_or(0), value })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        Value::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.to_string()))
    }

    fn visit_i128<E>(self, value: i128) -> Result<Value, E> {
        Ok(Value::Number(value.to_string()))
    }

    fn visit_u128<E>(self, value: u128) -> Result<Value, E> {
        Ok(Value::Number(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Number(value.to_string()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::Text(value))
    }

    fn visit_bytes<E>(self, value: &[u8]) -> Result<Value, E> {
        Ok(Value::Text(String::from_utf8_lossy(value).into_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map: Vec<(String, Node)> = Vec::new();
        let mut known = HashSet::new();
        while let Some((key, node)) = entries.next_entry::<String, Node>()? {
            if !known.insert(key.clone()) {
                return Err(serde::de::Error::custom(REPEATED_KEY)); // the JSON reader does not mind
            }
            map.push((key, node));
        }
        Ok(Value::Map(map))
    }
}

#[cfg(test)]
pub(super) mod tests;
