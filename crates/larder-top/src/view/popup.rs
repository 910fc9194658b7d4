//! Windows over the tabs: help, explanations, errors, and the question before a removal.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph};

use super::{Theme, Tone};
use crate::app::{App, HELP, Mode, Window};
use crate::text;

/// How many names of an image the question before a removal lists.
const NAMES: usize = 5;
/// Columns of a window at most, with its border.
const WIDEST: u16 = 100;

pub(super) fn draw(app: &App, theme: Theme, frame: &mut Frame<'_>, area: Rect) {
    let (title, lines) = match &app.mode {
        Mode::Normal | Mode::Filter(_) => return,
        Mode::Help => ("Keys".to_owned(), help(theme)),
        Mode::Lines(Window { title, lines }) => (title.clone(), in_columns(lines, area.width)),
        Mode::Confirm { name, frees, kept, images, .. } => {
            ("Remove".to_owned(), in_columns(&question(name, *frees, kept.as_deref(), images), area.width))
        }
    };
    // The area, not the size that is known: the terminal may have shrunk since.
    let width = columns(area.width).saturating_add(2);
    let height = u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_add(2);
    let height = height.min(area.height.saturating_sub(2));
    let x = area.x + area.width.saturating_sub(width) / 2;
    let y = area.y + area.height.saturating_sub(height) / 2;
    let window = Rect { x, y, width, height }.intersection(area);
    let hidden = lines.len().saturating_sub(usize::from(window.height.saturating_sub(2)) + app.scroll);
    // No key scrolls a question.
    let scrolls = hidden > 0 && !matches!(app.mode, Mode::Confirm { .. });
    let more = if scrolls { format!(" {hidden} more lines, Down scrolls ") } else { String::new() };
    let room = usize::from(width).saturating_sub(4);
    let title = theme.span(Tone::Head, format!(" {} ", text::end_of(&title, text::width(&title).min(room))));
    let block = Block::bordered().title(title).title_bottom(more);
    let shown: Vec<Line<'_>> = lines.into_iter().skip(app.scroll).collect();
    frame.render_widget(Clear, window);
    frame.render_widget(Paragraph::new(shown).block(block), window);
}

/// Columns inside a window on a terminal of this width.
fn columns(width: u16) -> u16 {
    width.min(WIDEST).saturating_sub(4)
}

/// Rows inside the highest window.
pub(super) fn height(app: &App) -> usize {
    usize::from(app.size.height.saturating_sub(4))
}

fn in_columns(lines: &[String], width: u16) -> Vec<Line<'static>> {
    wrapped(lines, width).into_iter().map(Line::from).collect()
}

/// The lines, those that are too long for a terminal of this width in pieces.
pub(super) fn wrapped(lines: &[String], width: u16) -> Vec<String> {
    let room = usize::from(columns(width)).max(1);
    let pieces = |line: &String| {
        let (mut pieces, mut piece) = (Vec::new(), String::new());
        for word in line.split_inclusive(' ') {
            if !piece.trim().is_empty() && text::width(&piece) + text::width(word.trim_end()) > room {
                pieces.push(std::mem::replace(&mut piece, "    ".to_owned()));
            }
            for c in word.chars() {
                if text::width(&piece) >= room && c != ' ' {
                    pieces.push(std::mem::replace(&mut piece, "    ".to_owned()));
                }
                piece.push(c);
            }
        }
        pieces.push(piece);
        pieces
    };
    lines.iter().flat_map(pieces).collect()
}

fn help(theme: Theme) -> Vec<Line<'static>> {
    let line = |(keys, what): (&str, &str)| {
        Line::from(vec![theme.span(Tone::Accent, format!("{keys:<17}")), Span::raw(what.to_owned())])
    };
    HELP.into_iter().map(line).collect()
}

fn question(name: &str, frees: Option<u64>, kept: Option<&str>, images: &[String]) -> Vec<String> {
    let mut lines = vec![format!("Remove {name}?")];
    if let Some(frees) = frees {
        lines.push(format!("This frees {}.", text::bytes(frees)));
    }
    if let Some(kept) = kept {
        lines.push(format!("GC retains it: {kept}, which stays for later pulls."));
    }
    lines.push(String::new());
    lines.push("y removes it, any other key cancels".to_owned());
    // Last, because a low terminal has no room for them.
    if images.len() > 1 {
        lines.push(String::new());
        lines.push(format!("It has {} names; all are removed:", images.len()));
        lines.extend(images.iter().take(NAMES).map(|name| format!("  {}", text::cell(name))));
        if images.len() > NAMES {
            lines.push(format!("  and {} more", images.len() - NAMES));
        }
    }
    lines
}
