//! The fields of the engine's responses that larder reads. A missing field is empty.

use std::collections::BTreeMap;

use larder::reference::{ImageId, ImageName, LayerId};
use serde::{Deserialize, Deserializer};

/// `null` counts as missing.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Option::<T>::deserialize(from).map(Option::unwrap_or_default)
}

/// `/version`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct EngineVersion {
    pub(crate) version: String,
    pub(crate) api_version: String,
    #[serde(rename = "MinAPIVersion")]
    pub(crate) min_api_version: String,
    /// `linux`, or `windows`.
    pub(crate) os: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) components: Vec<VersionComponent>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct VersionComponent {
    pub(crate) name: String,
}

/// `/info`.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct EngineInfo {
    /// The engine's ID. Since Docker 23 it is also in a file.
    #[serde(rename = "ID")]
    pub(crate) id: String,
    pub(crate) docker_root_dir: String,
    /// Host name of the machine.
    pub(crate) name: String,
    pub(crate) kernel_version: String,
    pub(crate) driver: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) driver_status: Vec<Vec<String>>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) containerd: ContainerdInfo,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct ContainerdInfo {
    /// Its socket.
    pub(crate) address: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) namespaces: ContainerdNamespaces,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct ContainerdNamespaces {
    /// The one of containers and images.
    pub(crate) containers: String,
}

impl ContainerdInfo {
    /// The namespace of images.
    pub(crate) fn namespace(&self) -> &str {
        if self.namespaces.containers.is_empty() { "moby" } else { &self.namespaces.containers }
    }
}

impl EngineInfo {
    /// Whether images are in containerd's store, not in the engine's graph driver.
    pub(crate) fn is_containerd_store(&self) -> bool {
        self.driver_status.iter().any(|status| match status.as_slice() {
            [name, value] => name == "driver-type" && value.starts_with("io.containerd.snapshotter"),
            _ => false,
        })
    }
}

/// An entry of `/images/json`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct ImageSummary {
    pub(crate) id: ImageId,
    #[serde(deserialize_with = "or_default")]
    pub(crate) repo_tags: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) repo_digests: Vec<String>,
    pub(crate) size: i64,
    pub(crate) shared_size: i64,
    pub(crate) containers: i64,
}

/// `/images/NAME/json`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct ImageInspect {
    pub(crate) id: ImageId,
    #[serde(deserialize_with = "or_default")]
    pub(crate) repo_tags: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) repo_digests: Vec<String>,
    pub(crate) size: i64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) config: InspectedImageConfig,
    #[serde(deserialize_with = "or_default")]
    pub(crate) graph_driver: GraphDriver,
    #[serde(rename = "RootFS", deserialize_with = "or_default")]
    pub(crate) root_fs: InspectedRootFs,
    #[serde(deserialize_with = "or_default")]
    pub(crate) metadata: ImageMetadata,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct InspectedImageConfig {
    pub(crate) user: String,
}

/// Where a graph driver stores layers of an image or a container.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct GraphDriver {
    #[serde(deserialize_with = "or_default")]
    pub(crate) data: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct InspectedRootFs {
    /// Diff ids, from the bottom up.
    #[serde(deserialize_with = "or_default")]
    pub(crate) layers: Vec<LayerId>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct ImageMetadata {
    /// Time of the last tag operation on this engine. The year 1 is never.
    pub(crate) last_tag_time: String,
}

/// An entry of `/images/NAME/history`, the newest first.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct HistoryEntry {
    pub(crate) created_by: String,
    pub(crate) size: i64,
}

/// An entry of `/containers/json`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct ContainerSummary {
    pub(crate) id: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) names: Vec<String>,
    pub(crate) image: ImageName,
    #[serde(rename = "ImageID")]
    pub(crate) image_id: ImageId,
    /// `created`, `running`, `paused`, `restarting`, `removing`, `exited`, `dead`.
    pub(crate) state: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) mounts: Vec<ContainerMount>,
    pub(crate) size_rw: i64,
}

/// A mount of a container, actual or requested.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct ContainerMount {
    #[serde(rename = "Type")]
    pub(crate) kind: String,
    pub(crate) source: String,
}

/// `/containers/ID/json`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct ContainerInspect {
    /// The id of its image.
    pub(crate) image: ImageId,
    #[serde(deserialize_with = "or_default")]
    pub(crate) host_config: HostConfig,
    #[serde(deserialize_with = "or_default")]
    pub(crate) graph_driver: GraphDriver,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct HostConfig {
    #[serde(deserialize_with = "or_default")]
    pub(crate) mounts: Vec<ContainerMount>,
}

/// An entry of the response to a removal.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct DeletedImage {
    /// The ID of a removed image.
    pub(crate) deleted: ImageId,
}

/// `/system/df`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct SystemDf {
    pub(crate) layers_size: i64,
    #[serde(deserialize_with = "or_default")]
    pub(crate) images: Vec<ImageSummary>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) containers: Vec<ContainerSummary>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) build_cache: Vec<BuildCache>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct BuildCache {
    pub(crate) in_use: bool,
    /// Whether an image shares it.
    pub(crate) shared: bool,
    pub(crate) size: i64,
}

/// `/build/prune`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct BuildPruneReport {
    pub(crate) space_reclaimed: i64,
}

/// One message of a pull.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PullMessage {
    #[serde(deserialize_with = "or_default")]
    pub(crate) status: String,
    /// The start of a layer's digest, or a tag.
    #[serde(deserialize_with = "or_default")]
    pub(crate) id: LayerId,
    #[serde(deserialize_with = "or_default")]
    pub(crate) progress_detail: ProgressDetail,
    #[serde(deserialize_with = "or_default")]
    pub(crate) error: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) error_detail: ErrorDetail,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ProgressDetail {
    pub(crate) current: i64,
    pub(crate) total: i64,
    /// The unit of `current` if it is not bytes.
    #[serde(deserialize_with = "or_default")]
    pub(crate) units: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ErrorDetail {
    #[serde(deserialize_with = "or_default")]
    pub(crate) message: String,
}

/// One message of `/events`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EventMessage {
    #[serde(rename = "Type")]
    pub(crate) kind: String,
    #[serde(rename = "Action")]
    pub(crate) action: String,
    #[serde(rename = "Actor", deserialize_with = "or_default")]
    pub(crate) actor: EventActor,
    /// Seconds since 1970.
    pub(crate) time: i64,
    #[serde(rename = "timeNano")]
    pub(crate) time_nano: i64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EventActor {
    #[serde(rename = "ID")]
    pub(crate) id: String,
    #[serde(rename = "Attributes", deserialize_with = "or_default")]
    pub(crate) attributes: BTreeMap<String, String>,
}

/// The body of an error response.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ErrorMessage {
    pub(crate) message: String,
}

/// A count of the engine; unknown counts are negative there, and 0 here.
pub(crate) fn count(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
