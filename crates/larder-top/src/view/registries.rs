//! Registries and mirrors with their budgets.

use std::time::Duration;

use larder_api::v1::RegistryStatus;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

use super::{Theme, Tone};
use crate::app::App;
use crate::text;

/// A column beside the host: its head, its width, and the least width of a terminal that has it.
const COLUMNS: [(&str, usize, usize); 6] = [
    ("CONNS", 8, 0),
    ("WAITING", 8, 50),
    ("REQUESTS", 8, 80),
    ("QUOTA", 10, 70),
    ("RECEIVED", 9, 0),
    ("RATE", 9, 60),
];

pub(super) fn head(width: usize) -> String {
    let columns = columns(width).map(|(title, room, _)| format!(" {title:>room$}"));
    text::left("REGISTRY", host_width(width)) + &columns.collect::<String>()
}

fn columns(width: usize) -> impl Iterator<Item = (&'static str, usize, usize)> {
    COLUMNS.into_iter().filter(move |(.., least)| width >= *least)
}

fn host_width(width: usize) -> usize {
    width.saturating_sub(columns(width).map(|(_, room, _)| room + 1).sum())
}

pub(super) fn lines(app: &App, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let Some(status) = &app.status else { return Vec::new() };
    if status.registries.is_empty() {
        let text = "no registry was used yet; runtimes and engines do not report theirs";
        return vec![Line::from(theme.span(Tone::Faint, text))];
    }
    let rate = |registry: &RegistryStatus| app.rates.get(&registry.host).copied().unwrap_or_default();
    status.registries.iter().flat_map(|registry| of(registry, rate(registry), theme, width)).collect()
}

fn of(registry: &RegistryStatus, rate: u64, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let connections = format!("{}/{}", registry.connections, registry.connection_limit);
    let quota = match (registry.quota_remaining, registry.quota_limit) {
        (Some(left), Some(limit)) => format!("{left}/{limit}"),
        (Some(left), None) => left.to_string(),
        (None, _) => "-".to_owned(),
    };
    let rate = if rate > 0 { format!("{}/s", text::bytes(rate)) } else { "-".to_owned() };
    let style = |is: bool, tone| if is { theme.style(tone) } else { Style::new() };
    let is_full = registry.connections >= registry.connection_limit;
    let cells = [
        (connections, style(is_full, Tone::Warning)),
        (registry.waiting_requests.to_string(), style(registry.waiting_requests > 0, Tone::Warning)),
        (registry.requests.to_string(), Style::new()),
        (quota, style(registry.quota_remaining == Some(0), Tone::Bad)),
        (text::bytes(registry.received_bytes), Style::new()),
        (rate, Style::new()),
    ];
    // The end of the host has its port.
    let mut line = Line::from(text::end_of(&text::cell(&registry.host), host_width(width)));
    let shown = COLUMNS.into_iter().zip(cells).filter(|((.., least), _)| width >= *least);
    line.extend(shown.map(|((_, room, _), (cell, style))| Span::styled(format!(" {cell:>room$}"), style)));
    let mut lines = vec![line];
    if let Some(wait) = registry.retry_after_milliseconds {
        let left = text::age(Duration::from_millis(wait));
        let text = format!("  rate limited: requests wait {left} more ({} waits so far)", registry.throttled);
        lines.push(Line::from(theme.span(Tone::Bad, text)));
    }
    lines
}
