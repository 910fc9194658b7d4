//! The disk usage of a Docker Engine, beside what `docker system df` prints.

use larder_api::v1alpha1::{DockerDiskSpace, DockerUsage};

use crate::output::size;
use crate::output::table::TextTable;

/// What the engine has on disk, beside what it reports itusage.
pub(super) fn table(usage: &DockerUsage) -> TextTable {
    let more = ["SYSTEM DF"].into_iter().filter(|_| usage.system_df.is_some());
    let mut table = TextTable::new(["DOCKER", "COUNT", "ON DISK", "INODES"].into_iter().chain(more.clone()));
    let about = |space: Option<DockerDiskSpace>| {
        let space = space.unwrap_or_default();
        let about = if space.estimated { "~" } else { "" };
        [
            space.count.to_string(),
            format!("{about}{}", size::bytes(space.size_bytes)),
            // A guess at inodes may be more than the file system has.
            if space.estimated { String::new() } else { space.inodes.to_string() },
        ]
    };
    let mut row = |name: &str, cells: [String; 3], said: Option<u64>| {
        let said = more.clone().map(|_| said.map(size::bytes).unwrap_or_default());
        table.row([name.to_owned()].into_iter().chain(cells).chain(said));
    };
    row("layers of images", about(usage.images), usage.system_df.map(|said| said.layers_bytes));
    row("written by containers", about(usage.containers), usage.system_df.map(|said| said.containers_bytes));
    let rest = usage.rest_bytes.map(size::bytes).unwrap_or_default();
    row("builder, and all else", [String::new(), rest, String::new()], usage.builder_bytes);
    if let (Some(folder), Some(bytes)) = (&usage.layer_store, usage.layer_store_bytes) {
        let inodes = usage.layer_store_inodes.map(|inodes| inodes.to_string()).unwrap_or_default();
        row(folder, [String::new(), size::bytes(bytes), inodes], None);
    }
    table
}

/// How the two columns differ, or why there is only one.
pub(super) fn legend(usage: &DockerUsage) -> String {
    let on_disk = if usage.layer_store.is_some() {
        "ON DISK is what du says: whole blocks, folders included."
    } else {
        "~ is a guess: larder may not look at the engine's files, or they are on another machine."
    };
    let system_df = match (&usage.system_df_problem, &usage.layer_store) {
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
