//! A place in a document, from which it is read.

use larder::near;

use super::{Node, Value};
use crate::manifest::problem::Problem;

/// A place in a document: a node and the path that leads to it.
#[derive(Debug, Clone)]
pub struct At<'a> {
    node: &'a Node,
    path: String,
    private: bool,
}

impl<'a> At<'a> {
    /// The document as a whole.
    pub fn root(node: &'a Node) -> Self {
        At { node, path: String::new(), private: false }
    }

    /// A value that something else than a document gives to this key.
    pub fn given(node: &'a Node, key: &str) -> Self {
        At { node, path: key.to_owned(), private: false }
    }

    /// The same place, whose values, and those below it, no problem shows.
    #[must_use]
    pub fn private(self) -> Self {
        At { private: true, ..self }
    }

    /// The line within the document.
    pub fn line(&self) -> usize {
        self.node.line
    }

    /// The path from the document's root, such as `spec.containers[0].image`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether nothing is written here.
    pub fn is_empty(&self) -> bool {
        matches!(&self.node.value, Value::Null)
    }

    /// Whether a mapping is here.
    pub fn is_mapping(&self) -> bool {
        matches!(&self.node.value, Value::Map(_))
    }

    /// A problem with what is here.
    pub fn problem(&self, what: impl Into<String>) -> Problem {
        Problem::new(what).at_line(self.node.line).at_field(&self.path)
    }

    /// A problem with a field that is missing here.
    pub fn missing(&self, field: &str) -> Problem {
        let problem = Problem::new("required, and missing").at_line(self.node.line);
        problem.at_field(&self.path_of(field)).hints(self.misspelt(field))
    }

    /// A field that may have been meant to be the one that is missing here.
    pub fn misspelt(&self, field: &str) -> Option<String> {
        let Value::Map(entries) = &self.node.value else { return None };
        let wanted = field.split('.').next().unwrap_or(field);
        let keys = || entries.iter().map(|(key, _)| key.as_str());
        if self.private || keys().any(|key| key == wanted) {
            return None;
        }
        near::nearest(wanted, keys()).map(|key| format!("{key}: did you mean {wanted}?"))
    }

    /// A field, `None` when it is absent or null.
    pub fn field(&self, name: &str) -> Result<Option<At<'a>>, Problem> {
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
    pub fn descend(&self, names: &[&str]) -> Result<Option<At<'a>>, Problem> {
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
    pub fn text_of(&self, name: &str) -> Result<Option<&'a str>, Problem> {
        self.field(name)?.map(|field| field.text()).transpose()
    }

    /// The text here.
    pub fn text(&self) -> Result<&'a str, Problem> {
        match &self.node.value {
            Value::Text(text) => Ok(text),
            Value::Bool(_) | Value::Number(_) => Err(self.must_be("a text").hint("put it in quotes")),
            _ => Err(self.must_be("a text")),
        }
    }

    /// The items of the list here; none when nothing is here.
    pub fn items(&self) -> Result<Vec<At<'a>>, Problem> {
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
    pub fn entries(&self) -> Result<Vec<(&'a str, At<'a>)>, Problem> {
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
    pub fn boolean(&self) -> Result<bool, Problem> {
        match &self.node.value {
            Value::Bool(value) => Ok(*value),
            Value::Text(text) if text.parse::<bool>().is_ok() => {
                Err(self.must_be("true or false").hint("leave out the quotes"))
            }
            _ => Err(self.must_be("true or false")),
        }
    }

    /// The number here, as it is written.
    pub fn number(&self) -> Result<&'a str, Problem> {
        match &self.node.value {
            Value::Number(number) => Ok(number),
            Value::Text(text) if text.parse::<f64>().is_ok() => {
                Err(self.must_be("a number").hint("leave out the quotes"))
            }
            _ => Err(self.must_be("a number")),
        }
    }

    /// Whether a number is here.
    pub fn is_number(&self) -> bool {
        matches!(&self.node.value, Value::Number(_))
    }

    /// A problem with a value that is of another type than it must be.
    pub fn must_be(&self, wanted: &str) -> Problem {
        self.problem(format!("must be {wanted}, is {}", self.node.value.what(self.private)))
    }

    /// The path of a field of what is here.
    pub fn path_of(&self, field: &str) -> String {
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
