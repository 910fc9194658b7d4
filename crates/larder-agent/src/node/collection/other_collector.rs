//! Another collector beside larder's, which removes images over CRI: a kubelet whose image GC is on.

use std::time::{Duration, SystemTime};

use larder_api::convert;
use parking_lot::Mutex;

/// Tools for people, which collect nothing by themselves.
const TOOLS: [&str; 2] = ["crictl", "larder"];

/// How long after its last removal it is warned of: a collector that was disabled removes nothing more.
const WARN_FOR: Duration = Duration::from_secs(24 * 3600);

/// State of another collector.
#[derive(Debug, Default)]
pub(crate) struct OtherCollector(Mutex<Option<OtherRemovals>>);

#[derive(Debug, Clone)]
struct OtherRemovals {
    by: String,
    images: u64,
    last: SystemTime,
}

impl OtherCollector {
    /// Notes that this command removed an image over CRI.
    pub(crate) fn removed(&self, command: &str, now: SystemTime) {
        if TOOLS.contains(&command) {
            return;
        }
        let mut known = self.0.lock();
        let images = known.as_ref().map_or(0, |known| known.images) + 1;
        let by = if command.is_empty() { "another process" } else { command };
        *known = Some(OtherRemovals { by: by.to_owned(), images, last: now });
    }

    /// A warning that two collectors work on one disk.
    pub(crate) fn warning(&self, now: SystemTime) -> Option<String> {
        let OtherRemovals { by, images, last } = self.0.lock().clone()?;
        if now.duration_since(last).is_ok_and(|since| since > WARN_FOR) {
            return None;
        }
        Some(format!(
            "{by} collects images, too: {images} removed over CRI, the last at {}; kubelet's GC is disabled with \
             imageGCHighThresholdPercent: 100 and imageMaximumGCAge: 0s in its settings, what its eviction removes under \
             disk pressure is not",
            convert::time(last)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removals_of_a_kubelet_are_those_of_a_collector_and_those_of_crictl_are_not() {
        let (others, now) = (OtherCollector::default(), SystemTime::UNIX_EPOCH);
        others.removed("crictl", now);
        assert_eq!(others.warning(now), None);
        others.removed("kubelet", now);
        others.removed("kubelet", now);
        let warning = others.warning(now + WARN_FOR).unwrap();
        assert!(
            warning.starts_with("kubelet collects images, too: 2 removed over CRI, the last at 1970"),
            "{warning}"
        );
        assert_eq!(others.warning(now + 2 * WARN_FOR), None, "it was disabled since");
    }
}
