//! Layer sizes from an image's history, for engines whose files cannot be read.
//!
//! A history has the bytes that each build step added, but not whether it made a layer. A step with bytes made one;
//! for the others the instruction decides.

use crate::api::{HistoryEntry, count};

/// Instructions that never make a layer.
const WITHOUT_LAYER: [&str; 14] = [
    "CMD",
    "ENTRYPOINT",
    "ENV",
    "LABEL",
    "EXPOSE",
    "ARG",
    "USER",
    "VOLUME",
    "MAINTAINER",
    "HEALTHCHECK",
    "STOPSIGNAL",
    "ONBUILD",
    "SHELL",
    "FROM",
];

/// Bytes of this many layers, from the bottom up; `None` if steps and layers do not match.
pub(crate) fn sizes(history: &[HistoryEntry], layers: usize) -> Option<Vec<u64>> {
    let steps = history.iter().rev();
    let by_word: Vec<u64> =
        steps.clone().filter(|step| makes_layer(step)).map(|step| count(step.size)).collect();
    if by_word.len() == layers {
        return Some(by_word);
    }
    let by_size: Vec<u64> = steps.map(|step| count(step.size)).filter(|size| *size > 0).collect();
    (by_size.len() == layers).then_some(by_size)
}

/// Scales the bytes of layers to this size of their image, which with containerd's store is that of layers and
/// archives.
pub(crate) fn scaled(sizes: Vec<u64>, size: u64) -> Vec<u64> {
    let sum: u128 = sizes.iter().copied().map(u128::from).sum();
    let scale = |bytes: u64| u64::try_from(u128::from(bytes) * u128::from(size) / sum).unwrap_or(u64::MAX);
    if sum == 0 { sizes } else { sizes.into_iter().map(scale).collect() }
}

fn makes_layer(step: &HistoryEntry) -> bool {
    if step.size > 0 {
        return true;
    }
    let text = step.created_by.trim();
    let instruction = text.split_once("#(nop)").map_or(text, |(_, instruction)| instruction.trim());
    let word = instruction.split_whitespace().next().unwrap_or_default();
    !WITHOUT_LAYER.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(steps: &[(&str, i64)]) -> Vec<HistoryEntry> {
        let entry = |(created_by, size): &(&str, i64)| HistoryEntry {
            created_by: (*created_by).to_owned(),
            size: *size,
        };
        steps.iter().rev().map(entry).collect()
    }

    #[test]
    fn layers_have_their_share_of_the_size_with_archives() {
        assert_eq!(scaled(vec![300, 50, 0], 700), [600, 100, 0]);
        assert_eq!(scaled(vec![0], 700), [0], "an image without files");
    }

    #[test]
    fn steps_are_matched_with_layers() {
        let classic = history(&[
            ("/bin/sh -c #(nop) ADD file:a in / ", 100),
            ("/bin/sh -c #(nop)  CMD [\"sh\"]", 0),
            ("/bin/sh -c #(nop) WORKDIR /srv", 0),
            ("/bin/sh -c make", 7),
        ]);
        assert_eq!(sizes(&classic, 3), Some(vec![100, 0, 7]), "a dir is a layer without bytes");
        let buildkit =
            history(&[("ADD a / # buildkit", 9), ("ENV A=1", 0), ("RUN /bin/sh -c true # buildkit", 0)]);
        assert_eq!(sizes(&buildkit, 2), Some(vec![9, 0]));
    }

    #[test]
    fn a_history_with_other_layers_is_not_trusted() {
        let strange = history(&[("something", 0), ("else", 5)]);
        assert_eq!(sizes(&strange, 1), Some(vec![5]), "the one that has bytes");
        assert_eq!(sizes(&strange, 3), None);
        assert_eq!(sizes(&[], 0), Some(Vec::new()));
    }
}
