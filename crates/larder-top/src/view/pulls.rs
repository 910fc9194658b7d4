//! Pulls with their layers: phase, bytes, rate, and what they wait for.

use std::time::Duration;

use larder_api::EnumWord as _;
use larder_api::v1::{LayerPhase, Pull, PullLayer, PullPhase, PullStep};
use ratatui::text::{Line, Span};

use super::header::rate_of;
use super::{Theme, Tone};
use crate::app::App;
use crate::text;

/// Columns of phase, bar, bytes and rate.
const PHASE: usize = 10;
const BAR: usize = 12;
const BYTES: usize = 16;
const RATE: usize = 9;

pub(super) fn head(width: usize) -> String {
    let name = text::left("IMAGE, LAYER", name_width(width));
    format!("{name} {:<PHASE$} {:<BAR$} {:>BYTES$} {:>RATE$}", "PHASE", "", "FETCHED", "RATE")
}

fn name_width(width: usize) -> usize {
    width.saturating_sub(PHASE + BAR + BYTES + RATE + 4).max(12)
}

pub(super) fn lines(app: &App, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let Some(status) = &app.status else { return Vec::new() };
    if status.pulls.is_empty() {
        return vec![Line::from(theme.span(Tone::Faint, "no pulls run"))];
    }
    status.pulls.iter().flat_map(|pull| of_pull(pull, theme, width)).collect()
}

fn of_pull(pull: &Pull, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let phase = match (pull.phase(), pull.step()) {
        (PullPhase::Pulling, step) if step != PullStep::Unspecified => step.word(),
        (phase, _) => phase.word(),
    };
    let progress = Progress {
        phase,
        done: pull.done_bytes,
        total: pull.total_bytes,
        rate: Some(rate_of(pull)).filter(|rate| *rate > 0),
    };
    let mut lines = vec![line(&text::cell(&pull.image), &progress, Some(Tone::Head), theme, width)];
    lines.extend(waiting(&pull.waiting, pull.waiting_milliseconds, theme, width));
    // What runs comes before what waits and what is done.
    let rank = |layer: &&PullLayer| match layer.phase() {
        LayerPhase::Fetching | LayerPhase::Unpacking => 0,
        LayerPhase::Elsewhere => 1,
        LayerPhase::Done | LayerPhase::Unpacked => 3,
        LayerPhase::Queued | LayerPhase::Unspecified => 2,
    };
    let mut layers: Vec<&PullLayer> = pull.layers.iter().collect();
    layers.sort_by_key(rank);
    lines.extend(layers.into_iter().flat_map(|layer| of_layer(layer, theme, width)));
    lines
}

fn of_layer(layer: &PullLayer, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let digits = layer.digest.split_once(':').map_or(&*layer.digest, |(_, digits)| digits);
    let name = format!("  {}", text::cell(digits).chars().take(12).collect::<String>());
    let (phase, tone) = match layer.phase() {
        LayerPhase::Elsewhere => ("shared", None),
        LayerPhase::Done => ("done", Some(Tone::Faint)),
        phase => (phase.word(), None),
    };
    let total = layer.total_bytes;
    let progress = Progress { phase, done: Some(layer.done_bytes), total, rate: layer.bytes_per_second };
    let mut lines = vec![line(&name, &progress, tone, theme, width)];
    lines.extend(waiting(&layer.waiting, layer.waiting_milliseconds, theme, width));
    lines
}

struct Progress {
    phase: &'static str,
    done: Option<u64>,
    total: Option<u64>,
    rate: Option<u64>,
}

fn line(name: &str, progress: &Progress, tone: Option<Tone>, theme: Theme, width: usize) -> Line<'static> {
    let Progress { phase, done, total, rate } = *progress;
    let name = text::end_of(name, name_width(width));
    let bar = done.zip(total).map_or_else(|| " ".repeat(BAR), |(done, total)| text::bar(done, total, BAR));
    let fetched = match (done, total) {
        (Some(done), Some(total)) => format!("{} of {}", text::bytes(done), text::bytes(total)),
        (Some(done), None) => text::bytes(done),
        _ => String::new(),
    };
    let rate = rate.map_or_else(String::new, |rate| format!("{}/s", text::bytes(rate)));
    let name = tone.map_or_else(|| Span::raw(name.clone()), |tone| theme.span(tone, name.clone()));
    Line::from(vec![
        name,
        Span::raw(format!(" {} ", text::left(phase, PHASE))),
        theme.span(Tone::Accent, bar),
        Span::raw(format!(" {} {}", text::right(&fetched, BYTES), text::right(&rate, RATE))),
    ])
}

/// Renders the reason for waiting, on a line of its own.
fn waiting(reason: &str, left: Option<u64>, theme: Theme, width: usize) -> Option<Line<'static>> {
    if reason.is_empty() {
        return None;
    }
    let left = left.map_or_else(String::new, |left| format!(" ({})", text::age(Duration::from_millis(left))));
    let text = format!("    waiting: {}{left}", text::cell(reason));
    Some(Line::from(theme.span(Tone::Warning, text::left(&text, width))))
}
