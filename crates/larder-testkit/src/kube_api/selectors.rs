//! Field and label selectors.

use serde_json::Value;

/// The selectors of a list or watch: every term must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Selectors {
    fields: Vec<Term>,
    labels: Vec<Term>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Term {
    key: String,
    value: String,
    is_equal: bool,
}

impl Selectors {
    /// From `fieldSelector` and `labelSelector`: `a=b`, `a==b` and `a!=b`, separated by commas.
    pub(super) fn parse(fields: &str, labels: &str) -> Selectors {
        Selectors { fields: terms(fields), labels: terms(labels) }
    }

    pub(super) fn match_object(&self, object: &Value) -> bool {
        let field = |key: &str| {
            let pointer = format!("/{}", key.replace('.', "/"));
            object.pointer(&pointer).and_then(Value::as_str).unwrap_or_default()
        };
        let label = |key: &str| object["metadata"]["labels"][key].as_str().unwrap_or_default();
        self.fields.iter().all(|term| (field(&term.key) == term.value) == term.is_equal)
            && self.labels.iter().all(|term| (label(&term.key) == term.value) == term.is_equal)
    }
}

fn terms(text: &str) -> Vec<Term> {
    let term = |text: &str| {
        let (key, value, is_equal) = match text.split_once("!=") {
            Some((key, value)) => (key, value, false),
            None => text.split_once('=').map(|(key, value)| (key, value.trim_start_matches('='), true))?,
        };
        Some(Term { key: key.to_owned(), value: value.to_owned(), is_equal })
    };
    text.split(',').filter_map(term).collect()
}
