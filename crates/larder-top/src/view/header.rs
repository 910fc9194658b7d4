//! Disk with its thresholds, and sums of images, pulls and GC.

use std::time::Duration;

use larder_api::EnumWord as _;
use larder_api::v1::{DiskUse, GcStatus, Pull, PullPhase, StatusResponse};
use ratatui::text::{Line, Span};

use super::{Theme, Tone, gc as gc_view};
use crate::app::{App, Moment};
use crate::text;

/// Columns of the bar of the disk at most.
const BAR: usize = 60;
/// A shorter bar shows nothing.
const LEAST_BAR: usize = 8;

pub(super) fn lines(app: &App, theme: Theme, width: usize, now: Moment) -> Vec<Line<'static>> {
    let Some(status) = &app.status else {
        let text = if app.disconnected.is_some() { "larder" } else { "larder: connecting" };
        return vec![Line::from(theme.span(Tone::Head, text))];
    };
    vec![
        title(status, theme, width),
        disk(status.disk.as_ref(), theme, width),
        images(app, status, theme),
        activity(status, theme, now),
    ]
}

/// Renders the backend, and the process with its uptime.
fn title(status: &StatusResponse, theme: Theme, width: usize) -> Line<'static> {
    let up = text::age(Duration::from_secs(status.uptime_seconds));
    let process = if status.socket.is_some() { "daemon" } else { "process" };
    let end = format!("{process} {}, up {up}", status.pid);
    let room = width.saturating_sub(text::width(&end) + "larder:  ".len());
    let backend = text::left(&text::cell(&status.backend), room);
    Line::from(vec![theme.span(Tone::Head, "larder: "), Span::raw(format!("{backend} {end}"))])
}

/// A bar with marks where GC starts and ends, and the same in words.
fn disk(disk: Option<&DiskUse>, theme: Theme, width: usize) -> Line<'static> {
    let Some(disk) = disk else { return Line::from("Disk unknown") };
    let used = u64::try_from(disk.used_percent).unwrap_or_default();
    let (high, low) = (disk.gc_starts_at_percent, disk.gc_frees_to_percent);
    let is_past = high.is_some_and(|high| disk.used_percent >= high);
    let thresholds = match (high, low) {
        (Some(high), Some(low)) if is_past => format!("past GC threshold {high}%, to {low}%"),
        (Some(high), Some(low)) => format!("GC at {high}% to {low}%"),
        (Some(high), None) => format!("GC at {high}%"),
        _ => "no GC by usage".to_owned(),
    };
    let end = format!(" {used}% of {}, {thresholds}", text::bytes(disk.size_bytes));
    let columns = width.saturating_sub(text::width(&end) + "Disk []".len()).min(BAR);
    if columns < LEAST_BAR {
        let text = format!("Disk{end}");
        return Line::from(if is_past { theme.span(Tone::Bad, text) } else { Span::raw(text) });
    }
    let tone = match low {
        _ if is_past => Tone::Bad,
        Some(low) if disk.used_percent > low => Tone::Warning,
        _ => Tone::Good,
    };
    Line::from(vec![
        Span::raw("Disk ["),
        theme.span(tone, marked(&text::bar(used, 100, columns), [low, high])),
        Span::raw("]"),
        if is_past { theme.span(Tone::Bad, end) } else { Span::raw(end) },
    ])
}

/// The bar with a mark at each of these percents.
fn marked(bar: &str, marks: [Option<i64>; 2]) -> String {
    let mut bar: Vec<char> = bar.chars().collect();
    let columns = bar.len();
    for percent in marks.into_iter().flatten() {
        let at = text::filled(u64::try_from(percent).unwrap_or_default(), 100, columns);
        if let Some(cell) = bar.get_mut(at) {
            *cell = '|';
        }
    }
    bar.into_iter().collect()
}

fn images(app: &App, status: &StatusResponse, theme: Theme) -> Line<'static> {
    let totals = app.images.totals;
    let mut parts = vec![Span::raw(format!(
        "{}, {} on disk, {} in use",
        text::count(totals.images, "image"),
        text::bytes(totals.bytes),
        totals.in_use
    ))];
    let disk = status.disk.unwrap_or_default();
    if let Some(used) = disk.inodes_used_percent {
        let is_past = disk.gc_starts_at_inodes_percent.is_some_and(|high| used >= high);
        let at =
            disk.gc_starts_at_inodes_percent.map_or_else(String::new, |high| format!(" (GC at {high}%)"));
        let text = format!("   inodes {used}% used{at}");
        parts.push(if is_past { theme.span(Tone::Bad, text) } else { Span::raw(text) });
    }
    for other in status.other_filesystems.iter().take(1) {
        let mountpoint = text::cell(&other.mountpoint);
        parts.push(Span::raw(format!("   {mountpoint} {}%", other.used_percent)));
    }
    Line::from(parts)
}

/// Pulls and GC.
fn activity(status: &StatusResponse, theme: Theme, now: Moment) -> Line<'static> {
    let of = |phase: PullPhase| status.pulls.iter().filter(|pull| pull.phase() == phase).count();
    let running = of(PullPhase::Pulling);
    let waiting = status.pulls.len() - running;
    let rate: u64 = status.pulls.iter().map(rate_of).sum();
    let waiting = if waiting > 0 { format!(" + {waiting} waiting") } else { String::new() };
    let rate = if rate > 0 { format!(", {}/s", text::bytes(rate)) } else { String::new() };
    let pulls = format!("{}{waiting}{rate}", text::count(running as u64, "pull"));
    let tone = if status.pulls.is_empty() { Tone::Faint } else { Tone::Accent };
    let (gc, gc_tone) = collection(status.gc.as_ref(), now);
    Line::from(vec![theme.span(tone, pulls), Span::raw("   "), theme.span(gc_tone, gc)])
}

pub(super) fn rate_of(pull: &Pull) -> u64 {
    let layers = || pull.layers.iter().filter_map(|layer| layer.bytes_per_second).sum();
    pull.bytes_per_second.unwrap_or_else(layers)
}

fn collection(gc: Option<&GcStatus>, now: Moment) -> (String, Tone) {
    let Some(gc) = gc else { return ("GC unknown".to_owned(), Tone::Faint) };
    if let Some(round) = &gc.round {
        let (removed, planned) = (round.removed_images, round.planned_images);
        let freed = text::bytes(round.freed_bytes);
        let promised = text::bytes(round.promised_bytes);
        let word = round.phase().word();
        return (format!("GC {word} {removed} of {planned}, {freed} of {promised}"), Tone::Warning);
    }
    match (&gc.ended, &gc.result) {
        _ if gc.running => ("GC running".to_owned(), Tone::Warning),
        (Some(ended), Some(result)) => {
            let tone = if gc.failures > 0 { Tone::Bad } else { Tone::Faint };
            let failed = if gc.failures > 0 { "failed " } else { "" };
            (format!("GC {failed}{} ago: {}", gc_view::ago(ended, now), text::cell(result)), tone)
        }
        _ => ("GC: no round yet".to_owned(), Tone::Faint),
    }
}
