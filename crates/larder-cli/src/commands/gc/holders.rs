//! What holds the disk, in words.

use larder::hint::Hint;
use larder_api::v1alpha1::{Held, HeldBy};

use crate::output::size;
use crate::output::table::TextTable;
use crate::printer::Printer;

/// Who holds anything, in words.
fn holding(held_by: &HeldBy) -> impl Iterator<Item = (&'static str, Held)> {
    let all = [
        ("in use", held_by.in_use),
        ("pinned by the runtime", held_by.pinned),
        ("kept by a rule", held_by.kept),
        ("just ensured or leased", held_by.leased),
        ("too young to go", held_by.too_young),
        ("unused", held_by.unused),
    ];
    all.into_iter().map(|(words, held)| (words, held.unwrap_or_default())).filter(|(_, held)| held.count > 0)
}

/// A row for each who holds anything.
pub(in crate::commands) fn table(held_by: &HeldBy) -> TextTable {
    let mut table = TextTable::new(["HELD BY", "COUNT", "SIZE"]);
    let about = if held_by.estimated { "about " } else { "" };
    for (words, held) in holding(held_by) {
        let size = format!("{about}{}", size::bytes(held.size_bytes));
        table.row([format!("images {words}"), held.count.to_string(), size]);
    }
    if let Some(other) = held_by.other_bytes {
        let size = format!("{about}{}", size::bytes(other));
        table.row(["other data on the file system".to_owned(), String::new(), size]);
    }
    let size = format!("{about}{}", size::bytes(held_by.reclaimable_bytes));
    table.row(["reclaimable".to_owned(), String::new(), size]);
    table
}

/// Who holds the disk, when little can be freed: a note beside the result, which may have told of each image why it stays.
pub(super) fn tell(held_by: &HeldBy, told_of_each: bool, out: &Printer) {
    let about = if held_by.estimated { "about " } else { "" };
    let mut parts: Vec<String> = Vec::new();
    for (words, held) in holding(held_by) {
        let images = if held.count == 1 { "image" } else { "images" };
        let size = size::bytes(held.size_bytes);
        parts.push(format!("{} {images} {words}: {about}{size}", held.count));
    }
    if let Some(other) = held_by.other_bytes {
        parts.push(format!("other data on the file system: {about}{}", size::bytes(other)));
    }
    out.info(format_args!("note: the disk is held by: {}", parts.join("; ")));
    let most = holding(held_by).map(|(_, held)| held.size_bytes).sum::<u64>();
    if held_by.other_bytes.is_some_and(|other| other > most) {
        out.hint("most of it is no image; look for other data, such as with du -x");
    } else if !told_of_each {
        out.hint(Hint::new().command(["gc"]).text(" -o wide --dry-run says of each image why it stays"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printer::tests::TestWriter;

    #[test]
    fn who_was_told_of_each_image_is_not_sent_to_ask() {
        for told_of_each in [false, true] {
            let page = TestWriter::default();
            let out = Printer::to(Box::new(std::io::sink()), Box::new(page.clone()));
            tell(&HeldBy::default(), told_of_each, &out);
            assert_eq!(page.text().contains("hint: larder gc -o wide --dry-run"), !told_of_each);
        }
    }
}
