//! How values are written: one form for each kind of value, which reads it and shows it.

mod paths;
mod quantities;

use std::marker::PhantomData;
use std::net::SocketAddr;

use larder::go_format::quote;
use larder::pod::is_subdomain;
use larder::suggestions::nearest;
use serde_json::{Value, json};

use crate::manifest::InputProblem;
use crate::manifest::tree::{NodeCursor, YamlNode};

pub(super) use paths::{AbsolutePathCodec, OptionalPathCodec, PathListCodec};
pub(super) use quantities::{
    ByteSizeCodec, DurationCodec, GoDurationCodec, IntegerCodec, KubeletIntCodec, OptionalDurationCodec,
};

/// Kind of value that a flag's text is read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FlagValueKind {
    Text,
    Number,
    Boolean,
    /// A list of one text.
    List,
}

impl FlagValueKind {
    /// A flag's text as a document would have it.
    pub(super) fn node(self, text: &str) -> YamlNode {
        match self {
            FlagValueKind::Text => YamlNode::text(text),
            FlagValueKind::Number => YamlNode::number(text),
            FlagValueKind::Boolean => YamlNode::boolean(text),
            FlagValueKind::List => YamlNode::list(text),
        }
    }
}

/// A way to write values. [`show`](SettingCodec::show) writes what [`read`](SettingCodec::read) reads back.
pub(super) trait SettingCodec {
    type Value;
    const KIND: FlagValueKind = FlagValueKind::Text;
    /// Its name on the reference page.
    fn name() -> String;
    fn parse(at: &NodeCursor<'_>) -> Result<Self::Value, InputProblem>;
    fn print(value: &Self::Value) -> Value;
}

/// `true` or `false`.
pub(super) struct BoolCodec;

impl SettingCodec for BoolCodec {
    type Value = bool;
    const KIND: FlagValueKind = FlagValueKind::Boolean;

    fn name() -> String {
        "boolean".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<bool, InputProblem> {
        at.boolean()
    }

    fn print(value: &bool) -> Value {
        json!(value)
    }
}

/// Any string.
pub(super) struct StringCodec;

impl SettingCodec for StringCodec {
    type Value = String;

    fn name() -> String {
        "string".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<String, InputProblem> {
        at.text().map(str::to_owned)
    }

    fn print(value: &String) -> Value {
        json!(value)
    }
}

/// A string that may be empty for none.
pub(super) struct OptionalStringCodec;

impl SettingCodec for OptionalStringCodec {
    type Value = Option<String>;

    fn name() -> String {
        "string".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Option<String>, InputProblem> {
        StringCodec::parse(at).map(|text| Some(text).filter(|text| !text.is_empty()))
    }

    fn print(value: &Option<String>) -> Value {
        json!(value.as_deref().unwrap_or_default())
    }
}

/// Name of a node's object in Kubernetes, or empty for none.
pub(super) struct OptionalNodeNameCodec;

impl SettingCodec for OptionalNodeNameCodec {
    type Value = Option<String>;

    fn name() -> String {
        OptionalStringCodec::name()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Option<String>, InputProblem> {
        let name = OptionalStringCodec::parse(at)?;
        if let Some(name) = name.as_deref().filter(|name| !is_subdomain(name)) {
            let problem = at.problem(format!("must be a lowercase RFC 1123 subdomain, is {}", quote(name)));
            return Err(problem.hint("`kubectl get nodes` lists the names"));
        }
        Ok(name)
    }

    fn print(value: &Option<String>) -> Value {
        OptionalStringCodec::print(value)
    }
}

/// A list of strings.
pub(super) struct StringListCodec;

impl SettingCodec for StringListCodec {
    type Value = Vec<String>;

    fn name() -> String {
        "list of strings".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Vec<String>, InputProblem> {
        at.items()?.iter().map(StringCodec::parse).collect()
    }

    fn print(value: &Vec<String>) -> Value {
        json!(value)
    }
}

/// One of a few words.
pub(super) struct EnumCodec<T>(PhantomData<T>);

/// Values that have a word each.
pub(super) trait EnumWords: Copy + PartialEq + 'static {
    /// Each value and its word.
    const WORDS: &'static [(&'static str, Self)];
}

impl<T: EnumWords> SettingCodec for EnumCodec<T> {
    type Value = T;

    fn name() -> String {
        words::<T>().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
    }

    fn parse(at: &NodeCursor<'_>) -> Result<T, InputProblem> {
        let known: Vec<_> = words::<T>().collect();
        let Ok(text) = at.text() else {
            return Err(at.must_be(&format!("one of {}", known.join(", "))));
        };
        if let Some((_, value)) = T::WORDS.iter().find(|(word, _)| *word == text) {
            return Ok(*value);
        }
        let problem = at.problem(format!("must be one of {}; is {}", known.join(", "), quote(text)));
        Err(problem.hints(nearest(text, known).map(|word| format!("did you mean {word}?"))))
    }

    fn print(value: &T) -> Value {
        let word = T::WORDS.iter().find(|(_, known)| known == value).map(|(word, _)| word);
        json!(word)
    }
}

fn words<T: EnumWords>() -> impl Iterator<Item = &'static str> {
    T::WORDS.iter().map(|(word, _)| *word)
}

/// The mode of a file: octal, in quotes.
pub(super) struct FileModeCodec;

impl SettingCodec for FileModeCodec {
    type Value = u32;

    fn name() -> String {
        "octal mode".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<u32, InputProblem> {
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

    fn print(value: &u32) -> Value {
        json!(format!("{value:04o}"))
    }
}

/// `ADDRESS:PORT`, or an empty text for none.
pub(super) struct SocketAddrCodec;

impl SettingCodec for SocketAddrCodec {
    type Value = Option<SocketAddr>;

    fn name() -> String {
        "address and port".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Option<SocketAddr>, InputProblem> {
        let text = at.text()?;
        if text.is_empty() {
            return Ok(None);
        }
        let hint = "write it like 127.0.0.1:9464 or [::1]:9464";
        let wrong = |_| at.problem(format!("{}: not an address with a port", quote(text))).hint(hint);
        text.parse().map(Some).map_err(wrong)
    }

    fn print(value: &Option<SocketAddr>) -> Value {
        json!(value.map(|address| address.to_string()).unwrap_or_default())
    }
}
