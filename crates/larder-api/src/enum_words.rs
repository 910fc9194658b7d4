//! Enums of the API as words, which `-o json` and tables print.

use serde::{Deserialize as _, Deserializer, Serializer};

use crate::v1::{
    CollectionGoal, DecisionReason, EventType, FilesystemContent, GcPhase, LayerPhase, PullPhase, PullStep,
    RemovalTrigger,
};

/// An enum of the API whose values print as words. Its numbers have no gaps.
pub trait EnumWord: Copy + Default + TryFrom<i32> {
    /// The word; empty where JSON has `null`.
    fn word(self) -> &'static str;

    /// The value with this word, or the unspecified one.
    fn from_word(word: &str) -> Self {
        let mut values = (0..).map_while(|number| Self::try_from(number).ok());
        values.find(|value| value.word() == word).unwrap_or_default()
    }
}

impl EnumWord for CollectionGoal {
    fn word(self) -> &'static str {
        match self {
            CollectionGoal::Unspecified => "unknown",
            CollectionGoal::Thresholds => "thresholds",
            CollectionGoal::Free => "free",
            CollectionGoal::AllUnused => "allUnused",
            CollectionGoal::FailedPulls => "failedPulls",
            CollectionGoal::Dangling => "dangling",
        }
    }
}

impl EnumWord for DecisionReason {
    fn word(self) -> &'static str {
        match self {
            DecisionReason::Unspecified => "Other",
            DecisionReason::Space => "Space",
            DecisionReason::SharedLayer => "SharedLayer",
            DecisionReason::TooOld => "TooOld",
            DecisionReason::Unused => "Unused",
            DecisionReason::ClockWentBack => "ClockWentBack",
            DecisionReason::Failed => "Failed",
            DecisionReason::FreesNothing => "FreesNothing",
            DecisionReason::InUse => "InUse",
            DecisionReason::InvalidId => "InvalidId",
            DecisionReason::Kept => "Kept",
            DecisionReason::NotNeeded => "NotNeeded",
            DecisionReason::Pinned => "Pinned",
            DecisionReason::TooYoung => "TooYoung",
            DecisionReason::Unreachable => "Unreachable",
            DecisionReason::Recent => "Recent",
            DecisionReason::Leased => "Leased",
        }
    }
}

impl EnumWord for RemovalTrigger {
    fn word(self) -> &'static str {
        match self {
            RemovalTrigger::Unspecified => "other",
            RemovalTrigger::Space => "space",
            RemovalTrigger::Age => "age",
            RemovalTrigger::Free => "free",
            RemovalTrigger::AllUnused => "allUnused",
            RemovalTrigger::Request => "request",
            RemovalTrigger::Dangling => "dangling",
        }
    }
}

impl EnumWord for PullPhase {
    fn word(self) -> &'static str {
        match self {
            PullPhase::Unspecified => "unknown",
            PullPhase::Queued => "queued",
            PullPhase::Throttled => "throttled",
            PullPhase::Pulling => "pulling",
        }
    }
}

impl EnumWord for PullStep {
    fn word(self) -> &'static str {
        match self {
            PullStep::Unspecified => "",
            PullStep::Resolving => "resolving",
            PullStep::Pulling => "pulling",
            PullStep::Committing => "committing",
        }
    }
}

impl EnumWord for LayerPhase {
    fn word(self) -> &'static str {
        match self {
            LayerPhase::Unspecified => "unknown",
            LayerPhase::Queued => "queued",
            LayerPhase::Elsewhere => "fetched by another pull",
            LayerPhase::Fetching => "fetching",
            LayerPhase::Unpacking => "unpacking",
            LayerPhase::Unpacked => "unpacked",
            LayerPhase::Done => "done",
        }
    }
}

impl EnumWord for GcPhase {
    fn word(self) -> &'static str {
        match self {
            GcPhase::Unspecified => "unknown",
            GcPhase::Reclaiming => "reclaiming",
            GcPhase::Planning => "planning",
            GcPhase::Removing => "removing",
        }
    }
}

impl EnumWord for FilesystemContent {
    fn word(self) -> &'static str {
        match self {
            FilesystemContent::Unspecified => "unknown",
            FilesystemContent::Images => "images",
            FilesystemContent::Containers => "containers",
        }
    }
}

impl EnumWord for EventType {
    fn word(self) -> &'static str {
        match self {
            EventType::Unspecified => "Unknown",
            EventType::Normal => "Normal",
            EventType::Warning => "Warning",
        }
    }
}

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
    use crate::v1::{Pull, Removal};

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
    }
}
