//! Questions on the terminal, and flags about who may use a present image.

pub(crate) mod terminal;
mod verify;

pub(crate) use verify::VerifyArgs;
