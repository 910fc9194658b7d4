//! Hard evictions of kubelet's file. They are no settings of larder, but remove images before GC starts if they come
//! first.

use std::path::Path;

use super::{Config, SettingOrigin};
use crate::manifest::tree::NodeCursor;
use crate::quantity::parse_size;

/// A hard eviction signal.
#[derive(Debug, Clone)]
pub(super) struct EvictionSignal {
    /// Such as `imagefs.available`.
    signal: String,
    /// A percentage or a quantity.
    threshold: String,
    origin: SettingOrigin,
}

/// The signals in kubelet's file.
pub(super) fn read(path: &Path, root: &NodeCursor<'_>) -> Vec<EvictionSignal> {
    let Ok(Some(signals)) = root.field("evictionHard") else { return Vec::new() };
    let read = |(signal, at): (&str, NodeCursor<'_>)| {
        let origin = SettingOrigin::KubeletFile { path: path.to_owned(), line: at.line() };
        let threshold = at.text().ok()?.to_owned();
        Some(EvictionSignal { signal: signal.to_owned(), threshold, origin })
    };
    signals.entries().unwrap_or_default().into_iter().filter_map(read).collect()
}

/// Warns of signals of the image filesystem that are met before larder's GC starts, or that larder does not compare.
pub(super) fn warn_of_early_evictions(config: &mut Config, evictions: &[EvictionSignal]) {
    if !config.gc.is_enabled() {
        return;
    }
    for eviction in evictions {
        if let Some(problem) = early_eviction(config, eviction) {
            let EvictionSignal { signal, threshold, origin } = eviction;
            config.warnings.push(format!("{origin}: evictionHard {signal} {threshold}: {problem}"));
        }
    }
}

fn early_eviction(config: &Config, eviction: &EvictionSignal) -> Option<String> {
    let (high, key) = match eviction.signal.as_str() {
        "imagefs.available" => (config.gc.high_threshold_percent, "imageGCHighThresholdPercent"),
        "imagefs.inodesFree" => {
            (config.gc.inodes.map_or(100, |inodes| inodes.high_percent), "gc.inodeHighThresholdPercent")
        }
        _ => return None,
    };
    if let Some(percent) = eviction.threshold.strip_suffix('%') {
        let evicted_at = 100.0 - percent.parse::<f64>().ok()?;
        let is_early = f64::from(high) >= evicted_at;
        return is_early.then(|| {
            format!("kubelet evicts at {evicted_at}% usage, before larder's GC starts; set {key} below that")
        });
    }
    if key == "gc.inodeHighThresholdPercent" {
        return Some(format!("a number of inodes is not compared with {key}; write it as a percentage"));
    }
    let bytes = parse_size(&eviction.threshold).ok()?;
    let is_early = config.gc.min_free_bytes <= bytes;
    is_early.then(|| "a size is compared only with gc.minimumFreeBytes; set that to more".to_owned())
}
