//! Draws the state. Pure: the same state, size and time give the same screen.

mod gc;
mod header;
mod images;
mod popup;
mod pulls;
mod registries;

use ratatui::Frame;
use ratatui::layout::{Rect, Size};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use crate::app::{App, HEADER, MIN_SIZE, Mode, Moment, Tab, is_too_small};
use crate::text;

/// Meaning of a text, as a style. Words say the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Head,
    Good,
    Warning,
    Bad,
    Faint,
    Accent,
}

/// Styles with colors or without.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Theme {
    pub(crate) colors: bool,
}

impl Theme {
    pub(crate) fn style(self, tone: Tone) -> Style {
        let color = |color| if self.colors { Style::new().fg(color) } else { Style::new() };
        match tone {
            Tone::Head => Style::new().add_modifier(Modifier::BOLD),
            Tone::Good => color(Color::Green),
            Tone::Warning => color(Color::Yellow),
            Tone::Bad => color(Color::Red).add_modifier(Modifier::BOLD),
            Tone::Faint if self.colors => Style::new().fg(Color::DarkGray),
            Tone::Faint => Style::new(),
            Tone::Accent => color(Color::Cyan),
        }
    }

    pub(crate) fn span(self, tone: Tone, text: impl Into<String>) -> Span<'static> {
        Span::styled(text.into(), self.style(tone))
    }
}

/// Draws everything.
pub fn draw(app: &App, frame: &mut Frame<'_>, now: Moment) {
    let area = frame.area();
    if is_too_small(area.as_size()) {
        let Size { width, height } = MIN_SIZE;
        let text = format!(
            "terminal too small: {}x{}, at least {width}x{height} is needed",
            area.width, area.height
        );
        frame.render_widget(Paragraph::new(text).wrap(ratatui::widgets::Wrap { trim: true }), area);
        return;
    }
    let theme = Theme { colors: app.colors };
    let width = usize::from(area.width);
    show(frame, area, 0, header::lines(app, theme, width, now));
    show(frame, area, HEADER - 1, vec![tabs(app, theme)]);
    show(frame, area, HEADER, body(app, theme, width, now));
    show(frame, area, area.height - 2, vec![message(app, theme, now), footer(app, theme, width)]);
    popup::draw(app, theme, frame, area);
}

/// Draws lines from a row on, as far as they fit above the footer.
fn show(frame: &mut Frame<'_>, area: Rect, row: u16, lines: Vec<Line<'static>>) {
    for (y, line) in (row..area.height).zip(lines) {
        let buffer = frame.buffer_mut();
        buffer.set_line(area.x, area.y + y, &line, area.width);
        if line.width() > usize::from(area.width)
            && let Some(last) = buffer.cell_mut((area.right().saturating_sub(1), area.y + y))
        {
            last.set_symbol("\u{2026}");
        }
    }
}

/// The last useful value of [`App::scroll`].
pub(crate) fn scroll_limit(app: &App, now: Moment) -> usize {
    let theme = Theme { colors: app.colors };
    let (lines, height) = match &app.mode {
        Mode::Lines(window) => (popup::wrapped(&window.lines, app.size.width).len(), popup::height(app)),
        Mode::Help => (crate::app::HELP.len(), popup::height(app)),
        _ => (
            scrolled_lines(app, theme, usize::from(app.size.width), now).len(),
            app.body_height().saturating_sub(1),
        ),
    };
    lines.saturating_sub(height)
}

/// Lines of the tabs that scroll as a whole, without their head.
fn scrolled_lines(app: &App, theme: Theme, width: usize, now: Moment) -> Vec<Line<'static>> {
    match app.tab {
        Tab::Images => Vec::new(),
        Tab::Pulls => pulls::lines(app, theme, width),
        Tab::Gc => gc::lines(app, theme, width, now),
        Tab::Registries => registries::lines(app, theme, width),
    }
}

fn body(app: &App, theme: Theme, width: usize, now: Moment) -> Vec<Line<'static>> {
    if app.tab == Tab::Images {
        let mut lines = images::lines(app, theme, width, now);
        let activity = app.activity_rows();
        if activity > 0 {
            lines.resize(app.image_rows() + 1, Line::default());
            lines.push(Line::from(theme.span(Tone::Head, text::left("ACTIVITY", width))));
            let running = gc::running(app, theme, width).into_iter().chain(pulls::lines(app, theme, width));
            lines.extend(running.take(activity - 1));
        }
        return lines;
    }
    let head = match app.tab {
        Tab::Pulls => pulls::head(width),
        Tab::Gc => gc::head(),
        _ => registries::head(width),
    };
    let mut lines = vec![Line::from(theme.span(Tone::Head, head))];
    let shown = scrolled_lines(app, theme, width, now).into_iter().skip(app.scroll);
    lines.extend(shown.take(app.body_height().saturating_sub(1)));
    lines
}

