//! Enums of the API as words, which `-o json` and tables print.

use std::str::FromStr;

use serde::{Deserialize as _, Deserializer, Serializer};

/// An enum of the API whose values print as words. `build.rs` derives them from the names of the values.
pub trait EnumWord: Copy + Default + TryFrom<i32> + Into<&'static str> + FromStr {
    /// The word; empty where JSON has `null`.
    fn word(self) -> &'static str {
        self.into()
    }

    /// The value with this word, or the unspecified one.
    fn from_word(word: &str) -> Self {
        word.parse().unwrap_or_default()
    }
}

impl<E: Copy + Default + TryFrom<i32> + Into<&'static str> + FromStr> EnumWord for E {}

/// Serializes the number of an enum as its word.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields so")]
pub(crate) fn serialize<E: EnumWord, S: Serializer>(number: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    crate::or_null(E::try_from(*number).unwrap_or_default().word(), serializer)
}

/// Deserializes a word, or `null`, as the number of an enum.
pub(crate) fn deserialize<'de, E, D>(deserializer: D) -> Result<i32, D::Error>
where
    E: EnumWord + Into<i32>,
    D: Deserializer<'de>,
{
    let word: Option<String> = Option::deserialize(deserializer)?;
    Ok(E::from_word(word.as_deref().unwrap_or_default()).into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::v1::{
        CollectionGoal, DecisionReason, EventType, FilesystemContent, GcPhase, LayerPhase, LeaseOwner, Pull,
        PullPhase, PullStep, Removal, RemovalTrigger,
    };

    #[test]
    fn json_has_words_for_numbers() {
        let pull = |phase: i32, step: i32| Pull { phase, step, ..Pull::default() };
        for (message, phase, step) in [
            (pull(PullPhase::Queued.into(), 0), json!("queued"), json!(null)),
            (pull(PullPhase::Pulling.into(), PullStep::Pulling.into()), json!("pulling"), json!("pulling")),
            (pull(0, PullStep::Committing.into()), json!("unknown"), json!("committing")),
        ] {
            let shown = serde_json::to_value(&message).unwrap();
            assert_eq!((&shown["phase"], &shown["step"]), (&phase, &step));
            assert_eq!(serde_json::from_value::<Pull>(shown).unwrap(), message);
        }
        let newer = Removal { reason: 99, ..Removal::default() };
        assert_eq!(serde_json::to_value(&newer).unwrap()["reason"], "Other");
    }

    #[test]
    fn each_word_means_one_value() {
        fn check<E: EnumWord + PartialEq + std::fmt::Debug>() {
            let values: Vec<E> = (0..).map_while(|number| E::try_from(number).ok()).collect();
            for value in values {
                assert_eq!(E::from_word(value.word()), value);
            }
            assert_eq!(E::from_word("no such word"), E::default());
        }
        check::<CollectionGoal>();
        check::<DecisionReason>();
        check::<RemovalTrigger>();
        check::<PullPhase>();
        check::<PullStep>();
        check::<LayerPhase>();
        check::<EventType>();
        check::<FilesystemContent>();
        check::<GcPhase>();
        check::<LeaseOwner>();
    }
}
