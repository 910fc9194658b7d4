//! Errors of the agent: [`Error`] for calls, [`NodeOpenError`] for opening what one process has at a time.

pub use larder_api::{Error, ErrorKind};

/// The answer to a request whose handler panicked. The panic's own message goes to the log only.
pub(crate) const DEFECT: &str =
    "internal error: a defect in larder ended this request; please report it with the daemon's log\n";

/// Why a store, a state directory or a node cannot be opened.
#[derive(Debug)]
pub enum NodeOpenError {
    /// Another process has it open, and serves it.
    InUse(Error),
    /// There is no store, and none was to be created.
    NoStore(Error),
    /// Anything else.
    Failed(Error),
}

impl NodeOpenError {
    /// Returns the error, whatever its cause.
    pub fn error(&self) -> &Error {
        match self {
            NodeOpenError::InUse(error) | NodeOpenError::NoStore(error) | NodeOpenError::Failed(error) => {
                error
            }
        }
    }
}

impl From<Error> for NodeOpenError {
    fn from(error: Error) -> NodeOpenError {
        NodeOpenError::Failed(error)
    }
}

impl From<NodeOpenError> for Error {
    fn from(error: NodeOpenError) -> Error {
        match error {
            NodeOpenError::InUse(error) | NodeOpenError::NoStore(error) | NodeOpenError::Failed(error) => {
                error
            }
        }
    }
}
