//! Keep rules on disk. A file that cannot be read is never taken for one without rules: then nothing is collected.

use std::io;
use std::path::PathBuf;

use larder::files;
use larder::hint::Hint;
use larder::retention::KeepRule;
use larder_api::convert;
use larder_api::v1 as api;
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
    rules: Vec<api::KeepRule>,
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
        let rules = file.rules.into_iter().map(convert::keep_rule_from).collect::<Result<_, _>>();
        rules.map_err(|problem| wrong(&format_args!("{}: {}", self.0.display(), problem.message())))
    }

    /// Replaces all rules. Durable when it returns.
    pub(crate) fn write(&self, rules: &[KeepRule]) -> Result<(), Error> {
        let file =
            KeepRuleDocument { version: VERSION, rules: rules.iter().map(convert::keep_rule).collect() };
        serde_json::to_vec_pretty(&file)
            .map_err(io::Error::from)
            .and_then(|text| files::replace(&self.0, &text))
            .map_err(|error| {
                Error::failed(format!("cannot write the keep rules: {error}"))
                    .hints(files::hint_of_full_disk(error.kind()))
            })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use larder::retention::Selector;

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
            KeepRule::new(Selector::Type("model".into())),
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
