//! Programs that give credentials: found where nobody else can put one, run for a bounded time, read up to a bound.
//!
//! Promises: what a program writes is never shown, since it may be a password; its memory is overwritten after use; a
//! program that is not waited for any more is killed, with all that it started and left in its process group.

mod run;
mod trust;

pub(super) use run::{ProgramCommand, run};
pub use trust::TrustError;
pub(super) use trust::check_program;
