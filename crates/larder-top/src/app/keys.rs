//! Keys: those of htop, k9s and ctop, where they agree.

use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::{App, Mode, Moment, Tab, is_too_small};
use crate::calls::Call;
use crate::images::ImageSort;

/// Keys that are pressed sooner after a question do not answer it: they were meant for the view before.
const ANSWERABLE_AFTER: Duration = Duration::from_millis(300);

/// Keys and their meaning, for the help.
pub(crate) const HELP: [(&str, &str); 18] = [
    ("1 2 3 4, Tab", "images, pulls, GC, registries"),
    ("Up Down j k", "move; PgUp PgDn, g G, Home End too"),
    ("/ F4", "filter by name, ID or state; Esc clears it"),
    ("s F6 < >", "sort by the next or previous column"),
    ("N S U L", "sort by name, size, unique bytes, last use"),
    ("r I", "reverse the order"),
    ("Enter e d", "explain: why GC retains or removes the image"),
    ("p", "keep the image from GC, or end that"),
    ("x Del F9 Ctrl-D", "remove the image, after a question"),
    ("Ctrl-R F5", "list images again"),
    ("? h F1", "this help"),
    ("Ctrl-Z", "suspend; fg resumes"),
    ("q F10 Ctrl-C", "quit"),
    ("", ""),
    ("SIZE", "as the backend reports it; containerd: compressed"),
    ("UNIQUE", "what removing only this image frees on disk"),
    ("SHARED", "layers on disk that other images have as well"),
    ("STATE", "in use, pinned, kept, leased, young or unused"),
];

impl App {
    pub(super) fn press(&mut self, key: KeyEvent, now: Moment) -> Vec<Call> {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if is_control && key.code == KeyCode::Char('c') {
            self.quit = true;
            return Vec::new();
        }
        if is_too_small(self.size) {
            // No view is drawn, so keys other than quit are ignored.
            self.quit |= matches!(key.code, KeyCode::Char('q') | KeyCode::F(10));
            return Vec::new();
        }
        match std::mem::take(&mut self.mode) {
            Mode::Filter(before) => {
                self.type_filter(key, before);
                Vec::new()
            }
            mode @ Mode::Confirm { asked, .. }
                if now.instant.saturating_duration_since(asked) < ANSWERABLE_AFTER =>
            {
                self.mode = mode;
                Vec::new()
            }
            Mode::Confirm { id, name, images, .. } => match key.code {
                KeyCode::Char('y' | 'Y') => {
                    self.message = None;
                    self.removing.push((id.clone(), name.clone()));
                    vec![Call::Remove { id, name, images }]
                }
                _ => Vec::new(),
            },
            mode @ (Mode::Help | Mode::Lines(_)) => {
                self.read(key, mode);
                Vec::new()
            }
            Mode::Normal if is_control => self.press_control(key.code, now),
            Mode::Normal => self.press_plain(key.code, now),
        }
    }

    /// A key while lines are read. Any key that does not scroll ends that.
    fn read(&mut self, key: KeyEvent, mode: Mode) {
        let page = isize::try_from(self.size.height / 2).unwrap_or(1);
        let by = match key.code {
            KeyCode::Up | KeyCode::Char('k') => -1,
            KeyCode::Down | KeyCode::Char('j') => 1,
            KeyCode::PageUp => -page,
            KeyCode::PageDown | KeyCode::Char(' ') => page,
            _ => {
                self.scroll = 0;
                return;
            }
        };
        self.scroll = self.scroll.saturating_add_signed(by);
        self.mode = mode;
    }

    fn type_filter(&mut self, key: KeyEvent, before: String) {
        let mut filter = self.images.filter.clone();
        if key.code == KeyCode::Backspace && filter.pop().is_none() {
            return;
        }
        match key.code {
            KeyCode::Enter => return,
            KeyCode::Esc => return self.images.set_filter(before),
            KeyCode::Char('u') if key.modifiers.contains(KeyModifiers::CONTROL) => filter.clear(),
            KeyCode::Char(c) if !key.modifiers.contains(KeyModifiers::CONTROL) => filter.push(c),
            KeyCode::Up => self.images.step(-1),
            KeyCode::Down => self.images.step(1),
            _ => {}
        }
        if filter != self.images.filter {
            self.images.set_filter(filter);
        }
        self.mode = Mode::Filter(before);
    }

