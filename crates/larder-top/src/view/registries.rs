//! Registries and mirrors with their budgets.

use std::time::Duration;

use larder_api::v1alpha1::RegistryStatus;
use ratatui::text::{Line, Span};

use super::{Theme, Tone};
use crate::app::App;
use crate::text;

/// Columns beside the host.
const OTHERS: usize = 8 + 8 + 8 + 10 + 9 + 9 + 6;

pub(super) fn head(width: usize) -> String {
    format!(
        "{} {:>8} {:>8} {:>8} {:>10} {:>9} {:>9}",
        text::left("REGISTRY", host_width(width)),
        "CONNS",
        "WAITING",
        "REQUESTS",
        "QUOTA",
        "RECEIVED",
        "RATE"
    )
}

fn host_width(width: usize) -> usize {
    width.saturating_sub(OTHERS).max(12)
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
    let tone = |is: bool, tone, cell: String| if is { theme.span(tone, cell) } else { Span::raw(cell) };
    let is_full = registry.connections >= registry.connection_limit;
    let mut lines = vec![Line::from(vec![
        Span::raw(text::left(&text::cell(&registry.host), host_width(width))),
        tone(is_full, Tone::Warning, format!(" {connections:>8}")),
        tone(registry.waiting_requests > 0, Tone::Warning, format!(" {:>8}", registry.waiting_requests)),
        Span::raw(format!(" {:>8}", registry.requests)),
        tone(registry.quota_remaining == Some(0), Tone::Bad, format!(" {quota:>10}")),
        Span::raw(format!(" {:>9} {rate:>9}", text::bytes(registry.received_bytes))),
    ])];
    if let Some(wait) = registry.retry_after_milliseconds {
        let left = text::age(Duration::from_millis(wait));
        let text = format!("  rate limited: requests wait {left} more ({} waits so far)", registry.throttled);
        lines.push(Line::from(theme.span(Tone::Bad, text)));
    }
    lines
}
