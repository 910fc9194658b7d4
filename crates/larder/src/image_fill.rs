//! Data that is still to come of an image whose containers can start: how much, from where, and until when.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use crate::go_format;

/// A time beyond this says nothing: the rate will have changed.
const LONGEST_ESTIMATE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Data that is still to come of an image whose containers can start: as they read it, and in the background.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageFill {
    /// Bytes that are missing.
    pub missing_bytes: u64,
    /// Reads of containers that wait for some of them.
    pub waiting_reads: u64,
    /// The registries and mirrors that must be reached until it is complete.
    pub hosts: BTreeSet<String>,
    /// Bytes that have come per second lately; `None` before that is known.
    pub bytes_per_second: Option<u64>,
    /// Why bytes do not come.
    pub problem: Option<FillProblem>,
}

/// Why missing data does not come.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FillProblem {
    /// The last error.
    pub reason: String,
    /// Time until the next attempt, if that is known.
    pub retry_in: Option<Duration>,
}

impl FillProblem {
    /// Reason of a process that is no daemon, and fetches nothing.
    pub const NO_DAEMON: &str = "no daemon fetches it now";
}

impl ImageFill {
    /// Adds what is still to come of another layer.
    pub fn add(&mut self, layer: ImageFill) {
        let ImageFill { missing_bytes, waiting_reads, hosts, bytes_per_second, problem } = layer;
        self.missing_bytes += missing_bytes;
        self.waiting_reads += waiting_reads;
        self.hosts.extend(hosts);
        let rates = [self.bytes_per_second, bytes_per_second];
        self.bytes_per_second = rates.into_iter().flatten().reduce(u64::saturating_add);
        self.problem = self.problem.take().or(problem);
    }

    /// How many percent of an image of this size are here: below 100 while bytes are missing.
    pub fn percent_of(&self, size: u64) -> u64 {
        let here = size.saturating_sub(self.missing_bytes);
        u64::try_from(u128::from(here) * 100 / u128::from(size.max(1))).unwrap_or(100)
    }

    /// How much of an image of this size is here, such as `12% of 1.3GB`.
    pub fn describe(&self, size: u64) -> String {
        format!("{}% of {}", self.percent_of(size), go_format::bytes(size))
    }

    /// Time until no registry is needed any more, at the present rate; `None` where that cannot be told.
    pub fn time_left(&self) -> Option<Duration> {
        let rate = self.bytes_per_second.filter(|rate| *rate > 0 && self.problem.is_none())?;
        Some(Duration::from_secs(self.missing_bytes.div_ceil(rate))).filter(|left| *left <= LONGEST_ESTIMATE)
    }

    /// From where the rest comes and until when, or why it does not come: `from r.example at 5MB/s, about 4m left`.
    pub fn describe_source(&self) -> String {
        let hosts: Vec<&str> = self.hosts.iter().map(String::as_str).collect();
        let mut text = if hosts.is_empty() { String::new() } else { format!("from {}", hosts.join(", ")) };
        match (&self.problem, self.bytes_per_second) {
            (Some(FillProblem { reason, retry_in }), _) => {
                text += if text.is_empty() { "once the registry sends it: " } else { ": " };
                text += reason;
                if let Some(retry_in) = retry_in {
                    let _ = write!(text, "; next attempt in {}s", retry_in.as_secs());
                }
            }
            (None, Some(0)) => text += ", nothing has come lately",
            (None, Some(rate)) => {
                let _ = write!(text, " at {}/s", go_format::bytes(rate));
            }
            (None, None) => {}
        }
        if let Some(left) = self.time_left() {
            let _ = write!(text, ", about {} left", rounded(left));
        }
        text
    }
}

/// `12s`, `4m`, `2h5m`.
fn rounded(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..60 => format!("{seconds}s"),
        seconds @ ..3600 => format!("{}m", seconds / 60),
        seconds => format!("{}h{}m", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(missing_bytes: u64, bytes_per_second: Option<u64>) -> ImageFill {
        let hosts = BTreeSet::from(["r.example".to_owned()]);
        ImageFill { missing_bytes, hosts, bytes_per_second, ..ImageFill::default() }
    }

    #[test]
    fn the_end_is_estimated_where_it_can_be_told() {
        let left = |missing, rate| fill(missing, rate).time_left().map(|left| left.as_secs());
        assert_eq!(left(1_200_000_000, Some(5_000_000)), Some(240));
        assert_eq!(left(1, Some(5_000_000)), Some(1), "never 0 while bytes are missing");
        assert_eq!(left(1_200_000_000, None), None);
        assert_eq!(left(1_200_000_000, Some(0)), None);
        assert_eq!(left(u64::MAX, Some(1)), None, "in no time that says anything");
        let problem = Some(FillProblem { reason: "refused".into(), retry_in: None });
        assert_eq!(ImageFill { problem, ..fill(10, Some(5)) }.time_left(), None, "nothing comes");
    }

    #[test]
    fn the_source_is_named_with_its_rate_or_why_nothing_comes() {
        let text = |rate| fill(1_200_000_000, rate).describe_source();
        assert_eq!(text(Some(5_000_000)), "from r.example at 5MB/s, about 4m left");
        assert_eq!(text(None), "from r.example");
        assert_eq!(text(Some(0)), "from r.example, nothing has come lately");
        let problem = FillProblem { reason: "refused".into(), retry_in: Some(Duration::from_secs(12)) };
        let failing = ImageFill { problem: Some(problem), ..fill(10, Some(5)) };
        assert_eq!(failing.describe_source(), "from r.example: refused; next attempt in 12s");
    }

    #[test]
    fn an_image_needs_what_its_layers_need() {
        let mut image = fill(10, None);
        image.add(ImageFill {
            waiting_reads: 2,
            hosts: BTreeSet::from(["m.example".into()]),
            ..fill(20, Some(5))
        });
        image.add(fill(1, Some(3)));
        assert_eq!((image.missing_bytes, image.waiting_reads, image.bytes_per_second), (31, 2, Some(8)));
        assert_eq!(image.describe_source(), "from m.example, r.example at 8B/s, about 4s left");
    }
}
