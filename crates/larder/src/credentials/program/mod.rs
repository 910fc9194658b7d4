//! Credential programs: trusted by file permissions, with bounded run time and output.
//!
//! Promises: a program's output is never shown, because it may be a password; its memory is overwritten after use; when
//! the caller is canceled, the program's process group is killed.

mod run;
mod trust;

pub(super) use run::{ProgramCommand, run};
pub use trust::TrustError;
pub(super) use trust::check_program;
