//! What holds the disk in larder's own store. Each layer counts once; the sum is what `du` says of the store's folder.

use larder_store::disk::Amount;
use larder_store::store::{ImageUsage, Store, StoreError, StoreUsage};
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, chain};
use crate::output::size;
use crate::output::table::Table;

/// The store's part of `-o json`. Sizes are bytes as the file system allocates them, unless said otherwise.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StoreReport {
    /// The largest first.
    pub(super) images: Vec<ImageReport>,
    disk: Holders,
}

/// One image.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ImageReport {
    id: String,
    repo_tags: Vec<String>,
    repo_digests: Vec<String>,
    pinned: bool,
    /// The sum of the next two.
    size_bytes: u64,
    /// Layers that other images have as well.
    shared_bytes: u64,
    /// What removing just this image frees.
    unique_bytes: u64,
    inodes: u64,
    /// What a pull of all of it fetches.
    compressed_bytes: u64,
}

/// What holds the disk, each thing once.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Holders {
    shared_layers: Room,
    other_layers: Room,
    manifests: Room,
    fetching: Room,
    unpacking: Room,
    mounts: Room,
    removed: Room,
    database: Room,
    total: Room,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Room {
    size_bytes: u64,
    inodes: u64,
}

impl StoreReport {
    pub(super) fn measure(store: &Store) -> Result<StoreReport, Failure> {
        let failed = |error: StoreError| Failure::failed(chain(&error));
        let images = store.image_usages().map_err(failed)?;
        Ok(StoreReport::new(images, store.usage().map_err(failed)?))
    }

    fn new(images: Vec<ImageUsage>, usage: StoreUsage) -> StoreReport {
        let mut images: Vec<_> = images.into_iter().map(ImageReport::from).collect();
        images.sort_by(|a, b| (b.size_bytes, &a.repo_tags, &a.id).cmp(&(a.size_bytes, &b.repo_tags, &b.id)));
        StoreReport { images, disk: Holders::from(usage) }
    }

    /// An image under each of its tags; what it takes stands in the first of its rows.
    pub(super) fn images_table(&self) -> Table {
        let mut table = Table::new(["IMAGE", "SIZE", "SHARED", "UNIQUE"]);
        for image in &self.images {
            let names = if image.repo_tags.is_empty() { &image.repo_digests } else { &image.repo_tags };
            let sizes = [image.size_bytes, image.shared_bytes, image.unique_bytes].map(size::bytes);
            let first = names.first().unwrap_or(&image.id).clone();
            table.row([first].into_iter().chain(sizes));
            for name in names.iter().skip(1) {
                table.row([name.clone()]);
            }
        }
        table
    }

    /// What takes nothing is shown only where more is wanted; its empty folders are part of the rest.
    pub(super) fn holders_table(&self, wide: bool) -> Table {
        let disk = &self.disk;
        let always = [
            ("layers of several images", disk.shared_layers),
            ("layers of one image", disk.other_layers),
            ("manifests and configs", disk.manifests),
        ];
        let seldom = [
            ("downloads that can be resumed", disk.fetching),
            ("layers being unpacked", disk.unpacking),
            ("written to mounts", disk.mounts),
            ("removed, being deleted", disk.removed),
        ];
        let mut rest = disk.database;
        let mut shown = Vec::from(always);
        for (name, room) in seldom {
            if wide || !room.is_empty_folder() {
                shown.push((name, room));
            } else {
                rest.size_bytes += room.size_bytes;
                rest.inodes += room.inodes;
            }
        }
        shown.extend([("database and the rest", rest), ("total", disk.total)]);
        let mut table = Table::new(["DISK", "SIZE", "INODES"]);
        for (name, room) in shown {
            table.row([name.to_owned(), size::bytes(room.size_bytes), room.inodes.to_string()]);
        }
        table
    }
}

impl From<ImageUsage> for ImageReport {
    fn from(usage: ImageUsage) -> ImageReport {
        ImageReport {
            id: usage.id.to_string(),
            repo_tags: usage.tags,
            repo_digests: usage.digests,
            pinned: usage.pinned,
            size_bytes: usage.total.bytes,
            shared_bytes: usage.shared.bytes,
            unique_bytes: usage.unique.bytes,
            inodes: usage.total.inodes,
            compressed_bytes: usage.compressed_bytes,
        }
    }
}

impl From<StoreUsage> for Holders {
    fn from(usage: StoreUsage) -> Holders {
        let other_layers = Amount {
            bytes: usage.layers.bytes.saturating_sub(usage.shared_layers.bytes),
            inodes: usage.layers.inodes.saturating_sub(usage.shared_layers.inodes),
        };
        Holders {
            shared_layers: usage.shared_layers.into(),
            other_layers: other_layers.into(),
            manifests: usage.blobs.into(),
            fetching: usage.ingest.into(),
            unpacking: usage.staging.into(),
            mounts: usage.mounts.into(),
            removed: usage.trash.into(),
            database: usage.database.into(),
            total: usage.total().into(),
        }
    }
}

impl From<Amount> for Room {
    fn from(amount: Amount) -> Room {
        Room { size_bytes: amount.bytes, inodes: amount.inodes }
    }
}

impl Room {
    /// The folder is there, and nothing in it.
    fn is_empty_folder(self) -> bool {
        self.inodes <= 1
    }
}

#[cfg(test)]
mod tests {
    use larder::reference::Digest;

    use super::*;

    fn amount(bytes: u64, inodes: u64) -> Amount {
        Amount { bytes, inodes }
    }

    fn image(digit: char, tags: &[&str], shared: u64, unique: u64) -> ImageUsage {
        ImageUsage {
            id: Digest::parse(&format!("sha256:{}", digit.to_string().repeat(64))).unwrap(),
            tags: tags.iter().map(|&tag| tag.to_owned()).collect(),
            digests: vec![format!("r.example/{digit}@sha256:0")],
            pinned: false,
            pulled_at: 0,
            own: Amount::ZERO,
            total: amount(shared + unique, 3),
            shared: amount(shared, 1),
            unique: amount(unique, 2),
            compressed_bytes: 1,
        }
    }

    #[test]
    fn shared_layers_count_once_and_what_is_nothing_is_left_out() {
        let images =
            vec![image('a', &["r.example/a:1", "r.example/a:2"], 4000, 1000), image('b', &[], 4000, 9000)];
        let usage = StoreUsage {
            layers: amount(14_000, 12),
            shared_layers: amount(4000, 2),
            blobs: amount(500, 5),
            ingest: amount(70, 1),
            staging: amount(80, 2),
            database: amount(100, 4),
            ..StoreUsage::default()
        };
        let report = StoreReport::new(images, usage);
        assert_eq!(
            report.images_table().to_string(),
            "IMAGE                  SIZE   SHARED   UNIQUE\n\
             r.example/b@sha256:0   13kB   4kB      9kB\n\
             r.example/a:1          5kB    4kB      1kB\n\
             r.example/a:2"
        );
        assert_eq!(
            report.holders_table(false).to_string(),
            "DISK                       SIZE     INODES\n\
             layers of several images   4kB      2\n\
             layers of one image        10kB     10\n\
             manifests and configs      500B     5\n\
             layers being unpacked      80B      2\n\
             database and the rest      170B     5\n\
             total                      14.8kB   24"
        );
    }
}
