//! Keep rules on disk. A file that cannot be read is never taken for one without rules: then nothing is collected.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use larder::files;
use larder::hint::Hint;
use larder::retention::{KeepRule, Selector};
use serde::{Deserialize, Serialize};

use super::dir::StateDir;
use crate::Error;

const VERSION: u32 = 1;

/// The file with the rules.
#[derive(Debug, Clone)]
pub(crate) struct KeepRuleFile(PathBuf);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeepRuleDocument {
    version: u32,
    rules: Vec<KeepRuleRecord>,
}

/// One rule, as it is written and as `-o json` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct KeepRuleRecord {
    select: KeepSelectorRecord,
    ttl_seconds: Option<u64>,
    budget_bytes: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
enum KeepSelectorRecord {
    Name(String),
    Digest(String),
    Label { key: String, value: Option<String> },
    Newest { repository: String, count: usize },
}

impl KeepRuleFile {
    /// The rules of this place.
    pub(crate) fn at(place: &StateDir) -> KeepRuleFile {
        KeepRuleFile(place.keep())
    }

    /// All rules; none when there is no file.
    pub(crate) fn read(&self) -> Result<Vec<KeepRule>, Error> {
        let wrong = |why: &dyn std::fmt::Display| {
            Error::bad_input(format!("cannot read the keep rules: {why}")).hint(
                Hint::from(
                    "GC removes nothing until the file is repaired or deleted, or all rules are removed: ",
                )
                .command(["unkeep", "--all"]),
            )
        };
        let text = match fs_err::read(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            text => text.map_err(|error| wrong(&error))?,
        };
        let file: KeepRuleDocument = files::decode_document(&text, VERSION)
            .map_err(|problem| wrong(&format_args!("{}: {problem}", self.0.display())))?;
        Ok(file.rules.into_iter().map(KeepRule::from).collect())
    }

    /// Replaces all rules. Durable when it returns.
    pub(crate) fn write(&self, rules: &[KeepRule]) -> Result<(), Error> {
        let file =
            KeepRuleDocument { version: VERSION, rules: rules.iter().map(KeepRuleRecord::from).collect() };
        serde_json::to_vec_pretty(&file)
            .map_err(io::Error::from)
            .and_then(|text| files::replace(&self.0, &text))
            .map_err(|error| Error::failed(format!("cannot write the keep rules: {error}")))
    }
}

/// A rule in force, and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedRule {
    /// The rule.
    pub rule: KeepRule,
    /// Where the settings have it, such as `/etc/larder/config.yaml:12`; `None` for one of `larder keep`.
    pub place: Option<String>,
}

/// How it is shown with `-o json`.
#[derive(Serialize)]
pub struct KeepRuleView<'a> {
    #[serde(flatten)]
    rule: KeepRuleRecord,
    from: Option<&'a str>,
}

impl<'a> From<&'a ListedRule> for KeepRuleView<'a> {
    fn from(listed: &'a ListedRule) -> KeepRuleView<'a> {
        KeepRuleView { rule: KeepRuleRecord::from(&listed.rule), from: listed.place.as_deref() }
    }
}

impl From<&KeepRule> for KeepRuleRecord {
    fn from(rule: &KeepRule) -> KeepRuleRecord {
        let select = match rule.select.clone() {
            Selector::Name(name) => KeepSelectorRecord::Name(name),
            Selector::Digest(digest) => KeepSelectorRecord::Digest(digest),
            Selector::Label(key, value) => KeepSelectorRecord::Label { key, value },
            Selector::Newest { repository, count } => KeepSelectorRecord::Newest { repository, count },
        };
        KeepRuleRecord {
            select,
            ttl_seconds: rule.ttl.map(|ttl| ttl.as_secs()),
            budget_bytes: rule.budget_bytes,
        }
    }
}

impl From<KeepRuleRecord> for KeepRule {
    fn from(rule: KeepRuleRecord) -> KeepRule {
        let select = match rule.select {
            KeepSelectorRecord::Name(name) => Selector::Name(name),
            KeepSelectorRecord::Digest(digest) => Selector::Digest(digest),
            KeepSelectorRecord::Label { key, value } => Selector::Label(key, value),
            KeepSelectorRecord::Newest { repository, count } => Selector::Newest { repository, count },
        };
        KeepRule { select, ttl: rule.ttl_seconds.map(Duration::from_secs), budget_bytes: rule.budget_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_as_they_were_written() {
        let dir = tempfile::tempdir().unwrap();
        let file = KeepRuleFile(dir.path().join("keep.json"));
        assert_eq!(file.read(), Ok(Vec::new()));
        let mut rules = vec![
            KeepRule::new(Selector::Name("app/*".into())),
            KeepRule::new(Selector::Digest("sha256:aa".into())),
            KeepRule::new(Selector::Label("team".into(), Some("infra".into()))),
            KeepRule::new(Selector::Newest { repository: "*".into(), count: 3 }),
        ];
        rules[0].ttl = Some(Duration::from_secs(60));
        rules[1].budget_bytes = Some(5);
        file.write(&rules).unwrap();
        assert_eq!(file.read(), Ok(rules));
    }

    #[test]
    fn unreadable_rules_are_not_taken_for_no_rules() {
        let dir = tempfile::tempdir().unwrap();
        let file = KeepRuleFile(dir.path().join("keep.json"));
        for text in
            ["", "{", r#"{"version":2,"selectors":[]}"#, r#"{"version":1,"rules":[{"select":{"x":"y"}}]}"#]
        {
            fs_err::write(&file.0, text).unwrap();
            assert!(file.read().is_err(), "{text}");
        }
    }
}
