//! Usage of the image filesystem: images by state, and other data.

use larder::hint::Hint;
use larder_api::v1::{DiskSpace, ImageTotal, ReclaimableSpace, UsageByState};

use crate::output::size;
use crate::output::table::TextTable;
use crate::printer::Printer;

/// The states that at least one image has.
pub(in crate::commands) fn image_states(
    by_state: &UsageByState,
) -> impl Iterator<Item = (&'static str, ImageTotal)> + use<> {
    let all = [
        ("in use", by_state.in_use),
        ("pinned by the runtime", by_state.pinned),
        ("kept by a rule", by_state.kept),
        ("leased", by_state.leased),
        ("younger than the minimum age", by_state.too_young),
        ("unused", by_state.unused),
    ];
    all.into_iter()
        .map(|(state, usage)| (state, usage.unwrap_or_default()))
        .filter(|(_, usage)| usage.count > 0)
}

/// Reclaimable bytes that are no part of an image, by what they are; those that there are.
pub(in crate::commands) fn reclaimable_kinds(beside: Option<&ReclaimableSpace>) -> Vec<(&'static str, u64)> {
    let beside = beside.copied().unwrap_or_default();
    let bytes = |space: Option<DiskSpace>| space.unwrap_or_default().size_bytes;
    let kinds = [
        ("left by failed pulls", bytes(beside.downloads) + bytes(beside.layers)),
        ("old remnants of removed layers", bytes(beside.remnants)),
        ("trash, being deleted", bytes(beside.trash)),
        ("build cache", bytes(beside.build_cache)),
    ];
    kinds.into_iter().filter(|(_, bytes)| *bytes > 0).collect()
}

/// A row for each state, for other data and for `reclaimable` bytes, of which those `beside` are no part of an image.
pub(in crate::commands) fn table(
    by_state: &UsageByState,
    reclaimable: u64,
    beside: Option<&ReclaimableSpace>,
) -> TextTable {
    let mut table = TextTable::new(["USAGE", "COUNT", "SIZE"]);
    let about = if by_state.estimated { "about " } else { "" };
    for (state, usage) in image_states(by_state) {
        let size = format!("{about}{}", size::bytes(usage.size_bytes));
        table.row([format!("images {state}"), usage.count.to_string(), size]);
    }
    if let Some(other) = by_state.other_bytes {
        let size = format!("{about}{}", size::bytes(other));
        table.row(["other data".to_owned(), String::new(), size]);
    }
    let row = |name: &str, bytes| [name.to_owned(), String::new(), format!("{about}{}", size::bytes(bytes))];
    table.row(row("reclaimable", reclaimable));
    for (kind, bytes) in reclaimable_kinds(beside) {
        table.row(row(&format!("reclaimable, {kind}"), bytes));
    }
    table
}

/// Prints the disk usage as a note, and a hint: to other data if that is the larger part, else to the reasons, unless
/// `lists_reasons` says that the result has them.
pub(super) fn print(by_state: &UsageByState, lists_reasons: bool, out: &Printer) {
    let about = if by_state.estimated { "about " } else { "" };
    let mut parts: Vec<String> = Vec::new();
    for (state, usage) in image_states(by_state) {
        let images = if usage.count == 1 { "image" } else { "images" };
        parts.push(format!("{} {images} {state}: {about}{}", usage.count, size::bytes(usage.size_bytes)));
    }
    if let Some(other) = by_state.other_bytes {
        parts.push(format!("other data: {about}{}", size::bytes(other)));
    }
    out.info(format_args!("note: disk usage: {}", parts.join("; ")));
    let images = image_states(by_state).map(|(_, usage)| usage.size_bytes).sum::<u64>();
    if by_state.other_bytes.is_some_and(|other| other > images) {
        out.hint("most of the disk usage is other data: find it with du -x");
    } else if !lists_reasons {
        out.hint(Hint::new().command(["gc"]).text(" -o wide --dry-run shows the reason for each image"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printer::tests::TestWriter;

    #[test]
    fn each_kind_of_reclaimable_space_has_its_own_name() {
        let space = |size_bytes| Some(DiskSpace { size_bytes, inodes: 1 });
        let beside = ReclaimableSpace {
            downloads: space(100),
            layers: space(20),
            remnants: space(3),
            trash: space(4),
            total: space(127),
            ..ReclaimableSpace::default()
        };
        let kinds = [
            ("left by failed pulls", 120),
            ("old remnants of removed layers", 3),
            ("trash, being deleted", 4),
        ];
        assert_eq!(reclaimable_kinds(Some(&beside)), kinds);
        let table = table(&UsageByState::default(), 1000, Some(&beside)).to_string();
        for (kind, _) in kinds {
            assert!(table.contains(&format!("reclaimable, {kind}")), "{table}");
        }
    }

    #[test]
    fn a_result_with_reasons_has_no_hint_to_them() {
        for lists_reasons in [false, true] {
            let page = TestWriter::default();
            let out = Printer::to(Box::new(std::io::sink()), Box::new(page.clone()));
            print(&UsageByState::default(), lists_reasons, &out);
            assert_eq!(page.text().contains("hint: larder gc -o wide --dry-run"), !lists_reasons);
        }
    }
}
