//! What holds the disk in a Docker Engine, beside what `docker system df` says of it.

use serde::{Deserialize, Serialize};

use crate::output::size;
use crate::output::table::Table;

/// The engine's part of `-o json`. Sizes are bytes as the file system allocates them, unless said otherwise.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EngineReport {
    /// The folder that all layers are in; absent where larder may not look at it. Then all else is estimated.
    layer_store: Option<String>,
    /// All that is in it.
    layer_store_bytes: Option<u64>,
    layer_store_inodes: Option<u64>,
    pub(super) images: Room,
    containers: Room,
    /// What is in the folder beside these: the builder's, and what nothing accounts for.
    rest_bytes: Option<u64>,
    /// As the engine tells them; absent where it does not.
    builder_bytes: Option<u64>,
    builder_unused_bytes: Option<u64>,
    system_df: Option<SystemDf>,
    /// Why it does not.
    #[serde(default)]
    system_df_problem: Option<String>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Room {
    count: usize,
    pub(super) size_bytes: u64,
    inodes: u64,
    estimated: bool,
}

/// What `docker system df` says: bytes of files.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[expect(clippy::struct_field_names, reason = "the unit is part of the name, as everywhere in the output")]
struct SystemDf {
    layers_bytes: u64,
    reclaimable_bytes: u64,
    containers_bytes: u64,
}

#[cfg(feature = "docker")]
impl From<larder_docker::EngineUsage> for EngineReport {
    fn from(usage: larder_docker::EngineUsage) -> EngineReport {
        let room = |part: larder_docker::Part| Room {
            count: part.count,
            size_bytes: part.amount.bytes,
            inodes: part.amount.inodes,
            estimated: part.estimated,
        };
        let said = usage.engine.as_ref();
        EngineReport {
            builder_bytes: said.map(|said| said.builder_bytes).ok(),
            builder_unused_bytes: said.map(|said| said.builder_unused_bytes).ok(),
            system_df: said.map(SystemDf::from).ok(),
            system_df_problem: said.err().map(ToString::to_string),
            layer_store: usage.layer_store.as_ref().map(|path| path.display().to_string()),
            layer_store_bytes: usage.on_disk.map(|amount| amount.bytes),
            layer_store_inodes: usage.on_disk.map(|amount| amount.inodes),
            images: room(usage.images),
            containers: room(usage.containers),
            rest_bytes: usage.rest().map(|amount| amount.bytes),
        }
    }
}

#[cfg(feature = "docker")]
impl From<&larder_docker::EngineCounts> for SystemDf {
    fn from(said: &larder_docker::EngineCounts) -> SystemDf {
        SystemDf {
            layers_bytes: said.layers_bytes,
            reclaimable_bytes: said.reclaimable_bytes,
            containers_bytes: said.containers_bytes,
        }
    }
}

impl Room {
    /// A guess at inodes may be more than the file system has.
    pub(super) fn measured_inodes(self) -> Option<u64> {
        (!self.estimated).then_some(self.inodes)
    }
}

impl EngineReport {
    pub(super) fn table(&self) -> Table {
        let more = ["SYSTEM DF"].into_iter().filter(|_| self.system_df.is_some());
        let mut table = Table::new(["DOCKER", "COUNT", "ON DISK", "INODES"].into_iter().chain(more.clone()));
        let about = |room: Room| {
            let about = if room.estimated { "~" } else { "" };
            [
                room.count.to_string(),
                format!("{about}{}", size::bytes(room.size_bytes)),
                room.measured_inodes().map(|inodes| inodes.to_string()).unwrap_or_default(),
            ]
        };
        let mut row = |name: &str, cells: [String; 3], said: Option<u64>| {
            let said = more.clone().map(|_| said.map(size::bytes).unwrap_or_default());
            table.row([name.to_owned()].into_iter().chain(cells).chain(said));
        };
        row("layers of images", about(self.images), self.system_df.map(|said| said.layers_bytes));
        row(
            "written by containers",
            about(self.containers),
            self.system_df.map(|said| said.containers_bytes),
        );
        let rest = self.rest_bytes.map(size::bytes).unwrap_or_default();
        row("builder, and all else", [String::new(), rest, String::new()], self.builder_bytes);
        if let (Some(folder), Some(bytes)) = (&self.layer_store, self.layer_store_bytes) {
            let inodes = self.layer_store_inodes.map(|inodes| inodes.to_string()).unwrap_or_default();
            row(folder, [String::new(), size::bytes(bytes), inodes], None);
        }
        table
    }

    /// How the two columns differ, in words, or why there is only one.
    pub(super) fn words(&self) -> String {
        let on_disk = if self.layer_store.is_some() {
            "ON DISK is what du says: whole blocks, folders included."
        } else {
            "~ is a guess: larder may not look at the engine's files, or they are on another machine."
        };
        let system_df = match (&self.system_df_problem, &self.layer_store) {
            (Some(problem), _) => format!("What docker system df says is left out: {problem}."),
            (None, Some(_)) => {
                "SYSTEM DF is what docker system df says: it adds up the bytes of files, and leaves out folders and what \
                 each container has beside what it wrote. In both a layer counts once; docker images counts it for each image."
                    .to_owned()
            }
            (None, None) => "SYSTEM DF is what docker system df says. In both a layer counts once; docker images counts it for \
                 each image."
                .to_owned(),
        };
        format!("{on_disk} {system_df}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_that_the_engine_does_not_fill_is_left_out_with_the_reason() {
        let room = Room { count: 2, size_bytes: 1_000_000, inodes: 7, estimated: false };
        let counts = SystemDf { layers_bytes: 900_000, reclaimable_bytes: 0, containers_bytes: 10_000 };
        let full = EngineReport {
            layer_store: Some("/var/lib/docker/overlay2".into()),
            layer_store_bytes: Some(2_000_000),
            layer_store_inodes: Some(20),
            images: room,
            containers: room,
            rest_bytes: Some(0),
            builder_bytes: Some(0),
            builder_unused_bytes: Some(0),
            system_df: Some(counts),
            system_df_problem: None,
        };
        assert!(full.table().to_string().contains("SYSTEM DF") && full.words().contains("adds up the bytes"));
        let guess = Room { inodes: 15_674, estimated: true, ..room };
        let guessed = EngineReport { images: guess, containers: guess, ..full.clone() }.table().to_string();
        assert!(guessed.contains("~1MB") && !guessed.contains("15674"), "no guess at inodes: {guessed}");
        let problem = "the engine did not answer within 2m0s".to_owned();
        let late = EngineReport {
            builder_bytes: None,
            builder_unused_bytes: None,
            system_df: None,
            system_df_problem: Some(problem),
            ..full
        };
        let table = late.table().to_string();
        assert!(!table.contains("SYSTEM DF") && table.contains("1MB"), "{table}");
        assert!(
            late.words().ends_with("left out: the engine did not answer within 2m0s."),
            "{}",
            late.words()
        );
    }
}