fn tabs(app: &App, theme: Theme) -> Line<'static> {
    let pulls = app.status.as_ref().map_or(0, |status| status.pulls.len());
    let registries = app.status.as_ref().map_or(0, |status| status.registries.len());
    let names = Tab::ALL.into_iter().zip([
        format!("1 Images {}", app.images.totals.images),
        format!("2 Pulls {pulls}"),
        "3 GC".to_owned(),
        format!("4 Registries {registries}"),
    ]);
    let tab = |(tab, name): (Tab, String)| {
        if tab == app.tab {
            Span::styled(format!("[{name}]"), theme.style(Tone::Head).add_modifier(Modifier::REVERSED))
        } else {
            Span::raw(format!(" {name} "))
        }
    };
    Line::from(names.map(tab).collect::<Vec<_>>())
}

/// The line above the keys: the filter while it is typed, a lost connection, or the last action.
fn message(app: &App, theme: Theme, now: Moment) -> Line<'static> {
    if let Mode::Filter(_) = app.mode {
        return Line::from(vec![
            theme.span(Tone::Accent, "Filter: "),
            Span::raw(format!("{}_", text::cell(&app.images.filter))),
        ]);
    }
    if let Some(lost) = &app.disconnected {
        let since = text::age(now.instant.saturating_duration_since(lost.since));
        return Line::from(
            theme.span(Tone::Bad, format!("no connection for {since}, retrying: {}", lost.why)),
        );
    }
    if let Some(message) = &app.message {
        let tone = if message.is_error { Tone::Bad } else { Tone::Good };
        return Line::from(theme.span(tone, message.text.clone()));
    }
    match &app.removing[..] {
        [] => warnings(app, theme),
        [(_, name)] => Line::from(theme.span(Tone::Accent, format!("removing {name}"))),
        several => Line::from(theme.span(Tone::Accent, format!("removing {} images", several.len()))),
    }
}

/// Renders the problems of the node.
fn warnings(app: &App, theme: Theme) -> Line<'static> {
    let Some(status) = &app.status else { return Line::default() };
    let down = (!status.backend_available).then_some(&status.backend_message);
    match down.into_iter().chain(&status.warnings).chain(&status.reload_error).next() {
        Some(warning) => Line::from(theme.span(Tone::Warning, format!("warning: {}", text::cell(warning)))),
        None => Line::default(),
    }
}

/// The keys, as many as fit; those that matter most come first.
fn footer(app: &App, theme: Theme, width: usize) -> Line<'static> {
    let keys: &[(&str, &str)] = match (&app.mode, app.tab) {
        (Mode::Filter(_), _) => &[("Enter", "apply"), ("Esc", "cancel"), ("Ctrl-U", "clear")],
        (Mode::Confirm { .. }, _) => &[("y", "remove"), ("n", "cancel")],
        (Mode::Help | Mode::Lines(_), _) => &[("Up Down", "scroll"), ("Esc", "close")],
        (Mode::Normal, Tab::Images) => &[
            ("?", "help"),
            ("q", "quit"),
            ("/", "filter"),
            ("s", "sort"),
            ("r", "reverse"),
            ("e", "explain"),
            ("p", "keep"),
            ("x", "remove"),
        ],
        (Mode::Normal, _) => &[("?", "help"), ("q", "quit"), ("Tab", "next view"), ("Up Down", "scroll")],
    };
    let reversed = Style::new().add_modifier(Modifier::REVERSED);
    let key = |(key, what): &(&str, &str)| {
        [Span::styled(format!(" {key} "), reversed), theme.span(Tone::Accent, format!("{what} "))]
    };
    let mut room = width;
    let shown = keys.iter().map(key).take_while(|spans| {
        let taken: usize = spans.iter().map(Span::width).sum();
        let fits = taken <= room;
        room = room.saturating_sub(taken);
        fits
    });
    Line::from(shown.flatten().collect::<Vec<_>>())
}
