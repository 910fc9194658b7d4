//! Paths.

use std::path::PathBuf;

use larder::gotext::quote;
use serde_json::{Value, json};

use super::{Form, Kind};
use crate::manifest::Problem;
use crate::manifest::tree::At;

/// An absolute path: what it would start at depends on who starts larder.
pub(in crate::config) struct Path;

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
pub(in crate::config) struct MaybePath;

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
pub(in crate::config) struct Paths;

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
