//! The loop: keys, signals and answers go into the state, and its calls to the node.

use std::io;
use std::thread;

use futures_util::StreamExt as _;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use jiff::Timestamp;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::Size;
use rustix::process::{Signal, getpid, kill_current_process_group, kill_process};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{self, Instant};

use crate::app::{App, Input, Moment};
use crate::calls::{Answer, NodeCalls, perform};
use crate::screen::Screen;
use crate::update::update;
use crate::view::draw;

/// How the view ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The user left it.
    Quit,
    /// It was stopped from outside.
    Stopped,
}

/// Shows the node until the user quits or `stop` completes. Standard output must be a terminal.
pub async fn run(node: &dyn NodeCalls, colors: bool, stop: impl Future<Output = ()>) -> io::Result<Ended> {
    let mut hangup = signal(SignalKind::hangup())?;
    let mut suspended = signal(SignalKind::from_raw(Signal::TSTP.as_raw()))?;
    let mut resumed = signal(SignalKind::from_raw(Signal::CONT.as_raw()))?;
    let mut screen = Screen::enter()?;
    let mut input = read_input();
    let mut app = App::new(screen.0.size()?, colors);
    let mut calls: FuturesUnordered<LocalBoxFuture<'_, Answer>> = FuturesUnordered::new();
    tokio::pin!(stop);
    loop {
        let now = moment();
        calls.extend(
            app.take_due(now)
                .into_iter()
                .map(|call| -> LocalBoxFuture<'_, Answer> { Box::pin(perform(node, call)) }),
        );
        screen.0.draw(|frame| draw(&app, frame, now))?;
        let received = tokio::select! {
            biased;
            () = &mut stop => return Ok(Ended::Stopped),
            _ = hangup.recv() => return Ok(Ended::Stopped),
            _ = suspended.recv() => {
                suspend(&mut screen)?;
                Input::Resized(screen.0.size()?)
            }
            _ = resumed.recv() => {
                screen.reenter()?;
                Input::Resized(screen.0.size()?)
            }
            event = input.recv() => match event {
                Some(event) => match read(&event) {
                    Some(input) => input,
                    None => continue,
                },
                None => return Ok(Ended::Stopped), // the terminal is gone
            },
            Some(answer) = calls.next() => Input::Answered(answer),
            () = time::sleep_until(app.next_wake(now)) => Input::Tick,
        };
        apply(&mut app, received, node, &mut calls);
        // Keys that were pressed while a frame was drawn.
        while let Ok(event) = input.try_recv() {
            if let Some(input) = read(&event) {
                apply(&mut app, input, node, &mut calls);
            }
        }
        if app.is_done() {
            return Ok(Ended::Quit);
        }
    }
}

fn apply<'a>(
    app: &mut App,
    input: Input,
    node: &'a dyn NodeCalls,
    calls: &mut FuturesUnordered<LocalBoxFuture<'a, Answer>>,
) {
    for call in update(app, input, moment()) {
        calls.push(Box::pin(perform(node, call)));
    }
}

fn moment() -> Moment {
    Moment { instant: Instant::now(), wall: Timestamp::now() }
}

/// Reads the terminal on a thread of its own, which ends with the process.
fn read_input() -> mpsc::Receiver<Event> {
    let (send, receive) = mpsc::channel(64);
    let _ = thread::Builder::new().name("keys".into()).spawn(move || {
        while let Ok(event) = event::read() {
            if send.blocking_send(event).is_err() {
                return;
            }
        }
    });
    receive
}

/// Converts an event of the terminal into an input of the view.
fn read(event: &Event) -> Option<Input> {
    match *event {
        Event::Key(key) if is_suspend(key) => {
            // The shell expects the whole job to stop. The signal comes back to this process.
            let _ = kill_current_process_group(Signal::TSTP);
            None
        }
        Event::Key(key) if key.kind != KeyEventKind::Release => Some(Input::Key(key)),
        Event::Resize(width, height) => Some(Input::Resized(Size { width, height })),
        _ => None,
    }
}

fn is_suspend(key: KeyEvent) -> bool {
    key.code == KeyCode::Char('z') && key.modifiers.contains(KeyModifiers::CONTROL)
}

/// Stops this process with its terminal restored; returns when it is continued.
fn suspend(screen: &mut Screen) -> io::Result<()> {
    Screen::leave();
    kill_process(getpid(), Signal::STOP)?;
    screen.reenter()
}
