//! The way of an input into the state, and of the state into what fits the terminal.

use crate::app::{App, Input, Moment};
use crate::calls::Call;
use crate::view;

/// Applies an input, and returns the calls that it asks for. Pure.
pub fn update(app: &mut App, input: Input, now: Moment) -> Vec<Call> {
    let calls = app.apply(input, now);
    let rows = app.image_rows();
    app.images.scroll(rows);
    app.scroll = app.scroll.min(view::scroll_limit(app, now));
    calls
}
