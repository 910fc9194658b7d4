//! A place in a document, from which it is read.

use larder::suggestions;

use super::{YamlNode, YamlValue};
use crate::manifest::problem::InputProblem;

/// A place in a document: a node and the path that leads to it.
#[derive(Debug, Clone)]
pub struct NodeCursor<'a> {
    node: &'a YamlNode,
    path: String,
    private: bool,
}

impl<'a> NodeCursor<'a> {
    /// The document as a whole.
    pub fn root(node: &'a YamlNode) -> Self {
        NodeCursor { node, path: String::new(), private: false }
    }

    /// A value that something else than a document gives to this key.
    pub fn given(node: &'a YamlNode, key: &str) -> Self {
        NodeCursor { node, path: key.to_owned(), private: false }
    }

    /// Hides the values here and below in problems.
    #[must_use]
    pub fn private(self) -> Self {
        NodeCursor { private: true, ..self }
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
        matches!(&self.node.value, YamlValue::Null)
    }

    /// Whether a mapping is here.
    pub fn is_mapping(&self) -> bool {
        matches!(&self.node.value, YamlValue::Map(_))
    }

    /// A problem with what is here.
    pub fn problem(&self, what: impl Into<String>) -> InputProblem {
        InputProblem::new(what).at_line(self.node.line).at_field(&self.path)
    }

    /// A problem with a field that is missing here.
    pub fn missing(&self, field: &str) -> InputProblem {
        let problem = InputProblem::new("required").at_line(self.node.line);
        problem.at_field(&self.path_of(field)).hints(self.misspelt(field))
    }

    /// A field that may have been meant to be the one that is missing here.
    pub fn misspelt(&self, field: &str) -> Option<String> {
        let YamlValue::Map(entries) = &self.node.value else { return None };
        let wanted = field.split('.').next().unwrap_or(field);
        let keys = || entries.iter().map(|(key, _)| key.as_str());
        if self.private || keys().any(|key| key == wanted) {
            return None;
        }
        suggestions::nearest(wanted, keys()).map(|key| format!("{key}: did you mean {wanted}?"))
    }

    /// A field, `None` when it is absent or null.
    pub fn field(&self, name: &str) -> Result<Option<NodeCursor<'a>>, InputProblem> {
        match &self.node.value {
            YamlValue::Map(entries) => Ok(entries
                .iter()
                .find(|(key, node)| key == name && node.value != YamlValue::Null)
                .map(|(_, node)| self.below(node, self.path_of(name)))),
            YamlValue::Null => Ok(None),
            _ => Err(self.must_be("a mapping")),
        }
    }

    /// A field of a field, `None` when any of them is absent.
    pub fn descend(&self, names: &[&str]) -> Result<Option<NodeCursor<'a>>, InputProblem> {
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
    pub fn text_of(&self, name: &str) -> Result<Option<&'a str>, InputProblem> {
        self.field(name)?.map(|field| field.text()).transpose()
    }

    /// The text here.
    pub fn text(&self) -> Result<&'a str, InputProblem> {
        match &self.node.value {
            YamlValue::Text(text) => Ok(text),
            YamlValue::Bool(_) | YamlValue::Number(_) => {
                Err(self.must_be("a string").hint("put it in quotes"))
            }
            _ => Err(self.must_be("a string")),
        }
    }

    /// The items of the list here; none when nothing is here.
    pub fn items(&self) -> Result<Vec<NodeCursor<'a>>, InputProblem> {
        match &self.node.value {
            YamlValue::List(items) => Ok(items
                .iter()
                .enumerate()
                .map(|(index, node)| self.below(node, format!("{}[{index}]", self.path)))
                .collect()),
            YamlValue::Null => Ok(Vec::new()),
            _ => Err(self.must_be("a list").hint("begin each entry with a dash")),
        }
    }

    /// The entries of the mapping here; none when nothing is here.
    pub fn entries(&self) -> Result<Vec<(&'a str, NodeCursor<'a>)>, InputProblem> {
        match &self.node.value {
            YamlValue::Map(entries) => Ok(entries
                .iter()
                .map(|(key, node)| (key.as_str(), self.below(node, self.path_of_key(key))))
                .collect()),
            YamlValue::Null => Ok(Vec::new()),
            _ => Err(self.must_be("a mapping")),
        }
    }

    fn below(&self, node: &'a YamlNode, path: String) -> NodeCursor<'a> {
        NodeCursor { node, path, private: self.private }
    }

    /// The boolean here.
    pub fn boolean(&self) -> Result<bool, InputProblem> {
        match &self.node.value {
            YamlValue::Bool(value) => Ok(*value),
            YamlValue::Text(text) if text.parse::<bool>().is_ok() => {
                Err(self.must_be("true or false").hint("leave out the quotes"))
            }
            _ => Err(self.must_be("true or false")),
        }
    }

    /// The number here, as it is written.
    pub fn number(&self) -> Result<&'a str, InputProblem> {
        match &self.node.value {
            YamlValue::Number(number) => Ok(number),
            YamlValue::Text(text) if text.parse::<f64>().is_ok() => {
                Err(self.must_be("a number").hint("leave out the quotes"))
            }
            _ => Err(self.must_be("a number")),
        }
    }

    /// Whether a number is here.
    pub fn is_number(&self) -> bool {
        matches!(&self.node.value, YamlValue::Number(_))
    }

    /// A problem with a value that is of another type than it must be.
    pub fn must_be(&self, wanted: &str) -> InputProblem {
        self.problem(format!("must be {wanted}, is {}", self.node.value.what(self.private)))
    }

    /// The path of a field of what is here.
    pub fn path_of(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// Like [`path_of`](NodeCursor::path_of), for keys that may hold dots: `data[.dockerconfigjson]`. In a private
    /// place, what cannot be a key of a secret is not shown: it may be a value that slipped.
    fn path_of_key(&self, key: &str) -> String {
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if self.private && !key.chars().all(is_name) {
            return format!("{}[...]", self.path);
        }
        if key.contains(['.', '/']) { format!("{}[{key}]", self.path) } else { self.path_of(key) }
    }
}

impl YamlValue {
    /// Description of the value; of a private one, only its type.
    fn what(&self, private: bool) -> String {
        match self {
            YamlValue::Null => "nothing".into(),
            YamlValue::Bool(_) if private => "a boolean".into(),
            YamlValue::Number(_) if private => "a number".into(),
            YamlValue::Bool(value) => format!("the boolean {value}"),
            YamlValue::Number(value) => format!("the number {value}"),
            YamlValue::Text(_) => "a string".into(),
            YamlValue::List(_) => "a list".into(),
            YamlValue::Map(_) => "a mapping".into(),
        }
    }
}
