//! `Content-Range`: which part of a blob a response contains.

/// `bytes FIRST-LAST/TOTAL`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContentRange {
    /// Offset of the first byte.
    pub(crate) first: u64,
    /// Offset after the last byte.
    pub(crate) end: u64,
    /// Total size; `None` if the server does not know it.
    pub(crate) total: Option<u64>,
}

impl ContentRange {
    /// `None` for anything that does not name one range of bytes.
    pub(crate) fn parse(text: &str) -> Option<ContentRange> {
        let text = text.trim();
        let unit = text.get(..5).filter(|unit| unit.eq_ignore_ascii_case("bytes"))?;
        let (range, total) = text[unit.len()..].trim_start().split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let first = number(first)?;
        let end = number(last)?.checked_add(1)?;
        let total = match total.trim() {
            "*" => None,
            total => Some(number(total)?),
        };
        (first < end && total.is_none_or(|total| end <= total)).then_some(ContentRange { first, end, total })
    }

    /// Why the range does not match a request for `offset..end` of a blob of `size` bytes. A shorter part matches.
    pub(crate) fn problem(&self, offset: u64, end: u64, size: u64) -> Option<String> {
        let ContentRange { first, end: got_end, total } = *self;
        if first != offset || got_end > end {
            return Some(format!(
                "requested bytes {offset}-{}, received {first}-{}",
                end.saturating_sub(1),
                got_end - 1
            ));
        }
        match total {
            Some(total) if total != size => Some(format!("blob has {total} bytes, the manifest says {size}")),
            _ => None,
        }
    }
}

/// Digits only: `parse` alone would take `+1`.
fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_ranges_within_the_request_are_accepted() {
        for (text, good) in [
            ("bytes 10-19/100", true),
            ("Bytes 10-19/*", true),
            ("bytes 10-14/100", true),
            ("bytes 10-20/100", false),
            ("bytes 0-19/100", false),
            ("bytes 10-19/90", false),
        ] {
            let range = ContentRange::parse(text).expect(text);
            assert_eq!(range.problem(10, 20, 100).is_none(), good, "{text}");
        }
    }

    #[test]
    fn malformed_ranges_are_refused() {
        for text in [
            "",
            "bytes",
            "bytes */100",
            "bytes 5-4/10",
            "bytes 0-10/10",
            "bytes +1-2/3",
            "items 0-1/2",
            "bytes 0-1",
            "bytes 0-18446744073709551615/*",
            "bytes 0-99999999999999999999/*",
            "bÿtes 0-1/2",
        ] {
            assert_eq!(ContentRange::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,60}", near in "(bytes|[0-9]{0,21}|-|/|\\*| ){0,9}") {
            let _ = ContentRange::parse(&text);
            if let Some(range) = ContentRange::parse(&near) {
                prop_assert!(range.first < range.end);
                let _ = range.problem(0, 0, 0);
            }
        }

        #[test]
        fn written_values_are_read_back(first in 0u64..1 << 50, more in 1u64..1 << 40, rest in 0u64..1 << 40) {
            let (end, total) = (first + more, first + more + rest);
            let range = ContentRange::parse(&format!("bytes {first}-{}/{total}", end - 1)).expect("a range");
            prop_assert_eq!((range.first, range.end, range.total), (first, end, Some(total)));
        }
    }
}
