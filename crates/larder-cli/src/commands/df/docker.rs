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
    /// As the engine tells them.
    builder_bytes: u64,
    builder_unused_bytes: u64,
    system_df: SystemDf,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Room {
    count: usize,
    pub(super) size_bytes: u64,
    pub(super) inodes: u64,
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
        EngineReport {
            layer_store: usage.layer_store.as_ref().map(|path| path.display().to_string()),
            layer_store_bytes: usage.on_disk.map(|amount| amount.bytes),
            layer_store_inodes: usage.on_disk.map(|amount| amount.inodes),
            images: room(usage.images),
            containers: room(usage.containers),
            rest_bytes: usage.rest().map(|amount| amount.bytes),
            builder_bytes: usage.builder_bytes,
            builder_unused_bytes: usage.builder_unused_bytes,
            system_df: SystemDf {
                layers_bytes: usage.engine.layers_bytes,
                reclaimable_bytes: usage.engine.reclaimable_bytes,
                containers_bytes: usage.engine.containers_bytes,
            },
        }
    }
}

impl EngineReport {
    pub(super) fn table(&self) -> Table {
        let mut table = Table::new(["DOCKER", "COUNT", "ON DISK", "INODES", "SYSTEM DF"]);
        let about = |room: Room| {
            let about = if room.estimated { "~" } else { "" };
            [
                room.count.to_string(),
                format!("{about}{}", size::bytes(room.size_bytes)),
                room.inodes.to_string(),
            ]
        };
        let mut row = |name: &str, cells: [String; 3], said: Option<u64>| {
            let said = said.map(size::bytes).unwrap_or_default();
            table.row([name.to_owned()].into_iter().chain(cells).chain([said]));
        };
        row("layers of images", about(self.images), Some(self.system_df.layers_bytes));
        row("written by containers", about(self.containers), Some(self.system_df.containers_bytes));
        let rest = self.rest_bytes.map(size::bytes).unwrap_or_default();
        row("builder, and all else", [String::new(), rest, String::new()], Some(self.builder_bytes));
        if let (Some(folder), Some(bytes)) = (&self.layer_store, self.layer_store_bytes) {
            let inodes = self.layer_store_inodes.map(|inodes| inodes.to_string()).unwrap_or_default();
            row(folder, [String::new(), size::bytes(bytes), inodes], None);
        }
        table
    }

    /// How the two columns differ, in words.
    pub(super) fn words(&self) -> &'static str {
        if self.layer_store.is_some() {
            "ON DISK is what du says: whole blocks, folders included. SYSTEM DF is what docker system df says: it adds up \
             the bytes of files, and leaves out folders and what each container has beside what it wrote. In both a layer \
             counts once; docker images counts it for each image."
        } else {
            "~ is a guess: larder may not look at the engine's files, or they are on another machine. SYSTEM DF is what \
             docker system df says. In both a layer counts once; docker images counts it for each image."
        }
    }
}
