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

/// Messages that the command line prints as they are, with `-o json`; enums as words.
const SHOWN: [&str; 38] = [
    "CallStatus",
    "Collection",
    "Condition",
    "ContainerdStatus",
    "DiskSpace",
    "DiskUse",
    "DockerDiskSpace",
    "DockerSystemDf",
    "DockerUsage",
    "Event",
    "FailedRemoval",
    "FileSystem",
    "GcRound",
    "GcStatus",
    "ImageTotal",
    "UsageByState",
    "HistoryEntry",
    "ImageDecision",
    "KubernetesConnection",
    "KubernetesStatus",
    "Mount",
    "NodeImage",
    "OtherFilesystem",
    "Pull",
    "PullLayer",
    "PulledRecord",
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
const MAY_BE_EMPTY: [&str; 12] = [
    "Collection.when_unreachable",
    "Event.namespace",
    "Event.name",
    "Event.uid",
    "Event.field_path",
    "Event.message",
    "Event.requester",
    "Event.time",
    "Pull.waiting",
    "PullLayer.waiting",
    "StatusResponse.state",
    "StatusResponse.backend_message",
];

/// Fields of theirs that it does not print.
const BESIDE: [&str; 8] = [
    "Collection.asked_bytes",
    "Collection.warnings",
    "Collection.error",
    "Collection.high_threshold_percent",
    "Collection.low_threshold_percent",
    "Collection.usage_by_state",
    "Collection.planned",
    "UsageByState.reclaimable_bytes",
];
