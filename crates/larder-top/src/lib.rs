//! A live view of a node's images in a terminal: disk with thresholds, images, pulls, garbage collection, registries.
//!
//! ```text
//! keys, answers -> update -> calls -> NodeCalls -> answers
//!                  App    -> draw  -> terminal
//! ```
//!
//! [`App`] is the state; [`update`] changes it and [`draw`] shows it. Both are pure: the time is an argument, and
//! effects are [`Call`]s, which [`run`] makes through [`NodeCalls`]. Start with [`update`].

mod app;
mod calls;
mod images;
mod run;
mod schedule;
mod screen;
mod text;
mod update;
mod view;

pub use app::{App, Input, Moment};
pub use calls::{Answer, Call, NodeCalls};
pub use run::{Ended, run};
pub use screen::Screen;
pub use update::update;
pub use view::draw;
