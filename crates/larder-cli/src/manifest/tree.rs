//! A document as a tree that knows its lines, and a cursor that reads it and names what is wrong where.
//!
//! Manifests are read through this tree and not into typed structs, because each bad field must be told with its
//! path and line, and one bad field must not hide the next.

use std::collections::HashSet;
use std::fmt;

use larder::near;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::problem::Problem;

/// A value and the line it starts on, counted within its document; 0 when not known.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Node {
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
/// Nothing is caught here: the reader gives an error beyond [`MAX_DEPTH`], aliases counted in, and so cannot use the
/// stack up; a panic would be a mistake of the program and ends it, as everywhere.
pub(crate) fn parse_all(texts: &[&str]) -> Vec<Result<Node, Problem>> {
    on_deep_stack(texts, Keys::Hidden)
}

/// Reads one document that holds no secrets.
pub(crate) fn parse_open(text: &str) -> Result<Node, Problem> {
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
        _ if text.contains("{{") && keys == Keys::Hidden => {
            problem.hint("this is a template: helm template CHART | larder ensure -f -")
        }
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
    pub(crate) fn text(text: &str) -> Node {
        Node { line: 0, value: Value::Text(text.to_owned()) }
    }

    /// The same as the number that it should be.
    pub(crate) fn number(text: &str) -> Node {
        Node { line: 0, value: Value::Number(text.to_owned()) }
    }

    /// A list of this text alone.
    pub(crate) fn list(text: &str) -> Node {
        Node { line: 0, value: Value::List(vec![Node::text(text)]) }
    }

    /// The same as the boolean that it should be.
    pub(crate) fn boolean(text: &str) -> Node {
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

impl Value {
    /// What this is; of a private value, only its type.
    fn what(&self, private: bool) -> String {
        match self {
            Value::Null => "nothing".into(),
            Value::Bool(_) if private => "a boolean".into(),
            Value::Number(_) if private => "a number".into(),
            Value::Bool(value) => format!("the boolean {value}"),
            Value::Number(value) => format!("the number {value}"),
            Value::Text(_) => "a text".into(),
            Value::List(_) => "a list".into(),
            Value::Map(_) => "a mapping".into(),
        }
    }
}

/// A place in a document: a node and the path that leads to it.
#[derive(Debug, Clone)]
pub(crate) struct At<'a> {
    node: &'a Node,
    path: String,
    private: bool,
}

impl<'a> At<'a> {
    /// The document as a whole.
    pub(crate) fn root(node: &'a Node) -> Self {
        At { node, path: String::new(), private: false }
    }

    /// A value that something else than a document gives to this key.
    pub(crate) fn given(node: &'a Node, key: &str) -> Self {
        At { node, path: key.to_owned(), private: false }
    }

    /// The same place, whose values, and those below it, no problem shows.
    pub(crate) fn private(self) -> Self {
        At { private: true, ..self }
    }

    /// The line within the document.
    pub(crate) fn line(&self) -> usize {
        self.node.line
    }

    /// The path from the document's root, such as `spec.containers[0].image`.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Whether nothing is written here.
    pub(crate) fn is_empty(&self) -> bool {
        matches!(&self.node.value, Value::Null)
    }

    /// Whether a mapping is here.
    pub(crate) fn is_mapping(&self) -> bool {
        matches!(&self.node.value, Value::Map(_))
    }

    /// A problem with what is here.
    pub(crate) fn problem(&self, what: impl Into<String>) -> Problem {
        Problem::new(what).at_line(self.node.line).at_field(&self.path)
    }

    /// A problem with a field that is missing here.
    pub(crate) fn missing(&self, field: &str) -> Problem {
        let problem = Problem::new("required, and missing").at_line(self.node.line);
        problem.at_field(&self.path_of(field)).hints(self.misspelt(field))
    }

    /// A field that may have been meant to be the one that is missing here.
    pub(crate) fn misspelt(&self, field: &str) -> Option<String> {
        let Value::Map(entries) = &self.node.value else { return None };
        let wanted = field.split('.').next().unwrap_or(field);
        let keys = || entries.iter().map(|(key, _)| key.as_str());
        if self.private || keys().any(|key| key == wanted) {
            return None;
        }
        near::nearest(wanted, keys()).map(|key| format!("{key}: did you mean {wanted}?"))
    }

    /// A field, `None` when it is absent or null.
    pub(crate) fn field(&self, name: &str) -> Result<Option<At<'a>>, Problem> {
        match &self.node.value {
            Value::Map(entries) => Ok(entries
                .iter()
                .find(|(key, node)| key == name && node.value != Value::Null)
                .map(|(_, node)| self.below(node, self.path_of(name)))),
            Value::Null => Ok(None),
            _ => Err(self.must_be("a mapping")),
        }
    }

    /// A field of a field, `None` when any of them is absent.
    pub(crate) fn descend(&self, names: &[&str]) -> Result<Option<At<'a>>, Problem> {
        let mut at = self.clone();
        for name in names {
            match at.field(name)? {
                Some(found) => at = found,
                None => return Ok(None),
            }
        }
        Ok(Some(at))
    }

    /// A field's text, `None` when it is absent.
    pub(crate) fn text_of(&self, name: &str) -> Result<Option<&'a str>, Problem> {
        self.field(name)?.map(|field| field.text()).transpose()
    }

    /// The text here.
    pub(crate) fn text(&self) -> Result<&'a str, Problem> {
        match &self.node.value {
            Value::Text(text) => Ok(text),
            Value::Bool(_) | Value::Number(_) => Err(self.must_be("a text").hint("put it in quotes")),
            _ => Err(self.must_be("a text")),
        }
    }

    /// The items of the list here; none when nothing is here.
    pub(crate) fn items(&self) -> Result<Vec<At<'a>>, Problem> {
        match &self.node.value {
            Value::List(items) => Ok(items
                .iter()
                .enumerate()
                .map(|(index, node)| self.below(node, format!("{}[{index}]", self.path)))
                .collect()),
            Value::Null => Ok(Vec::new()),
            _ => Err(self.must_be("a list").hint("begin each entry with a dash: - name: ...")),
        }
    }

    /// The entries of the mapping here; none when nothing is here.
    pub(crate) fn entries(&self) -> Result<Vec<(&'a str, At<'a>)>, Problem> {
        match &self.node.value {
            Value::Map(entries) => Ok(entries
                .iter()
                .map(|(key, node)| (key.as_str(), self.below(node, self.path_of_key(key))))
                .collect()),
            Value::Null => Ok(Vec::new()),
            _ => Err(self.must_be("a mapping")),
        }
    }

    fn below(&self, node: &'a Node, path: String) -> At<'a> {
        At { node, path, private: self.private }
    }

    /// The boolean here.
    pub(crate) fn boolean(&self) -> Result<bool, Problem> {
        match &self.node.value {
            Value::Bool(value) => Ok(*value),
            Value::Text(text) if text.parse::<bool>().is_ok() => {
                Err(self.must_be("true or false").hint("leave out the quotes"))
            }
            _ => Err(self.must_be("true or false")),
        }
    }

    /// The number here, as it is written.
    pub(crate) fn number(&self) -> Result<&'a str, Problem> {
        match &self.node.value {
            Value::Number(number) => Ok(number),
            Value::Text(text) if text.parse::<f64>().is_ok() => {
                Err(self.must_be("a number").hint("leave out the quotes"))
            }
            _ => Err(self.must_be("a number")),
        }
    }

    /// Whether a number is here.
    pub(crate) fn is_number(&self) -> bool {
        matches!(&self.node.value, Value::Number(_))
    }

    /// A problem with a value that is of another type than it must be.
    pub(crate) fn must_be(&self, wanted: &str) -> Problem {
        self.problem(format!("must be {wanted}, is {}", self.node.value.what(self.private)))
    }

    /// The path of a field of what is here.
    pub(crate) fn path_of(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// Like [`path_of`](At::path_of), for keys that may hold dots: `data[.dockerconfigjson]`. In a private place,
    /// what cannot be a key of a secret is not shown: it may be a value that slipped.
    fn path_of_key(&self, key: &str) -> String {
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if self.private && !key.chars().all(is_name) {
            return format!("{}[...]", self.path);
        }
        if key.contains(['.', '/']) { format!("{}[{key}]", self.path) } else { self.path_of(key) }
    }
}

#[cfg(test)]
pub(super) mod tests;