    fn press_control(&mut self, code: KeyCode, now: Moment) -> Vec<Call> {
        let page = self.page();
        match code {
            KeyCode::Char('d') => self.ask_to_remove(now),
            KeyCode::Char('r' | 'l') => self.schedule.refresh(),
            KeyCode::Char('f') => self.step(page),
            KeyCode::Char('b') => self.step(-page),
            _ => {}
        }
        Vec::new()
    }

    fn press_plain(&mut self, code: KeyCode, now: Moment) -> Vec<Call> {
        let page = self.page();
        match code {
            KeyCode::Char('q') | KeyCode::F(10) => self.quit = true,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.mode = Mode::Help,
            KeyCode::Char('1') => self.show(Tab::Images),
            KeyCode::Char('2') => self.show(Tab::Pulls),
            KeyCode::Char('3') => self.show(Tab::Gc),
            KeyCode::Char('4') => self.show(Tab::Registries),
            KeyCode::Tab | KeyCode::Right => self.show(self.tab.step(1)),
            KeyCode::BackTab | KeyCode::Left => self.show(self.tab.step(Tab::ALL.len() - 1)),
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::PageUp => self.step(-page),
            KeyCode::PageDown | KeyCode::Char(' ') => self.step(page),
            KeyCode::Home | KeyCode::Char('g') => self.step(-isize::MAX),
            KeyCode::End | KeyCode::Char('G') => self.step(isize::MAX),
            KeyCode::F(5) => self.schedule.refresh(),
            _ if self.tab == Tab::Images => return self.press_on_image(code, now),
            _ => {}
        }
        Vec::new()
    }

    fn press_on_image(&mut self, code: KeyCode, now: Moment) -> Vec<Call> {
        let (sort, reverse) = (self.images.sort, self.images.reverse);
        let columns = ImageSort::ALL.len();
        match code {
            KeyCode::Char('/') | KeyCode::F(3 | 4) => self.mode = Mode::Filter(self.images.filter.clone()),
            KeyCode::Esc => self.images.set_filter(String::new()),
            KeyCode::Char('s' | '>') | KeyCode::F(6) => self.images.set_sort(sort.step(1), false),
            KeyCode::Char('<') => self.images.set_sort(sort.step(columns - 1), false),
            KeyCode::Char('N') => self.images.set_sort(ImageSort::Name, false),
            KeyCode::Char('S') => self.images.set_sort(ImageSort::Size, false),
            KeyCode::Char('U') => self.images.set_sort(ImageSort::Unique, false),
            KeyCode::Char('L') => self.images.set_sort(ImageSort::LastUsed, false),
            KeyCode::Char('r' | 'I') => self.images.set_sort(sort, !reverse),
            KeyCode::Char('x') | KeyCode::Delete | KeyCode::F(9) => self.ask_to_remove(now),
            KeyCode::Enter | KeyCode::Char('e' | 'd') => {
                let explain = |row: &crate::images::ImageRow| Call::Explain {
                    id: row.id.clone(),
                    name: row.names.first().unwrap_or(&row.id).clone(),
                };
                return self.images.selected().map(explain).into_iter().collect();
            }
            KeyCode::Char('p') => {
                if let Some(id) = self.images.selected().map(|row| row.id.clone()) {
                    self.show_message("changing the keep rule", false, now);
                    return vec![Call::ToggleKeep { id }];
                }
            }
            _ => {}
        }
        Vec::new()
    }

    fn ask_to_remove(&mut self, now: Moment) {
        if let (Tab::Images, Some(row)) = (self.tab, self.images.selected())
            && self.removing.iter().all(|(id, _)| *id != row.id)
        {
            let (id, name, images) = (row.id.clone(), row.name.clone(), row.requested());
            let (frees, kept) = (row.unique, row.kept.clone());
            self.mode = Mode::Confirm { id, name, frees, kept, images, asked: now.instant };
        }
    }

    fn show(&mut self, tab: Tab) {
        (self.tab, self.scroll) = (tab, 0);
    }

    fn page(&self) -> isize {
        isize::try_from(self.body_height()).unwrap_or(1).max(1)
    }

    fn step(&mut self, by: isize) {
        match self.tab {
            Tab::Images => self.images.step(by),
            _ => self.scroll = self.scroll.saturating_add_signed(by),
        }
    }
}

impl Tab {
    pub(crate) const ALL: [Tab; 4] = [Tab::Images, Tab::Pulls, Tab::Gc, Tab::Registries];

    /// The tab so many places to the right.
    fn step(self, by: usize) -> Tab {
        let at = Tab::ALL.iter().position(|tab| *tab == self).unwrap_or_default();
        Tab::ALL[(at + by) % Tab::ALL.len()]
    }
}
