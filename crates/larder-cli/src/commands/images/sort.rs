//! `--sort` of `larder images`.

use std::cmp::Reverse;

use jiff::Timestamp;

use super::ImageTableRow;
use crate::args::SortKey;

/// Sorts; equal ones, and those of which the key is unknown, by name.
pub(super) fn sort(key: SortKey, rows: &mut [ImageTableRow]) {
    let time = |text: &Option<String>| text.as_ref().and_then(|text| text.parse::<Timestamp>().ok());
    rows.sort_by(|a, b| (&a.repository, &a.tag, &a.id).cmp(&(&b.repository, &b.tag, &b.id)));
    match key {
        SortKey::Name => {}
        SortKey::Created => rows.sort_by_key(|row| Reverse(time(&row.created))),
        SortKey::Used => rows.sort_by_key(|row| Reverse((row.in_use == Some(true), time(&row.last_used)))),
        SortKey::Size => rows.sort_by_key(|row| Reverse(row.size_bytes)),
        SortKey::Unique => rows.sort_by_key(|row| Reverse(row.unique_bytes)),
        SortKey::Tag => rows.sort_by(|a, b| a.tag.cmp(&b.tag)),
        SortKey::Id => rows.sort_by(|a, b| a.id.cmp(&b.id)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_its_order_and_names_decide_between_equals() {
        let row = |name: &str, tag: &str, created: &str, size, unique, in_use| ImageTableRow {
            repository: name.to_owned(),
            tag: Some(tag.to_owned()),
            created: Some(created.to_owned()).filter(|text| !text.is_empty()),
            last_used: Some("2026-01-01T00:00:00Z".to_owned()),
            size_bytes: size,
            unique_bytes: Some(unique),
            in_use: Some(in_use),
            ..ImageTableRow::default()
        };
        let rows = [
            row("c", "1", "2024-01-01T00:00:00Z", 5, 1, true),
            row("b", "3", "", 9, 2, false),
            row("a", "2", "2025-01-01T00:00:00Z", 5, 3, false),
        ];
        for (key, expected) in [
            (SortKey::Name, "abc"),
            (SortKey::Created, "acb"),
            (SortKey::Used, "cab"),
            (SortKey::Size, "bac"),
            (SortKey::Unique, "abc"),
            (SortKey::Tag, "cab"),
        ] {
            let mut rows = rows.to_vec();
            sort(key, &mut rows);
            let names: String = rows.iter().map(|row| row.repository.as_str()).collect();
            assert_eq!(names, expected, "{key:?}");
        }
    }
}
