//! How values are written: one form for each kind of value, which reads it and shows it.

mod paths;
mod quantities;

use std::marker::PhantomData;
use std::net::SocketAddr;

use larder::gotext::quote;
use larder::near::nearest;
use serde_json::{Value, json};

use crate::manifest::Problem;
use crate::manifest::tree::{At, Node};

pub(super) use paths::{MaybePath, Path, Paths};
pub(super) use quantities::{Bytes, GoTime, Int32, MaybeTime, Time, Whole};

/// What a flag's text stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Number,
    Boolean,
    /// A list of one text.
    List,
}

impl Kind {
    /// A flag's text as a document would have it.
    pub(super) fn node(self, text: &str) -> Node {
        match self {
            Kind::Text => Node::text(text),
            Kind::Number => Node::number(text),
            Kind::Boolean => Node::boolean(text),
            Kind::List => Node::list(text),
        }
    }
}

/// A way to write values. [`show`](Form::show) writes what [`read`](Form::read) reads back.
pub(super) trait Form {
    type Value;
    const KIND: Kind = Kind::Text;
    /// Its name on the reference page.
    fn name() -> String;
    fn read(at: &At<'_>) -> Result<Self::Value, Problem>;
    fn show(value: &Self::Value) -> Value;
}

/// `true` or `false`.
pub(super) struct Switch;

impl Form for Switch {
    type Value = bool;
    const KIND: Kind = Kind::Boolean;

    fn name() -> String {
        "boolean".into()
    }

    fn read(at: &At<'_>) -> Result<bool, Problem> {
        at.boolean()
    }

    fn show(value: &bool) -> Value {
        json!(value)
    }
}

/// Any text.
pub(super) struct Text;

impl Form for Text {
    type Value = String;

    fn name() -> String {
        "text".into()
    }

    fn read(at: &At<'_>) -> Result<String, Problem> {
        at.text().map(str::to_owned)
    }

    fn show(value: &String) -> Value {
        json!(value)
    }
}

/// A text that may be empty for none.
pub(super) struct MaybeText;

impl Form for MaybeText {
    type Value = Option<String>;

    fn name() -> String {
        "text".into()
    }

    fn read(at: &At<'_>) -> Result<Option<String>, Problem> {
        Text::read(at).map(|text| Some(text).filter(|text| !text.is_empty()))
    }

    fn show(value: &Option<String>) -> Value {
        json!(value.as_deref().unwrap_or_default())
    }
}

/// A list of texts.
pub(super) struct Texts;

impl Form for Texts {
    type Value = Vec<String>;

    fn name() -> String {
        "list of texts".into()
    }

    fn read(at: &At<'_>) -> Result<Vec<String>, Problem> {
        at.items()?.iter().map(Text::read).collect()
    }

    fn show(value: &Vec<String>) -> Value {
        json!(value)
    }
}

/// One of a few words.
pub(super) struct Choice<T>(PhantomData<T>);

/// Values that have a word each.
pub(super) trait Words: Copy + PartialEq + 'static {
    /// Each value and its word.
    const WORDS: &'static [(&'static str, Self)];
}

impl<T: Words> Form for Choice<T> {
    type Value = T;

    fn name() -> String {
        words::<T>().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
    }

    fn read(at: &At<'_>) -> Result<T, Problem> {
        let text = at.text()?;
        if let Some((_, value)) = T::WORDS.iter().find(|(word, _)| *word == text) {
            return Ok(*value);
        }
        let known: Vec<_> = words::<T>().collect();
        let problem = at.problem(format!("must be one of {}; is {}", known.join(", "), quote(text)));
        Err(problem.hints(nearest(text, known).map(|word| format!("did you mean {word}?"))))
    }

    fn show(value: &T) -> Value {
        let word = T::WORDS.iter().find(|(_, known)| known == value).map(|(word, _)| word);
        json!(word)
    }
}

fn words<T: Words>() -> impl Iterator<Item = &'static str> {
    T::WORDS.iter().map(|(word, _)| *word)
}

/// The mode of a file: octal, in quotes.
pub(super) struct Mode;

impl Form for Mode {
    type Value = u32;

    fn name() -> String {
        "octal mode".into()
    }

    fn read(at: &At<'_>) -> Result<u32, Problem> {
        let octal = |text: &str| u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
        if at.is_number() {
            // YAML drops the leading zero, or reads octal, depending on who reads it.
            return Err(at.must_be("a mode such as \"0660\"").hint("put it in quotes"));
        }
        let text = at.text()?;
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        octal(text).filter(|_| digits).ok_or_else(|| {
            at.problem(format!("must be an octal mode from \"0000\" to \"0777\", is {}", quote(text)))
        })
    }

    fn show(value: &u32) -> Value {
        json!(format!("{value:04o}"))
    }
}

/// `ADDRESS:PORT`, or an empty text for none.
pub(super) struct Address;

impl Form for Address {
    type Value = Option<SocketAddr>;

    fn name() -> String {
        "address and port".into()
    }

    fn read(at: &At<'_>) -> Result<Option<SocketAddr>, Problem> {
        let text = at.text()?;
        if text.is_empty() {
            return Ok(None);
        }
        let hint = "write it like 127.0.0.1:9464 or [::1]:9464";
        let wrong = |_| at.problem(format!("{}: not an address with a port", quote(text))).hint(hint);
        text.parse().map(Some).map_err(wrong)
    }

    fn show(value: &Option<SocketAddr>) -> Value {
        json!(value.map(|address| address.to_string()).unwrap_or_default())
    }
}
