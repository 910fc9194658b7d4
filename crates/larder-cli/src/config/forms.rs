//! How values are written: one form for each kind of value, which reads it and shows it.

use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use larder::config::GoDuration;
use larder::gotext::quote;
use serde_json::{Value, json};

use crate::args::size;
use crate::duration::LONGEST;
use crate::manifest::Problem;
use crate::manifest::tree::{At, Node};
use larder::near::nearest;

/// What a flag's text stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
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

/// A whole number from `MIN` to `MAX`.
pub(super) struct Whole<T, const MIN: i64, const MAX: i64>(PhantomData<T>);

/// Whole numbers as kubelet has them: what is out of bounds is told later, in kubelet's words.
pub(super) type Int32 = Whole<i32, { i32::MIN as i64 }, { i32::MAX as i64 }>;

impl<T, const MIN: i64, const MAX: i64> Form for Whole<T, MIN, MAX>
where
    T: TryFrom<i64> + Copy,
    i64: TryFrom<T>,
{
    type Value = T;
    const KIND: Kind = Kind::Number;

    fn name() -> String {
        match (MIN, MAX) {
            (0, 100) => "percent".into(),
            _ => "whole number".into(),
        }
    }

    fn read(at: &At<'_>) -> Result<T, Problem> {
        let number = at.number()?;
        let whole = number.parse::<i64>().ok().filter(|whole| (MIN..=MAX).contains(whole));
        whole.and_then(|whole| T::try_from(whole).ok()).ok_or_else(|| {
            at.problem(format!("must be a whole number from {MIN} to {MAX}, is {}", quote(number)))
        })
    }

    fn show(value: &T) -> Value {
        i64::try_from(*value).map_or(Value::Null, |number| json!(number))
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

/// An absolute path: what it would start at depends on who starts larder.
pub(super) struct Path;

impl Form for Path {
    type Value = PathBuf;

    fn name() -> String {
        "path".into()
    }

    fn read(at: &At<'_>) -> Result<PathBuf, Problem> {
        let text = at.text()?;
        let path = PathBuf::from(text);
        if path.is_absolute() && !text.contains('\0') {
            return Ok(path);
        }
        Err(at.problem(format!("must be an absolute path, is {}", quote(text))).hint("begin it with /"))
    }

    fn show(value: &PathBuf) -> Value {
        json!(value.to_string_lossy())
    }
}

/// An absolute path, or an empty text for none.
pub(super) struct MaybePath;

impl Form for MaybePath {
    type Value = Option<PathBuf>;

    fn name() -> String {
        "path".into()
    }

    fn read(at: &At<'_>) -> Result<Option<PathBuf>, Problem> {
        if at.text()?.is_empty() { Ok(None) } else { Path::read(at).map(Some) }
    }

    fn show(value: &Option<PathBuf>) -> Value {
        value.as_ref().map_or_else(|| json!(""), Path::show)
    }
}

/// A list of absolute paths.
pub(super) struct Paths;

impl Form for Paths {
    type Value = Vec<PathBuf>;
    const KIND: Kind = Kind::List;

    fn name() -> String {
        "list of paths".into()
    }

    fn read(at: &At<'_>) -> Result<Vec<PathBuf>, Problem> {
        at.items()?.iter().map(Path::read).collect()
    }

    fn show(value: &Vec<PathBuf>) -> Value {
        value.iter().map(Path::show).collect()
    }
}

/// A duration of kubelet's: any that Go reads; what is out of bounds is told later, in kubelet's words.
pub(super) struct GoTime;

impl Form for GoTime {
    type Value = GoDuration;

    fn name() -> String {
        "duration".into()
    }

    fn read(at: &At<'_>) -> Result<GoDuration, Problem> {
        if at.is_number() && at.number()? != "0" {
            let hint = "write it with its unit, such as 90s";
            return Err(at.must_be("a duration").hint(hint));
        }
        let text = if at.is_number() { "0" } else { at.text()? };
        GoDuration::parse(text).map_err(|error| at.problem(format!("{}: {error}", quote(text))))
    }

    fn show(value: &GoDuration) -> Value {
        json!(value.to_string())
    }
}

/// A duration from `MIN` seconds to a year.
pub(super) struct Time<const MIN: u64>;

impl<const MIN: u64> Form for Time<MIN> {
    type Value = Duration;

    fn name() -> String {
        "duration".into()
    }

    fn read(at: &At<'_>) -> Result<Duration, Problem> {
        let written = GoTime::read(at)?;
        match written.to_std() {
            Some(time) if (Duration::from_secs(MIN)..=LONGEST).contains(&time) => Ok(time),
            _ => Err(at.problem(format!("must be from {MIN}s to 8760h, a year; is {written}"))),
        }
    }

    fn show(value: &Duration) -> Value {
        json!(larder::gotext::duration(*value))
    }
}

/// A duration up to a year; 0 is none.
pub(super) struct MaybeTime;

impl Form for MaybeTime {
    type Value = Option<Duration>;

    fn name() -> String {
        "duration".into()
    }

    fn read(at: &At<'_>) -> Result<Option<Duration>, Problem> {
        Time::<0>::read(at).map(|time| Some(time).filter(|time| !time.is_zero()))
    }

    fn show(value: &Option<Duration>) -> Value {
        Time::<0>::show(&value.unwrap_or_default())
    }
}

/// A size in bytes, with or without a unit; at least `MIN`.
pub(super) struct Bytes<const MIN: u64>;

impl<const MIN: u64> Form for Bytes<MIN> {
    type Value = u64;

    fn name() -> String {
        "size".into()
    }

    fn read(at: &At<'_>) -> Result<u64, Problem> {
        let text = if at.is_number() { at.number()? } else { at.text()? };
        let bytes = match text.parse::<u64>() {
            Ok(bytes) => Ok(bytes),
            Err(_) => size(text),
        };
        match bytes {
            Ok(bytes) if (MIN..=1 << 60).contains(&bytes) => Ok(bytes),
            Ok(_) => Err(at.problem(format!("must be from {} to 1024PiB, is {text}", size_text(MIN)))),
            Err(wrong) => Err(at.problem(wrong)),
        }
    }

    fn show(value: &u64) -> Value {
        let text = size_text(*value);
        if text.ends_with('B') { json!(text) } else { json!(value) }
    }
}

/// A size, exactly, in the largest unit that fits: `16MiB`, `1500`.
fn size_text(bytes: u64) -> String {
    let unit = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)]
        .into_iter()
        .find(|(_, bits)| bytes > 0 && bytes.trailing_zeros() >= *bits);
    unit.map_or_else(|| bytes.to_string(), |(name, bits)| format!("{}{name}", bytes >> bits))
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
