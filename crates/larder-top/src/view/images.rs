//! Images by size or last use, with what they share.

use ratatui::style::Modifier;
use ratatui::text::{Line, Span};

use super::{Theme, Tone};
use crate::app::{App, Moment};
use crate::images::{ImageRow, ImageSort};
use crate::text;

/// A column beside the name: its head, its width, and the least width of a terminal that has it.
const COLUMNS: [(ImageSort, &str, usize, usize); 5] = [
    (ImageSort::Size, "SIZE", 8, 0),
    (ImageSort::Unique, "UNIQUE", 8, 60),
    (ImageSort::Shared, "SHARED", 8, 70),
    (ImageSort::LastUsed, "USED", 6, 50),
    (ImageSort::State, "STATE", 7, 0),
];

/// The head and the rows in view.
pub(super) fn lines(app: &App, theme: Theme, width: usize, now: Moment) -> Vec<Line<'static>> {
    let columns: Vec<_> = COLUMNS.into_iter().filter(|(.., least)| width >= *least).collect();
    let others: usize = columns.iter().map(|(_, _, width, _)| width + 1).sum();
    let name = width.saturating_sub(others);
    let images = &app.images;
    let mark = |sort| match (images.sort == sort, images.reverse) {
        (false, _) => "",
        (true, false) => "\u{25bc}",
        (true, true) => "\u{25b2}",
    };
    let title = match &*images.filter {
        "" => format!("IMAGE{}", mark(ImageSort::Name)),
        filter => {
            format!("IMAGE{} ({} match {})", mark(ImageSort::Name), images.rows().len(), text::cell(filter))
        }
    };
    let mut head = text::left(&title, name);
    for (sort, title, width, _) in &columns {
        head += " ";
        head += &aligned(*sort, &format!("{title}{}", mark(*sort)), *width);
    }
    let mut lines = vec![Line::from(theme.span(Tone::Head, head))];
    if images.is_empty() {
        lines.push(Line::from(if app.status.is_some() { "no images" } else { "" }));
    }
    let rows = images.rows().enumerate().skip(images.top()).take(app.image_rows());
    lines.extend(rows.map(|(at, row)| {
        let line = line(row, &columns, name, theme, now);
        if at == images.position() { line.patch_style(Modifier::REVERSED) } else { line }
    }));
    lines
}

fn line(
    row: &ImageRow,
    columns: &[(ImageSort, &str, usize, usize)],
    name: usize,
    theme: Theme,
    now: Moment,
) -> Line<'static> {
    let mut spans = vec![Span::raw(text::end_of(&row.name, name))];
    for (sort, _, width, _) in columns {
        let cell = format!(" {}", aligned(*sort, &cell(row, *sort, now), *width));
        spans.push(match (sort, row.state) {
            (ImageSort::State, "in use") => theme.span(Tone::Good, cell),
            (ImageSort::State, "pinned" | "kept" | "leased") => theme.span(Tone::Accent, cell),
            (ImageSort::State, "unused" | "unknown") => theme.span(Tone::Faint, cell),
            _ => Span::raw(cell),
        });
    }
    Line::from(spans)
}

fn cell(row: &ImageRow, column: ImageSort, now: Moment) -> String {
    let bytes = |size: Option<u64>| size.map_or_else(|| "-".to_owned(), text::bytes);
    match column {
        ImageSort::Name => row.name.clone(),
        ImageSort::Size => text::bytes(row.size),
        ImageSort::Unique => bytes(row.unique),
        ImageSort::Shared => bytes(row.shared),
        ImageSort::LastUsed if row.in_use => "now".to_owned(),
        ImageSort::LastUsed => row.unused_for(now.wall).map_or_else(|| "never".to_owned(), text::age),
        ImageSort::State => row.state.to_owned(),
    }
}

fn aligned(column: ImageSort, cell: &str, width: usize) -> String {
    if column == ImageSort::State { text::left(cell, width) } else { text::right(cell, width) }
}
