//! A document as a tree that knows its lines, and a cursor that reads it and names what is wrong where.
//!
//! Manifests are read through this tree and not into typed structs, because each bad field must be told with its
//! path and line, and one bad field must not hide the next.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::problem::Problem;

/// A value and the line it starts on, counted within its document; 0 when not known.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
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

/// Reads each of the documents.
pub(super) fn parse_all(texts: &[&str]) -> Vec<Result<Node, Problem>> {
    let reader = || texts.iter().map(|text| parse(text)).collect();
    let failed =
        || texts.iter().map(|_| Err(Problem::new("could not be read: the YAML reader failed"))).collect();
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, reader);
        thread.map_or_else(|_| failed(), |thread| thread.join().unwrap_or_else(|_| failed()))
    })
}

/// Reads one document. An error is told with its line and without an excerpt: the document may hold secrets.
fn parse(text: &str) -> Result<Node, Problem> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_depth: MAX_DEPTH },
        with_snippet: false,
        non_finite_float_policy: serde_saphyr::NonFiniteFloatPolicy::AsString,
    };
    let from_yaml = serde_saphyr::from_str_with_options::<Node>(text, options);
    let error = match from_yaml {
        Ok(node) => return Ok(node),
        Err(error) => error,
    };
    // JSON allows what YAML does not, such as tabs and escaped surrogate pairs. Its reader knows no lines.
    if text.trim_start().starts_with('{')
        && let Ok(node) = serde_json::from_str::<Node>(text)
    {
        return Ok(node);
    }
    let error = error.without_snippet();
    let text = error.render_with_formatter(&serde_saphyr::UserMessageFormatter);
    let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
    let Some(location) = error.location() else {
        return Err(Problem::new(format!("not valid YAML: {first}")));
    };
    // The line that the text ends with is the document's, and would contradict the file's.
    let place = format!(" at line {}, column {}", location.line(), location.column());
    let message = first.strip_suffix(&place).unwrap_or(first);
    let line = usize::try_from(location.line()).unwrap_or(0);
    Err(Problem::new(format!("not valid YAML: {message}")).at_line(line))
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
        let mut map = Vec::new();
        while let Some(entry) = entries.next_entry()? {
            map.push(entry);
        }
        Ok(Value::Map(map))
    }
}

impl Value {
    fn what(&self) -> String {
        match self {
            Value::Null => "nothing".into(),
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
pub(super) struct At<'a> {
    node: &'a Node,
    path: String,
}

impl<'a> At<'a> {
    /// The document as a whole.
    pub(super) fn root(node: &'a Node) -> Self {
        At { node, path: String::new() }
    }

    /// The line within the document.
    pub(super) fn line(&self) -> usize {
        self.node.line
    }

    /// Whether nothing is written here.
    pub(super) fn is_empty(&self) -> bool {
        matches!(&self.node.value, Value::Null)
    }

    /// Whether a mapping is here.
    pub(super) fn is_mapping(&self) -> bool {
        matches!(&self.node.value, Value::Map(_))
    }

    /// A problem with what is here.
    pub(super) fn problem(&self, what: impl Into<String>) -> Problem {
        Problem::new(what).at_line(self.node.line).at_field(&self.path)
    }

    /// A problem with a field that is missing here.
    pub(super) fn missing(&self, field: &str) -> Problem {
        Problem::new("required, and missing").at_line(self.node.line).at_field(&self.path_of(field))
    }

    /// A field, `None` when it is absent or null.
    pub(super) fn field(&self, name: &str) -> Result<Option<At<'a>>, Problem> {
        match &self.node.value {
            Value::Map(entries) => Ok(entries
                .iter()
                .find(|(key, node)| key == name && node.value != Value::Null)
                .map(|(_, node)| At { node, path: self.path_of(name) })),
            Value::Null => Ok(None),
            other => Err(self.problem(format!("must be a mapping, is {}", other.what()))),
        }
    }

    /// A field of a field, `None` when any of them is absent.
    pub(super) fn path(&self, names: &[&str]) -> Result<Option<At<'a>>, Problem> {
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
    pub(super) fn text_of(&self, name: &str) -> Result<Option<&'a str>, Problem> {
        self.field(name)?.map(|field| field.text()).transpose()
    }

