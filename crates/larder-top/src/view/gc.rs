//! The running round, the rounds that ended, and what was removed.

use std::time::Duration;

use jiff::Timestamp;
use larder_api::EnumWord as _;
use larder_api::v1::{GcPhase, HistoryEntry};
use ratatui::text::{Line, Span};

use super::{Theme, Tone};
use crate::app::{App, Moment};
use crate::text;

const BAR: usize = 30;
/// How many ended rounds are shown above the removals.
const ROUNDS: usize = 5;

pub(super) fn head() -> String {
    "GARBAGE COLLECTION".to_owned()
}

pub(super) fn lines(app: &App, theme: Theme, width: usize, now: Moment) -> Vec<Line<'static>> {
    let mut lines = running(app, theme, width);
    if lines.is_empty() {
        lines.push(Line::from(theme.span(Tone::Faint, "no round runs")));
    }
    for round in app.rounds.iter().take(ROUNDS) {
        let text = format!("round ended {} ago: {}", ago(&round.ended, now), round.result);
        lines.push(Line::from(text::left(&text, width)));
    }
    lines.push(Line::default());
    let image = image_width(width);
    let head =
        format!("{:>7} {:>8} {:<9} {} REASON", "REMOVED", "FREED", "TRIGGER", text::left("IMAGE", image));
    lines.push(Line::from(theme.span(Tone::Head, text::left(&head, width))));
    if app.removals.is_empty() {
        lines.push(Line::from(theme.span(Tone::Faint, "no removals in the history")));
    }
    lines.extend(app.removals.iter().map(|entry| removal(entry, image, width, now)));
    lines
}

fn image_width(width: usize) -> usize {
    (width.saturating_sub(27) * 3 / 5).max(10)
}

/// The running round, if one runs.
pub(super) fn running(app: &App, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let gc = app.status.as_ref().and_then(|status| status.gc.as_ref());
    let Some(round) = gc.and_then(|gc| gc.round.as_ref()) else { return Vec::new() };
    let since = text::age(Duration::from_millis(round.milliseconds));
    let goal = round.goal().word();
    let mut lines = vec![Line::from(vec![
        theme.span(Tone::Warning, format!("{} ", round.phase().word())),
        Span::raw(format!("for {since}, goal {goal}")),
    ])];
    if round.phase() == GcPhase::Removing {
        let (freed, promised) = (round.freed_bytes, round.promised_bytes);
        let text = format!(
            "] {} of {} images, {} of {}",
            round.removed_images,
            round.planned_images,
            text::bytes(freed),
            text::bytes(promised)
        );
        let bar = text::bar(round.removed_images.into(), round.planned_images.into(), BAR.min(width / 3));
        lines.push(Line::from(vec![Span::raw("["), theme.span(Tone::Warning, bar), Span::raw(text)]));
    }
    if let Some(removal) = &round.removing {
        let name = text::cell(removal.names.first().unwrap_or(&removal.id));
        let text = format!(
            "removing {name} ({}): {}",
            text::bytes(removal.promised_bytes),
            text::cell(&removal.why)
        );
        lines.push(Line::from(text::left(&text, width)));
    }
    lines
}

fn removal(entry: &HistoryEntry, image: usize, width: usize, now: Moment) -> Line<'static> {
    let time = entry.time.as_deref().map_or_else(|| "-".to_owned(), |time| ago(time, now));
    let freed = entry.freed_bytes.map_or_else(|| "-".to_owned(), text::bytes);
    let name = text::cell(entry.names.first().unwrap_or(&entry.id));
    let text = format!(
        "{time:>7} {freed:>8} {:<9} {} {}",
        entry.trigger().word(),
        text::end_of(&name, image),
        text::cell(&entry.why)
    );
    Line::from(text::left(&text, width))
}

/// The time since then.
pub(super) fn ago(time: &str, now: Moment) -> String {
    let since = time.parse::<Timestamp>().map(|then| now.wall.duration_since(then));
    since
        .ok()
        .map_or_else(|| "-".to_owned(), |since| text::age(Duration::try_from(since).unwrap_or_default()))
}
