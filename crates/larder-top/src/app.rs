//! The state of the view, and what changes it. Pure.

mod keys;
mod layout;

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use jiff::Timestamp;
use larder::go_format;
use larder_api::v1::{self as api, removed};
use ratatui::crossterm::event::KeyEvent;
use ratatui::layout::Size;
use tokio::time::Instant;

use crate::calls::{Answer, Call};
use crate::images::ImageList;
use crate::schedule::Schedule;
use crate::text;

pub(crate) use keys::HELP;
pub(crate) use layout::{HEADER, MIN_SIZE, is_too_small};

/// Now, for intervals and for people.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// For intervals.
    pub instant: Instant,
    /// For ages of images.
    pub wall: Timestamp,
}

/// An input that changes the state.
#[derive(Debug)]
pub enum Input {
    /// A key was pressed.
    Key(KeyEvent),
    /// The terminal has this size now.
    Resized(Size),
    /// A call ended.
    Answered(Answer),
    /// Time has passed.
    Tick,
}

/// One part of the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Tab {
    #[default]
    Images,
    Pulls,
    Gc,
    Registries,
}

/// Meaning of the keys.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Mode {
    #[default]
    Normal,
    /// The filter is typed; the text is the one before.
    Filter(String),
    Help,
    Lines(Window),
    /// The question whether to remove this image.
    Confirm {
        id: String,
        name: String,
        frees: Option<u64>,
        /// The keep rule that retains it.
        kept: Option<String>,
        images: Vec<String>,
        asked: Instant,
    },
}

/// Lines to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) title: String,
    pub(crate) lines: Vec<String>,
}

/// A line about the last action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) text: String,
    pub(crate) is_error: bool,
    since: Instant,
}

/// A round that ended while the view ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EndedRound {
    pub(crate) ended: String,
    pub(crate) result: String,
}

/// Why there is no status now.
#[derive(Debug, Clone)]
pub(crate) struct Disconnected {
    pub(crate) since: Instant,
    pub(crate) why: String,
}

/// How long a message is shown.
const MESSAGE_FOR: Duration = Duration::from_secs(8);
/// How many ended rounds are remembered.
const ROUNDS: usize = 100;

/// The state of the view.
#[derive(Debug)]
pub struct App {
    pub(crate) size: Size,
    /// Whether colors are used; without them, words and attributes say the same.
    pub(crate) colors: bool,
    pub(crate) tab: Tab,
    pub(crate) mode: Mode,
    /// Opened one by one when no key has another meaning, so that no typed key has an effect there.
    waiting: VecDeque<Window>,
    pub(crate) status: Option<api::StatusResponse>,
    pub(crate) disconnected: Option<Disconnected>,
    pub(crate) images: ImageList,
    /// The newest first.
    pub(crate) removals: Vec<api::HistoryEntry>,
    /// The newest first.
    pub(crate) rounds: Vec<EndedRound>,
    /// Bytes per second of each registry.
    pub(crate) rates: HashMap<String, u64>,
    received: Option<Instant>,
    pub(crate) message: Option<Message>,
    /// IDs and names of images that are being removed.
    pub(crate) removing: Vec<(String, String)>,
    /// The first line in view of a tab or a window with lines.
    pub(crate) scroll: usize,
    schedule: Schedule,
    quit: bool,
}

impl App {
    /// Nothing is known yet.
    pub fn new(size: Size, colors: bool) -> App {
        App {
            size,
            colors,
            tab: Tab::default(),
            mode: Mode::default(),
            waiting: VecDeque::new(),
            status: None,
            disconnected: None,
            images: ImageList::default(),
            removals: Vec::new(),
            rounds: Vec::new(),
            rates: HashMap::new(),
            received: None,
            message: None,
            removing: Vec::new(),
            scroll: 0,
            schedule: Schedule::default(),
            quit: false,
        }
    }

    /// Whether the user wants to leave.
    pub fn is_done(&self) -> bool {
        self.quit
    }

    /// Calls that are due now; they count as begun.
    pub fn take_due(&mut self, now: Moment) -> Vec<Call> {
        self.schedule.take_due(now.instant, self.tab == Tab::Gc)
    }

    /// When [`take_due`](App::take_due) has something again, at the latest.
    pub fn next_wake(&self, now: Moment) -> Instant {
        self.schedule.next(now.instant)
    }

    /// Applies an input, and returns the calls that it asks for.
    pub(crate) fn apply(&mut self, input: Input, now: Moment) -> Vec<Call> {
        let calls = match input {
            Input::Key(key) => self.press(key, now),
            Input::Resized(size) => {
                self.size = size;
                Vec::new()
            }
            Input::Answered(answer) => {
                self.receive(answer, now);
                Vec::new()
            }
            Input::Tick => Vec::new(),
        };
        self.open_waiting();
        let is_old = |message: &Message| now.instant.saturating_duration_since(message.since) > MESSAGE_FOR;
        self.message = self.message.take().filter(|message| !is_old(message));
        calls
    }

