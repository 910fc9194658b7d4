//! The disk usage of a Docker Engine, beside what `docker system df` prints.

use larder_api::v1::{DockerDiskSpace, DockerUsage};

use crate::output::size;
use crate::output::table::TextTable;

/// Disk usage by kind of data, with the column that the engine reports itself.
pub(super) fn table(usage: &DockerUsage) -> TextTable {
    let more = ["SYSTEM DF"].into_iter().filter(|_| usage.system_df.is_some());
    let mut table = TextTable::new(["DOCKER", "COUNT", "ON DISK", "INODES"].into_iter().chain(more.clone()));
    let about = |space: Option<DockerDiskSpace>| {
        let space = space.unwrap_or_default();
        let about = if space.estimated { "~" } else { "" };
        [
            space.count.to_string(),
            format!("{about}{}", size::bytes(space.size_bytes)),
            // An estimate of inodes may exceed those of the filesystem.
            if space.estimated { String::new() } else { space.inodes.to_string() },
        ]
    };
    let mut row = |name: &str, cells: [String; 3], reported: Option<u64>| {
        let reported = more.clone().map(|_| reported.map(size::bytes).unwrap_or_default());
        table.row([name.to_owned()].into_iter().chain(cells).chain(reported));
    };
    row("image layers", about(usage.images), usage.system_df.map(|engine| engine.layers_bytes));
    row("container data", about(usage.containers), usage.system_df.map(|engine| engine.containers_bytes));
    let rest = usage.other_bytes.map(size::bytes).unwrap_or_default();
    row("build cache and other files", [String::new(), rest, String::new()], usage.build_cache_bytes);
    if let (Some(dir), Some(bytes)) = (&usage.layer_store, usage.layer_store_bytes) {
        let inodes = usage.layer_store_inodes.map(|inodes| inodes.to_string()).unwrap_or_default();
        row(dir, [String::new(), size::bytes(bytes), inodes], None);
    }
    table
}

/// Explains how the columns count.
pub(super) fn legend(usage: &DockerUsage) -> String {
    let on_disk = if usage.layer_store.is_some() {
        "ON DISK: allocated blocks, including directories, as du counts"
    } else {
        "~: estimate, because the engine's files are not accessible to larder"
    };
    let system_df = match (&usage.system_df_error, &usage.layer_store) {
        (Some(problem), _) => format!("SYSTEM DF: unavailable: {problem}"),
        (None, Some(_)) => {
            "SYSTEM DF: bytes of files as docker system df reports them, without directories and the \
             containers' own metadata\nboth count a layer once; docker images counts it for each image"
                .to_owned()
        }
        (None, None) => {
            "SYSTEM DF: as docker system df reports it\nboth count a layer once; docker images counts it \
             for each image"
                .to_owned()
        }
    };
    format!("{on_disk}\n{system_df}")
}