    /// The text here.
    pub(super) fn text(&self) -> Result<&'a str, Problem> {
        match &self.node.value {
            Value::Text(text) => Ok(text),
            other @ (Value::Bool(_) | Value::Number(_)) => {
                Err(self.problem(format!("must be a text, is {}", other.what())).hint("put it in quotes"))
            }
            other => Err(self.problem(format!("must be a text, is {}", other.what()))),
        }
    }

    /// The items of the list here; none when nothing is here.
    pub(super) fn items(&self) -> Result<Vec<At<'a>>, Problem> {
        match &self.node.value {
            Value::List(items) => Ok(items
                .iter()
                .enumerate()
                .map(|(index, node)| At { node, path: format!("{}[{index}]", self.path) })
                .collect()),
            Value::Null => Ok(Vec::new()),
            other => Err(self.problem(format!("must be a list, is {}", other.what()))),
        }
    }

    /// The entries of the mapping here; none when nothing is here.
    pub(super) fn entries(&self) -> Result<Vec<(&'a str, At<'a>)>, Problem> {
        match &self.node.value {
            Value::Map(entries) => Ok(entries
                .iter()
                .map(|(key, node)| (key.as_str(), At { node, path: self.path_of_key(key) }))
                .collect()),
            Value::Null => Ok(Vec::new()),
            other => Err(self.problem(format!("must be a mapping, is {}", other.what()))),
        }
    }

    /// The path of a field of what is here.
    pub(super) fn path_of(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// Like [`path_of`](At::path_of), for keys that may hold dots: `data[.dockerconfigjson]`.
    fn path_of_key(&self, key: &str) -> String {
        if key.contains(['.', '/']) { format!("{}[{key}]", self.path) } else { self.path_of(key) }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::problem::Place;
    use super::*;

    /// Reads one document, as [`parse_all`] does.
    pub(in crate::manifest) fn parse(text: &str) -> Result<Node, Problem> {
        parse_all(&[text]).remove(0)
    }

    #[test]
    fn fields_know_their_path_and_line() {
        let node = parse("a:\n  b:\n    - c: 1.25\n").unwrap();
        let c = At::root(&node).path(&["a", "b"]).unwrap().unwrap().items().unwrap()[0].field("c");
        let problem = c.unwrap().unwrap().text().expect_err("a number is not a text");
        let located = Place { document: 1, ..Place::file("f") }.holds(problem);
        assert_eq!(located.to_string(), "f:3: document 1: a.b[0].c: must be a text, is the number 1.25");
    }

    #[test]
    fn json_is_read_even_where_yaml_would_not() {
        let node = parse("{\n\t\"a\": \"\\ud83d\\ude00\\/\"\n}").unwrap();
        assert_eq!(At::root(&node).text_of("a"), Ok(Some("😀/")));
    }

    #[test]
    fn broken_yaml_is_told_with_its_line_and_without_its_content() {
        let problem = parse("data:\n  password: [hunter2\n").expect_err("the list has no end");
        let located = Place { document: 1, ..Place::file("f") }.holds(problem).to_string();
        assert!(located.starts_with("f:2: ") || located.starts_with("f:3: "), "{located}");
        assert!(!located.contains("hunter2"), "{located}");
    }

    #[test]
    fn a_repeated_key_is_an_error() {
        assert!(parse("a: 1\na: 2\n").is_err());
    }

    #[test]
    fn expanding_aliases_without_bound_is_refused() {
        let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..9 {
            let below = level - 1;
            let refs = vec![format!("*a{below}"); 10].join(", ");
            text = format!("{text}a{level}: &a{level} [{refs}]\n");
        }
        assert!(parse(&text).is_err());
    }

    #[test]
    fn deep_nesting_is_refused() {
        for nested in ["[", "{a: ", "- ", "? "] {
            assert!(parse(&nested.repeat(10_000)).is_err(), "{nested}");
        }
        assert!(parse(&format!("{}1", "- ".repeat(100))).is_ok(), "but some depth is fine");
    }
}
