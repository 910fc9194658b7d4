//! Usage of the image filesystem: images by state, and other data.

use larder::hint::Hint;
use larder_api::v1::{ImageTotal, UsageByState};

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

/// A row for each state, for other data and for `reclaimable` bytes, of which `beside_images` are no part of an image.
pub(in crate::commands) fn table(by_state: &UsageByState, reclaimable: u64, beside_images: u64) -> TextTable {
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
    if beside_images > 0 {
        table.row(row("reclaimable, left by failed pulls", beside_images));
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
    fn a_result_with_reasons_has_no_hint_to_them() {
        for lists_reasons in [false, true] {
            let page = TestWriter::default();
            let out = Printer::to(Box::new(std::io::sink()), Box::new(page.clone()));
            print(&UsageByState::default(), lists_reasons, &out);
            assert_eq!(page.text().contains("hint: larder gc -o wide --dry-run"), !lists_reasons);
        }
    }
}