    fn receive(&mut self, answer: Answer, now: Moment) {
        match answer {
            Answer::Status(status) => self.receive_status(*status, now),
            Answer::Images(images) => {
                self.schedule.ended(&Call::Images, now.instant);
                self.images.replace(images);
            }
            Answer::History(history) => {
                self.schedule.ended(&Call::History, now.instant);
                self.removals = history.entries.into_iter().rev().collect();
            }
            Answer::Explained { name, lines } => {
                let lines = lines.iter().map(|line| text::cell(line)).collect();
                self.waiting.push_back(Window { title: text::cell(&name), lines });
            }
            Answer::Removed { id, answer } => {
                self.schedule.refresh();
                self.removing.retain(|(removing, _)| *removing != id);
                let (text, is_error) = outcome(&answer);
                self.show_message(text, is_error, now);
            }
            Answer::Kept(done) => {
                self.schedule.refresh();
                self.show_message(done, false, now);
            }
            Answer::Failed { call, message, hints } => self.receive_failure(&call, &message, &hints, now),
        }
    }

    fn receive_status(&mut self, status: api::StatusResponse, now: Moment) {
        self.schedule.ended(&Call::Status, now.instant);
        self.schedule.received(&status);
        self.disconnected = None;
        self.note_rates(&status, now.instant);
        if let Some(gc) = &status.gc
            && let (Some(ended), Some(result)) = (&gc.ended, &gc.result)
            && self.rounds.first().is_none_or(|last| last.ended != *ended)
        {
            self.rounds.insert(0, EndedRound { ended: text::cell(ended), result: text::cell(result) });
            self.rounds.truncate(ROUNDS);
        }
        self.received = Some(now.instant);
        self.status = Some(status);
    }

    /// Records the bytes that each registry sent since the last status.
    fn note_rates(&mut self, status: &api::StatusResponse, now: Instant) {
        let (Some(before), Some(at)) = (&self.status, self.received) else { return };
        let millis = now.saturating_duration_since(at).as_millis().max(1);
        let received: HashMap<&str, u64> =
            before.registries.iter().map(|registry| (&*registry.host, registry.received_bytes)).collect();
        let rate = |registry: &api::RegistryStatus| {
            let before = received.get(&*registry.host).copied().unwrap_or_default();
            let bytes = u128::from(registry.received_bytes.saturating_sub(before)) * 1000 / millis;
            (registry.host.clone(), u64::try_from(bytes).unwrap_or(u64::MAX))
        };
        self.rates = status.registries.iter().map(rate).collect();
    }

    fn receive_failure(&mut self, call: &Call, message: &str, hints: &[String], now: Moment) {
        self.schedule.ended(call, now.instant);
        if *call == Call::Status {
            self.schedule.failed();
            let since = self.disconnected.take().map_or(now.instant, |lost| lost.since);
            self.disconnected = Some(Disconnected { since, why: text::cell(message) });
            return;
        }
        if let Call::Remove { id, .. } = call {
            self.removing.retain(|(removing, _)| removing != id);
        }
        if matches!(call, Call::Images | Call::History) {
            return self.show_message(format!("error: {message}"), true, now);
        }
        let lines = [format!("error: {message}")].into_iter().chain(hints.iter().cloned());
        let lines = lines.map(|line| text::cell(&line)).collect();
        self.waiting.push_back(Window { title: "Error".to_owned(), lines });
    }

    fn open_waiting(&mut self) {
        if self.mode == Mode::Normal
            && let Some(window) = self.waiting.pop_front()
        {
            (self.mode, self.scroll) = (Mode::Lines(window), 0);
        }
    }

    fn show_message(&mut self, text: impl AsRef<str>, is_error: bool, now: Moment) {
        self.message = Some(Message { text: text::cell(text.as_ref()), is_error, since: now.instant });
    }
}

/// Describes the outcome of a removal in a line.
fn outcome(answer: &api::RemoveResponse) -> (String, bool) {
    let refused = answer.results.iter().find_map(|result| match &result.result {
        Some(removed::Result::Refused(refused)) => Some(&refused.message),
        _ => None,
    });
    if let Some(message) = refused.or(answer.error.as_ref().map(|error| &error.message)) {
        return (format!("error: {message}"), true);
    }
    let removed = answer.results.iter().find_map(|result| match &result.result {
        Some(removed::Result::Removed(image)) => Some(image),
        _ => None,
    });
    match removed {
        Some(image) => {
            let name = image.repo_tags.first().unwrap_or(&image.id);
            (format!("removed {name} ({})", go_format::bytes(image.size_bytes)), false)
        }
        None => ("removed the name".to_owned(), false),
    }
}
