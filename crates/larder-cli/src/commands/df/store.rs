//! The disk usage of larder's own store. Each layer counts once; the total is that of `du` for the store's directory.

use larder::artifact_type::type_word;
use larder_api::v1::{DiskSpace, StoreDiskUsage, StoreImageUsage};

use crate::output::size;
use crate::output::table::TextTable;

/// A row for each tag of an image; the first one has the sizes, which may be `estimated`.
pub(super) fn images_table(images: &[StoreImageUsage], estimated: bool) -> TextTable {
    let types = images.iter().any(|image| !image.artifact_type.is_empty());
    let heads = ["IMAGE"].into_iter().chain(types.then_some("TYPE")).chain(["SIZE", "SHARED", "UNIQUE"]);
    let mut table = TextTable::new(heads);
    for image in images {
        let names = if image.repo_tags.is_empty() { &image.repo_digests } else { &image.repo_tags };
        let sizes =
            [image.size_bytes, image.shared_bytes, image.unique_bytes].map(|bytes| about(bytes, estimated));
        let first = names.first().unwrap_or(&image.id).clone();
        let of_type = types.then(|| type_word(&image.artifact_type).to_owned());
        table.row([first].into_iter().chain(of_type).chain(sizes));
        for name in names.iter().skip(1) {
            table.row([name.clone()]);
        }
    }
    table
}

fn about(bytes: u64, estimated: bool) -> String {
    format!("{}{}", if estimated { "about " } else { "" }, size::bytes(bytes))
}

/// Empty directories are part of the last row before the total, unless the output is wide. Sizes may be `estimated`.
pub(super) fn disk_table(disk: &StoreDiskUsage, estimated: bool, wide: bool) -> TextTable {
    let always = [
        ("shared layers", disk.shared_layers),
        ("unique layers", disk.unique_layers),
        ("manifests and configs", disk.manifests),
    ];
    let seldom = [
        ("kept of removed layers", disk.remnants),
        ("resumable downloads", disk.downloads),
        ("layers being unpacked", disk.unpacking),
        ("files of mounts and snapshots", disk.mounts),
        ("layers extracted for mounts", disk.extracted),
        ("trash, being deleted", disk.trash),
    ];
    let mut rest = disk.database.unwrap_or_default();
    let mut shown = Vec::from(always);
    for (name, space_of) in seldom {
        let space = space_of.unwrap_or_default();
        if wide || !is_empty_directory(space) {
            shown.push((name, space_of));
        } else {
            rest.size_bytes += space.size_bytes;
            rest.inodes += space.inodes;
        }
    }
    shown.extend([("database and other files", Some(rest)), ("total", disk.total)]);
    let promised = disk.promised.filter(|space| space.size_bytes > 0);
    shown.extend(promised.map(|space| ("promised to incomplete layers", Some(space))));
    let mut table = TextTable::new(["DISK", "SIZE", "INODES"]);
    for (name, space) in shown {
        let space = space.unwrap_or_default();
        table.row([name.to_owned(), about(space.size_bytes, estimated), space.inodes.to_string()]);
    }
    table
}

fn is_empty_directory(space: DiskSpace) -> bool {
    space.inodes <= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promised_space_has_a_row_only_where_there_is_some() {
        let space = |size_bytes| Some(DiskSpace { size_bytes, inodes: 2 });
        let shown = |promised| {
            let disk = StoreDiskUsage { total: space(5_000_000), promised, ..StoreDiskUsage::default() };
            disk_table(&disk, false, false).to_string()
        };
        assert!(!shown(None).contains("promised") && !shown(space(0)).contains("promised"));
        let table = shown(space(1_300_000_000));
        let row = table.lines().last().unwrap_or_default();
        assert!(row.starts_with("promised to incomplete layers") && row.contains("1.3GB"), "{table}");
    }
}
