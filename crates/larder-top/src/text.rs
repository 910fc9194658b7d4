//! Texts that fit into columns. All text from a node passes [`cell`].

use std::time::Duration;

use larder::escape::escape_cell;
use larder::go_format;
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

/// Text of a node on one line, without anything that a terminal would interpret.
pub(crate) fn cell(text: &str) -> String {
    escape_cell(text)
}

/// Bytes as other commands print them.
pub(crate) fn bytes(size: u64) -> String {
    go_format::bytes(size)
}

/// A duration in its largest unit, as kubectl prints ages.
pub(crate) fn age(age: Duration) -> String {
    let seconds = age.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        0..120 => format!("{seconds}s"),
        _ if minutes < 120 => format!("{minutes}m"),
        _ if hours < 48 => format!("{hours}h"),
        _ if days < 730 => format!("{days}d"),
        _ => format!("{}y", days / 365),
    }
}

/// Columns that the text takes.
pub(crate) fn width(text: &str) -> usize {
    text.width()
}

/// The beginning of the text that fits, with spaces up to the width.
pub(crate) fn left(text: &str, room: usize) -> String {
    let mut shown = String::new();
    let mut used = 0;
    let is_cut = width(text) > room;
    let end = if is_cut { room.saturating_sub(1) } else { room };
    for c in text.chars() {
        let wide = c.width().unwrap_or(0);
        if used + wide > end {
            break;
        }
        used += wide;
        shown.push(c);
    }
    if is_cut && room > 0 {
        shown.push('\u{2026}');
        used += 1;
    }
    shown + &" ".repeat(room.saturating_sub(used))
}

/// The end of the text that fits, with spaces up to the width: names of images differ in their end.
pub(crate) fn end_of(text: &str, room: usize) -> String {
    if width(text) <= room {
        return left(text, room);
    }
    let (mut used, mut start) = (1, text.len());
    for (at, c) in text.char_indices().rev() {
        used += c.width().unwrap_or(0);
        if used > room {
            break;
        }
        start = at;
    }
    left(&format!("\u{2026}{}", &text[start..]), room)
}

/// The text at the right end of so many columns.
pub(crate) fn right(text: &str, room: usize) -> String {
    if width(text) > room {
        return left(text, room);
    }
    " ".repeat(room - width(text)) + text
}

/// A number of things: `1 image`, `2 images`.
pub(crate) fn count(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// A bar of so many columns, of which a part is full.
pub(crate) fn bar(part: u64, whole: u64, columns: usize) -> String {
    let full = filled(part, whole, columns);
    "\u{2588}".repeat(full) + &"\u{b7}".repeat(columns - full)
}

/// How many of so many columns a part fills.
pub(crate) fn filled(part: u64, whole: u64, columns: usize) -> usize {
    let part = u128::from(part.min(whole)) * columns as u128;
    usize::try_from(part / u128::from(whole.max(1))).unwrap_or(columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_fit_their_columns() {
        assert_eq!(left("abc", 5), "abc  ");
        assert_eq!(left("abcdef", 4), "abc\u{2026}");
        assert_eq!(end_of("registry/app:1", 6), "\u{2026}app:1");
        assert_eq!(right("7B", 4), "  7B");
        assert_eq!((left("\u{4f60}\u{597d}x", 4), width("\u{4f60}")), ("\u{4f60}\u{2026} ".to_owned(), 2));
        assert_eq!((left("abc", 0), end_of("abc", 1)), (String::new(), "\u{2026}".to_owned()));
        assert_eq!(
            (bar(1, 2, 4), bar(9, 0, 2)),
            ("\u{2588}\u{2588}\u{b7}\u{b7}".into(), "\u{b7}\u{b7}".into())
        );
    }

    #[test]
    fn ages_have_one_unit() {
        let ages = [5, 119, 120, 7_200, 172_800, 86_400 * 800].map(Duration::from_secs).map(age);
        assert_eq!(ages, ["5s", "119s", "2m", "2h", "2d", "2y"]);
    }
}
