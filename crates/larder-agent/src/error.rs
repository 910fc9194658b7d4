//! Errors of the agent: [`Error`] for calls, [`OpenError`] for opening what one process has at a time.

pub use larder_api::{Error, ErrorKind};

/// Why a store, a state directory or a node cannot be opened.
#[derive(Debug)]
pub enum OpenError {
    /// Another process has it open, and serves it.
    InUse(Error),
    /// There is no store, and none was to be created.
    NoStore(Error),
    /// Anything else.
    Failed(Error),
}

impl From<Error> for OpenError {
    fn from(error: Error) -> OpenError {
        OpenError::Failed(error)
    }
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Error {
        match error {
            OpenError::InUse(error) | OpenError::NoStore(error) | OpenError::Failed(error) => error,
        }
    }
}
