//! Sizes and durations for people.

use std::time::Duration;

use larder::go_format;

/// Bytes as crictl and docker print them: `4.26MB`.
pub(crate) fn bytes(size: u64) -> String {
    go_format::bytes(size)
}

/// A number of things: `1 image`, `2 images`.
pub(crate) fn count(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// A part of a whole in percent, rounded up as `df` does; `-` when there is no whole.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    match (u128::from(part) * 100).checked_next_multiple_of(u128::from(whole).max(1)) {
        Some(rounded) if whole > 0 => format!("{}%", rounded / u128::from(whole)),
        _ => "-".into(),
    }
}

/// Whether a part is more than a hundredth of the whole, so that people see that it is missing somewhere.
pub(crate) fn is_significant(part: u64, whole: u64) -> bool {
    part > whole / 100
}

/// A duration as kubelet's events have it, cut to milliseconds: `1.234s`.
pub(crate) fn duration(time: Duration) -> String {
    go_format::duration(go_format::truncated_to_millis(time))
}

/// A duration in whole seconds, rounded up: what is left of a wait.
pub(crate) fn whole_seconds(time: Duration) -> String {
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    go_format::duration(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_crictl_prints_them() {
        for (size, text) in [
            (0, "0B"),
            (999, "999B"),
            (1_000, "1kB"),
            (742_385, "742kB"),
            (4_261_550, "4.26MB"),
            (77_900_000, "77.9MB"),
            (999_499, "999kB"),
            (999_500, "1MB"),
            (1_234_000_000, "1.23GB"),
            (u64::MAX, "18447PB"),
        ] {
            assert_eq!(bytes(size), text);
        }
    }

    #[test]
    fn one_thing_is_singular() {
        assert_eq!([0, 1, 2].map(|number| count(number, "layer")), ["0 layers", "1 layer", "2 layers"]);
    }

    #[test]
    fn percents_are_rounded_up_and_need_a_whole() {
        assert_eq!(percent(1, 1000), "1%");
        assert_eq!(percent(0, 1000), "0%");
        assert_eq!(percent(1000, 1000), "100%");
        assert_eq!(percent(5, 0), "-");
        assert_eq!(percent(u64::MAX, u64::MAX), "100%");
    }

    #[test]
    fn waits_are_rounded_up_to_seconds() {
        assert_eq!(whole_seconds(Duration::from_millis(9_001)), "10s");
        assert_eq!(whole_seconds(Duration::from_secs(10)), "10s");
    }
}
