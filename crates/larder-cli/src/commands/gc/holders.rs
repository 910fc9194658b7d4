//! Who holds the disk, in sentences and as data.

use larder::gc::{Holder, Holders};
use serde::Serialize;

use crate::out::Out;
use crate::output::size;
use crate::output::table::Table;

/// The shape of `heldBy` and `reclaimable` in `larder df -o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::commands) struct HeldBy {
    in_use: Held,
    pinned: Held,
    kept: Held,
    leased: Held,
    too_young: Held,
    unused: Held,
    /// What on the file system is no image; `null` where it cannot be read.
    other_bytes: Option<u64>,
    /// Whether sizes are guesses, because the runtime does not tell what layers take.
    estimated: bool,
}

/// What one of them holds, each layer once.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::commands) struct Held {
    count: usize,
    size_bytes: u64,
}

impl From<&Holders> for HeldBy {
    fn from(holders: &Holders) -> HeldBy {
        let of = |holder: Holder| {
            let found = holders.images.iter().find(|held| held.holder == holder);
            found.map_or(Held::default(), |held| Held { count: held.images, size_bytes: held.amount.bytes })
        };
        HeldBy {
            in_use: of(Holder::InUse),
            pinned: of(Holder::Pinned),
            kept: of(Holder::Kept),
            leased: of(Holder::Leased),
            too_young: of(Holder::TooYoung),
            unused: of(Holder::Unused),
            other_bytes: holders.other_bytes,
            estimated: holders.estimated,
        }
    }
}

fn words(holder: Holder) -> &'static str {
    match holder {
        Holder::InUse => "in use",
        Holder::Pinned => "pinned by the runtime",
        Holder::Kept => "kept by a rule",
        Holder::Leased => "just ensured or leased",
        Holder::TooYoung => "too young to go",
        Holder::Unused => "unused",
    }
}

/// A row for each who holds anything.
pub(in crate::commands) fn table(holders: &Holders) -> Table {
    let mut table = Table::new(["HELD BY", "COUNT", "SIZE"]);
    let about = if holders.estimated { "about " } else { "" };
    for held in holders.images.iter().filter(|held| held.images > 0) {
        let size = format!("{about}{}", size::bytes(held.amount.bytes));
        table.row([format!("images {}", words(held.holder)), held.images.to_string(), size]);
    }
    if let Some(other) = holders.other_bytes {
        let size = format!("{about}{}", size::bytes(other));
        table.row(["other data on the file system".to_owned(), String::new(), size]);
    }
    let size = format!("{about}{}", size::bytes(holders.reclaimable.bytes));
    table.row(["reclaimable".to_owned(), String::new(), size]);
    table
}

/// Who holds the disk, when little can be freed: a note beside the result.
pub(super) fn tell(holders: &Holders, out: &Out) {
    let about = if holders.estimated { "about " } else { "" };
    let mut parts: Vec<String> = Vec::new();
    for held in holders.images.iter().filter(|held| held.images > 0) {
        let images = if held.images == 1 { "image" } else { "images" };
        let size = size::bytes(held.amount.bytes);
        parts.push(format!("{} {images} {}: {about}{size}", held.images, words(held.holder)));
    }
    if let Some(other) = holders.other_bytes {
        parts.push(format!("other data on the file system: {about}{}", size::bytes(other)));
    }
    out.note(format_args!("note: the disk is held by: {}", parts.join("; ")));
    let most = holders.images.iter().map(|held| held.amount.bytes).sum::<u64>();
    if holders.other_bytes.is_some_and(|other| other > most) {
        out.note("hint: most of it is no image; look for other data, such as with du -x");
    } else {
        out.note("hint: larder gc -o wide --dry-run says of each image why it stays");
    }
}
