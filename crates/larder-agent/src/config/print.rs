//! The effective configuration as a file of larder's, and as data.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use super::settings;
use super::{API_VERSION, Config, KIND, SettingOrigin};

/// A file of larder's that says the same, with a comment at each setting that says where the value came from.
pub fn as_yaml(config: &Config) -> String {
    let mut text = format!("apiVersion: {API_VERSION}\nkind: {KIND}\n");
    let mut open = Vec::new();
    for setting in settings::all() {
        let mut sections: Vec<&str> = setting.key.split('.').collect();
        let name = sections.pop().unwrap_or_default();
        let already = open.iter().zip(&sections).take_while(|(open, section)| open == section).count();
        for (depth, section) in sections.iter().enumerate().skip(already) {
            _ = writeln!(text, "{}{section}:", "  ".repeat(depth));
        }
        let indent = &"  ".repeat(sections.len());
        open = sections;
        let comment = format!("# {}", comment(config.origin(setting.key)));
        let value = (setting.show)(config);
        match &value {
            Value::Array(items) if !items.is_empty() => {
                _ = writeln!(text, "{indent}{name}: {comment}");
                for item in items {
                    push_item(&mut text, indent, item);
                }
            }
            value => _ = writeln!(text, "{indent}{name}: {} {comment}", scalar(value)),
        }
    }
    text
}

/// A path may hold line breaks; a comment must not.
fn comment(origin: &SettingOrigin) -> String {
    origin.to_string().chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn push_item(text: &mut String, indent: &str, item: &Value) {
    let Value::Object(fields) = item else {
        _ = writeln!(text, "{indent}  - {}", scalar(item));
        return;
    };
    for (index, (key, value)) in fields.iter().enumerate() {
        let dash = if index == 0 { "- " } else { "  " };
        _ = writeln!(text, "{indent}  {dash}{key}: {}", scalar(value));
    }
}

/// A value on one line: JSON, which is YAML, without quotes where YAML needs none.
fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) if is_plain(text) => text.clone(),
        value => value.to_string(),
    }
}

/// Whether a text means itself in YAML, by a rule that is stricter than YAML's.
fn is_plain(text: &str) -> bool {
    const WORDS: [&str; 8] = ["true", "false", "null", "yes", "no", "on", "off", "nan"];
    let starts = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
    let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '-' | '_' | ':');
    let is_time = larder::config::GoDuration::parse(text).is_ok() && text.ends_with('s');
    let is_size = text.strip_suffix("iB").is_some_and(|size| {
        let number = size.trim_end_matches(['K', 'M', 'G', 'T']);
        number.len() + 1 == size.len() && number.bytes().all(|byte| byte.is_ascii_digit())
    });
    let is_word = text.len() == 1 || WORDS.iter().any(|word| word.eq_ignore_ascii_case(text));
    is_time || is_size || (starts && !is_word && !text.ends_with(':') && text.chars().all(known))
}

/// The value of a setting as it is written; `None` for a key that is unknown.
pub fn value_of(config: &Config, key: &str) -> Option<Value> {
    settings::find(key).map(|setting| (setting.show)(config))
}

/// Kubelet's flags, each with the setting that it is for.
pub fn kubelet_flags() -> impl Iterator<Item = (&'static str, &'static str)> {
    settings::all().filter_map(|setting| Some((setting.kubelet_flag?, setting.key)))
}

/// Key, value and origin of each setting that is not a default.
pub fn explicit_settings(config: &Config) -> impl Iterator<Item = (&'static str, Value, &SettingOrigin)> {
    settings::all().filter_map(|setting| match config.origin(setting.key) {
        SettingOrigin::Default => None,
        origin => Some((setting.key, (setting.show)(config), origin)),
    })
}

/// Settings that decide who may use an image, and with which credentials: a default of theirs is not given up for
/// another process's value.
const GUARDS: [&str; 4] = [
    "featureGates.KubeletEnsureSecretPulledImages",
    "imagePullCredentialsVerificationPolicy",
    "preloadedImagesVerificationAllowlist",
    "pull.credentialTokens",
];

/// The settings that a process which joins another one insists on: those that were given, and those that guard images.
pub fn join_settings(config: &Config) -> impl Iterator<Item = (&'static str, Value, &SettingOrigin)> {
    settings::all().filter_map(|setting| {
        let origin = config.origin(setting.key);
        let insists = *origin != SettingOrigin::Default || GUARDS.contains(&setting.key);
        insists.then(|| (setting.key, (setting.show)(config), origin))
    })
}

/// The configuration as data: the values, and where each came from.
pub fn as_data(config: &Config) -> Value {
    let mut values =
        Map::from_iter([("apiVersion".to_owned(), json!(API_VERSION)), ("kind".to_owned(), json!(KIND))]);
    let mut origins = Map::new();
    for setting in settings::all() {
        let value = (setting.show)(config);
        match setting.key.split_once('.') {
            None => _ = values.insert(setting.key.to_owned(), value),
            Some((section, names)) => {
                let section = values.entry(section).or_insert_with(|| json!({}));
                *names.split('.').fold(section, |at, name| &mut at[name]) = value;
            }
        }
        origins.insert(setting.key.to_owned(), origin(config.origin(setting.key)));
    }
    json!({ "config": values, "origins": origins, "warnings": config.warnings })
}

fn origin(origin: &SettingOrigin) -> Value {
    let (from, name, line) = match origin {
        SettingOrigin::Default => ("default", None, None),
        SettingOrigin::File { path, line } => ("file", Some(path.display().to_string()), Some(*line)),
        SettingOrigin::KubeletFile { path, line } => {
            ("kubeletFile", Some(path.display().to_string()), Some(*line))
        }
        SettingOrigin::Flag(name) => ("flag", Some((*name).to_owned()), None),
        SettingOrigin::Variable(name) => ("variable", Some((*name).to_owned()), None),
    };
    json!({ "from": from, "name": name, "line": line.filter(|line| *line > 0) })
}
