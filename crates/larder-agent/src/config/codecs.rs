//! How values are written: one form for each kind of value, which reads it and shows it.

mod quantities;

use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::PathBuf;

use larder::go_format::quote;
use larder::pod::is_subdomain;
use larder::suggestions::nearest;
use serde_json::{Value, json};

use crate::manifest::InputProblem;
use crate::manifest::tree::{NodeCursor, YamlNode};

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
    /// Reads a value and reports everything that is wrong with it.
    fn parse_all(at: &NodeCursor<'_>) -> Result<Self::Value, Vec<InputProblem>> {
        Self::parse(at).map_err(|problem| vec![problem])
    }
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

/// A value that may be an empty text for none.
pub(super) struct OptionalCodec<C>(PhantomData<C>);

impl<C: SettingCodec> SettingCodec for OptionalCodec<C> {
    type Value = Option<C::Value>;

    fn name() -> String {
        C::name()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Option<C::Value>, InputProblem> {
        if at.text()?.is_empty() { Ok(None) } else { C::parse(at).map(Some) }
    }

    fn print(value: &Option<C::Value>) -> Value {
        value.as_ref().map_or_else(|| json!(""), C::print)
    }
}

/// A list of values.
pub(super) struct ListCodec<C>(PhantomData<C>);

impl<C: SettingCodec> SettingCodec for ListCodec<C> {
    type Value = Vec<C::Value>;
    const KIND: FlagValueKind = FlagValueKind::List;

    fn name() -> String {
        format!("list of {}s", C::name())
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Vec<C::Value>, InputProblem> {
        at.items()?.iter().map(C::parse).collect()
    }

    fn print(values: &Vec<C::Value>) -> Value {
        values.iter().map(C::print).collect()
    }
}

/// Name of a node's object in Kubernetes.
pub(super) struct NodeNameCodec;

impl SettingCodec for NodeNameCodec {
    type Value = String;

    fn name() -> String {
        StringCodec::name()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<String, InputProblem> {
        let name = StringCodec::parse(at)?;
        if is_subdomain(&name) {
            return Ok(name);
        }
        let problem = at.problem(format!("must be a lowercase RFC 1123 subdomain, is {}", quote(&name)));
        Err(problem.hint("`kubectl get nodes` lists the names"))
    }

    fn print(value: &String) -> Value {
        StringCodec::print(value)
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

/// `ADDRESS:PORT`.
pub(super) struct SocketAddrCodec;

impl SettingCodec for SocketAddrCodec {
    type Value = SocketAddr;

    fn name() -> String {
        "address and port".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<SocketAddr, InputProblem> {
        let text = at.text()?;
        let hint = "write it like 127.0.0.1:9464 or [::1]:9464";
        text.parse()
            .map_err(|_| at.problem(format!("{}: not an address with a port", quote(text))).hint(hint))
    }

    fn print(value: &SocketAddr) -> Value {
        json!(value.to_string())
    }
}

/// An absolute path: what it would start at depends on who starts larder.
pub(super) struct AbsolutePathCodec;

impl SettingCodec for AbsolutePathCodec {
    type Value = PathBuf;

    fn name() -> String {
        "path".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<PathBuf, InputProblem> {
        let text = at.text()?;
        let path = PathBuf::from(text);
        if path.is_absolute() && !text.contains('\0') {
            return Ok(path);
        }
        Err(at.problem(format!("must be an absolute path, is {}", quote(text))).hint("begin it with /"))
    }

    fn print(value: &PathBuf) -> Value {
        json!(value.to_string_lossy())
    }
}
