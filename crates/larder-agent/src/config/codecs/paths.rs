//! Paths.

use std::path::PathBuf;

use larder::go_format::quote;
use serde_json::{Value, json};

use super::{FlagValueKind, SettingCodec};
use crate::manifest::InputProblem;
use crate::manifest::tree::NodeCursor;

/// An absolute path: what it would start at depends on who starts larder.
pub(in crate::config) struct AbsolutePathCodec;

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

/// An absolute path, or an empty text for none.
pub(in crate::config) struct OptionalPathCodec;

impl SettingCodec for OptionalPathCodec {
    type Value = Option<PathBuf>;

    fn name() -> String {
        "path".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Option<PathBuf>, InputProblem> {
        if at.text()?.is_empty() { Ok(None) } else { AbsolutePathCodec::parse(at).map(Some) }
    }

    fn print(value: &Option<PathBuf>) -> Value {
        value.as_ref().map_or_else(|| json!(""), AbsolutePathCodec::print)
    }
}

/// A list of absolute paths.
pub(in crate::config) struct PathListCodec;

impl SettingCodec for PathListCodec {
    type Value = Vec<PathBuf>;
    const KIND: FlagValueKind = FlagValueKind::List;

    fn name() -> String {
        "list of paths".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Vec<PathBuf>, InputProblem> {
        at.items()?.iter().map(AbsolutePathCodec::parse).collect()
    }

    fn print(value: &Vec<PathBuf>) -> Value {
        value.iter().map(AbsolutePathCodec::print).collect()
    }
}
