//! Compiles the API without a system `protoc`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    #[allow(clippy::disallowed_macros, reason = "this is how a build script speaks to cargo")]
    {
        println!("cargo:rerun-if-changed=proto");
    }
    let definitions = protox::compile(["larder/control/v1/control.proto"], ["proto"])?;
    let mut config = tonic_prost_build::configure()
        .build_transport(false)
        .btree_map(".")
        .skip_debug(["larder.control.v1.PullSecret"]); // it holds secrets; `lib.rs` has one that hides them
    for message in SHOWN {
        let derive = "#[derive(serde::Serialize, serde::Deserialize)] #[serde(rename_all = \"camelCase\")]";
        config = config.type_attribute(format!(".larder.control.v1.{message}"), derive);
    }
    for message in STRICT {
        config =
            config.type_attribute(format!(".larder.control.v1.{message}"), "#[serde(deny_unknown_fields)]");
    }
    for (name, case, unspecified) in WORDS {
        let name = format!(".larder.control.v1.{name}");
        let derive = "#[derive(strum::EnumString, strum::IntoStaticStr)]";
        config = config.enum_attribute(&name, format!("{derive} #[strum(serialize_all = \"{case}\")]"));
        let unspecified = format!("#[strum(serialize = \"{unspecified}\")]");
        config = config.field_attribute(format!("{name}.{}", unspecified_variant(&name)), unspecified);
    }
    for (variant, word) in OTHER_WORDS {
        let word = format!("#[strum(serialize = \"{word}\")]");
        config = config.field_attribute(format!(".larder.control.v1.{variant}"), word);
    }
    for field in FLATTENED {
        config = config.field_attribute(format!(".larder.control.v1.{field}"), "#[serde(flatten)]");
    }
    for field in MAY_BE_EMPTY {
        let null = "#[serde(serialize_with = \"crate::or_null\", deserialize_with = \"crate::or_empty\")]";
        config = config.field_attribute(format!(".larder.control.v1.{field}"), null);
    }
    for field in BESIDE {
        config = config.field_attribute(format!(".larder.control.v1.{field}"), "#[serde(skip)]");
    }
    for file in &definitions.file {
        let package = file.package();
        for message in file.message_type.iter().filter(|message| SHOWN.contains(&message.name())) {
            for field in &message.field {
                let is_of = |name: &str| field.type_name() == format!(".{package}.{name}");
                let Some(of) = file.enum_type.iter().find(|of| is_of(of.name())) else { continue };
                let word = format!(
                    "#[serde(serialize_with = \"crate::enum_words::serialize::<{0}, _>\", \
                     deserialize_with = \"crate::enum_words::deserialize::<{0}, _>\")]",
                    of.name()
                );
                config =
                    config.field_attribute(format!(".{package}.{}.{}", message.name(), field.name()), word);
            }
        }
    }
    config.compile_fds(definitions)?;
    Ok(())
}

/// The variant for an unknown value: `PULL_PHASE_UNSPECIFIED` of `PullPhase`.
fn unspecified_variant(name: &str) -> String {
    let mut variant = String::new();
    for letter in name.rsplit('.').next().unwrap_or_default().chars() {
        if letter.is_uppercase() && !variant.is_empty() {
            variant.push('_');
        }
        variant.push(letter.to_ascii_uppercase());
    }
    variant + "_UNSPECIFIED"
}

/// Enums that print as words: the case of their words, and the word for an unknown value, empty where JSON has `null`.
const WORDS: [(&str, &str, &str); 10] = [
    ("CollectionGoal", "camelCase", "unknown"),
    ("DecisionReason", "PascalCase", "Other"),
    ("EventType", "PascalCase", "Unknown"),
    ("FilesystemContent", "camelCase", "unknown"),
    ("GcPhase", "camelCase", "unknown"),
    ("LayerPhase", "camelCase", "unknown"),
    ("LeaseOwner", "camelCase", "unknown"),
    ("PullPhase", "camelCase", "unknown"),
    ("PullStep", "camelCase", ""),
    ("RemovalTrigger", "camelCase", "other"),
];

/// Words that are not the names of their values.
const OTHER_WORDS: [(&str, &str); 2] = [
    ("LayerPhase.LAYER_PHASE_ELSEWHERE", "fetched by another pull"),
    ("LeaseOwner.LEASE_OWNER_REQUEST", "lease"),
];

/// Messages that the command line prints as they are, with `-o json`; enums as words.
const SHOWN: [&str; 50] = [
    "CallStatus",
    "Collection",
    "Condition",
    "ContainerdStatus",
    "DamagedImage",
    "DiskSpace",
    "DiskUse",
    "DockerDiskSpace",
    "DockerSystemDf",
    "DockerUsage",
    "Event",
    "Explanation",
    "FailedRemoval",
    "FileSystem",
    "GcRound",
    "GcStatus",
    "ImageTotal",
    "UsageByState",
    "HistoryEntry",
    "Image",
    "ImageDecision",
    "ImageFill",
    "ImageLease",
    "IncompleteLayer",
    "KeepRule",
    "KubernetesConnection",
    "KubernetesStatus",
    "LabelSelector",
    "LazyPullStatus",
    "LoadedImage",
    "Mount",
    "NewestSelector",
    "NodeImage",
    "OtherFilesystem",
    "Pull",
    "PullLayer",
    "PulledRecord",
    "ReadVerificationStatus",
    "RegistryStatus",
    "Removal",
    "RuntimeResponse",
    "ReclaimableSpace",
    "SpaceHolder",
    "StatusResponse",
    "StoreDiskUsage",
    "StoreImageUsage",
    "StoreUsage",
    "UsageFileSystem",
    "UsageImages",
    "UsageResponse",
];

/// Texts of theirs that may say nothing, which is `null` there.
const MAY_BE_EMPTY: [&str; 16] = [
    "Collection.when_unreachable",
    "Event.namespace",
    "Event.name",
    "Event.uid",
    "Event.field_path",
    "Event.message",
    "Event.requester",
    "Event.time",
    "Image.username",
    "Image.artifact_type",
    "ImageDecision.artifact_type",
    "Pull.waiting",
    "PullLayer.waiting",
    "StatusResponse.state",
    "StatusResponse.backend_message",
    "StoreImageUsage.artifact_type",
];

/// Messages of theirs that the file of keep rules has: with a field that is unknown, it is not read.
const STRICT: [&str; 3] = ["KeepRule", "LabelSelector", "NewestSelector"];

/// Messages within others whose fields print as fields of these.
const FLATTENED: [&str; 1] = ["Explanation.decision"];

/// Fields of theirs that it does not print.
const BESIDE: [&str; 15] = [
    "Collection.asked_bytes",
    "Collection.warnings",
    "Collection.error",
    "Collection.high_threshold_percent",
    "Collection.low_threshold_percent",
    "Collection.usage_by_state",
    "Collection.planned",
    "Explanation.under_pressure",
    "Explanation.milliseconds_since_first_seen",
    "Explanation.milliseconds_since_last_used",
    "Image.details",
    "Image.hidden",
    "LoadedImage.bare_tags",
    "LoadedImage.warnings",
    "UsageByState.reclaimable_bytes",
];
