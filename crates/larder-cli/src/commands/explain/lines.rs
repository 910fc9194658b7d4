//! Explanations of GC decisions as text for people.

use std::time::Duration;

use larder::artifact_type::type_word;
use larder::backend::{FillProblem, ImageFill};
use larder::go_format;
use larder::hint::Hint;
use larder::reference::Reference;
use larder_api::convert;
use larder_api::v1::Explanation;
use larder_store::store::damage_hint;

use super::pull_record_lines;
use crate::commands::images::short;
use crate::output::hint;

const HIDDEN: &str =
    "hidden: fetched with credentials ahead of kubelet, visible once kubelet's own pull succeeds";

/// How much of an image is here, and what that means.
fn incomplete(name: &str, fill: &ImageFill, size_bytes: u64, given: &str) -> String {
    let reads = match fill.waiting_reads {
        0 => String::new(),
        1 => "; 1 read waits".to_owned(),
        count => format!("; {count} reads wait"),
    };
    let has_daemon = fill.problem.as_ref().is_none_or(|problem| problem.reason != FillProblem::NO_DAEMON);
    let complete = Hint::new().command(["complete".to_owned(), name.to_owned()]).text(" fetches it");
    let next = if has_daemon { String::new() } else { format!("; {}", hint::carrying(given, &complete)) };
    format!("{} is here, the rest follows {}{reads}{next}", fill.describe(size_bytes), fill.describe_source())
}

/// The lines about an image that was requested by this name. Commands in them carry the options that were given.
pub(crate) fn lines(requested: &str, explanation: &Explanation, given: &str) -> Vec<String> {
    let Some(image) = &explanation.decision else { return Vec::new() };
    let head = requested_name(requested, &image.names);
    let mut lines = vec![head.unwrap_or(&image.id).clone()];
    let others = image.names.iter().filter(|name| Some(*name) != head);
    lines.extend(others.map(|name| format!("  also named: {name}")));
    lines.push(format!("  id:         {}", image.id));
    if !image.artifact_type.is_empty() {
        let word = type_word(&image.artifact_type);
        let exact =
            if word == image.artifact_type { String::new() } else { format!(" ({})", image.artifact_type) };
        lines.push(format!("  type:       {word}{exact}"));
    }
    let decision = if image.remove { "remove" } else { "retain" };
    lines.push(format!("  next GC:    {decision}: {}", image.why));
    if !explanation.under_pressure.is_empty() {
        lines.push(format!("  under pressure: {}", explanation.under_pressure));
    }
    lines.extend(image.used_by.iter().map(|by| format!("  used by:    {by}")));
    let written = image_mounts_written(explanation);
    lines.extend(written.map(|(target, bytes)| {
        format!("  written:    {} to the mount {target}, which larder umount frees", go_format::bytes(bytes))
    }));
    let ago = |milliseconds: u64, time: &Option<String>| {
        let since = go_format::duration(Duration::from_secs(milliseconds / 1000));
        format!("{since} ago ({})", time.as_deref().unwrap_or_default())
    };
    lines.extend(pull_record_lines::lines(&explanation.pulled_records, explanation.unrecorded_access));
    if explanation.hidden {
        lines.push(format!("  kubelet:    {HIDDEN}"));
    }
    let first_seen = ago(explanation.milliseconds_since_first_seen, &image.first_seen);
    lines.push(format!("  first seen: {first_seen}"));
    let last_used = explanation.milliseconds_since_last_used.map(|since| ago(since, &image.last_used));
    lines.push(format!("  last used:  {}", last_used.unwrap_or_else(|| "never".to_owned())));
    lines.push(format!("  size:       {}", go_format::bytes(image.size_bytes)));
    if let Some(fill) = explanation.fill.clone().map(convert::fill_from) {
        lines.push(format!(
            "  incomplete: {}",
            incomplete(head.unwrap_or(&image.id), &fill, image.size_bytes, given)
        ));
    }
    if !explanation.damaged_layers.is_empty() {
        let layers: Vec<&str> = explanation.damaged_layers.iter().map(|key| short(key)).collect();
        let next = hint::carrying(given, &damage_hint(head.unwrap_or(&image.id)));
        lines.push(format!("  damaged:    layer {}: {next}", layers.join(", ")));
    }
    if explanation.containerd_bytes > 0 {
        let bytes = go_format::bytes(explanation.containerd_bytes);
        lines.push(format!("  containerd: {bytes} of the size, because another program put the image there"));
    }
    let shared = explanation
        .shared_bytes
        .map(|bytes| format!(" ({} shared with other images)", go_format::bytes(bytes)));
    let frees = go_format::bytes(image.unique_bytes);
    lines.push(format!("  removal frees: {frees}{}", shared.unwrap_or_default()));
    lines
}

/// Returns the writable mounts of the image, and the bytes written to each.
fn image_mounts_written(explanation: &Explanation) -> impl Iterator<Item = (&str, u64)> {
    let mounts = explanation.mounts.iter().filter(|mount| mount.writable);
    mounts.map(|mount| (mount.target.as_str(), mount.written_bytes))
}

/// The requested name as the image has it, else its first one.
fn requested_name<'a>(requested: &str, names: &'a [String]) -> Option<&'a String> {
    let parsed = Reference::parse(requested).ok();
    let is_same =
        |name: &&String| *name == requested || (parsed.is_some() && Reference::parse(name).ok() == parsed);
    names.iter().find(is_same).or(names.first())
}

#[cfg(test)]
mod tests {
    use larder_api::v1::ImageDecision;

    use super::*;

    #[test]
    fn damaged_layers_have_the_command_that_replaces_them() {
        let decision =
            Some(ImageDecision { names: vec!["r.example/app:1".into()], ..ImageDecision::default() });
        let damaged_layers = vec!["3f8a21b0c9d4".repeat(6)];
        let explanation = Explanation { decision, damaged_layers, ..Explanation::default() };
        let lines = lines("r.example/app:1", &explanation, "--root /r");
        let expected = "  damaged:    layer 3f8a21b0c9d43: larder --root /r pull r.example/app:1 replaces what is damaged; \
                        without a registry, larder --root /r load FILE";
        assert!(lines.iter().any(|line| line == expected), "{lines:?}");
    }
}
